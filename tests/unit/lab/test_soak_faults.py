from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.config.schema import Config
from kintsugi.control.phases.table import Phase
from kintsugi.lab.injector.injection import Ability, Injected
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.soak.faults import FaultSequence
from kintsugi.lab.soak.leak_check import ResourceGrowth
from kintsugi.lab.soak.plan import FaultPlan, FaultRole, PlannedFault
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import process_start_time
from kintsugi.telemetry.events import EventLog, ProcessBegan, Transition
from tests.unit.lab.sleepers import TWO_SLEEPERS


class Bench:
    """Two processes of a run, one of them named as the master, with event files that this test writes."""

    def __init__(self, folder: Path) -> None:
        self.run = MarkedRun(Config(name="lab"), run_dir=folder, command=(sys.executable, "-c", TWO_SLEEPERS))
        self.run.start()
        self.watch = RunWatch(folder)
        self.watch.until(lambda: len(self.run.pids()) == 2, what="two processes", timeout_s=10.0)
        assert self.run.launcher is not None
        self.master = self.run.launcher.pid
        (self.server,) = set(self.run.pids()) - {self.master}
        self.emit("master-0", ProcessBegan("master", "a", self.master))
        self.emit("server-0", ProcessBegan("server", "1.1", self.server))
        self.injector = Injector(self.run, folder.parent / "lab", watch=self.watch)
        self.sequence = FaultSequence(
            self.run,
            self.watch,
            plan=FaultPlan(random.Random(0)),
            growth=ResourceGrowth(),
            injector=self.injector,
        )

    def signal(self, role: FaultRole, ability: Ability, phase: Phase) -> tuple[Injected, ...]:
        planned = PlannedFault(role, ability, phase)
        targets = self.sequence.choose(planned)
        return self.injector.signal_in_phase(planned.injection(next(iter(targets))), targets)

    def emit(self, process: str, event: ProcessBegan | Transition) -> None:
        log = EventLog(RunFolder(self.run.run_dir).events_file(process), process=process)
        log.emit(event)
        log.close()
        self.watch.look(force=True)

    def enter(self, phase: str) -> None:
        self.emit("master-0", Transition("master", "run", "", phase, ""))

    @staticmethod
    def state(pid: int) -> str:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat[stat.rindex(")") + 2]

    def close(self) -> None:
        self.injector.close()
        self.watch.close()
        self.run.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "run")
    yield bench
    bench.close()


def test_a_fault_is_injected_in_its_phase_and_the_master_is_resumed(bench: Bench) -> None:
    bench.enter("publishing")
    (injected,) = bench.signal(FaultRole.SERVER, Ability.KILL, Phase.PUBLISHING)
    assert (injected.phase, injected.process, injected.pid) == ("publishing", "server-0", bench.server)
    bench.watch.until(lambda: process_start_time(bench.server) is None, what="its end", timeout_s=5.0)
    bench.watch.until(lambda: bench.state(bench.master) == "S", what="the master to run", timeout_s=5.0)


def test_no_fault_is_injected_when_the_phase_has_passed(bench: Bench) -> None:
    bench.enter("publishing")
    bench.enter("collecting")
    assert bench.signal(FaultRole.SERVER, Ability.KILL, Phase.PUBLISHING) == ()
    assert process_start_time(bench.server) is not None
    bench.watch.until(lambda: bench.state(bench.master) == "S", what="the master to run", timeout_s=5.0)


def test_a_stopped_master_stays_stopped(bench: Bench) -> None:
    bench.enter("training")
    (injected,) = bench.signal(FaultRole.MASTER, Ability.STOP, Phase.TRAINING)
    assert (injected.process, injected.pid, injected.end) == ("master-0", bench.master, None)
    bench.watch.until(lambda: bench.state(bench.master) == "T", what="the master to stop", timeout_s=5.0)


def test_no_process_is_chosen_where_none_of_the_role_is_running(bench: Bench) -> None:
    assert bench.sequence.choose(PlannedFault(FaultRole.MODEL, Ability.KILL, Phase.TRAINING)) == {}
