from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.control.protocol import (
    Began,
    Event,
    Exited,
    Joined,
    Replied,
    RequestFailed,
    StopRequested,
    Suspected,
    Tick,
)
from kintsugi.errors import Fault
from kintsugi.journal.inputs import InputRecorder, are_complete, read_inputs, read_moments
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.types import ChildReport, Peer, Role, SampleText, Ticket
from tests.unit.control.driven import scored

EVENTS: tuple[Event, ...] = (
    Began("job", "digest", "1", True, 4, "step-4"),
    Joined(Peer("model-0", "1.1", "host-0", "tcp://a", b"key"), Role.MODEL, 7, {"store": "a:1"}),
    Exited("rollout-0", "1.2", -9, "killed", 3.0),
    Replied("a", "model-0", Ok()),
    RequestFailed("b", "model-0", Fault("f", "StorageError", "model-0", "full", 1.0)),
    StopRequested("SIGTERM"),
    Suspected("model-0", "1.1", "it does not move", "stuck", 4.0, time=9.0),
    Began("job", "digest", "2", restore_step=4, adopting=True),
    Joined(
        Peer("agent-0", "2", "host-0", "tcp://b", b"key"),
        Role.AGENT,
        8,
        children=(ChildReport("model-0", "1.1", 7, b"key"),),
    ),
    Tick(),
)


def record(path: Path, *events: Event) -> None:
    recorder = InputRecorder(path)
    for number, event in enumerate(events):
        recorder.write(event, float(number))
    recorder.close()


def test_every_event_comes_back_as_it_was_written_with_its_time(tmp_path: Path) -> None:
    record(tmp_path / "inputs", *EVENTS)
    read = list(read_inputs(tmp_path / "inputs"))
    assert [one.event for one in read] == list(EVENTS)
    assert [one.now for one in read] == [float(number) for number in range(len(EVENTS))]


def test_a_second_master_writes_behind_the_first(tmp_path: Path) -> None:
    record(tmp_path / "inputs", *EVENTS[:3])
    record(tmp_path / "inputs", *EVENTS[3:])
    assert [one.event for one in read_inputs(tmp_path / "inputs")] == list(EVENTS)


def test_texts_are_left_out_and_everything_that_is_decided_on_is_kept(tmp_path: Path) -> None:
    ticket = Ticket("grpo:0:0:0", "grpo", 0, 0, 0, 2)
    samples = scored(ticket, version=1).samples
    said = EpisodesDone(
        ticket.id, samples, {"a": "b"}, {samples[0].key: SampleText("1+1=", "2")}, {"reward": 0.1}
    )
    record(tmp_path / "inputs", Replied("a", "rollout-0", said))
    (read,) = read_inputs(tmp_path / "inputs")
    assert read.event == Replied(
        "a", "rollout-0", EpisodesDone(ticket.id, samples, {"a": "b"}, {}, {"reward": 0.1})
    )


def test_a_tail_torn_anywhere_is_left_out_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "inputs"
    record(path, *EVENTS[:2])
    kept = path.stat().st_size
    record(path, EVENTS[2])
    whole = path.read_bytes()
    for length in range(kept, len(whole)):
        path.write_bytes(whole[:length])
        assert [one.event for one in read_inputs(path)] == list(EVENTS[:2])


def test_a_recording_goes_on_readably_behind_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "inputs"
    record(path, *EVENTS[:3])
    path.write_bytes(path.read_bytes()[:-2])
    record(path, *EVENTS[3:])
    assert [one.event for one in read_inputs(path)] == [*EVENTS[:2], *EVENTS[3:]]


def test_when_inputs_came_is_read_piece_by_piece_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "inputs"
    recorder = InputRecorder(path)
    offset, found = 0, []
    for number, event in enumerate(EVENTS):
        recorder.write(event, float(number), wall=100.0 + number, after=2 * number)
        moments, offset = read_moments(path, offset=offset)
        found += [(moment.now, moment.wall, moment.after) for moment in moments]
    recorder.close()
    assert found == [(float(number), 100.0 + number, 2 * number) for number in range(len(EVENTS))]
    assert read_moments(path, offset=offset) == ([], path.stat().st_size)


def test_a_long_recording_is_kept_in_parts_of_which_the_oldest_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kintsugi.journal.inputs.PART_SIZE", 1_000)
    monkeypatch.setattr("kintsugi.journal.inputs.MOST_SIZE", 5_000)
    path, offset, found = tmp_path / "inputs", 0, []
    assert not list(tmp_path.iterdir())
    for session in range(4):
        recorder = InputRecorder(path)
        for number in range(100):
            recorder.write(Tick(), 100.0 * session + number, wall=1.0)
            if number % 7 == 0:
                moments, offset = read_moments(path, offset=offset)
                found += [moment.now for moment in moments]
        recorder.close()
    found += [moment.now for moment in read_moments(path, offset=offset)[0]]
    assert found == [float(number) for number in range(400)], "a reader that follows misses nothing"
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 6_000
    kept = [record.now for record in read_inputs(path)]
    assert kept == found[-len(kept) :] and 100 < len(kept) < 400
    assert [moment.now for moment in read_moments(path)[0]] == kept, "a new reader begins with what is kept"
    assert not are_complete(path)


def test_when_inputs_came_is_read_up_to_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "inputs"
    record(path, *EVENTS[:3])
    path.write_bytes(path.read_bytes()[:-2])
    moments, _ = read_moments(path)
    assert len(moments) == 2
    first, offset = read_moments(path, most=1)
    assert (len(first), len(read_moments(path, offset=offset)[0])) == (1, 1)
