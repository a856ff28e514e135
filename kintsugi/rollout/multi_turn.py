"""Groups of episodes: they run in the user process, which requests completions from the model turn by turn.

Episodes run independently; their group is answered when all have ended. Completions are remembered until then: an
episode that is run again, because its environment failed or its process died, receives the same completions as long as
it sends the same prompts, and nothing is sampled twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import msgspec
import xxhash

from kintsugi.config.schema import Config
from kintsugi.errors import USER_ERRORS, DataError, KintsugiError, RemoteError
from kintsugi.rollout.environments.protocol import Episode, EpisodeFailed, EpisodeRecord
from kintsugi.rollout.generation_client import GenerationClient
from kintsugi.rollout.group import GroupOutcome, GroupSample, RolloutGroup, sample_text
from kintsugi.rollout.rewards.spec import RETURN
from kintsugi.rollout.single_turn import EMPTY
from kintsugi.rollout.trajectory import discounted, episode_trajectory, is_empty
from kintsugi.rollout.user_code.channel import (
    Ended,
    GenerationAnswered,
    GenerationWanted,
    GroupScored,
    UserCodeFailed,
)
from kintsugi.rollout.user_code.process import UserProcess
from kintsugi.runtime.clock import Clock, random_stream
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.events import QuarantineCause
from kintsugi.types import Completion, SamplingParams, sample_key

_RequestKey = tuple[int, bytes, SamplingParams]
"""Identity of a generation request: turn, digest of the prompt (the prompts of a long episode are large), sampling."""


class _GroupEpisode(msgspec.Struct, eq=False):
    """One episode of a group."""

    sample: int
    attempts: int = 1
    record: EpisodeRecord | None = None
    reason: str = ""
    """Why there will be no record."""
    cause: QuarantineCause = QuarantineCause.SAMPLE
    """Cause of that reason."""
    is_refused: bool = False
    """Whether a completion that the current attempt requested was refused."""
    completions: dict[_RequestKey, Completion] = {}
    """Completions that the model has returned."""
    pending: dict[_RequestKey, list[GenerationWanted]] = {}
    """Requests that wait for the model; several for one key if the episode was restarted meanwhile."""

    @property
    def has_ended(self) -> bool:
        return self.record is not None or bool(self.reason)


class _EpisodeGroup(msgspec.Struct, eq=False):
    """A group and its episodes."""

    group: RolloutGroup
    demonstrate: bool
    seed: int
    episodes: list[_GroupEpisode]


class MultiTurnGroups:
    """Running groups of episodes; `take` handles the messages of the environment process."""

    def __init__(
        self,
        config: Config,
        *,
        generation: GenerationClient,
        process: UserProcess,
        finish: Callable[[RolloutGroup, GroupOutcome], None],
        give_up: Callable[[RolloutGroup, KintsugiError], None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._rollout = config.rollout
        self._generation = generation
        self._process = process
        self._finish = finish
        self._give_up = give_up
        self._clock = clock
        self._running: dict[int, tuple[_EpisodeGroup, _GroupEpisode]] = {}
        self._ids = itertools.count()

    @property
    def load(self) -> int:
        return len(self._running)

    def oldest(self) -> tuple[float, RolloutGroup] | None:
        """Return the group that has been running longest, and since when."""
        running = next((each for each, _ in self._running.values() if each.group.is_open), None)
        return None if running is None else (running.group.since, running.group)

    def begin(self, group: RolloutGroup, *, demonstrate: bool = False) -> None:
        episodes = [_GroupEpisode(sample) for sample in range(group.request.ticket.num_samples)]
        episode_group = _EpisodeGroup(group, demonstrate, self._seed(group), episodes)
        for episode in episodes:
            self._start(episode_group, episode)

    def take(self, message: Ended | GenerationWanted) -> None:
        """Handle a message of the environment process: a generation request, or the end of an episode."""
        assert not isinstance(message, GroupScored), "episodes are not scored by reward functions"
        if isinstance(message, GenerationWanted):
            self._relay(message)
            return
        episode_group, episode = self._running.pop(message.id)
        group = episode_group.group
        if not group.is_open:
            return
        if isinstance(message, UserCodeFailed) and message.kind in USER_ERRORS:
            self._give_up(group, USER_ERRORS[message.kind](message.message))
            return
        if isinstance(message, UserCodeFailed):
            self._retry(episode_group, episode, message)
        else:
            self._take_record(episode, message)
        if all(each.has_ended for each in episode_group.episodes):
            self._finish(group, self._outcome(episode_group))

    def _seed(self, group: RolloutGroup) -> int:
        """Seed of the environment, equal for the whole group; for a held-out problem equal in all runs."""
        request, ticket = group.request, group.request.ticket
        if request.split == "eval":
            return random_stream(0, "held out", ticket.position).getrandbits(62)
        return random_stream(self._config.seed, "episode", ticket.id).getrandbits(62)

    def _start(self, episode_group: _EpisodeGroup, episode: _GroupEpisode, *, alone: bool = False) -> None:
        group = episode_group.group
        work = Episode(
            next(self._ids),
            group.ticket,
            episode.sample,
            group.row,
            group.prompt,
            episode_group.seed,
            group.request.sampling,
            episode_group.demonstrate,
        )
        try:
            self._process.submit(work, alone=alone)
        except DataError as error:
            if group.is_open:
                self._give_up(group, error)
            return
        self._running[work.id] = (episode_group, episode)

    def _relay(self, wanted: GenerationWanted) -> None:
        """Send an episode's request to the model, unless the completion is known or already requested."""
        episode_group, episode = self._running[wanted.episode]
        group = episode_group.group
        sampling = _sampling(group.request.sampling, wanted)
        if not group.is_open:
            self._refuse(wanted, group)
            return
        if group.request.split == "train" and sampling.temperature != group.request.sampling.temperature:
            expected = group.request.sampling.temperature
            reason = f"expected the run's own temperature, {expected:g}, got {sampling.temperature:g}"
            self._process.answer(GenerationAnswered(wanted.id, None, reason))
            return
        key = (wanted.turn, xxhash.xxh3_128_digest(wanted.prompt), sampling)
        if key in episode.completions:
            self._answer(episode, wanted, episode.completions[key])
            return
        if key in episode.pending:
            episode.pending[key].append(wanted)
            return
        episode.pending[key] = [wanted]
        self._generation.request(
            group,
            turn=wanted.turn,
            prompt=wanted.prompt,
            sampling=sampling,
            samples=(episode.sample,),
            then=partial(self._generated, group, episode, key),
        )

    def _generated(
        self,
        group: RolloutGroup,
        episode: _GroupEpisode,
        key: _RequestKey,
        answer: tuple[Completion, ...] | KintsugiError,
    ) -> None:
        pending = episode.pending.pop(key)
        cause = answer.cause if isinstance(answer, RemoteError) else None
        is_user_error = cause is not None and cause.kind in USER_ERRORS
        if isinstance(answer, KintsugiError) and group.is_open and not is_user_error:
            self._give_up(group, answer)
        for wanted in pending:
            if not group.is_open:
                self._refuse(wanted, group)
            elif isinstance(answer, KintsugiError):
                assert cause is not None
                episode.is_refused = True
                self._process.answer(GenerationAnswered(wanted.id, None, cause.message))
            else:
                (episode.completions[key],) = answer
                self._answer(episode, wanted, episode.completions[key])

    def _refuse(self, wanted: GenerationWanted, group: RolloutGroup) -> None:
        """Refuse a request of a group that was dropped, so that its episode ends."""
        self._process.answer(GenerationAnswered(wanted.id, None, f"{group.ticket} was dropped"))

    def _answer(self, episode: _GroupEpisode, wanted: GenerationWanted, completion: Completion) -> None:
        if is_empty(completion):
            episode.attempts = self._rollout.attempts  # A retry would get the same completion.
            episode.is_refused = True
            self._process.answer(GenerationAnswered(wanted.id, None, f"turn {wanted.turn}: {EMPTY}"))
        else:
            self._process.answer(GenerationAnswered(wanted.id, completion))

    def _take_record(self, episode: _GroupEpisode, record: EpisodeRecord) -> None:
        num_tokens = sum(len(turn.fed) + len(turn.completion.tokens) for turn in record.turns) // 4
        if all(is_empty(turn.completion) for turn in record.turns):
            episode.reason = "an episode in which the model said nothing"
        elif num_tokens > self._config.generation.max_length:
            limit = self._config.generation.max_length
            episode.reason = f"an episode of {num_tokens} tokens, `generation.max_length` is {limit}"
        elif not all(map(math.isfinite, self._components(record).values())):
            episode.reason = "an episode with rewards or metrics that are not finite"
        else:
            episode.record = record
            COUNTERS.add("episodes")

    def _retry(self, episode_group: _EpisodeGroup, episode: _GroupEpisode, failed: UserCodeFailed) -> None:
        """Retry; after the last attempt the sample is quarantined with the reason, never scored 0. An episode that may
        have ended its process runs alone, to tell its failures from those of others."""
        if episode.attempts >= self._rollout.attempts:
            episode.reason = failed.message
            if failed.kind == EpisodeFailed.__name__ and not episode.is_refused:
                episode.cause = QuarantineCause.USER_CODE
            return
        episode.attempts += 1
        episode.is_refused = False
        self._start(episode_group, episode, alone=failed.hangs or failed.kind != EpisodeFailed.__name__)

    def _outcome(self, episode_group: _EpisodeGroup) -> GroupOutcome:
        ticket, group = episode_group.group.ticket, episode_group.group
        episodes = episode_group.episodes
        records = [(each.sample, each.record) for each in episodes if each.record is not None]
        environment_s = max((record.seconds for _, record in records), default=0.0)
        elapsed_s = self._clock.monotonic() - group.since
        generating = "demonstrate" if episode_group.demonstrate else "actor_generate"
        is_user_code = any(each.cause is QuarantineCause.USER_CODE for each in episodes)
        return GroupOutcome(
            [
                GroupSample(
                    episode_trajectory(sample_key(ticket, sample), record.turns, finish=record.finish),
                    sample_text(group.row, record.text, prompt=record.prompt),
                    {} if episode_group.demonstrate else self._components(record),
                )
                for sample, record in records
            ],
            {sample_key(ticket, each.sample): each.reason for each in episodes if each.reason},
            {generating: max(0.0, elapsed_s - environment_s), "reward": environment_s},
            QuarantineCause.USER_CODE if is_user_code else QuarantineCause.SAMPLE,
        )

    def _components(self, record: EpisodeRecord) -> dict[str, float]:
        earned = discounted(record.rewards, discount=self._rollout.turn_discount)
        ours = {"success": float(record.success), RETURN: earned}
        return ours | record.components | ours  # First, because the first one counts in an evaluation.


def _sampling(sampling: SamplingParams, wanted: GenerationWanted) -> SamplingParams:
    """Sampling parameters of one turn: those of the group, with the overrides of the request."""
    temperature = sampling.temperature if wanted.temperature is None else wanted.temperature
    return msgspec.structs.replace(
        sampling, max_new_tokens=wanted.max_new_tokens, stop=wanted.stop, temperature=temperature
    )
