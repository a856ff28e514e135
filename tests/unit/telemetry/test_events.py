from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import get_args

import pytest

from kintsugi.errors import Fault
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.counters import COUNTERS
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import (
    Alert,
    Event,
    EventLog,
    FaultSeen,
    Note,
    OperationFailed,
    ProcessBegan,
    ProcessEnded,
    QuarantineCause,
    SamplesQuarantined,
    SlowLink,
    Span,
    Transition,
    fault_at_end,
    read_events,
)
from tests.unit.conftest import SmallDisk

EVENTS: list[Event] = [
    ProcessBegan("model", "a", 17),
    FaultSeen(
        Fault("f1", "StorageError", "model-0", "disk full", 0.0, Fault("f0", "OSError", "model-0", "", 0.0))
    ),
    Transition("membership", "model-0", "joined", "lost", "exit -9"),
    Span("actor_train", 12.5, 0.8, {"step": "3"}),
    Alert("mean ratio is not 1", {"ratio": 1.2}),
    Note("a line"),
    ProcessEnded(0, ""),
]


def test_every_event_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    log = EventLog(
        RunFolder(tmp_path).events_file("model-0"), process="model-0", clock=VirtualClock(start=3.0)
    )
    for event in EVENTS:
        log.emit(event)
    log.close()
    records = read_events(tmp_path)
    assert [record.event for record in records] == EVENTS
    assert {(record.stamp.process, record.stamp.monotonic) for record in records} == {("model-0", 3.0)}


def test_a_line_is_flat_json_that_names_its_kind(tmp_path: Path) -> None:
    log = EventLog(
        RunFolder(tmp_path).events_file("model-0"), process="model-0", clock=VirtualClock(wall=9.0)
    )
    log.emit(Note("hello"))
    log.close()
    line = json.loads(RunFolder(tmp_path).events_file("model-0").read_text())
    assert line == {"time": 9.0, "monotonic": 0.0, "process": "model-0", "kind": "Note", "message": "hello"}


def test_a_torn_last_line_is_skipped_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events_file("model-0")
    log = EventLog(path, process="model-0")
    log.emit(Note("whole"))
    log.emit(Note("torn"))
    log.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert [record.event for record in read_events(tmp_path)] == [Note("whole")]
    successor = EventLog(path, process="model-0")
    successor.emit(Note("next"))
    successor.close()
    assert [record.event for record in read_events(tmp_path)] == [Note("whole"), Note("next")]


@pytest.mark.parametrize("torn", [b'{"time": 1.0, "mess', b'{"message": "caf\xc3"}', bytes(40), b"\xff\xfe"])
def test_whatever_a_crash_left_at_the_end_is_skipped(tmp_path: Path, torn: bytes) -> None:
    path = RunFolder(tmp_path).events_file("model-0")
    for note in ("before", "after"):
        log = EventLog(path, process="model-0")
        log.emit(Note(note))
        log.close()
        path.write_bytes(path.read_bytes() + torn)
    assert [record.event for record in read_events(tmp_path)] == [Note("before"), Note("after")]


def test_a_log_is_as_long_as_what_it_says_though_it_owns_more(tmp_path: Path) -> None:
    log = EventLog(RunFolder(tmp_path).events_file("model-0"), process="model-0")
    log.emit(Note("hello"))
    log.close()
    stat = RunFolder(tmp_path).events_file("model-0").stat()
    assert stat.st_size < 200 and stat.st_blocks * 512 >= 256 << 10


def test_on_a_full_disk_there_is_room_for_hundreds_of_events_and_then_a_count_of_the_lost(
    small_disk: SmallDisk,
) -> None:
    log = EventLog(RunFolder(small_disk.folder).events_file("model-0"), process="model-0")
    log.emit(Note("begin"))
    small_disk.fill()
    num_taken = 0
    while log.try_emit(Note("the disk is full")):
        num_taken += 1
    for _ in range(4):
        assert not log.try_emit(Note("lost"))
    assert num_taken > 300
    small_disk.clear()
    log.emit(Note("room again"))
    log.close()
    (*_, last, lost, after) = [record.event for record in read_events(small_disk.folder)]
    assert (last, after) == (Note("the disk is full"), Note("room again"))
    assert isinstance(lost, Alert) and lost.values == {"events": 5}


