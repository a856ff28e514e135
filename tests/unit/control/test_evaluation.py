from __future__ import annotations

import msgspec

from kintsugi.config.schema import Config, EvaluationSection
from kintsugi.control.evaluation import Evaluation
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.types import SampleMeta
from tests.unit.control.driven import CONFIG, scored


def configured(num_samples: int) -> Config:
    return msgspec.structs.replace(CONFIG, eval=EvaluationSection(num_samples=num_samples))


def right(meta: SampleMeta, is_right: bool) -> SampleMeta:
    components = {"exact": 1.0 if is_right else 0.5, "style": 5.0}
    return msgspec.structs.replace(meta, reward=sum(components.values()), reward_components=components)


def answers(evaluation: Evaluation, *, is_right: bool, version: int = 7) -> list[EpisodesDone]:
    done = [scored(ticket, version=version) for ticket, _ in evaluation.tasks.values()]
    return [
        msgspec.structs.replace(each, samples=tuple(right(meta, is_right) for meta in each.samples))
        for each in done
    ]


def test_every_problem_is_asked_once_greedily_and_k_times_sampled() -> None:
    evaluation = Evaluation(configured(4), step=3, version=7, num_problems=2)
    asked = [
        (name, ticket.num_samples, s.num_samples, s.temperature)
        for name, (ticket, s) in evaluation.tasks.items()
    ]
    assert asked == [
        ("eval:3:0:0", 1, 1, 0.0),
        ("eval:3:1:0", 1, 1, 0.0),
        ("eval:3:0:1", 4, 4, 1.0),
        ("eval:3:1:1", 4, 4, 1.0),
    ]


def test_no_samples_leave_only_the_greedy_answers() -> None:
    evaluation = Evaluation(configured(0), step=3, version=7, num_problems=2)
    assert list(evaluation.tasks) == ["eval:3:0:0", "eval:3:1:0"]


def test_it_is_finished_when_every_answer_is_in_however_often_one_comes() -> None:
    evaluation = Evaluation(configured(0), step=3, version=7, num_problems=2)
    first, second = answers(evaluation, is_right=True)
    assert evaluation.take(first) is evaluation.take(first) is None
    assert not evaluation.finished
    evaluation.take(second)
    assert evaluation.finished


def test_only_full_marks_of_the_first_reward_count_as_right() -> None:
    evaluation = Evaluation(configured(2), step=3, version=7, num_problems=2)
    for done in (*answers(evaluation, is_right=True)[::2], *answers(evaluation, is_right=False)[1::2]):
        assert evaluation.take(done) is None
    metrics = evaluation.metrics()
    assert (metrics["eval/problems"], metrics["eval/accuracy"]) == (2.0, 0.5)
    assert (metrics["eval/mean@2"], metrics["eval/pass@2"]) == (0.5, 0.5)


def test_an_answer_of_another_version_is_refused_and_not_counted() -> None:
    evaluation = Evaluation(configured(0), step=3, version=7, num_problems=1)
    (stale,) = answers(evaluation, is_right=True, version=6)
    problem = evaluation.take(stale)
    assert problem is not None and "version 7" in problem and "[6]" in problem
    assert not evaluation.finished


def test_an_answer_that_could_not_be_scored_counts_as_wrong_and_is_counted() -> None:
    evaluation = Evaluation(configured(2), step=3, version=7, num_problems=2)
    for done in answers(evaluation, is_right=True):
        lost = {meta.key: "reward crashed" for meta in done.samples[-1:]} if ":0:" in done.ticket[4:] else {}
        kept = tuple(meta for meta in done.samples if meta.key not in lost)
        assert evaluation.take(EpisodesDone(done.ticket, kept, lost)) is None
    metrics = evaluation.metrics()
    assert evaluation.finished and set(evaluation.unscored.values()) == {"reward crashed"}
    assert (metrics["eval/accuracy"], metrics["eval/mean@2"]) == (0.5, 0.75)
    assert metrics["eval/unscored"] == 2.0


def test_an_evaluation_of_which_nothing_could_be_scored_is_refused_with_the_reason() -> None:
    evaluation = Evaluation(configured(0), step=3, version=7, num_problems=2)
    lost = [EpisodesDone(f"eval:3:{n}:0", (), {f"eval:3:{n}:0/0": "reward crashed"}) for n in range(2)]
    assert evaluation.take(lost[0]) is None
    problem = evaluation.take(lost[1])
    assert problem is not None and "no evaluation problem" in problem and "reward crashed" in problem
