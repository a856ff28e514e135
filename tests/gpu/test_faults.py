"""A rank breaks the card, or dies on it, in the middle of a run: the cause is named, one process is replaced, memory
comes back, and the weights are those of a run in which nothing happened."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from kintsugi.config.recipe import load
from kintsugi.errors import Fault, root_first
from kintsugi.journal.facts import (
    Fact,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    ProcessLost,
    RunEnded,
    StepCommitted,
)
from kintsugi.journal.journal import read_facts
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.run_folder.layout import RunFolder
from tests.gpu.programs.faulty_trainer import (
    DONE_FILE,
    FAULT_FILE,
    MEMORY_FILE,
    STEP,
    VICTIM,
    MemoryTaken,
    memory_taken,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
LAUNCHER = (sys.executable, "-m", "tests.gpu.programs.faulty_trainer")
LAST_STEP = 8
OVERRIDES = ("cluster.hosts=1", f"algorithm.steps={LAST_STEP}", "eval.every=0", "checkpoint.every=0")
RUN_TIMEOUT_S = 150.0
SLACK_BYTES = 50 << 20


@dataclass(frozen=True)
class Story:
    """What a run left behind."""

    facts: tuple[Fact, ...]
    injected: bool
    memory: list[MemoryTaken]
    """As it was when the training calls of rank 0 began, in that order; a repeated step is there twice."""
    memory_before: int
    memory_after: int

    @property
    def weights(self) -> str:
        (ended,) = (fact for fact in self.facts if isinstance(fact, RunEnded))
        assert ended.outcome == "finished"
        return ended.weights_sha256

    @property
    def steps(self) -> list[int]:
        return [fact.step for fact in self.facts if isinstance(fact, StepCommitted)]

    @property
    def incidents(self) -> list[IncidentOpened]:
        return [fact for fact in self.facts if isinstance(fact, IncidentOpened)]

    @property
    def losses(self) -> list[ProcessLost]:
        return [fact for fact in self.facts if isinstance(fact, ProcessLost)]

    def joined(self) -> Counter[str]:
        """How many incarnations of each process there were."""
        return Counter(fact.peer.process for fact in self.facts if isinstance(fact, ProcessJoined))


def run_to_the_end(run_dir: Path, *, fault: str | None) -> Story:
    before = memory_taken()
    run = MarkedRun(
        load(ROOT / "kintsugi" / "recipes" / "soak.yaml", OVERRIDES).config, run_dir=run_dir, command=LAUNCHER
    )
    if fault is not None:
        (run_dir / FAULT_FILE).write_text(fault)
    try:
        run.start()
        assert run.launcher is not None
        run.launcher.wait_ended(whom="launcher", timeout_s=RUN_TIMEOUT_S)
        after = memory_taken()
        assert run.exit_code() == 0, run.output()
        assert run.pids() == []
    finally:
        run.close()
    lines = (run_dir / MEMORY_FILE).read_bytes().splitlines()
    memory = [msgspec.json.decode(line, type=MemoryTaken) for line in lines]
    facts = read_facts(RunFolder(run_dir).journal_file)
    return Story(facts, (run_dir / DONE_FILE).exists(), memory, before, after)


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def undisturbed(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = run_to_the_end(tmp_path_factory.mktemp("undisturbed") / "run", fault=None)
    assert (story.injected, story.incidents) == (False, [])
    return story


@pytest.fixture(scope="module", params=["killed", "out of memory", "illegal access"])
def disturbed(
    request: pytest.FixtureRequest, undisturbed: Story, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Story]:
    """After the undisturbed one, during which the card also gets back what other tests of this process had."""
    fault = str(request.param)
    folder = tmp_path_factory.mktemp(fault.replace(" ", "-"))
    story = run_to_the_end(folder / "run", fault=fault)
    assert story.injected
    return fault, story


CAUSES = {
    "killed": ("ProcessDied", "SIGKILL"),
    "out of memory": ("DeviceOutOfMemory", "CUDA out of memory"),
    "illegal access": ("DeviceError", "illegal memory access"),
}


def test_the_run_goes_on_to_the_weights_of_its_undisturbed_twin(
    disturbed: tuple[str, Story], undisturbed: Story
) -> None:
    _, story = disturbed
    assert story.steps == list(range(1, LAST_STEP + 1))
    assert story.weights == undisturbed.weights


def test_the_cause_is_named_with_the_process_that_it_lies_in(disturbed: tuple[str, Story]) -> None:
    fault, story = disturbed
    kind, words = CAUSES[fault]
    (incident,) = story.incidents
    assert incident.step == STEP - 1
    for found in (incident.fault, story.losses[0].fault):
        cause = _root(found)
        assert (cause.kind, cause.process) == (kind, VICTIM), cause
        assert words in cause.message


def test_only_the_broken_process_is_replaced(disturbed: tuple[str, Story], undisturbed: Story) -> None:
    _, story = disturbed
    assert [loss.process for loss in story.losses] == [VICTIM]
    assert story.joined() == undisturbed.joined() + Counter({VICTIM: 1})
    (closed,) = (fact for fact in story.facts if isinstance(fact, IncidentClosed))
    assert (closed.outcome, closed.processes) == ("recover", (VICTIM,))


def test_the_cards_memory_is_what_it_was_before(disturbed: tuple[str, Story]) -> None:
    _, story = disturbed
    before = next(entry for entry in story.memory if entry.step == STEP)
    after = story.memory[-1]
    assert after.step == LAST_STEP
    assert abs(after.used_bytes - before.used_bytes) < SLACK_BYTES, story.memory
    assert story.memory_after - story.memory_before < SLACK_BYTES


def _root(fault: Fault) -> Fault:
    return root_first([fault])[0]