def test_events_of_several_processes_are_merged_by_time(tmp_path: Path) -> None:
    clock = VirtualClock()
    logs = [
        EventLog(RunFolder(tmp_path).events_file(name), process=name, clock=clock) for name in ("b-0", "a-0")
    ]
    for number, log in enumerate([*logs, *logs]):
        clock.advance(1)
        log.emit(Note(str(number)))
    for log in logs:
        log.close()
    assert [record.event for record in read_events(tmp_path)] == [Note(str(number)) for number in range(4)]
    assert len(read_events(tmp_path, process="a-0")) == 2


def dropped() -> int:
    return COUNTERS.snapshot().counters.get("events.dropped", 0)


def test_a_full_disk_drops_events_and_takes_the_next_when_it_has_room(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events_file("model-0")
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    before = dropped()
    log = EventLog(path, process="model-0")
    log.emit(Note("lost"))
    assert dropped() == before + 1
    log.close()
    path.unlink()
    log.emit(Note("kept"))
    log.close()
    first, second = [record.event for record in read_events(tmp_path)]
    assert isinstance(first, OperationFailed)
    assert first.message == "events before this one were lost: No space left on device"
    assert (first.error, first.values) == ("No space left on device", {"events": 1})
    assert second == Note("kept")


def test_a_folder_that_can_not_be_made_drops_events_instead_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file")
    before = dropped()
    EventLog(RunFolder(tmp_path).events_file("model-0"), process="model-0").emit(Note("lost"))
    assert dropped() == before + 1


def test_a_line_that_the_disk_took_half_of_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events_file("model-0")
    log = EventLog(path, process="model-0")
    log.emit(Note("whole"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        log.emit(Note("half"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.emit(Note("next"))
    log.close()
    reason = "only a part of a line was taken"
    message = f"events before this one were lost: {reason}"
    lost = OperationFailed(message, {"events": 1}, operation="events", error=reason)
    assert [record.event for record in read_events(tmp_path)] == [Note("whole"), lost, Note("next")]


def test_the_error_that_ended_a_process_is_the_fault_before_its_end(tmp_path: Path) -> None:
    log = EventLog(RunFolder(tmp_path).events_file("server-0"), process="server-0")
    earlier, last = (Fault(name, "DeviceError", "server-0", "lost", 1.0) for name in ("first", "last"))
    log.emit(FaultSeen(earlier))
    assert fault_at_end(tmp_path, "server-0") is None
    log.emit(Note("continues"))
    log.emit(ProcessEnded(0, ""))
    assert fault_at_end(tmp_path, "server-0") is None
    log.emit(FaultSeen(last))
    log.emit(ProcessEnded(1, "DeviceError: lost"))
    assert fault_at_end(tmp_path, "server-0") == last
    assert fault_at_end(tmp_path, "server-1") is None
    log.close()


def test_an_alert_of_a_class_of_its_own_is_an_alert_and_is_read_back_as_what_it_is(tmp_path: Path) -> None:
    log = EventLog(RunFolder(tmp_path).events_file("model-0"), process="model-0")
    events: list[SlowLink | SamplesQuarantined] = [
        SlowLink("the link is slow", {"rate": 1.0}, of="model-0", peer="agent-0"),
        SamplesQuarantined("quarantined", ticket="grpo:0:1:0", cause=QuarantineCause.USER_CODE),
    ]
    for event in events:
        log.emit(event)
    log.close()
    found = [record.event for record in read_events(tmp_path)]
    assert found == events
    assert isinstance(found[0], Alert) and isinstance(found[1], Note)


def test_no_event_has_a_field_that_the_stamp_of_its_line_has() -> None:
    names = {"time", "monotonic", "process", "kind"}
    assert not [event for event in get_args(Event) if names & set(event.__struct_fields__)]
