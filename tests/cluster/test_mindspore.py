"""MindSpore ranks in the same recovery protocol: faults do not change the weights, and the flow is the one without a
rollback."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from kintsugi.journal.facts import StrategyChosen
from kintsugi.recovery.rank import FLOWS, Flow
from kintsugi.run_folder.reader import read_journal
from tests.cluster.mindspore_interpreter import PYTHON, needs_mindspore
from tests.cluster.real_runs import Run, finished, play
from tests.cluster.test_elastic import STEPS, lose_a_rank_for_a_while

MINDSPORE = ("actor.framework=mindspore", f"actor.python={PYTHON}")
OPERATIONS = [
    re.sub(r"(?<!^)(?=[A-Z])", "_", operation.__name__).lower() for operation in FLOWS[Flow.RESTORE]
]
"""Names of the spans that a rank records of them."""


def undisturbed(run: Run) -> None:
    run.start(*MINDSPORE)
    run.finish()


def assert_without_torch(run: Run) -> None:
    """A rank has MindSpore's libraries in its memory, and none of torch."""
    mapped = Path(f"/proc/{read_journal(run.run_dir).processes['model-0']}/maps").read_text()
    assert "libmindspore" in mapped and "libtorch" not in mapped


def killed(process: str, *, step: int, number: signal.Signals = signal.SIGKILL) -> object:
    def scenario(run: Run) -> None:
        run.start(*MINDSPORE, gates=(step,))
        run.wait_at(step)
        assert_without_torch(run)
        run.kill(process, number)
        run.let_through(step)
        run.finish()

    return scenario


def longer(run: Run) -> None:
    run.start(STEPS, *MINDSPORE)
    run.finish()


def smaller_for_a_while(run: Run) -> None:
    lose_a_rank_for_a_while(run, *MINDSPORE)


SCENARIOS = {
    "undisturbed": undisturbed,
    "the same again": undisturbed,
    "kill of model-0": killed("model-0", step=5),
    "kill of model-1": killed("model-1", step=6),
    "stop of model-1": killed("model-1", step=5, number=signal.SIGSTOP),
    "kill of the master": killed("master-0", step=5),
    "longer": longer,
    "smaller for a while": smaller_for_a_while,
}
KILLED = [name for name in SCENARIOS if name.startswith(("kill", "stop", "the same"))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run | BaseException]:
    return play(SCENARIOS, tmp_path_factory.mktemp("mindspore"))  # type: ignore[arg-type]


def operations_of(run_dir: Path, process: str) -> list[str]:
    """Operations of recovery that a rank carried out, in their order."""
    spans = (run_dir / "events" / f"{process}.spans.jsonl").read_text().splitlines()
    names = [json.loads(line)["name"] for line in spans]
    return [name for name in names if name in OPERATIONS or name == "rollback"]


@needs_mindspore
@pytest.mark.mindspore
@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_a_fault_leaves_the_weights_of_the_undisturbed_run(
    runs: Mapping[str, Run | BaseException], name: str
) -> None:
    expected, run = finished(runs["undisturbed"]), finished(runs[name])
    assert run.summary.weights_sha256 == expected.summary.weights_sha256
    disturbed = name.removeprefix("kill of ").removeprefix("stop of ")
    incarnations = {process: len(pids) for process, pids in run.pids_joined().items()}
    if disturbed in incarnations:
        assert incarnations.pop(disturbed) == 2, "the fault fired, and the process was replaced"
    assert set(incarnations.values()) == {1}, f"healthy processes keep their pid: {incarnations}"


@needs_mindspore
@pytest.mark.mindspore
@pytest.mark.slow
def test_a_healthy_rank_carries_out_the_operations_of_the_diagram_without_a_rollback(
    runs: Mapping[str, Run | BaseException],
) -> None:
    found = operations_of(finished(runs["kill of model-1"]).run_dir, "model-0")
    assert "rollback" not in found
    assert found[-len(OPERATIONS) :] == OPERATIONS


@needs_mindspore
@pytest.mark.mindspore
@pytest.mark.slow
def test_a_run_that_goes_on_with_one_rank_for_a_while_ends_in_the_weights_of_two(
    runs: Mapping[str, Run | BaseException],
) -> None:
    smaller = finished(runs["smaller for a while"])
    assert [fact.strategy for fact in smaller.facts if isinstance(fact, StrategyChosen)][-1] == "elastic"
    assert len(smaller.pids_joined()["model-1"]) == 2
    assert smaller.summary.weights_sha256 == finished(runs["longer"]).summary.weights_sha256


@needs_mindspore
@pytest.mark.mindspore
@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("kill of model-0", "killed"), ("stop of model-1", "stopped")])
def test_the_diagnosis_names_the_rank_and_what_happened_to_it(
    runs: Mapping[str, Run | BaseException], name: str, kind: str
) -> None:
    run = finished(runs[name])
    code, output = run.ask("diagnose", str(run.run_dir), "--json")
    assert code == 0
    cause = json.loads(output)["causes"][0]
    assert (cause["process"], cause["kind"]) == (name.rsplit(maxsplit=1)[-1], kind)
