from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.errors import DeadlineExceeded, Fault
from kintsugi.lab.testbed.watch import ProcessPresence, RunWatch, detected_at
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import (
    Event,
    EventLog,
    FaultSeen,
    Note,
    ProcessBegan,
    Span,
    Tail,
    Transition,
)


class Written:
    """A run folder whose processes write at times of our choosing."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = VirtualClock()

    def write(self, process: str, event: Event, *, at: float) -> None:
        self.clock.advance(at - self.clock.monotonic())
        log = EventLog(RunFolder(self.run_dir).events_file(process), process=process, clock=self.clock)
        log.emit(event)
        log.close()

    def phase(self, before: str, after: str, *, at: float, reason: str = "") -> None:
        self.write("master-0", Transition("master", "run", before, after, reason), at=at)

    def committed(self, step: int, *, at: float) -> None:
        self.write("master-0", Span("step", at - 0.5, 0.5, {"step": str(step)}), at=at)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def watched(written: Written) -> RunWatch:
    watch = RunWatch(written.run_dir)
    watch.look(force=True)
    watch.close()
    return watch


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = EventLog(path, process="server-0")
    log.emit(Note("first"))
    log.emit(Note("second"))
    whole = path.read_bytes().rstrip(b"\0")
    log.close()
    path.write_bytes(whole[:-10])
    tail = Tail(path)
    assert [record.event for record in tail.records()] == [Note("first")]
    path.write_bytes(whole + bytes(100))
    assert [record.event for record in tail.records()] == [Note("second")]
    assert list(tail.records()) == []
    tail.close()


def test_a_line_that_was_torn_by_a_kill_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"time": 1.0, "mono\n')
    tail = Tail(path)
    assert list(tail.records()) == []
    tail.close()


def test_a_moment_is_placed_in_the_phase_that_the_master_was_in(written: Written) -> None:
    written.phase("preparing", "collecting", at=1.0)
    written.phase("collecting", "training", at=3.0)
    written.phase("training", "committing", at=4.0)
    watch = watched(written)
    assert [watch.phase_at(moment) for moment in (0.5, 1.0, 2.9, 3.5, 9.0)] == [
        "", "collecting", "collecting", "training", "committing"
    ]  # fmt: skip
    assert watch.phase == "committing"
    assert (watch.lengths_s("collecting"), watch.lengths_s("committing")) == ([2.0], [])


def test_the_first_step_committed_after_a_moment_is_found(written: Written) -> None:
    for step in (1, 2, 3):
        written.committed(step, at=float(step))
    watch = watched(written)
    found = watch.committed_after(1.5)
    assert found is not None and found.step == 2
    assert watch.committed_after(3.0) is None
    assert watch.step == 3


def test_a_successor_takes_the_place_of_the_process_it_replaces(written: Written) -> None:
    written.write("server-0", ProcessBegan("server", "1.1", 100), at=1.0)
    written.write("server-0", ProcessBegan("server", "1.2", 200), at=2.0)
    assert watched(written).processes == {"server-0": ProcessPresence(200, 2.0)}


def lost(process: str) -> FaultSeen:
    return FaultSeen(Fault("f", "ProcessDied", process, f"{process} was killed by SIGKILL", 0.0))


@pytest.mark.parametrize(
    ("process", "event"),
    [
        ("master-0", lost("server-0")),
        ("agent-0", Note("server-0 stands still")),
        ("server-0", ProcessBegan("server", "1.2", 200)),
        ("master-0", Transition("master", "run", "training", "recovering", "server-0 is lost")),
    ],
)
def test_a_fault_is_detected_when_somebody_records_it(written: Written, process: str, event: Event) -> None:
    written.write("master-0", lost("server-0"), at=1.0)
    written.write("master-0", lost("server-1"), at=2.5)
    written.write(process, event, at=3.0)
    assert detected_at(watched(written).records, process="server-0", after=2.0) == 3.0


def test_what_the_master_does_next_is_no_detection(written: Written) -> None:
    written.phase("committing", "publishing", at=3.0, reason="model-0, model-1 lay out version 5")
    assert detected_at(watched(written).records, process="model-0", after=2.0) is None


def test_waiting_for_what_never_comes_ends_at_the_deadline(written: Written) -> None:
    with pytest.raises(DeadlineExceeded, match="the run: a miracle"):
        RunWatch(written.run_dir).until(lambda: False, what="a miracle", timeout_s=0.01)
