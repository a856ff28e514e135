from __future__ import annotations

import json
import resource
from pathlib import Path

from kintsugi.errors import Fault
from kintsugi.observe.events import (
    Alert,
    Event,
    EventLog,
    FaultSeen,
    Note,
    ProcessBegan,
    ProcessEnded,
    Span,
    Transition,
    events_path,
    read_events,
)
from kintsugi.runtime import COUNTERS, VirtualClock

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
    log = EventLog(events_path(tmp_path, "model-0"), process="model-0", clock=VirtualClock(start=3.0))
    for event in EVENTS:
        log.emit(event)
    log.close()
    records = read_events(tmp_path)
    assert [record.event for record in records] == EVENTS
    assert {(record.stamp.process, record.stamp.monotonic) for record in records} == {("model-0", 3.0)}


def test_a_line_is_flat_json_that_names_its_kind(tmp_path: Path) -> None:
    log = EventLog(events_path(tmp_path, "model-0"), process="model-0", clock=VirtualClock(wall=9.0))
    log.emit(Note("hello"))
    log.close()
    line = json.loads(events_path(tmp_path, "model-0").read_text())
    assert line == {"time": 9.0, "monotonic": 0.0, "process": "model-0", "kind": "Note", "message": "hello"}


def test_a_torn_last_line_is_skipped_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = events_path(tmp_path, "model-0")
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


def test_events_of_several_processes_are_merged_by_time(tmp_path: Path) -> None:
    clock = VirtualClock()
    logs = [EventLog(events_path(tmp_path, name), process=name, clock=clock) for name in ("b-0", "a-0")]
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
    path = events_path(tmp_path, "model-0")
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
    assert [record.event for record in read_events(tmp_path)] == [Note("kept")]


def test_a_folder_that_can_not_be_made_drops_events_instead_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file")
    before = dropped()
    EventLog(events_path(tmp_path, "model-0"), process="model-0").emit(Note("lost"))
    assert dropped() == before + 1


def test_a_line_that_the_disk_took_half_of_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = events_path(tmp_path, "model-0")
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
    assert [record.event for record in read_events(tmp_path)] == [Note("whole"), Note("next")]
