"""From files that grow, tear and rotate to evidence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.diagnosis import diagnose
from kintsugi.diagnosis.diagnose import Follower
from kintsugi.diagnosis.evidence import EvidenceBundle
from kintsugi.diagnosis.reader import EvidenceReader, last_recorded
from kintsugi.errors import Fault, UserError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import (
    Alert,
    EventLog,
    FaultSeen,
    JournalPaused,
    Note,
    ProcessBegan,
    ProcessEnded,
    ProcessGone,
    Span,
    Stamp,
    Transition,
    stamped,
)
from kintsugi.telemetry.readings import ClockOffsetReading, HostReading, ProcessReading


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def write(run_dir: Path, recorder: str, clock: VirtualClock, *samples: object) -> None:
    path = RunFolder(run_dir).readings_file(recorder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for sample in samples:
            file.write(stamped(Stamp(clock.wall(), clock.monotonic(), recorder), sample))  # type: ignore[arg-type]


def log(run_dir: Path, process: str, clock: VirtualClock) -> EventLog:
    return EventLog(RunFolder(run_dir).events_file(process), process=process, clock=clock)


def test_a_folder_without_events_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the folder of a run"):
        diagnose(tmp_path)


def test_totals_become_rates_per_second_and_begin_anew_with_a_new_process(
    tmp_path: Path, clock: VirtualClock
) -> None:
    log(tmp_path, "agent-0", clock).emit(Note("begins"))
    for pid, cpu_s in ((1, 1.0), (1, 1.5), (2, 0.1), (2, 0.2)):
        write(
            tmp_path,
            "agent-0",
            clock,
            ProcessReading("model-0", pid, "S", {"cpu_s": cpu_s, "run_delay_s": 0.0}),
        )
        clock.advance(2.0)
    bundle = EvidenceReader(tmp_path).read()
    assert bundle.processes["model-0"]["cpu"].values == pytest.approx([0.25, 0.05])


def test_what_the_watcher_itself_said_is_no_evidence(tmp_path: Path, clock: VirtualClock) -> None:
    log(tmp_path, "watcher-0", clock).emit(Alert("cause disk_full: No space left on device"))
    log(tmp_path, "master-0", clock).emit(Note("begins"))
    assert EvidenceReader(tmp_path).read().alerts == []


def test_torn_lines_and_kinds_of_later_versions_are_skipped(tmp_path: Path, clock: VirtualClock) -> None:
    log(tmp_path, "master-0", clock).emit(Note("first"))
    with RunFolder(tmp_path).events_file("master-0").open("r+b") as file:
        content = file.read().rstrip(b"\0")
        file.seek(0)
        file.truncate()
        file.write(content + b'{"time":1,"monotonic":1,"process":"master-0","kind":"Later"}\n{"time":17000')
    assert [note.message for note in EvidenceReader(tmp_path).read().notes] == ["first"]


def test_what_is_read_as_it_grows_is_what_is_read_at_once(tmp_path: Path, clock: VirtualClock) -> None:
    (tmp_path / "events").mkdir()
    reader = EvidenceReader(tmp_path)
    agent = log(tmp_path, "agent-0", clock)
    for number in range(5):
        agent.emit(Note(f"note {number}"))
        write(tmp_path, "agent-0", clock, HostReading("host-0", {"fsync_s": float(number)}))
        reader.read()
        clock.advance(1.0)
    at_once = EvidenceReader(tmp_path).read()
    assert [note.message for note in reader.bundle.notes] == [note.message for note in at_once.notes]
    assert reader.bundle.hosts["host-0"]["fsync_s"].values == at_once.hosts["host-0"]["fsync_s"].values


def test_nothing_later_than_the_moment_asked_for_is_looked_at(tmp_path: Path, clock: VirtualClock) -> None:
    agent = log(tmp_path, "agent-0", clock)
    agent.emit(ProcessBegan("agent", "1", 1))
    before = clock.wall()
    clock.advance(5.0)
    agent.emit(ProcessGone("server-0", "1", 2, -9, "killed by SIGKILL"))
    assert diagnose(tmp_path, at=before + 1).causes == ()
    (cause,) = diagnose(tmp_path, at=before + 6).causes
    assert (cause.process, cause.kind) == ("server-0", "killed")


def test_times_of_a_host_whose_clock_is_ahead_are_put_back(tmp_path: Path, clock: VirtualClock) -> None:
    write(
        tmp_path,
        "agent-1",
        clock,
        HostReading("host-1", {"fsync_s": 0.1}),
        ClockOffsetReading("host-1", offset_s=3.0, error_s=0.001),
        ProcessReading("model-1", 1, "S", {}),
    )
    log(tmp_path, "agent-1", clock).emit(ProcessGone("model-1", "1", 1, -9, "killed by SIGKILL"))
    (end,) = EvidenceReader(tmp_path).read().ends
    assert end.time == pytest.approx(clock.wall() - 3.0, abs=0.01)


def test_a_clock_that_is_set_in_the_middle_moves_only_what_was_stamped_after_it(
    tmp_path: Path, clock: VirtualClock
) -> None:
    began = clock.wall()
    for offset_s, then_s in ((0.0, 1.0), (0.0, 1.0 + 5.0), (5.0, 1.0), (5.0, 1.0)):
        write(
            tmp_path,
            "agent-1",
            clock,
            ClockOffsetReading("host-1", offset_s=offset_s, error_s=0.001),
            HostReading("host-1", {"fsync_s": 0.1}),
        )
        log(tmp_path, "agent-1", clock).emit(Note("looked"))
        clock.advance(then_s)
    bundle = EvidenceReader(tmp_path).read()
    expected = [began, began + 1, began + 2, began + 3]
    assert bundle.hosts["host-1"]["fsync_s"].times == pytest.approx(expected, abs=0.01)
    assert [note.time for note in bundle.notes] == pytest.approx(expected, abs=0.01)


def test_what_lies_before_the_asked_for_is_told_by_the_masters_clock(
    tmp_path: Path, clock: VirtualClock
) -> None:
    write(tmp_path, "agent-1", clock, ClockOffsetReading("host-1", offset_s=-30.0, error_s=0.001))
    log(tmp_path, "agent-1", clock).emit(Note("thirty seconds later than it says"))
    now = clock.wall() + 30.0
    assert EvidenceReader(tmp_path, since=now - 1.0).read().notes
    assert not EvidenceReader(tmp_path).read(until=now - 1.0).notes


@pytest.mark.parametrize("ahead_s", [-30.0, 30.0])
@pytest.mark.parametrize("by", ["model-1", "master-0"])
def test_a_fault_is_seen_when_it_was_whatever_the_clock_of_its_host_says(
    tmp_path: Path, clock: VirtualClock, ahead_s: float, by: str
) -> None:
    """Stamped by its process, and told by it or by the master."""
    now = clock.wall()
    agent = Stamp(now + ahead_s, 1.0, "agent-1")
    path = RunFolder(tmp_path).readings_file("agent-1")
    path.parent.mkdir(parents=True)
    path.write_bytes(
        b"".join(
            stamped(agent, sample)
            for sample in (
                ClockOffsetReading("host-1", ahead_s, 0.001),
                ProcessReading("model-1", 1, "S", {}),
            )
        )
    )
    fault = Fault("f1", "DeviceError", "model-1", "illegal memory access", now + ahead_s)
    told = now if by == "master-0" else now + ahead_s
    path = RunFolder(tmp_path).events_file(by)
    path.parent.mkdir(parents=True)
    path.write_bytes(stamped(Stamp(told + 0.1, 1.0, by), FaultSeen(fault)))
    (said,) = EvidenceReader(tmp_path).read().faults
    assert said.time == pytest.approx(now, abs=0.11)
    (cause,) = diagnose(tmp_path, at=now + 1.0).causes
    assert cause.onset == pytest.approx(now, abs=0.11)


def test_a_fault_that_the_master_noted_of_a_host_ahead_has_the_masters_time(
    tmp_path: Path, clock: VirtualClock
) -> None:
    write(
        tmp_path,
        "agent-1",
        clock,
        ClockOffsetReading("host-1", offset_s=30.0, error_s=0.001),
        ProcessReading("model-1", 1, "S", {}),
    )
    fault = Fault("f1", "Hung", "model-1", "makes no progress", clock.wall())
    log(tmp_path, "master-0", clock).emit(FaultSeen(fault))
    (said,) = EvidenceReader(tmp_path).read().faults
    assert said.time == clock.wall()


def test_the_past_that_is_kept_is_bounded_and_who_began_long_ago_is_not_forgotten(
    tmp_path: Path, clock: VirtualClock
) -> None:
    agent = log(tmp_path, "agent-0", clock)
    for number in range(3):
        agent.emit(ProcessBegan("agent", str(number), number))
        agent.emit(ProcessEnded(0, ""))
        write(tmp_path, "agent-0", clock, HostReading(f"host-{number}", {"cpu_busy_s": 1.0}))
        clock.advance(100.0)
    bundle = EvidenceReader(tmp_path).read()
    bundle.forget_before(clock.wall() - 50.0)
    assert [pid for _, pid in bundle.births["agent-0"]] == [2]
    assert bundle.goodbyes["agent-0"] == []
    assert bundle._totals == {}


def test_who_follows_a_run_says_what_one_look_says(tmp_path: Path, clock: VirtualClock) -> None:
    agent = log(tmp_path, "agent-0", clock)
    agent.emit(ProcessBegan("agent", "1", 1))
    follower = Follower(tmp_path, clock=clock)
    assert follower.look().causes == ()
    clock.advance(1.0)
    agent.emit(ProcessGone("server-0", "1", 2, -9, "killed by SIGKILL"))
    followed, once = follower.look(), diagnose(tmp_path, at=clock.wall())
    assert [cause.summary for cause in followed.causes] == [cause.summary for cause in once.causes]
    follower.close()


def test_what_was_wrong_when_nobody_could_record_any_more_still_is(
    tmp_path: Path, clock: VirtualClock
) -> None:
    agent = log(tmp_path, "agent-0", clock)
    agent.emit(ProcessBegan("agent", "1", 1))
    follower = Follower(tmp_path, clock=clock)
    agent.emit(JournalPaused("paused", error="could not write to journal: No space left on device"))
    clock.advance(60.0)
    assert [cause.kind for cause in follower.look().causes] == ["disk_full"]
    write(tmp_path, "agent-0", clock, HostReading("host-0", {"cpu_busy_s": 1.0}))
    assert follower.look().causes == ()
    follower.close()


def test_when_a_run_was_last_heard_of_is_what_it_says_and_not_when_it_was_copied(
    tmp_path: Path, clock: VirtualClock
) -> None:
    log(tmp_path, "master-0", clock).emit(Note("begins"))
    clock.advance(30.0)
    write(tmp_path, "agent-0", clock, HostReading("host-0", {}))
    assert last_recorded(tmp_path) == pytest.approx(clock.wall())
    for path in (RunFolder(tmp_path).events_file("master-0"), RunFolder(tmp_path).readings_file("agent-0")):
        os.utime(path, (clock.wall() + 86400, clock.wall() + 86400))
    assert last_recorded(tmp_path) == pytest.approx(clock.wall())
    assert diagnose(tmp_path).at == pytest.approx(clock.wall())


def test_how_long_steps_take_is_known_however_long_ago_they_were(tmp_path: Path, clock: VirtualClock) -> None:
    master = log(tmp_path, "master-0", clock)
    began = clock.wall()
    for number in range(1, 9):
        master.emit(Transition("master", "run", "", "training", ""))
        clock.advance(700.0)
        master.emit(Span("step", clock.monotonic(), 700.0, {"step": str(number)}))
    bundle = EvidenceReader(tmp_path, since=clock.wall() - 600.0).read()
    assert [step.number for step in bundle.steps] == list(range(1, 9))
    assert len(bundle.phases) == 8
    assert bundle.began == pytest.approx(began)


def test_what_has_lasted_for_a_quarter_of_an_hour_is_still_found_by_who_asks_once(
    tmp_path: Path, clock: VirtualClock
) -> None:
    master = log(tmp_path, "master-0", clock)
    for second in range(3000):
        is_bad = second >= 2100
        write(tmp_path, "agent-0", clock, HostReading("host-0", {"fsync_s": 0.6 if is_bad else 0.004}))
        if second % 10 == 0:
            master.emit(Span("step", clock.monotonic(), 10.0, {"step": str(second // 10 + 1)}))
        clock.advance(1.0)
    found = diagnose(tmp_path, at=clock.wall() - 1.0)
    assert [cause.kind for cause in found.causes] == ["disk_slow"]
    assert found.causes[0].onset <= clock.wall() - 590.0


def test_a_process_is_where_it_was_last_seen() -> None:
    bundle = EvidenceBundle()
    for agent, host in (("agent-1", "host-1"), ("agent-0", "host-0")):
        bundle.take(1.0, 1.0, agent, HostReading(host, {}))
        bundle.take(1.0, 1.0, agent, ProcessReading("model-1", 5, "S", {}))
    assert bundle.host("model-1") == "host-0"
