import pytest

from kintsugi.config.schema import SourceSection
from kintsugi.data.reasoning_gym import ReasoningGymTasks
from kintsugi.rollout.rewards.reasoning_gym import task_score
from kintsugi.types import Row


def row(task: str) -> Row:
    return ReasoningGymTasks(SourceSection(source=f"reasoning_gym:{task}", num_eval=3), split="eval").row(0)


def score(problem: Row, *completions: str) -> list[float]:
    columns = {name: [value] * len(completions) for name, value in problem.columns.items()}
    return task_score(list(completions), **columns)


def test_the_tasks_verifier_judges_the_last_tagged_answer_or_the_whole_text() -> None:
    problem = row("chain_sum")
    answer = problem.columns["answer"]
    tagged = f"<answer>7</answer> no: <answer> {answer} </answer>."
    assert score(problem, answer, tagged, "", "x") == [1.0, 1.0, 0.0, 0.0]


def test_an_answer_that_the_verifier_can_not_read_is_wrong() -> None:
    problem = row("prime_factorization")
    assert score(problem, problem.columns["answer"], "two × three", "3.7") == [1.0, 0.0, 0.0]


def test_anything_but_the_right_word_is_wrong_where_the_verifier_lets_it_pass() -> None:
    problem = row("game_of_life_halting")
    assert score(problem, problem.columns["answer"], "xyzzy", "") == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("task", ["graph_color", "boxnet"])
def test_a_task_without_a_known_answer_is_scored_by_its_verifier(task: str) -> None:
    assert score(row(task), "xyzzy", "3.7") == [0.0, 0.0]
