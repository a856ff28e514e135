"""Proof that injections leave no residue: many injections with random kills of injector, target and laboratory.

    python -m kintsugi.lab.residue.residue FOLDER SEED FIRST COUNT

runs a laboratory that may kill itself at any moment. The process that requested the injections starts another one when
that happens, and compares the machine before and after. A bystander process on the host of a target must not be
affected.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from kintsugi.errors import DeadlineExceeded, KintsugiError
from kintsugi.lab import probing
from kintsugi.lab.faults.catalogue import mechanism_named
from kintsugi.lab.faults.mechanism import end_with_parent
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.injector.reaper import reap_abandoned
from kintsugi.lab.residue.host_diff import difference, host_snapshot, placement
from kintsugi.lab.residue.probe_workload import ProbeRun
from kintsugi.lab.testbed import hosts
from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, random_stream
from kintsugi.runtime.proc import stat_fields
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.runtime.waits import join, wait

MARK = "KINTSUGI_RESIDUE"
DISK_BYTES = 32 << 20
LAB_TIMEOUT_S = 600.0
CLEAN_TIMEOUT_S = 45.0
"""Time for the reapers of killed laboratories to finish."""
LONGEST_S = 0.6
"""Longest fault."""
LATEST_KILL_S = 0.6
POLL_S = 0.05
PER_LAB = 25
SMALL = {"limit": 3e7, "rate": 1e8}
"""Parameters of memory faults that exhaust the memory within the duration of a fault."""
SMALLEST_SHARE = 0.5
"""Smallest share of injections that have to take effect: an unchanged machine proves nothing if nothing was
injected."""
VICTIMS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("injector",),
    ("target",),
    ("injector", "target"),
    ("reaper", "injector"),
    ("laboratory",),
    ("laboratory", "injector"),
)
"""Processes that are killed while a fault is active or begins."""


class ResidueAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One injection, as the laboratory recorded it: before it began, and again after every change."""

    number: int
    ability: str
    mechanism: str
    begun: bool = False
    killed: tuple[str, ...] = ()
    """Processes that were killed."""
    problem: str = ""
    """Reason why it did not begin or could not be ended."""
    touched: str = ""
    """Change that was found and should not exist."""


class ResidueReport(msgspec.Struct, frozen=True, kw_only=True):
    injections: int
    took_effect: int
    """Injections with a fault that began."""
    mechanisms: dict[str, int]
    """Mechanism → number of injections that took effect."""
    killed: dict[str, int]
    laboratories: int
    not_begun: dict[str, int]
    """Reason → number of injections that did not begin."""
    left: tuple[str, ...]
    """Differences on this machine; empty when nothing is left."""
    seconds: float
    seed: int

    @property
    def proves_it(self) -> bool:
        """Whether nothing is left although enough injections took effect."""
        return not self.left and self.took_effect >= SMALLEST_SHARE * self.injections


