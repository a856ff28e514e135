"""The watcher tells what is new, once, to everybody who should know."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.diagnosis import watcher as module
from kintsugi.diagnosis.telling import DIAGNOSES_FILE, earlier, tell
from kintsugi.diagnosis.verdict import Cause, Diagnosis, Evidence, FaultKind, Hop
from kintsugi.diagnosis.watcher import PROCESS, Watcher
from kintsugi.observe.events import Alert, EventLog, ProcessBegan, ProcessGone, events_path, read_events
from kintsugi.observe.verdicts import take_verdicts
from kintsugi.runtime import VirtualClock


class World:
    """A run folder with one agent that says what happens, and a watcher."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.clock = run_dir, VirtualClock()
        self.agent = EventLog(events_path(run_dir, "agent-0"), process="agent-0", clock=self.clock)
        self.agent.emit(ProcessBegan("agent", "1", 1))
        log = EventLog(events_path(run_dir, PROCESS), process=PROCESS, clock=self.clock)
        self.watcher = Watcher(run_dir, log=log, clock=self.clock)

    def pass_a_second(self) -> Diagnosis:
        self.clock.advance(1.0)
        return self.watcher.look()

    def kill(self, process: str) -> None:
        self.agent.emit(ProcessGone(process, "1", 2, -9, "killed by SIGKILL"))

    def told(self) -> list[str]:
        records = read_events(self.run_dir, process=PROCESS)
        return [record.event.message for record in records if isinstance(record.event, Alert)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_new_verdict_is_told_once_and_handed_to_the_master_once(world: World) -> None:
    world.kill("server-0")
    for _ in range(3):
        world.pass_a_second()
    assert world.told() == ["cause killed: server-0: was killed by SIGKILL"]
    (verdict,) = take_verdicts(world.run_dir)
    assert (verdict.process, verdict.kind, verdict.replace) == ("server-0", "killed", False)
    assert take_verdicts(world.run_dir) == []


def test_the_file_has_a_line_for_every_change_also_for_the_end_of_a_trouble(world: World) -> None:
    world.kill("server-0")
    for _ in range(12):
        world.pass_a_second()
    lines = (world.run_dir / DIAGNOSES_FILE).read_bytes().partition(b"\0")[0].splitlines()
    diagnoses = [msgspec.json.decode(line, type=Diagnosis) for line in lines]
    assert [len(diagnosis.causes) for diagnosis in diagnoses] == [1, 0]


def test_what_was_told_before_is_found_again(world: World) -> None:
    world.kill("server-0")
    world.pass_a_second()
    world.clock.advance(60.0)
    ((_, cause),) = earlier(world.run_dir, before=world.clock.wall())
    assert cause.process == "server-0"
    assert "earlier in this run" in tell(world.pass_a_second())


def lasting_cause(at: float) -> Diagnosis:
    cause = Cause(
        process="model-1",
        host="host-1",
        kind=FaultKind.CPU,
        onset=at - 3,
        confidence=0.95,
        summary="model-1: is starved",
        path=(Hop("model-1", "is starved", at),),
        evidence=(Evidence("figures/agent-1.jsonl", at, "starved"),),
    )
    return Diagnosis(run="", at=at, since=at - 8, causes=(cause,))


def test_a_process_is_to_be_replaced_only_when_it_lastingly_holds_the_run_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_held_up", lambda *_, **__: True)
    monkeypatch.setattr(world.watcher._follower, "look", lambda: lasting_cause(world.clock.wall()))
    asked = []
    for _ in range(8):
        world.pass_a_second()
        asked += [verdict.replace for verdict in take_verdicts(world.run_dir)]
    assert asked == [False, True]


def test_a_run_that_goes_on_as_usual_keeps_its_processes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_held_up", lambda *_, **__: False)
    monkeypatch.setattr(world.watcher._follower, "look", lambda: lasting_cause(world.clock.wall()))
    for _ in range(10):
        world.pass_a_second()
    assert [verdict.replace for verdict in take_verdicts(world.run_dir)] == [False]
