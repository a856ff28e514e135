import pytest

from kintsugi.data.reasoning_gym import open_task
from kintsugi.errors import ConfigError, DataError
from kintsugi.rollout.environments.builtin import Calculator, NumberGame, ReasoningGym
from kintsugi.rollout.environments.protocol import Step
from kintsugi.types import Row

SUM = Row("(1+2)*3=", {"answer": "9"})


def calculator(**options: float) -> Calculator:
    environment = Calculator(**options)
    environment.reset(SUM, seed=0)
    return environment


def test_the_calculator_calculates_and_the_answer_is_compared_with_the_rows() -> None:
    here = calculator()
    called = here.step("<tool>(1+2)*3</tool>")
    assert (called.observation, called.reward, called.done) == ("9\n", 0.0, False)
    answered = here.step("9")
    assert (answered.reward, answered.done, answered.info["success"]) == (1.0, True, True)


def test_a_wrong_answer_earns_nothing_and_ends_the_episode() -> None:
    step = calculator().step("10")
    assert (step.reward, step.done, step.info["success"]) == (0.0, True, False)


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("<tool>(1+2</tool>", "error: no )\n"),
        ("<tool>(1+2)*3", "error: no </tool>\n"),
        ("<tool></tool>", "error: unexpected end\n"),
        ("<tool>1/0</tool>", "error: division by zero\n"),
    ],
)
def test_a_tool_call_that_is_not_understood_is_an_observation_that_says_so(
    action: str, observation: str
) -> None:
    step = calculator().step(action)
    assert step == Step(observation, info={"success": False, "calls": 1, "tool_errors": 1})


def test_only_the_first_result_earns_the_hint() -> None:
    here = calculator(call_reward=0.25)
    rewards = [here.step(f"<tool>{text}</tool>").reward for text in ("(", "1+1", "1+1")]
    assert rewards == [0.0, 0.25, 0.0]


def test_the_calculator_shows_how_it_is_used() -> None:
    here = calculator()
    assert here.demonstrate() == "<tool>(1+2)*3</tool>"
    here.step(here.demonstrate())
    assert here.step(here.demonstrate()).reward == 1.0


def test_rows_without_an_answer_are_the_datas_fault() -> None:
    with pytest.raises(DataError, match="column `answer`"):
        Calculator().reset(Row("1+1="), seed=0)


def test_the_number_is_found_by_halving_what_is_left() -> None:
    here = NumberGame(low=0, high=15)
    here.reset(Row("?", {"answer": "11"}), seed=0)
    said = []
    while not (step := here.step(here.demonstrate())).done:
        said.append(step.observation)
    assert said == ["higher\n"] and step.reward == 1.0


def test_every_guess_before_the_last_costs_and_what_is_no_number_is_told() -> None:
    here = NumberGame(guess_cost=0.1)
    here.reset(Row("?", {"answer": 50}), seed=0)
    steps = [here.step(guess) for guess in ("x\n", "70\n", "50\n")]
    assert [(step.observation, step.reward) for step in steps] == [
        ("?\n", -0.1),
        ("lower\n", -0.1),
        ("", 1.0),
    ]


def test_a_number_that_no_row_names_depends_on_the_seed_only() -> None:
    def found(seed: int) -> int:
        here = NumberGame(low=0, high=99)
        here.reset(Row("?"), seed=seed)
        return next(guess for guess in range(100) if here.step(str(guess)).done)

    assert found(3) == found(3) and len({found(seed) for seed in range(20)}) > 10


@pytest.mark.parametrize("make", [lambda: NumberGame(low=5, high=4), lambda: ReasoningGym(tries=0)])
def test_options_that_can_not_be_are_refused(make: type) -> None:
    with pytest.raises(ConfigError, match=r"`rollout\.options`"):
        make()


def test_a_number_game_of_rows_whose_answers_are_no_numbers_is_the_datas_fault() -> None:
    with pytest.raises(DataError, match="got 'many'"):
        NumberGame().reset(Row("?", {"answer": "many"}), seed=0)


WORD = Row("…", {"task": "spell_backward", "options": {}, "number": 0, "answer": "?"})


def test_a_task_of_reasoning_gym_is_scored_by_its_own_verifier_and_may_be_tried_again() -> None:
    here = ReasoningGym(tries=2)
    assert here.reset(WORD, seed=0) is None
    answer = str(open_task("spell_backward", {})[0]["answer"])
    partly = here.step(answer[0] + "?" * (len(answer) - 1))
    assert 0.0 < partly.reward < 1.0 and not partly.done
    right = here.step(answer)
    assert right.reward + partly.reward == pytest.approx(1.0) and right.done and right.info["success"]


def test_the_last_try_ends_the_episode() -> None:
    here = ReasoningGym()
    here.reset(WORD, seed=0)
    step = here.step("?")
    assert step.done and not step.info["success"]


def test_a_named_task_draws_its_problem_by_the_seed_and_shows_its_answer() -> None:
    here = ReasoningGym(task="spell_backward", max_word_len=5)
    shown = here.reset(Row("anything"), seed=4711)
    assert shown is not None and shown.startswith("Spell this word backward")
    assert here.reset(Row("anything"), seed=4711) == shown != here.reset(Row("anything"), seed=4712)
    assert here.step(here.demonstrate()).reward == 1.0


def test_a_row_of_no_task_is_refused_with_what_would_help() -> None:
    with pytest.raises(DataError, match=r"data\.source: reasoning_gym:TASK"):
        ReasoningGym().reset(Row("1+1="), seed=0)
    with pytest.raises(ConfigError, match="a `task` beside its options"):
        ReasoningGym(max_word_len=5)