def run_residue(count: int, *, seed: int, folder: Path, say: Callable[[str], None]) -> ResidueReport:
    """Inject `count` faults and compare the machine before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    reap_abandoned()
    mark, began = uuid4().hex, SYSTEM_CLOCK.monotonic()
    before = host_snapshot(mark=mark)
    first, laboratories = 0, 0
    while first < count:
        laboratories += 1
        _laboratory(folder, mark=mark, seed=seed, first=first, count=min(PER_LAB, count - first))
        tried = _attempts(folder)
        assert len(tried) > first, f"the laboratory of injection {first} tried nothing: see {folder}/lab.log"
        first = len(tried)
        say(f"{first} of {count} injections, {laboratories} laboratories")
    attempts = list(_attempts(folder).values())
    left = [
        f"injection {each.number} ({each.mechanism}): {each.touched}" for each in attempts if each.touched
    ]
    left += _until_clean(lambda: difference(before, host_snapshot(mark=mark)))
    for line in left:
        say(f"left: {line}")
    seconds = SYSTEM_CLOCK.monotonic() - began
    report = report_of(attempts, left=left, laboratories=laboratories, seconds=seconds, seed=seed)
    for reason, often in report.not_begun.items():
        say(f"{often} did not begin: {reason}")
    found = "nothing is left" if not left else f"{len(left)} differences"
    say(f"{report.took_effect} of {report.injections} injections took effect: {found}")
    if not left and not report.proves_it:
        say(f"too few took effect: expected at least {SMALLEST_SHARE:.0%}")
    return report


def report_of(
    attempts: Sequence[ResidueAttempt], *, left: Sequence[str], laboratories: int, seconds: float, seed: int
) -> ResidueReport:
    begun = [each for each in attempts if each.begun]
    # Reasons that differ only in a pid are the same.
    reasons = Counter(
        re.sub(r"\d+", "N", each.problem) or "the laboratory was killed before"
        for each in attempts
        if not each.begun
    )
    return ResidueReport(
        injections=len(attempts),
        took_effect=len(begun),
        mechanisms=dict(Counter(each.mechanism for each in begun)),
        killed=dict(Counter(victim for each in attempts for victim in each.killed)),
        laboratories=laboratories,
        not_begun=dict(reasons.most_common()),
        left=tuple(left),
        seconds=seconds,
        seed=seed,
    )


def _laboratory(folder: Path, *, mark: str, seed: int, first: int, count: int) -> None:
    """Run one laboratory until it completes or kills itself."""
    with (folder / "lab.log").open("ab") as log:
        lab = SystemProcesses().spawn(
            [
                sys.executable,
                "-P",
                "-m",
                "kintsugi.lab.residue.residue",
                str(folder),
                str(seed),
                str(first),
                str(count),
            ],
            environment={**os.environ, MARK: mark},
            stdout=log,
            stderr=log,
            before_exec=partial(end_with_parent, os.getpid()),
            new_session=True,
        )
    try:
        lab.wait_ended(whom="laboratory", timeout_s=LAB_TIMEOUT_S)
    finally:
        lab.send_signal(signal.SIGKILL)
        lab.close()


def _attempts(folder: Path) -> dict[int, ResidueAttempt]:
    path = folder / "attempts.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    attempts = (msgspec.json.decode(line, type=ResidueAttempt) for line in lines)
    return {attempt.number: attempt for attempt in attempts}


def _until_clean(look: Callable[[], list[str]]) -> list[str]:
    """Return the differences that remain after the reapers had time to finish."""
    found: list[str] = []

    def attempt(remaining_s: float) -> bool | None:
        found[:] = look()
        if not found:
            return True
        time.sleep(min(remaining_s, 10 * POLL_S))
        return None

    with contextlib.suppress(DeadlineExceeded):
        wait(attempt, whom="reapers", what="a clean machine", timeout_s=CLEAN_TIMEOUT_S)
    return found


class Laboratory:
    """Injects faults and kills the drawn processes, possibly itself."""

    def __init__(self, folder: Path, *, seed: int, first: int) -> None:
        own_hosts = hosts.missing() is None
        self._testbed = RunTestbed(
            folder / f"place-{first}",
            num_hosts=2 if own_hosts else 0,
            named=own_hosts,
            disk_bytes=DISK_BYTES if os.geteuid() == 0 else None,
        )
        self._log = (folder / "attempts.jsonl").open("ab", buffering=0)
        self._attempt = ResidueAttempt(number=-1, ability="", mechanism="")
        self._noting = threading.Lock()
        """The injecting thread and the killing thread both write records."""
        self._seed = seed
        self._run = ProbeRun(self._testbed.run_dir(), testbed=self._testbed, count=3)
        self._injector = Injector(self._run, folder / f"lab-{first}")
        self._bystander = self._placement("probe-2")
        self._choices = [
            each
            for each in probing.abilities()
            # A probe has no checkpoint; without isolated hosts the machine's network is left alone.
            if each.missing is None
            and "checkpoint" not in each.mechanism
            and (own_hosts or not _is_network(each))
        ]

    def run(self, first: int, count: int) -> None:
        with contextlib.ExitStack() as stack:
            for part in (self._testbed, self._run, self._injector):
                stack.callback(part.close)
            for number in range(first, first + count):
                self._inject(number)

    def _inject(self, number: int) -> None:
        draw = random_stream(self._seed, "residue", number)
        chosen = draw.choice(self._choices)
        target = draw.choice(["probe-0", "probe-1"])
        victims = draw.choice(VICTIMS)
        self._attempt = ResidueAttempt(
            number=number, ability=chosen.ability.value, mechanism=chosen.mechanism
        )
        self._note()
        before = self._placement(target)
        killing = threading.Timer(draw.uniform(0.0, LATEST_KILL_S), self._kill, args=(victims, target))
        killing.daemon = True
        self._carry_out(chosen.ability, chosen.mechanism, target, draw, killing)
        _join(killing)
        self._note(touched=self._touched(target, before))
        for name in ("probe-0", "probe-1"):
            if not self._run.alive(name):
                self._run.start(name)
                self._run.until(lambda name=name: self._began(name), what=f"{name} to begin")  # type: ignore[misc]

    def _carry_out(
        self, ability: Ability, mechanism: str, target: str, draw: random.Random, killing: threading.Timer
    ) -> None:
        """Run one fault from begin to end; the drawn processes are killed while it begins (seldom) or while it is
        active."""
        early = draw.random() < 0.25
        if early:
            killing.start()
        kind = mechanism_named(ability, mechanism)
        injection = Injection(
            ability=ability,
            target=target,
            mechanism=mechanism,
            duration_s=draw.uniform(0.05, LONGEST_S),
            ramp_s=draw.choice([0.0, 0.1]) if kind.ramps else 0.0,
            amount=SMALL if ability is Ability.MEMORY and kind.supported_parameters >= SMALL.keys() else {},
        )
        try:
            injected = self._injector.begin(injection)
            self._note(begun=True)
            if not early:
                killing.start()
            with contextlib.suppress(DeadlineExceeded):
                wait(_attempt_nothing, whom="timer", what="a moment", timeout_s=draw.uniform(0.0, LONGEST_S))
            self._injector.end(injected)
        except KintsugiError as error:
            self._note(problem=f"{type(error).__name__}: {error}")
            if killing.ident is None:
                killing.start()

    def _kill(self, victims: tuple[str, ...], target: str) -> None:
        """Kill in the given order, the laboratory last."""
        for victim in sorted(victims, key=lambda name: name == "laboratory"):
            if victim == "target":
                pids = [self._run.pid(target)] if self._run.alive(target) else []
            elif victim == "laboratory":
                pids = [os.getpid()]
                self._note(killed=(*self._attempt.killed, victim))
            else:
                module = {
                    "injector": "kintsugi.lab.injector.injector_process",
                    "reaper": "kintsugi.lab.injector.reaper",
                }[victim]
                pids = _children_running(module)
            killed = [pid for pid in pids if _killed(pid)]
            if killed:
                self._note(killed=(*self._attempt.killed, victim))

    def _touched(self, target: str, before: str) -> str:
        """Describe a change of a living target, or of the bystander; empty when there is none."""
        for name, was in (("probe-2", self._bystander), (target, before)):
            now = self._placement(name)
            # A process that is about to end has left its groups already.
            if now not in (was, "") and not self._ends(name):
                return f"{name} was {was}, is {now}"
        return ""

    def _ends(self, name: str) -> bool:
        def attempt(remaining_s: float) -> bool | None:
            time.sleep(min(remaining_s, POLL_S))
            return True if not self._run.alive(name) else None

        with contextlib.suppress(DeadlineExceeded):
            return wait(attempt, whom=name, what="its end", timeout_s=4 * POLL_S)
        return False

    def _placement(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return placement(Path(f"/proc/{self._run.pid(name)}"))
        return ""

    def _began(self, name: str) -> bool:
        events = RunFolder(self._run.run_dir).events_file(name).read_text()
        return f'"pid":{self._run.pid(name)}' in events

    def _note(self, **changes: Any) -> None:
        """Append the current record of this injection."""
        with self._noting:
            self._attempt = msgspec.structs.replace(self._attempt, **changes)
            self._log.write(msgspec.json.encode(self._attempt) + b"\n")


def _killed(pid: int) -> bool:
    """Kill a process; False when it had ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _join(timer: threading.Timer) -> None:
    join(timer, whom="killing thread", timeout_s=2 * LATEST_KILL_S + 5.0)


def _is_network(each: probing.Availability) -> bool:
    return each.ability.value.startswith("network") or each.ability is Ability.DNS


def _attempt_nothing(remaining_s: float) -> None:
    time.sleep(min(remaining_s, POLL_S))


def _children_running(module: str) -> list[int]:
    """Return the processes of a module that this process started."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                command = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                parent = stat_fields(Path("/proc", entry, "stat").read_text())[1]
                if module.encode() in command and int(parent) == os.getpid():
                    found.append(int(entry))
    return found


def main(arguments: list[str]) -> int:
    folder, seed, first, count = arguments
    laboratory = Laboratory(Path(folder), seed=int(seed), first=int(first))
    laboratory.run(int(first), int(count))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
