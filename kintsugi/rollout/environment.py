"""What a model can act in, and how an episode of it is told: the seam between the user's code and this package.

    Episode ─► Player ── asks ──► Policy ── tokens ──► Player ─► EpisodeRecord

A player is given an episode and a policy that continues tokens; it says what was fed, what was sampled, and what that
was worth. There are two: one plays environments (`reset`, `step`, `close`), the other runs agent programs. Both live in
the process beside the rollout worker, where the user's code may do what it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kintsugi.errors import WorldError
from kintsugi.types import Completion, Finish, Row, Sampling


class EpisodeFailed(WorldError):
    """An episode could not be played: the user's code raised, took too long, or said what can not be understood.

    An error as data: the episode is tried again, `rollout.attempts` times in all, then quarantined with this text.
    """


class EpisodeHangs(EpisodeFailed):
    """The user's code took too long and can not be interrupted: its process is replaced."""


class Policy(Protocol):
    """The model as a player meets it."""

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
        that is played again with the same tokens is given the same answer. A temperature of None is the group's; in
        training no other is accepted, because the trainer would see another distribution than was sampled.

        `EpisodeFailed` where the answer can not be had.
        """
        ...

    def working(self) -> None:
        """The user's code begins something that has `rollout.turn_timeout_s` of its own: its time counts from now."""
        ...


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is shown first, with how it shall be asked: `Observation(text="12*34=", stop=("</tool>",))`."""

    text: str | None = None
    """In the place of the row's prompt; None leaves that as it is."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides the model's own end token; the text is part of the action."""


class Step(msgspec.Struct, frozen=True):
    """What an action led to: `Step("408", reward=0.0, done=False)`."""

    observation: str
    """What the model reads next; shown to nobody when the episode is done."""
    reward: float = 0.0
    """Of this turn."""
    done: bool = False
    info: dict[str, Any] = {}
    """Numbers in it are summed over the episode and reported as components, `reward/<name>` in the metrics. `success`
    says whether the episode counts as solved in an evaluation; without it, a sum of rewards of at least 1 does."""


class Environment(Protocol):
    """What `rollout.environment` names: a class, made once per episode with `rollout.options` as its arguments.

    All three may be ordinary functions, which run in threads, or `async def`.
    """

    def reset(self, row: Row, *, seed: int) -> Any:
        """Begin, and say what is shown: a `str` or an `Observation`; None is the row's prompt. All episodes of a group
        have the same seed."""
        ...

    def step(self, action: str) -> Any:
        """Take what the model wrote: a `Step`, or a tuple `(observation, reward, done, info)`."""
        ...

    def close(self) -> Any:
        """The episode is over, however it ended."""
        ...


class DemonstratingEnvironment(Environment, Protocol):
    """One that can show how it is done: an SFT warm-up then learns whole episodes of it."""

    def demonstrate(self) -> Any:
        """The next action, a `str`; what it leads to is asked of `step` as ever."""
        ...


class Episode(msgspec.Struct, frozen=True, tag=True):
    """One episode to be played."""

    id: int
    """Of this attempt."""
    ticket: str
    sample: int
    row: Row
    prompt: bytes
    """int32: the row's prompt in tokens."""
    seed: int
    """For the environment's own randomness; the same for all episodes of a group."""
    sampling: Sampling
    """How the group is sampled; `max_new_tokens` is that of one turn."""
    demonstrate: bool = False
    """Show how it is done, for SFT: by the environment's own `demonstrate`, or by the row's completion. No policy is
    asked."""


class Turn(msgspec.Struct, frozen=True):
    """What was fed since the last sampled token, and what the model answered."""

    fed: bytes
    """int32: the prompt, later the observation in tokens; masked from the loss."""
    completion: Completion
    """Its tokens are in the loss."""


class EpisodeRecord(msgspec.Struct, frozen=True, tag=True):
    """An episode as it was played. Its tokens are those of its turns, one after the other, never encoded anew."""

    id: int
    turns: tuple[Turn, ...]
    rewards: tuple[float, ...]
    """Of each turn; an agent program's one reward stands last, after zeros."""
    finish: Finish
    """LENGTH where it was cut off: by the length of a turn or of the context, or by `rollout.max_turns`."""
    success: bool
    components: dict[str, float] = {}
    """What else is reported of it: {"turns": 3.0, "tool_errors": 1.0}."""
    prompt: str = ""
    """What was shown first, as people read it."""
    text: str = ""
    """What was said after it."""
    seconds: float = 0.0
    """Spent in the user's code."""


class Player(Protocol):
    """Plays episodes, many at once, in the loop of the process beside the rollout worker."""

    async def play(self, episode: Episode, policy: Policy) -> EpisodeRecord:
        """`EpisodeFailed` says why there is no record; a `UserError` (configuration, data) is mended by no
        repetition."""
        ...

    async def close(self) -> None:
        """No episode is played any more."""
        ...
