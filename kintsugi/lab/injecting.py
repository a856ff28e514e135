"""Carries out injections on a living run, says what was really done, and leaves nothing.

    injector = Injector(run, folder)
    injected = injector.begin(Injection(ability=Ability.CPU, target="rollout-1", amount={"share": 0.9}))
    …
    injected = injector.end(injected)
    injector.close()

`begin` returns when the fault has begun, or raises: `UserError` for what can not be done (no such process, a trigger
that does not come, a mechanism that this machine lacks), `ProcessDied` when the target ended by itself first. A fault
ends by itself after its `duration_s`; `end` ends it earlier and gives the marker with its end. Under `folder` lie:

    undo.jsonl      how every change is undone, written before it is made
    markers/N.json  what was done (`Injected`)
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from kintsugi.errors import DeadlineExceeded, ProcessDied, UserError
from kintsugi.lab import probing
from kintsugi.lab.abilities.fault import Fault, Scene
from kintsugi.lab.abilities.signals import Stop
from kintsugi.lab.culprit import Word
from kintsugi.lab.fault_checks import check_injection
from kintsugi.lab.injection import Injected, Injection
from kintsugi.lab.places import Place
from kintsugi.lab.reaper import Guard
from kintsugi.lab.tools import ToolFailed
from kintsugi.lab.triggers import TriggerWatch
from kintsugi.lab.undo import Continue, Who, network_of
from kintsugi.lab.watching import MASTER, Watch
from kintsugi.runtime import SYSTEM_CLOCK, Child, SystemProcesses, wait

READY_TIMEOUT_S = 20.0
END_TIMEOUT_S = 15.0
PEEK_LEASE_S = 120.0
"""How long the master might have to be set going again by somebody else."""


class Run(Protocol):
    """What is asked of a run that is broken; `MarkedRun` is one."""

    run_dir: Path
    place: Place | None

    @property
    def running(self) -> bool: ...

    def is_ours(self, pid: int) -> bool: ...


class _Culprit:
    """The process of one fault, as the laboratory sees it."""

    def __init__(self, scene: Scene) -> None:
        orders, self._orders = os.pipe2(os.O_CLOEXEC)
        self._words, words = os.pipe2(os.O_CLOEXEC)
        try:
            self.child: Child = SystemProcesses().spawn(
                [sys.executable, "-m", "kintsugi.lab.culprit", str(orders), str(words)],
                pass_fds=(orders, words),
                new_session=True,
            )
        finally:
            os.close(orders)
            os.close(words)
        self._unread = b""
        self._order(msgspec.json.encode(scene))

    def _order(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, line + b"\n")

    def go(self) -> None:
        self._order(b"go")

    def end(self) -> None:
        self._order(b"end")

    def hear(self, *, timeout_s: float) -> Word | None:
        """The next thing that it says; None when it will say no more."""
        poller = select.poll()
        poller.register(self._words, select.POLLIN)

        def attempt(remaining_s: float) -> tuple[Word | None] | None:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                return (msgspec.json.decode(line, type=Word),)
            if not poller.poll(remaining_s * 1000):
                return None
            content = os.read(self._words, 1 << 16)
            self._unread += content
            return None if content else (None,)

        return wait(attempt, whom=f"injector {self.child.pid}", what="its word", timeout_s=timeout_s)[0]

    def close(self) -> None:
        """Let go of it: at the end of its orders it undoes what there is to undo, and ends."""
        os.close(self._orders)
        try:
            self.child.wait_ended(whom="injector", timeout_s=END_TIMEOUT_S)
        except DeadlineExceeded:
            self.child.send_signal(signal.SIGKILL)
            self.child.wait_ended(whom="injector", timeout_s=END_TIMEOUT_S)
        self.child.close()
        os.close(self._words)


class Injector:
    """The faults of one run. Several may last at once."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self._markers = folder / "markers"
        self._markers.mkdir(parents=True, exist_ok=True)
        self._guard = Guard(folder / "undo.jsonl")
        self._watch = Watch(run.run_dir)
        self._lasting: dict[int, tuple[_Culprit, Injected]] = {}
        self._count = len(list(self._markers.glob("*.json")))

    # Beginning.

    def begin(self, injection: Injection) -> Injected:
        """Wait for the trigger and begin the fault."""
        try:
            return self._begin(injection)
        except UserError as error:
            raise UserError(f"{injection.ability.value} on {injection.target}: {error}") from error

    def _begin(self, injection: Injection) -> Injected:
        check_injection(injection)
        trigger = TriggerWatch(
            injection.trigger, watch=self._watch, run_dir=self._run.run_dir, alive=lambda: self._run.running
        )
        target = self._who(injection.target)
        mechanism = probing.choose(injection, pid=target.pid)
        self._guard.renew()
        if self._run.place is not None:
            self._run.place.renew()
        culprit = _Culprit(self._scene(injection, mechanism, target))
        try:
            self._expect(culprit, "ready", injection, target)
            trigger.until_holds()
            trigger.pause()
            began = self._strike(culprit, injection, target, trigger, stops_it=mechanism is Stop)
        except BaseException:
            culprit.close()
            raise
        self._count += 1
        injected = Injected(
            injection=injection,
            process=injection.target,
            pid=target.pid,
            host=self._host_of(target),
            mechanism=mechanism.name,
            start=began.wall,
            monotonic=began.monotonic,
            phase=self._watch.phase_at(began.monotonic),
            step=self._watch.step + 1,
            number=self._count,
            end=None if mechanism.lasts else began.wall,
        )
        self._lasting[injected.number] = culprit, injected
        self._mark(injected)
        return injected

    def _strike(
        self, culprit: _Culprit, injection: Injection, target: Who, trigger: TriggerWatch, *, stops_it: bool
    ) -> Word:
        """Begin it. Where a phase was asked for, the master stands still meanwhile, so that the phase can not pass."""
        if injection.trigger.phase is None or injection.trigger.after_s or MASTER not in self._watch.staff:
            culprit.go()
            return self._expect(culprit, "began", injection, target)
        while True:
            word = self._strike_in_phase(culprit, injection, target, trigger, stops_it=stops_it)
            if word is not None:
                return word
            trigger.until_holds()

    def _strike_in_phase(
        self, culprit: _Culprit, injection: Injection, target: Who, trigger: TriggerWatch, *, stops_it: bool
    ) -> Word | None:
        """Stop the master, look whether the phase still holds, begin, and let the master go on; None when it passed."""
        master = self._who(MASTER)
        entry = self._guard.before(Continue(master), lease_s=PEEK_LEASE_S)
        word: Word | None = None
        try:
            master.signal(signal.SIGSTOP)
            self._watch.glance()
            if trigger.holds:
                culprit.go()
                word = self._expect(culprit, "began", injection, target)
        finally:
            is_the_fault = injection.target == MASTER and stops_it
            if word is not None and is_the_fault:
                self._guard.forget(entry)
            else:
                self._guard.undo(entry)
        return word

    def _who(self, process: str) -> Who:
        """A process of the run; UserError when there is none of this name, ProcessDied when it is gone."""
        self._watch.look(at_once=True)
        presence = self._watch.staff.get(process)
        if presence is None:
            known = ", ".join(sorted(self._watch.staff)) or "none yet"
            raise UserError(f"target: this run has no process {process!r}; it has {known}")
        with contextlib.suppress(ProcessLookupError):
            who = Who.of(presence.pid)
            # Known by descriptor of its birth before it is asked for its mark: no later process can be meant.
            if self._run.is_ours(who.pid) and who.alive:
                return who
        raise ProcessDied(
            f"{process} (pid {presence.pid}) has ended by itself, and no other has its place yet"
        )

    def _scene(self, injection: Injection, mechanism: type[Fault], target: Who) -> Scene:
        place = self._run.place
        peers = (self._who(injection.peer),) if injection.peer is not None else ()
        disk = place.disk if place is not None else None
        on_disk = disk is not None and self._run.run_dir.resolve().is_relative_to(disk.resolve())
        return Scene(
            injection=injection,
            mechanism=mechanism.name,
            target=target,
            peers=peers,
            run_dir=str(self._run.run_dir),
            disk=str(disk) if on_disk else None,
            named=place is not None and place.named,
            journal=str(self._guard.path),
            seed=self._count,
        )

    def _host_of(self, target: Who) -> str:
        """Of its place; the machine's own name where it has none."""
        place = self._run.place
        with contextlib.suppress(OSError):
            found = place.host_of(network_of(target.pid)) if place is not None else None
            if found is not None:
                return found
        return socket.gethostname()

    def _expect(self, culprit: _Culprit, what: str, injection: Injection, target: Who) -> Word:
        word = culprit.hear(timeout_s=READY_TIMEOUT_S)
        if word is not None and word.what == what:
            return word
        if not target.alive:
            raise ProcessDied(
                f"{injection.target} (pid {target.pid}) ended by itself before the fault could begin"
            )
        why = (
            word.why
            if word is not None
            else f"the injector was {'killed' if culprit.child.ended() else 'silent'}"
        )
        raise UserError(why)

    # Ending.

    def end(self, injected: Injected) -> Injected:
        """Undo a fault, if it has not ended by itself; gives it with its end."""
        if injected.number not in self._lasting:
            return injected
        culprit, injected = self._lasting.pop(injected.number)
        culprit.end()
        word: Word | None = None
        with contextlib.suppress(DeadlineExceeded):
            word = culprit.hear(timeout_s=END_TIMEOUT_S)
        ended = self._settle(culprit, injected, word)
        self._mark(ended)
        return ended

    def _settle(self, culprit: _Culprit, injected: Injected, word: Word | None) -> Injected:
        """Whatever became of the one who did it: when this returns, it is undone."""
        replace = msgspec.structs.replace
        if word is None or word.what != "ended":
            try:
                culprit.child.send_signal(signal.SIGKILL)
                culprit.child.wait_ended(whom="injector", timeout_s=END_TIMEOUT_S)
                self._undo_for(culprit.child.pid)
            finally:
                culprit.close()
            return replace(injected, end=injected.end or SYSTEM_CLOCK.wall())
        culprit.close()
        return replace(
            injected, end=injected.end or word.wall, measured=word.measured, target_ended=word.target_ended
        )

    def _undo_for(self, pid: int) -> None:
        """Undo what a killed process left; the reaper does the same, and whoever comes second finds nothing."""

        def attempt(remaining_s: float) -> bool | None:
            mine = [entry for entry in self._guard.outstanding() if entry.owner.pid == pid]
            for entry in mine:
                with contextlib.suppress(OSError, ToolFailed, DeadlineExceeded):
                    self._guard.undo(entry)
            return None if mine else True

        wait(attempt, whom="injector", what="its changes to be undone", timeout_s=END_TIMEOUT_S)

    @property
    def lasting(self) -> tuple[Injected, ...]:
        """Those that were begun and not ended by `end`."""
        return tuple(injected for _, injected in self._lasting.values())

    def _mark(self, injected: Injected) -> None:
        path = self._markers / f"{injected.number}.json"
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(injected))
        os.replace(new, path)

    def close(self) -> None:
        """End every fault, the last one first; nothing is left when this returns. One that fails keeps no other."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._guard.close)
            stack.callback(self._watch.close)
            for injected in self.lasting:
                stack.callback(self.end, injected)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
