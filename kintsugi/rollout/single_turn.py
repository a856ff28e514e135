"""Groups of one turn: all samples of a prompt are generated together, then scored by the reward functions.

begin ─► completions ─► `RewardCase` to the reward process ─► scored samples, and quarantined ones with reasons
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import msgspec

from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError, DataError, KintsugiError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.generation_client import GenerationClient
from kintsugi.rollout.group import GroupOutcome, GroupSample, RolloutGroup, sample_text
from kintsugi.rollout.rewards.spec import RewardFailed
from kintsugi.rollout.trajectory import is_empty, sampled_trajectory
from kintsugi.rollout.user_code.channel import (
    Ended,
    GenerationWanted,
    GroupScored,
    RewardCase,
    UserCodeFailed,
)
from kintsugi.rollout.user_code.process import UserProcess
from kintsugi.runtime.clock import Clock
from kintsugi.runtime.spans import SPANS
from kintsugi.telemetry.events import QuarantineCause
from kintsugi.types import Completion, FinishReason, sample_key

EMPTY = "a completion of zero tokens"


class PendingScore(msgspec.Struct, eq=False):
    """A group that is being scored, or is queued for it."""

    group: RolloutGroup
    completions: list[Completion]
    texts: list[str]
    quarantined: dict[str, str]
    generated_s: float
    since: float
    attempts: int = 1


class SingleTurnGroups:
    """Running groups of one turn; `take` handles the messages of the reward process."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        generation: GenerationClient,
        process: UserProcess,
        finish: Callable[[RolloutGroup, GroupOutcome], None],
        give_up: Callable[[RolloutGroup, KintsugiError], None],
        clock: Clock,
    ) -> None:
        self._attempts = config.rollout.attempts
        self._tokenizer = tokenizer
        self._generation = generation
        self._process = process
        self._finish = finish
        self._give_up = give_up
        self._clock = clock
        self._scoring: dict[int, PendingScore] = {}
        self._ids = itertools.count()

    @property
    def load(self) -> int:
        return len(self._scoring)

    def oldest(self) -> tuple[float, RolloutGroup] | None:
        """Return the group that has been in scoring longest, and since when."""
        scoring = next((each for each in self._scoring.values() if each.group.is_open), None)
        return None if scoring is None else (scoring.since, scoring.group)

    def begin(self, group: RolloutGroup) -> None:
        self._process.prepare()
        then = partial(self._generated, group)
        self._generation.request(group, prompt=group.prompt, sampling=group.request.sampling, then=then)

    def take(self, message: Ended | GenerationWanted) -> None:
        """Handle a message of the reward process: finish the group, or score it again."""
        assert isinstance(message, GroupScored | UserCodeFailed), (
            f"scoring does not end in {type(message).__name__}"
        )
        scoring = self._scoring.pop(message.id)
        if not scoring.group.is_open:
            return
        match message:
            case GroupScored():
                self._take_score(scoring, message)
            case UserCodeFailed(message=reason, kind=DataError.__name__):
                self._give_up(scoring.group, DataError(reason))
            case UserCodeFailed(message=reason, kind=ConfigError.__name__):
                self._give_up(scoring.group, ConfigError(reason))
            case UserCodeFailed():
                self._score_again(scoring, message)

    def _generated(self, group: RolloutGroup, answer: tuple[Completion, ...] | KintsugiError) -> None:
        if not group.is_open:
            return
        if isinstance(answer, KintsugiError):
            self._give_up(group, answer)
            return
        now = self._clock.monotonic()
        completions = [completion for completion in answer if not is_empty(completion)]
        empty = [completion for completion in answer if is_empty(completion)]
        quarantined = {sample_key(group.ticket, completion.sample): EMPTY for completion in empty}
        if not completions:
            self._finish(group, GroupOutcome([], quarantined))
            return
        texts = [self._text(completion) for completion in completions]
        self._score(
            PendingScore(group, completions, texts, quarantined, generated_s=now - group.since, since=now)
        )

    def _score(self, scoring: PendingScore) -> None:
        """Submit a group for scoring; one that failed before runs alone, to tell its failures from those of others."""
        row = scoring.group.row
        case = RewardCase(next(self._ids), row.prompt, tuple(scoring.texts), row.columns)
        try:
            self._process.submit(case, alone=scoring.attempts > 1)
        except DataError as error:
            self._give_up(scoring.group, error)
            return
        self._scoring[case.id] = scoring

    def _text(self, completion: Completion) -> str:
        ids = memoryview(completion.tokens).cast("i").tolist()
        return self._tokenizer.text_of_completion(ids, ended=completion.finish is FinishReason.EOS)

    def _take_score(self, scoring: PendingScore, scored: GroupScored) -> None:
        """Finish a group with its scored samples; samples that could not be scored are quarantined with the reason."""
        group, ticket = scoring.group, scoring.group.ticket
        quarantined = {
            sample_key(ticket, scoring.completions[index].sample): reason
            for index, reason in scored.reasons.items()
        }
        samples = [
            GroupSample(
                sampled_trajectory(ticket, group.prompt, completion),
                sample_text(group.row, text),
                components,
            )
            for index, (completion, text, components) in enumerate(
                zip(scoring.completions, scoring.texts, scored.components, strict=True)
            )
            if index not in scored.reasons
        ]
        SPANS.add("reward", {"ticket": ticket, "attempts": scoring.attempts}, since=scoring.since)
        timing = {"actor_generate": scoring.generated_s, "reward": self._clock.monotonic() - scoring.since}
        timing |= {f"reward.{name}": seconds for name, seconds in scored.seconds.items()}
        cause = QuarantineCause.USER_CODE if quarantined else QuarantineCause.SAMPLE
        self._finish(group, GroupOutcome(samples, scoring.quarantined | quarantined, timing, cause))

    def _score_again(self, scoring: PendingScore, failed: UserCodeFailed) -> None:
        """Retry; after the last attempt the samples are quarantined with the reason, never scored 0."""
        if scoring.attempts < self._attempts:
            scoring.attempts += 1
            self._score(scoring)
            return
        keys = [sample_key(scoring.group.ticket, completion.sample) for completion in scoring.completions]
        quarantined = scoring.quarantined | dict.fromkeys(keys, failed.message)
        is_user_code = failed.kind == RewardFailed.__name__
        cause = QuarantineCause.USER_CODE if is_user_code else QuarantineCause.SAMPLE
        self._finish(scoring.group, GroupOutcome([], quarantined, cause=cause))
