import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kintsugi.config.schema import Config, DataSection
from kintsugi.data.dataset import DataSet, open_data
from kintsugi.data.reasoning_gym import REFUSED
from kintsugi.errors import DataError, UserError

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Some two hundred different sums."""


def opened(task: str, *, num_eval: int = 3, **data: Any) -> DataSet:
    section = DataSection(source=f"reasoning_gym:{task}", num_eval=num_eval, **data)
    return open_data(Config(name="t", data=section))


def test_a_task_is_a_question_with_its_answer_and_what_its_verifier_needs() -> None:
    row = opened("chain_sum", options={"min_terms": 2, "max_terms": 2}).held_out_row(2)
    assert row.columns["task"] == "chain_sum" and row.columns["number"] == 2
    assert row.prompt.endswith("=") and int(row.columns["answer"]) is not None
    assert row.columns["completion"] == row.columns["answer"]


def test_the_seed_is_an_option_and_the_same_seed_gives_the_same_problems() -> None:
    first, again, other = (opened("chain_sum", options={"seed": seed}).held_out_row(0) for seed in (1, 1, 2))
    assert first == again != other


def test_a_task_without_a_known_answer_has_no_answer_to_learn() -> None:
    assert "answer" not in opened("graph_color").held_out_row(0).columns


def test_held_out_problems_of_a_small_task_are_not_trained_on() -> None:
    data = opened("chain_sum", options={**SMALL, "size": 400})
    held_out = {data.held_out_row(index).prompt for index in range(3)}
    rows = [data.training_row(stage="s", seed=0, epoch=0, position=i) for i in range(data.num_positions)]
    assert len(rows) == 400 - 3 - 50
    assert not held_out & {row.prompt for row in rows}


def test_a_task_that_is_all_held_out_is_an_error() -> None:
    data = opened("chain_sum", num_eval=3000, options={**SMALL, "size": 4000})
    with pytest.raises(UserError, match=r"`data.num_eval`"):
        data.training_row(stage="s", seed=0, epoch=0, position=0)


@pytest.mark.parametrize(
    ("task", "options", "parts"),
    [
        ("chain_sums", {}, ["expected a task of reasoning-gym, got 'chain_sums'", "chain_sum,"]),
        ("composite", {}, ["'composite' can not be used", "`data.sources`"]),
        ("list_functions", {}, ["differ between processes"]),
        ("chain_sum", {"terms": 2}, ["`data.options`", "'chain_sum'", "terms"]),
        ("chain_sum", {"min_terms": -2}, ["`data.options`", "min_terms"]),
        ("chain_sum", {"seed": "x"}, ["`data.options`", '"seed":"x"']),
        ("chain_sum", {"size": 30}, ["`data.num_eval`", "the 30 rows"]),
    ],
)
def test_what_can_not_be_used_is_refused_with_the_reason(
    task: str, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        opened(task, options=options)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"kintsugi\[tasks\]"):
        opened("chain_sum")


PROGRAM = """
import hashlib, json, signal, sys, warnings
warnings.simplefilter("ignore")
import reasoning_gym
from reasoning_gym.factory import DATASETS

class TooSlow(BaseException):
    pass

def stop(*arguments):
    raise TooSlow

signal.signal(signal.SIGVTALRM, stop)
found = {}
for name in sorted(DATASETS.keys() - set(sys.argv[1:])):
    problems = reasoning_gym.create_dataset(name, seed=3, size=10000)
    digests = found[name] = []
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.3)  # Of slow tasks the first problems.
    try:
        for number in range(0, 12 * 37, 37):
            problem = problems[number]
            text = problem["question"] + "|" + repr(problem["answer"])
            digests.append(hashlib.md5(text.encode()).hexdigest())
    except TooSlow:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
sys.stdout.write("\\n" + json.dumps(found))  # Some of them write dots to it.
"""


@pytest.mark.slow
def test_every_task_that_is_not_refused_makes_the_same_problems_in_every_process() -> None:
    found = []
    for seed in ("1", "5"):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *REFUSED],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=300,
        )
        found.append(json.loads(result.stdout.splitlines()[-1]))
    differing = [
        name
        for name, digests in found[0].items()
        if any(one != other for one, other in zip(digests, found[1][name], strict=False))
    ]
    assert differing == []
    assert sum(map(len, found[0].values())) > 500
