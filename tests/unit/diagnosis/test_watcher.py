"""The watcher tells what is new, once, to everybody who should know."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import msgspec
import pytest

from kintsugi.config.schema import MonitoringSection
from kintsugi.diagnosis import watcher as module
from kintsugi.diagnosis.format import earlier, format_diagnosis
from kintsugi.diagnosis.verdict import Cause, Diagnosis, Evidence, FaultKind, Hop
from kintsugi.diagnosis.watcher import DiagnosisWatcher
from kintsugi.errors import UserError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import (
    Alert,
    EventLog,
    Note,
    OperationFailed,
    ProcessBegan,
    ProcessEnded,
    ProcessGone,
    Stamp,
    Transition,
    read_events,
    stamped,
)
from kintsugi.telemetry.export.webhooks import Notification, Webhook
from kintsugi.telemetry.verdict_files import WATCHER, hand_over, take_verdicts


class World:
    """A run folder with one agent that says what happens, and a watcher."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.clock = run_dir, VirtualClock()
        self.posted: list[Notification] = []
        self.agent = EventLog(RunFolder(run_dir).events_file("agent-0"), process="agent-0", clock=self.clock)
        self.agent.emit(ProcessBegan("agent", "1", 1))
        log = EventLog(RunFolder(run_dir).events_file(WATCHER), process=WATCHER, clock=self.clock)
        self.watcher = DiagnosisWatcher(run_dir, log=log, webhook=cast("Webhook", self), clock=self.clock)

    def send(self, notification: Notification) -> None:
        """As a webhook."""
        self.posted.append(notification)

    def pass_a_second(self) -> Diagnosis:
        """In which the run records something: one that can not any more has not become well."""
        self.clock.advance(1.0)
        self.agent.emit(Note("goes on"))
        return self.watcher.look()

    def kill(self, process: str) -> None:
        self.agent.emit(ProcessGone(process, "1", 2, -9, "killed by SIGKILL"))

    def told(self) -> list[str]:
        records = read_events(self.run_dir, process=WATCHER)
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
    lines = RunFolder(world.run_dir).diagnoses_file.read_bytes().partition(b"\0")[0].splitlines()
    diagnoses = [msgspec.json.decode(line, type=Diagnosis) for line in lines]
    assert [len(diagnosis.causes) for diagnosis in diagnoses] == [1, 0]


def test_what_was_told_before_is_found_again(world: World) -> None:
    world.kill("server-0")
    world.pass_a_second()
    world.clock.advance(60.0)
    ((_, cause),) = earlier(world.run_dir, before=world.clock.wall())
    assert cause.process == "server-0"
    assert "earlier in this run" in format_diagnosis(world.pass_a_second())


def test_one_that_is_killed_again_while_its_first_end_still_shows_is_told_again(world: World) -> None:
    for _ in range(2):
        world.kill("server-0")
        for _ in range(3):
            world.pass_a_second()
    assert world.told() == ["cause killed: server-0: was killed by SIGKILL"] * 2


def test_what_is_read_late_is_posted_though_it_happened_before_the_last_look(world: World) -> None:
    happened = world.clock.wall() + 0.1
    for _ in range(3):
        world.pass_a_second()
    path = RunFolder(world.run_dir).events_file("model-1")
    path.write_bytes(stamped(Stamp(happened, 1.0, "model-1"), Alert("it was hot", {"degrees": 91.0})))
    for _ in range(2):
        world.pass_a_second()
    (posted,) = world.posted
    assert (posted.kind, posted.process, posted.text) == ("alert", "model-1", "it was hot")
    assert posted.values == {"degrees": 91.0}


