"""Groups whose samples are episodes: played in the process beside the worker, which asks the model turn by turn.

Each episode goes its own way; its group is answered when all have ended. What the model said is remembered until then:
an episode that is played again, because its environment failed or its process died, is answered from memory as far as
it says the same, and nothing is sampled twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import msgspec
import xxhash

from kintsugi.config import Config
from kintsugi.errors import ConfigError, DataError, KintsugiError, ModelError, RemoteError, UserError
from kintsugi.rollout.answering import EMPTY
from kintsugi.rollout.channel import Answered, Ended, Failed, Judged, Wanted
from kintsugi.rollout.environment import Episode, EpisodeFailed, EpisodeRecord
from kintsugi.rollout.episode import discounted, episode_trajectory, is_empty
from kintsugi.rollout.generating import Generating
from kintsugi.rollout.groups import Group, Outcome, Sample
from kintsugi.rollout.scoring import RETURN
from kintsugi.rollout.user_process import UserProcess
from kintsugi.runtime import COUNTERS, Clock, random_stream
from kintsugi.types import Completion, SampleText, Sampling, sample_key

_Question = tuple[int, bytes, Sampling]
"""What the model was asked: turn, digest of the prompt (prompts of a long episode would fill the memory), sampling."""
_USER_ERRORS = {each.__name__: each for each in (UserError, ConfigError, DataError, ModelError)}


class _Part(msgspec.Struct, eq=False):
    """One episode of a group."""

    sample: int
    attempts: int = 1
    record: EpisodeRecord | None = None
    reason: str = ""
    """Why there will be no record."""
    said: dict[_Question, Completion] = {}
    """What the model answered."""
    asked: dict[_Question, list[Wanted]] = {}
    """What it has not answered yet; more than one wait for it when the episode has been begun again meanwhile."""

    @property
    def has_ended(self) -> bool:
        return self.record is not None or bool(self.reason)


class _Company(msgspec.Struct, eq=False):
    """A group and its episodes."""

    group: Group
    demonstrate: bool
    seed: int
    parts: list[_Part]


class Acting:
    """Groups of episodes that are on their way; `take` is told what the environment process says."""

    def __init__(
        self,
        config: Config,
        *,
        generating: Generating,
        process: UserProcess,
        finish: Callable[[Group, Outcome], None],
        give_up: Callable[[Group, KintsugiError], None],
        clock: Clock,
    ) -> None:
        self._config, self._rollout = config, config.rollout
        self._generating, self._process = generating, process
        self._finish, self._give_up, self._clock = finish, give_up, clock
        self._playing: dict[int, tuple[_Company, _Part]] = {}
        self._ids = itertools.count()

    @property
    def load(self) -> int:
        return len(self._playing)

    def oldest(self) -> tuple[float, Group] | None:
        """Since when which group is being played."""
        company = next((each for each, _ in self._playing.values() if each.group.is_open), None)
        return None if company is None else (company.group.since, company.group)

    def begin(self, group: Group, *, demonstrate: bool = False) -> None:
        parts = [_Part(sample) for sample in range(group.request.ticket.num_samples)]
        company = _Company(group, demonstrate, self._seed(group), parts)
        for part in parts:
            self._play(company, part)

    def take(self, said: Ended | Wanted) -> None:
        assert not isinstance(said, Judged), "episodes are not judged"
        if isinstance(said, Wanted):
            self._relay(said)
            return
        company, part = self._playing.pop(said.id)
        if not company.group.is_open:
            return
        if isinstance(said, Failed) and said.kind in _USER_ERRORS:
            self._give_up(company.group, _USER_ERRORS[said.kind](said.message))
            return
        if isinstance(said, Failed):
            self._play_again(company, part, said)
        else:
            self._take_record(part, said)
        if all(each.has_ended for each in company.parts):
            self._finish(company.group, self._outcome(company))

    def _seed(self, group: Group) -> int:
        """The same for the whole group, and for a held-out problem whenever and in whichever run it is asked."""
        request, ticket = group.request, group.request.ticket
        if request.split == "eval":
            return random_stream(0, "held out", ticket.position).getrandbits(62)
        return random_stream(self._config.seed, "episode", ticket.id).getrandbits(62)

    def _play(self, company: _Company, part: _Part, *, alone: bool = False) -> None:
        group = company.group
        episode = Episode(
            next(self._ids),
            group.ticket,
            part.sample,
            group.row,
            group.prompt,
            company.seed,
            group.request.sampling,
            company.demonstrate,
        )
        try:
            self._process.submit(episode, alone=alone)
        except DataError as error:
            if group.is_open:
                self._give_up(group, error)
            return
        self._playing[episode.id] = (company, part)

    def _relay(self, wanted: Wanted) -> None:
        """Ask the model what an episode asks, unless it has answered that before."""
        company, part = self._playing[wanted.episode]
        group = company.group
        sampling = _sampling(group.request.sampling, wanted)
        if not group.is_open:
            self._refuse(wanted, group)
            return
        if group.request.split == "train" and sampling.temperature != group.request.sampling.temperature:
            expected = group.request.sampling.temperature
            reason = f"expected the run's own temperature, {expected:g}, got {sampling.temperature:g}"
            self._process.answer(Answered(wanted.id, None, reason))
            return
        question = (wanted.turn, xxhash.xxh3_128_digest(wanted.prompt), sampling)
        if question in part.said:
            self._answer(part, wanted, part.said[question])
            return
        if question in part.asked:
            part.asked[question].append(wanted)
            return
        part.asked[question] = [wanted]
        self._generating.ask(
            group,
            turn=wanted.turn,
            prompt=wanted.prompt,
            sampling=sampling,
            samples=(part.sample,),
            then=partial(self._generated, company, part, question),
        )

    def _generated(
        self,
        company: _Company,
        part: _Part,
        question: _Question,
        answer: tuple[Completion, ...] | KintsugiError,
    ) -> None:
        group, asked = company.group, part.asked.pop(question)
        cause = answer.cause if isinstance(answer, RemoteError) else None
        is_theirs = cause is not None and cause.kind in _USER_ERRORS
        if isinstance(answer, KintsugiError) and group.is_open and not is_theirs:
            self._give_up(group, answer)
        for wanted in asked:
            if not group.is_open:
                self._refuse(wanted, group)
            elif isinstance(answer, KintsugiError):
                assert cause is not None
                self._process.answer(Answered(wanted.id, None, cause.message))
            else:
                (part.said[question],) = answer
                self._answer(part, wanted, part.said[question])

    def _refuse(self, wanted: Wanted, group: Group) -> None:
        """Nobody waits for the group any more: let its episode end."""
        self._process.answer(Answered(wanted.id, None, f"{group.ticket} was dropped"))

    def _answer(self, part: _Part, wanted: Wanted, completion: Completion) -> None:
        if is_empty(completion):
            part.attempts = self._rollout.attempts  # It would be the same again.
            self._process.answer(Answered(wanted.id, None, f"turn {wanted.turn}: {EMPTY}"))
        else:
            self._process.answer(Answered(wanted.id, completion))

    def _take_record(self, part: _Part, record: EpisodeRecord) -> None:
        num_tokens = sum(len(turn.fed) + len(turn.completion.tokens) for turn in record.turns) // 4
        if all(is_empty(turn.completion) for turn in record.turns):
            part.reason = "an episode in which the model said nothing"
        elif num_tokens > self._config.generation.max_length:
            limit = self._config.generation.max_length
            part.reason = f"an episode of {num_tokens} tokens, `generation.max_length` is {limit}"
        elif not all(map(math.isfinite, self._components(record).values())):
            part.reason = "an episode whose rewards or figures add up to no finite number"
        else:
            part.record = record
            COUNTERS.add("episodes")

    def _play_again(self, company: _Company, part: _Part, failed: Failed) -> None:
        """Try once more; after the last attempt the sample is set aside with the reason, never scored 0. What ended its
        process is played alone, so that it is not blamed for another's fault."""
        if part.attempts >= self._rollout.attempts:
            part.reason = failed.message
            return
        part.attempts += 1
        self._play(company, part, alone=failed.hangs or failed.kind != EpisodeFailed.__name__)

    def _outcome(self, company: _Company) -> Outcome:
        ticket, group = company.group.ticket, company.group
        played = [(part.sample, part.record) for part in company.parts if part.record is not None]
        environment_s = max((record.seconds for _, record in played), default=0.0)
        elapsed_s = self._clock.monotonic() - group.since
        generating = "demonstrate" if company.demonstrate else "actor_generate"
        return Outcome(
            [
                Sample(
                    episode_trajectory(sample_key(ticket, sample), record.turns, finish=record.finish),
                    SampleText(record.prompt, record.text),
                    {} if company.demonstrate else self._components(record),
                )
                for sample, record in played
            ],
            {sample_key(ticket, part.sample): part.reason for part in company.parts if part.reason},
            {generating: max(0.0, elapsed_s - environment_s), "reward": environment_s},
        )

    def _components(self, record: EpisodeRecord) -> dict[str, float]:
        earned = discounted(record.rewards, discount=self._rollout.turn_discount)
        ours = {"success": float(record.success), RETURN: earned}
        return ours | record.components | ours  # First, because the first one counts in an evaluation.


def _sampling(sampling: Sampling, wanted: Wanted) -> Sampling:
    """As the group is sampled, for one turn of one of its episodes."""
    temperature = sampling.temperature if wanted.temperature is None else wanted.temperature
    return msgspec.structs.replace(
        sampling, max_new_tokens=wanted.max_new_tokens, stop=wanted.stop, temperature=temperature
    )
