"""The worker's side of episodes, with a process and a manager that do what they are told."""

from array import array

import pytest

from kintsugi.config.schema import Config, GenerationSection, RolloutSection
from kintsugi.errors import DataError, DeadlineExceeded, Fault, KintsugiError, RemoteError
from kintsugi.protocol.rollout import RunEpisodes
from kintsugi.rollout.environments.protocol import Episode, EpisodeFailed, EpisodeRecord, Turn
from kintsugi.rollout.generation_client import Then
from kintsugi.rollout.group import GroupOutcome, RolloutGroup
from kintsugi.rollout.multi_turn import MultiTurnGroups
from kintsugi.rollout.single_turn import EMPTY
from kintsugi.rollout.trajectory import int32
from kintsugi.rollout.user_code.channel import (
    GenerationAnswered,
    GenerationWanted,
    RewardCase,
    UserCodeFailed,
)
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.types import Completion, FinishReason, Row, SamplingParams, Ticket

PROMPT = int32([3, 4])


def completion(*ids: int, sample: int = 0) -> Completion:
    return Completion(
        sample, int32(ids), array("f", [-0.5] * len(ids)).tobytes(), int32([3] * len(ids)), FinishReason.EOS
    )


class Process:
    """Keeps what it was asked and answered."""

    def __init__(self) -> None:
        self.played: list[tuple[Episode, bool]] = []
        self.answered: list[GenerationAnswered] = []

    def submit(self, body: RewardCase | Episode, *, alone: bool = False) -> None:
        assert isinstance(body, Episode)
        self.played.append((body, alone))

    def answer(self, answer: GenerationAnswered) -> None:
        self.answered.append(answer)


