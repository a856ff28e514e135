"""What needs no root and no place: signals, limits, triggers, markers, and errors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kintsugi.errors import ProcessDied, UserError
from kintsugi.lab.injector.fault_process import FaultProcess
from kintsugi.lab.injector.injection import Ability, Injected, Injection, Trigger
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.injector.reports import InjectorReport
from kintsugi.lab.injector.undo_log import ProcessIdentity
from kintsugi.lab.residue.probe_workload import ProbeRun

TARGET = "probe-1"


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = ProbeRun(folder / "run")
        self.injector = Injector(self.run, folder / "lab")

    def state(self) -> str:
        return Path(f"/proc/{self.run.pid(TARGET)}/stat").read_text().rpartition(")")[2].split()[0]

    def until_state(self, states: str) -> None:
        self.run.until(lambda: self.state() in states, what=f"state {states}", timeout_s=10.0)

    def marker(self, number: int) -> Injected:
        path = self.folder / "lab" / "markers" / f"{number}.json"
        return msgspec.json.decode(path.read_bytes(), type=Injected)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    yield bench
    bench.injector.close()
    bench.run.close()


def test_a_fault_is_marked_when_it_begins_and_when_it_ends(bench: Bench) -> None:
    injected = bench.injector.begin(Injection(ability=Ability.STOP, target=TARGET, duration_s=20.0))
    bench.until_state("T")
    assert bench.marker(injected.number) == injected
    assert (injected.process, injected.pid, injected.mechanism) == (TARGET, bench.run.pid(TARGET), "SIGSTOP")
    assert injected.end is None
    ended = bench.injector.end(injected)
    bench.until_state("SRD")
    assert bench.marker(injected.number) == ended
    assert ended.end is not None
    assert ended.end >= ended.start


def test_a_fault_ends_with_its_lease_though_nobody_ends_it(bench: Bench) -> None:
    injected = bench.injector.begin(Injection(ability=Ability.STOP, target=TARGET, duration_s=0.3))
    bench.until_state("T")
    bench.until_state("SRD")
    assert time.monotonic() - injected.monotonic >= 0.3
    assert bench.injector.end(injected).end is not None


def test_what_a_killed_injector_did_is_undone_and_marked_as_ended(bench: Bench) -> None:
    injected = bench.injector.begin(Injection(ability=Ability.STOP, target=TARGET, duration_s=20.0))
    bench.until_state("T")
    process, _ = bench.injector._active[injected.number]
    assert isinstance(process, FaultProcess)
    os.kill(process.child.pid, signal.SIGKILL)
    bench.until_state("SRD")
    assert bench.injector.end(injected).end is not None


def test_an_event_can_begin_a_fault(bench: Bench) -> None:
    with (bench.run.run_dir / "events" / "model-0.jsonl").open("w") as events:
        trigger = Trigger(event="nothing like it", timeout_s=0.05)
        with pytest.raises(UserError, match="an event like"):
            bench.injector.begin(Injection(ability=Ability.STOP, target=TARGET, trigger=trigger))
        events.write("{}\n")
    assert bench.state() != "T"


@pytest.mark.parametrize(
    ("injection", "words"),
    [
        (
            Injection(ability=Ability.KILL, target="model-9"),
            "no process 'model-9'; it has probe-0, probe-1",
        ),
        (Injection(ability=Ability.STOP, target=TARGET, peer="model-9"), "not to a link of it"),
        (
            Injection(ability=Ability.STOP, target=TARGET, duration_s=0.0),
            "duration_s: expected seconds above 0",
        ),
        (
            Injection(ability=Ability.STOP, target=TARGET, duration_s=float("inf")),
            "stop on probe-1: duration_s: expected seconds above 0, at most 3600, got inf",
        ),
        (Injection(ability=Ability.STOP, target=TARGET, ramp_s=1.0), "SIGSTOP: does not know ramp_s"),
        (Injection(ability=Ability.STOP, target=TARGET, trigger=Trigger(phase="x")), r"trigger\.phase"),
    ],
)
def test_what_can_not_be_done_is_refused(bench: Bench, injection: Injection, words: str) -> None:
    with pytest.raises(UserError, match=words):
        bench.injector.begin(injection)


def test_a_target_that_died_before_the_fault_is_no_success(bench: Bench) -> None:
    os.kill(bench.run.pid("probe-0"), signal.SIGKILL)
    bench.run.until(lambda: not bench.run.alive("probe-0"), what="its end", timeout_s=10.0)
    with pytest.raises(ProcessDied, match=r"probe-0 .* has ended and"):
        bench.injector.begin(Injection(ability=Ability.KILL, target="probe-0"))


class Unprepared(FaultProcess):
    """One that could not even prepare."""

    def __init__(self) -> None:
        self._target = ProcessIdentity(2**22 - 1, 1)

    def receive(self, *, timeout_s: float) -> InjectorReport | None:
        return InjectorReport("failed", why="No such process")


def test_a_target_that_died_while_the_fault_was_prepared_is_nobodys_mistake(bench: Bench) -> None:
    injection = Injection(ability=Ability.CPU, target=TARGET)
    with pytest.raises(ProcessDied, match="ended before the fault could begin"):
        bench.injector._expect(Unprepared(), "ready", injection, 2**22 - 1)


def test_a_fault_that_can_not_be_ended_keeps_no_other_from_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    injector = Injector(bench.run, tmp_path / "lab")
    stuck = injector.begin(Injection(ability=Ability.STOP, target=TARGET, duration_s=20.0))
    other = injector.begin(Injection(ability=Ability.NUMERIC, target=TARGET, duration_s=20.0))
    end = injector.end

    def fail_at_first(injected: Injected) -> Injected:
        ended = end(injected)
        if injected is other:
            raise ProcessDied("the injector")
        return ended

    monkeypatch.setattr(injector, "end", fail_at_first)
    with pytest.raises(ProcessDied):
        injector.close()
    bench.until_state("SRD")
    assert injector.active == ()
    assert stuck.end is None
