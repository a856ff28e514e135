"""Groups of one turn: all samples of a prompt are generated at once, then judged together by the reward functions.

begin ─► completions ─► a case for the reward process ─► scored samples, and the reasons of the others
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import msgspec

from kintsugi.config import Config
from kintsugi.errors import ConfigError, DataError, KintsugiError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.channel import Case, Ended, Failed, Judged, Wanted
from kintsugi.rollout.episode import is_empty, sampled_trajectory
from kintsugi.rollout.generating import Generating
from kintsugi.rollout.groups import Group, Outcome, Sample
from kintsugi.rollout.user_process import UserProcess
from kintsugi.runtime import SPANS, Clock
from kintsugi.types import Completion, Finish, SampleText, sample_key

EMPTY = "a completion of zero tokens"


class Scoring(msgspec.Struct, eq=False):
    """A group that is being judged, or waits for those before it."""

    group: Group
    completions: list[Completion]
    texts: list[str]
    quarantined: dict[str, str]
    generated_s: float
    since: float
    attempts: int = 1


class Answering:
    """Groups of one turn that are on their way; `take` is told what the reward process says."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        generating: Generating,
        process: UserProcess,
        finish: Callable[[Group, Outcome], None],
        give_up: Callable[[Group, KintsugiError], None],
        clock: Clock,
    ) -> None:
        self._attempts, self._tokenizer = config.rollout.attempts, tokenizer
        self._generating, self._process = generating, process
        self._finish, self._give_up, self._clock = finish, give_up, clock
        self._scoring: dict[int, Scoring] = {}
        self._ids = itertools.count()

    @property
    def load(self) -> int:
        return len(self._scoring)

    def oldest(self) -> tuple[float, Group] | None:
        """Since when which group is being judged."""
        judged = next((each for each in self._scoring.values() if each.group.is_open), None)
        return None if judged is None else (judged.since, judged.group)

    def begin(self, group: Group) -> None:
        self._process.prepare()
        then = partial(self._generated, group)
        self._generating.ask(group, prompt=group.prompt, sampling=group.request.sampling, then=then)

    def take(self, said: Ended | Wanted) -> None:
        assert isinstance(said, Judged | Failed), f"judging does not say {type(said).__name__}"
        scoring = self._scoring.pop(said.id)
        if not scoring.group.is_open:
            return
        match said:
            case Judged():
                self._take_score(scoring, said)
            case Failed(message=message, kind=DataError.__name__):
                self._give_up(scoring.group, DataError(message))
            case Failed(message=message, kind=ConfigError.__name__):
                self._give_up(scoring.group, ConfigError(message))
            case Failed(message=message):
                self._score_again(scoring, message)

    def _generated(self, group: Group, answer: tuple[Completion, ...] | KintsugiError) -> None:
        if not group.is_open:
            return
        if isinstance(answer, KintsugiError):
            self._give_up(group, answer)
            return
        now = self._clock.monotonic()
        said = [completion for completion in answer if not is_empty(completion)]
        empty = [completion for completion in answer if is_empty(completion)]
        quarantined = {sample_key(group.ticket, completion.sample): EMPTY for completion in empty}
        if not said:
            self._finish(group, Outcome([], quarantined))
            return
        texts = [self._text(completion) for completion in said]
        self._score(Scoring(group, said, texts, quarantined, generated_s=now - group.since, since=now))

    def _score(self, scoring: Scoring) -> None:
        """A group that has failed before is judged alone, so that it is not blamed for another's fault."""
        row = scoring.group.row
        case = Case(next(self._ids), row.prompt, tuple(scoring.texts), row.columns)
        try:
            self._process.submit(case, alone=scoring.attempts > 1)
        except DataError as error:
            self._give_up(scoring.group, error)
            return
        self._scoring[case.id] = scoring

    def _text(self, completion: Completion) -> str:
        ids = memoryview(completion.tokens).cast("i").tolist()
        return self._tokenizer.text_of_completion(ids, ended=completion.finish is Finish.EOS)

    def _take_score(self, scoring: Scoring, verdict: Judged) -> None:
        """What was judged goes on its way; what could not be is set aside, sample by sample, with its reason."""
        group, ticket = scoring.group, scoring.group.ticket
        quarantined = {
            sample_key(ticket, scoring.completions[index].sample): reason
            for index, reason in verdict.reasons.items()
        }
        samples = [
            Sample(
                sampled_trajectory(ticket, group.prompt, completion),
                SampleText(group.row.prompt, text),
                components,
            )
            for index, (completion, text, components) in enumerate(
                zip(scoring.completions, scoring.texts, verdict.components, strict=True)
            )
            if index not in verdict.reasons
        ]
        SPANS.add("reward", {"ticket": ticket, "attempts": scoring.attempts}, since=scoring.since)
        timing = {"actor_generate": scoring.generated_s, "reward": self._clock.monotonic() - scoring.since}
        timing |= {f"reward.{name}": seconds for name, seconds in verdict.seconds.items()}
        self._finish(group, Outcome(samples, scoring.quarantined | quarantined, timing))

    def _score_again(self, scoring: Scoring, reason: str) -> None:
        """Try once more; after the last attempt the samples are set aside with the reason, never scored 0."""
        if scoring.attempts < self._attempts:
            scoring.attempts += 1
            self._score(scoring)
            return
        keys = [sample_key(scoring.group.ticket, completion.sample) for completion in scoring.completions]
        self._finish(scoring.group, Outcome([], scoring.quarantined | dict.fromkeys(keys, reason)))