def test_what_happened_before_the_watcher_began_is_not_posted(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events_file("model-1")
    path.parent.mkdir()
    path.write_bytes(stamped(Stamp(VirtualClock().wall() - 1.0, 1.0, "model-1"), Alert("it was hot")))
    world = World(tmp_path)
    for _ in range(2):
        world.pass_a_second()
    assert world.posted == []


def test_an_end_that_nobody_ordered_is_posted_and_so_is_its_cause(world: World) -> None:
    world.pass_a_second()
    world.kill("server-0")
    world.pass_a_second()
    assert [(each.kind, each.process) for each in world.posted] == [
        ("diagnosis", "server-0"),
        ("fault", "server-0"),
    ]
    assert world.posted[0].details["kind"] == "killed"


def test_ends_with_the_run_are_not_posted(world: World) -> None:
    log = EventLog(RunFolder(world.run_dir).events_file("master-0"), process="master-0", clock=world.clock)
    world.clock.advance(0.1)
    log.emit(Transition("master", "run", "saving", "ended", "the run failed"))
    world.clock.advance(0.1)
    world.kill("server-0")
    world.pass_a_second()
    assert world.posted == []


def test_the_figures_are_offered_where_the_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[tuple[str, int]] = []

    def offer(_: Path, *, host: str, port: int) -> AbstractContextManager[None]:
        offered.append((host, port))
        return nullcontext()

    monkeypatch.setattr(module, "MetricsServer", offer)
    log = EventLog(RunFolder(tmp_path).events_file(WATCHER), process=WATCHER)
    log.emit(ProcessBegan("watcher", "1", 1))
    lifeline, write = os.pipe()
    os.close(write)
    module.run(tmp_path, MonitoringSection(port=9100, host="0.0.0.0"), lifeline=lifeline, log=log)
    os.close(lifeline)
    assert offered == [("0.0.0.0", 9100)]


def test_a_watcher_that_dies_of_an_error_says_which(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "config.yaml").write_text("no: such: config")
    with pytest.raises(UserError):
        module.main([str(tmp_path), "0"])
    last = read_events(tmp_path, process=WATCHER)[-1].event
    assert isinstance(last, ProcessEnded)
    assert last.code == 1
    assert "Error: " in last.reason


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
    monkeypatch.setattr(module, "is_delayed", lambda *_, **__: True)
    monkeypatch.setattr(world.watcher._follower, "look", lambda: lasting_cause(world.clock.wall()))
    asked = []
    for _ in range(8):
        world.pass_a_second()
        asked += [verdict.replace for verdict in take_verdicts(world.run_dir)]
    assert asked == [False, True]


def test_that_a_process_is_to_be_replaced_is_said_again_every_minute_while_it_holds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_delayed", lambda *_, **__: True)
    monkeypatch.setattr(world.watcher._follower, "look", lambda: lasting_cause(world.clock.wall()))
    for _ in range(130):
        world.pass_a_second()
    assert [verdict.replace for verdict in take_verdicts(world.run_dir)] == [False, True, True, True]


def test_a_verdict_that_the_disk_did_not_take_is_handed_over_at_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "hand_over", refuse)
    world.kill("server-0")
    world.pass_a_second()
    monkeypatch.setattr(module, "hand_over", hand_over)
    for _ in range(2):
        world.pass_a_second()
    (verdict,) = take_verdicts(world.run_dir)
    assert verdict.process == "server-0"


def test_the_file_of_verdicts_is_bounded_and_the_older_ones_are_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.watcher._file, "_largest_size", 2000)
    for number in range(4):
        world.kill(f"server-{number}")
        for _ in range(12):
            world.pass_a_second()
    assert RunFolder(world.run_dir).diagnoses_file.stat().st_size <= 2000
    found = earlier(world.run_dir, before=world.clock.wall())
    assert [cause.process for _, cause in found] == [f"server-{number}" for number in range(4)]


def test_a_run_that_goes_on_as_usual_keeps_its_processes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_delayed", lambda *_, **__: False)
    monkeypatch.setattr(world.watcher._follower, "look", lambda: lasting_cause(world.clock.wall()))
    for _ in range(10):
        world.pass_a_second()
    assert [verdict.replace for verdict in take_verdicts(world.run_dir)] == [False]


def test_a_new_watcher_that_finds_nothing_says_that_it_is_over(world: World) -> None:
    world.kill("server-0")
    world.pass_a_second()
    world.clock.advance(60.0)
    after = World(world.run_dir)
    after.clock.advance(world.clock.monotonic())
    after.pass_a_second()
    after.pass_a_second()
    lines = RunFolder(world.run_dir).diagnoses_file.read_bytes().replace(b"\0", b"").splitlines()
    told = [msgspec.json.decode(line, type=Diagnosis) for line in lines]
    assert [bool(each.causes) for each in told] == [True, False]


def test_that_a_trouble_is_over_is_posted_once(world: World) -> None:
    world.agent.emit(OperationFailed("no checkpoint", operation="save", error="No space left on device"))
    world.pass_a_second()
    for _ in range(12):
        world.pass_a_second()
    told = [each.text for each in world.posted if each.kind == "diagnosis"]
    assert len(told) == 2
    assert "disk_full" in told[0]
    assert "over" in told[1]