class Asked:
    """What was asked of the manager, to be answered by the test."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, tuple[int, ...], SamplingParams, Then]] = []

    def request(
        self,
        group: RolloutGroup,
        *,
        prompt: bytes,
        sampling: SamplingParams,
        then: Then,
        turn: int = 0,
        samples: tuple[int, ...] = (),
    ) -> None:
        self.requests.append((turn, samples, sampling, then))


class Stage:
    """Acting with fakes around it."""

    def __init__(self, *, num_samples: int = 2, split: str = "train", discount: float = 1.0) -> None:
        self.process, self.asked = Process(), Asked()
        self.finished: list[GroupOutcome] = []
        self.given_up: list[KintsugiError] = []
        config = Config(
            name="t",
            generation=GenerationSection(max_length=32),
            rollout=RolloutSection(environment="calculator", attempts=2, turn_discount=discount),
        )
        self.acting = MultiTurnGroups(
            config,
            generation=self.asked,  # type: ignore[arg-type]
            process=self.process,  # type: ignore[arg-type]
            finish=self._finish,
            give_up=self._give_up,
            clock=VirtualClock(),
        )
        ticket = Ticket("grpo:0:5:0", "grpo", 0, 5, 0, num_samples)
        sampling = SamplingParams(max_new_tokens=8, num_samples=num_samples)
        request = RunEpisodes(ticket, split, sampling, 3, 20.0)
        self.group = RolloutGroup([], request, Row("1+1="), PROMPT, 0.0, 20.0)

    def _finish(self, group: RolloutGroup, outcome: GroupOutcome) -> None:
        group.is_open = False
        self.finished.append(outcome)

    def _give_up(self, group: RolloutGroup, error: KintsugiError) -> None:
        group.is_open = False
        self.given_up.append(error)

    def begin(self) -> list[Episode]:
        self.acting.begin(self.group)
        return [episode for episode, _ in self.process.played]

    def record(self, episode: Episode, *rewards: float, success: bool = False) -> None:
        turns = tuple(Turn(int32([2]), completion(5, 1)) for _ in rewards)
        self.acting.take(EpisodeRecord(episode.id, turns, rewards, FinishReason.EOS, success, {"turns": 2.0}))

    def fail(self, episode: Episode, reason: str = "broken", *, kind: str = EpisodeFailed.__name__) -> None:
        self.acting.take(UserCodeFailed(episode.id, reason, kind))

    def want(
        self, episode: Episode, *, number: int = 0, turn: int = 0, temperature: float | None = None
    ) -> None:
        self.acting.take(GenerationWanted(number, episode.id, turn, PROMPT, 4, ("+",), temperature))


def test_all_episodes_of_a_group_have_the_same_seed_and_another_group_another() -> None:
    seeds = [episode.seed for episode in Stage().begin()]
    other = Stage()
    other.group.request = RunEpisodes(
        Ticket("grpo:0:6:0", "grpo", 0, 6, 0, 2), "train", SamplingParams(), 3, 20.0
    )
    assert len(set(seeds)) == 1 and other.begin()[0].seed != seeds[0]


def test_a_held_out_problem_has_the_same_seed_in_every_evaluation() -> None:
    def seed(step: int) -> int:
        here = Stage(split="eval")
        ticket = Ticket(f"eval:{step}:5:0", "eval", step, 5, 0, 2)
        here.group.request = RunEpisodes(ticket, "eval", SamplingParams(), step, 20.0)
        return here.begin()[0].seed

    assert seed(1) == seed(2)


def test_a_turn_is_asked_for_its_own_sample_as_the_group_is_sampled() -> None:
    here = Stage()
    _, second = here.begin()
    here.want(second, number=7, turn=2)
    ((turn, samples, sampling, then),) = here.asked.requests
    assert (turn, samples) == (2, (1,))
    assert (sampling.max_new_tokens, sampling.stop, sampling.temperature) == (4, ("+",), 1.0)
    then((completion(5, 1, sample=1),))
    assert here.process.answered == [GenerationAnswered(7, completion(5, 1, sample=1))]


def test_what_an_episode_asks_again_when_it_is_played_again_is_answered_from_memory() -> None:
    here = Stage(num_samples=1)
    (episode,) = here.begin()
    here.want(episode)
    here.asked.requests[0][3]((completion(5, 1),))
    here.fail(episode)
    again = here.process.played[-1][0]
    here.want(again, number=9)
    assert len(here.asked.requests) == 1
    assert here.process.answered[-1] == GenerationAnswered(9, completion(5, 1))


def test_a_group_ends_when_all_of_its_episodes_have_and_its_reward_is_the_sum_of_its_turns() -> None:
    here = Stage()
    first, second = here.begin()
    here.record(second, 0.5, 1.0, success=True)
    assert here.finished == []
    here.record(first, 0.0)
    (outcome,) = here.finished
    assert [sample.trajectory.key for sample in outcome.samples] == ["grpo:0:5:0/0", "grpo:0:5:0/1"]
    assert [list(sample.components.items()) for sample in outcome.samples] == [
        [("success", 0.0), ("return", 0.0), ("turns", 2.0)],
        [("success", 1.0), ("return", 1.5), ("turns", 2.0)],
    ]
    assert list(outcome.samples[1].trajectory.loss_mask) == [0, 1, 1, 0, 1, 1]


def test_later_turns_are_worth_less_where_they_are_discounted() -> None:
    here = Stage(num_samples=1, discount=0.5)
    here.record(here.begin()[0], 0.5, 1.0)
    assert here.finished[0].samples[0].components["return"] == 1.0


def test_an_episode_that_fails_is_played_again_and_then_set_aside_with_its_reason() -> None:
    here = Stage()
    first, second = here.begin()
    here.record(second, 1.0)
    here.fail(first)
    again, alone = here.process.played[-1]
    assert again.sample == 0 and not alone
    here.fail(again, "broken again")
    (outcome,) = here.finished
    assert [sample.trajectory.key for sample in outcome.samples] == ["grpo:0:5:0/1"]
    assert outcome.quarantined == {"grpo:0:5:0/0": "broken again"}


def test_what_may_have_ended_its_process_is_played_alone() -> None:
    here = Stage(num_samples=1)
    here.fail(here.begin()[0], kind="RewardFailed")
    assert here.process.played[-1][1]


def test_the_users_own_mistake_ends_the_group() -> None:
    here = Stage()
    here.fail(here.begin()[0], "no column", kind=DataError.__name__)
    assert [type(error) for error in here.given_up] == [DataError] and here.finished == []


def test_a_completion_of_zero_tokens_is_set_aside_without_another_try() -> None:
    here = Stage(num_samples=1)
    (episode,) = here.begin()
    here.want(episode)
    here.asked.requests[0][3]((completion(),))
    (answer,) = here.process.answered
    assert answer.completion is None and answer.reason == f"turn 0: {EMPTY}"
    here.fail(episode, answer.reason)
    assert here.finished[0].quarantined == {"grpo:0:5:0/0": f"turn 0: {EMPTY}"}


@pytest.mark.parametrize(
    ("turns", "reason"),
    [((), "the model said nothing"), ((Turn(int32([1] * 40), completion(5)),), "max_length` is 32")],
)
def test_an_episode_that_can_not_be_trained_is_set_aside(turns: tuple[Turn, ...], reason: str) -> None:
    here = Stage(num_samples=1)
    (episode,) = here.begin()
    here.acting.take(EpisodeRecord(episode.id, turns, (), FinishReason.EOS, False))
    assert reason in here.finished[0].quarantined["grpo:0:5:0/0"]


def test_another_temperature_than_the_runs_is_refused_in_training_only() -> None:
    for split, num_asked in (("train", 0), ("eval", 1)):
        here = Stage(split=split)
        here.want(here.begin()[0], temperature=0.5)
        assert len(here.asked.requests) == num_asked
        assert [answer.completion for answer in here.process.answered] == [None] * (1 - num_asked)


def test_a_request_that_a_server_refuses_fails_the_episode_and_one_without_time_left_the_group() -> None:
    here = Stage()
    first, _ = here.begin()
    here.want(first)
    fault = Fault("f1", "UserError", "server-0", "16 stop texts", 0.0)
    here.asked.requests[0][3](RemoteError(fault))
    assert here.process.answered == [GenerationAnswered(0, None, "16 stop texts")] and here.given_up == []
    here.want(first)
    late = DeadlineExceeded(whom="manager-0", what="Generate", waited_s=20.0)
    here.asked.requests[1][3](late)
    assert here.given_up == [late]


def test_what_is_asked_for_a_group_that_was_dropped_is_told_so() -> None:
    here = Stage()
    first, _ = here.begin()
    here.group.is_open = False
    here.want(first)
    here.fail(first)
    assert "was dropped" in here.process.answered[0].reason
    assert here.finished == [] and len(here.process.played) == 2


def test_rewards_that_add_up_to_no_finite_number_are_set_aside() -> None:
    here = Stage(num_samples=1)
    here.record(here.begin()[0], 1e308, 1e308)
    (outcome,) = here.finished
    assert outcome.samples == [] and "not finite" in outcome.quarantined["grpo:0:5:0/0"]


def test_what_is_asked_again_while_it_is_being_sampled_is_sampled_once() -> None:
    here = Stage(num_samples=1)
    (first,) = here.begin()
    here.want(first, number=0)
    here.want(first, number=1)
    (request,) = here.asked.requests
    request[3]((completion(5, 1),))
    assert here.process.answered == [GenerationAnswered(n, completion(5, 1)) for n in (0, 1)]


def test_a_demonstration_earns_nothing() -> None:
    here = Stage(num_samples=1)
    here.acting.begin(here.group, demonstrate=True)
    here.record(here.process.played[0][0], 1.0)
    assert here.process.played[0][0].demonstrate
    assert here.finished[0].samples[0].components == {}
