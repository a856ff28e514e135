"""Interface between the user's environments and this package: environments, episodes and their records.

    Episode ─► Player ── prompt ──► Policy ── tokens ──► Player ─► EpisodeRecord

A player runs an episode with a policy that continues tokens; the record has the context, the sampled tokens and the
rewards. There are two players: one for environments (`reset`, `step`, `close`), one for agent programs. Both run in the
user process, isolated from the rollout worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kintsugi.errors import WorldError
from kintsugi.types import Completion, FinishReason, Row, SamplingParams


class EpisodeFailed(WorldError):
    """An episode could not be run: the user's code raised, took too long, or returned something invalid.

    The episode is retried, `rollout.attempts` times in all, then quarantined with this text.
    """


class EpisodeHangs(EpisodeFailed):
    """The user's code took too long and can not be interrupted: its process is replaced."""


class Policy(Protocol):
    """The model, as a player uses it."""

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        turn: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Completion:
        """Continue these tokens. `turn` numbers the calls of an episode from 0 and keys the sampling noise: an episode
        that is run again with the same tokens gets the same completion. A temperature of None is the group's; training
        accepts no other, because the trainer would assume another distribution than was sampled.

        Raises `EpisodeFailed` if there is no completion.
        """
        ...

    def working(self) -> None:
        """Report that the user's code starts a call; its `rollout.turn_timeout_s` counts from now."""
        ...


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """First prompt of an episode and its stop texts: `Observation(text="12*34=", stop=("</tool>",))`."""

    text: str | None = None
    """Text that replaces the row's prompt; None keeps that."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides the model's own end token; the text is part of the action."""


class Step(msgspec.Struct, frozen=True):
    """Result of an action: `Step("408", reward=0.0, done=False)`."""

    observation: str
    """Text that the model reads next; unused when the episode is done."""
    reward: float = 0.0
    """Reward of this turn."""
    done: bool = False
    info: dict[str, Any] = {}
    """Numbers in it are summed over the episode and reported as components, `reward/<name>` in the metrics. `success`
    decides whether an evaluation counts the episode as solved; without it, a sum of rewards of at least 1 does."""


class Environment(Protocol):
    """Class named by `rollout.environment`, instantiated once per episode with `rollout.options` as its arguments.

    All three methods may be synchronous, and then run in threads, or `async def`.
    """

    def reset(self, row: Row, *, seed: int) -> Any:
        """Begin an episode and return its prompt: a `str` or an `Observation`; None keeps the row's prompt. All
        episodes of a group have the same seed."""
        ...

    def step(self, action: str) -> Any:
        """Apply the model's text; return a `Step`, or a tuple `(observation, reward, done, info)`."""
        ...

    def close(self) -> Any:
        """Release resources; called once at the end of every episode, also of a failed one."""
        ...


class DemonstratingEnvironment(Environment, Protocol):
    """Environment with demonstrations: an SFT warm-up learns whole episodes of it."""

    def demonstrate(self) -> Any:
        """Return the next action, a `str`; it is passed to `step` like one of the model."""
        ...


class Episode(msgspec.Struct, frozen=True, tag=True):
    """One episode to be run."""

    id: int
    """Id of this attempt."""
    ticket: str
    sample: int
    row: Row
    prompt: bytes
    """Tokens of the row's prompt as int32."""
    seed: int
    """Seed of the environment's own randomness; the same for all episodes of a group."""
    sampling: SamplingParams
    """Sampling parameters of the group; `max_new_tokens` is that of one turn."""
    demonstrate: bool = False
    """Whether to demonstrate for SFT, without a policy: by the environment's `demonstrate`, or the row's completion."""


class Turn(msgspec.Struct, frozen=True):
    """Tokens added to the context since the last sampled token, and the model's completion."""

    fed: bytes
    """Tokens of the prompt, later of the observation, as int32; masked from the loss."""
    completion: Completion
    """Completion; its tokens are in the loss."""


class EpisodeRecord(msgspec.Struct, frozen=True, tag=True):
    """Record of an episode. Its tokens are those of its turns, concatenated; text is never re-encoded."""

    id: int
    turns: tuple[Turn, ...]
    rewards: tuple[float, ...]
    """Reward of each turn; the single reward of an agent program is last, after zeros."""
    finish: FinishReason
    """LENGTH if the episode was truncated: by the length of a turn or of the context, or by `rollout.max_turns`."""
    success: bool
    components: dict[str, float] = {}
    """Further metrics of the episode: {"turns": 3.0, "tool_errors": 1.0}."""
    prompt: str = ""
    """Text of the first prompt."""
    text: str = ""
    """Text after the first prompt."""
    seconds: float = 0.0
    """Seconds spent in the user's code."""


class Player(Protocol):
    """Runs episodes, many concurrently, in the event loop of the user process."""

    async def play(self, episode: Episode, policy: Policy) -> EpisodeRecord:
        """Run an episode. `EpisodeFailed` says why there is no record; a `UserError` (configuration, data) is not
        retried."""
        ...

    async def close(self) -> None:
        """Release resources; no episode follows."""
        ...
