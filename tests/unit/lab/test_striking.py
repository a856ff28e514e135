from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.cluster.children import process_start_time
from kintsugi.config import Config
from kintsugi.lab.faults import Aim, Deck, Kind, Moment, Target
from kintsugi.lab.running import MarkedRun
from kintsugi.lab.striking import Striker
from kintsugi.lab.watching import Watch
from kintsugi.observe.events import EventLog, ProcessBegan, Transition, events_path
from tests.unit.lab.sleepers import TWO_SLEEPERS


class Scene:
    """Two processes of a run, one of them called the master, and what they are said to be doing."""

    def __init__(self, folder: Path) -> None:
        self.run = MarkedRun(Config(name="lab"), run_dir=folder, command=(sys.executable, "-c", TWO_SLEEPERS))
        self.run.start()
        self.watch = Watch(folder)
        self.watch.until(lambda: len(self.run.pids()) == 2, what="two processes", timeout_s=10.0)
        assert self.run.launcher is not None
        self.master = self.run.launcher.pid
        (self.server,) = set(self.run.pids()) - {self.master}
        self.say("master-0", ProcessBegan("master", "a", self.master))
        self.say("server-0", ProcessBegan("server", "1.1", self.server))
        self.striker = Striker(self.run, self.watch, Deck(random.Random(0)))

    def say(self, process: str, event: ProcessBegan | Transition) -> None:
        log = EventLog(events_path(self.run.run_dir, process), process=process)
        log.emit(event)
        log.close()
        self.watch.look(at_once=True)

    def enter(self, phase: str) -> None:
        self.say("master-0", Transition("master", "run", "", phase, ""))

    @staticmethod
    def state(pid: int) -> str:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat[stat.rindex(")") + 2]

    def close(self) -> None:
        self.watch.close()
        self.run.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "run")
    yield scene
    scene.close()


def test_a_fault_strikes_in_its_phase_and_the_master_goes_on(scene: Scene) -> None:
    scene.enter("publishing")
    aim = Aim(Target.SERVER, Kind.KILL, Moment.PUBLISHING)
    hit = scene.striker.strike(aim, scene.striker.choose(aim))
    assert hit is not None
    assert (hit.phase, hit.processes) == ("publishing", {"server-0": scene.server})
    scene.watch.until(lambda: process_start_time(scene.server) is None, what="its end", timeout_s=5.0)
    scene.watch.until(lambda: scene.state(scene.master) == "S", what="the master to go on", timeout_s=5.0)


def test_a_phase_that_has_passed_is_not_struck(scene: Scene) -> None:
    scene.enter("publishing")
    scene.enter("collecting")
    aim = Aim(Target.SERVER, Kind.KILL, Moment.PUBLISHING)
    assert scene.striker.strike(aim, scene.striker.choose(aim)) is None
    assert process_start_time(scene.server) is not None
    scene.watch.until(lambda: scene.state(scene.master) == "S", what="the master to go on", timeout_s=5.0)


def test_a_stopped_master_stays_stopped(scene: Scene) -> None:
    scene.enter("training")
    aim = Aim(Target.MASTER, Kind.STOP, Moment.TRAINING)
    hit = scene.striker.strike(aim, scene.striker.choose(aim))
    assert hit is not None and hit.processes == {"master-0": scene.master}
    scene.watch.until(lambda: scene.state(scene.master) == "T", what="the master to stop", timeout_s=5.0)


def test_nobody_is_chosen_where_nobody_of_the_role_lives(scene: Scene) -> None:
    aim = Aim(Target.MODEL, Kind.KILL, Moment.TRAINING)
    assert scene.striker.choose(aim) == {}
