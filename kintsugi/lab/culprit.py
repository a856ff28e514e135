"""The process in which one fault lives.

    python -m kintsugi.lab.culprit ORDERS WORDS

It reads a `Scene` from the pipe ORDERS, prepares, says `ready` on WORDS, and begins when it is told `go`. It undoes the
fault when it is told `end`, when its time is over, and when the pipe ends because the laboratory has. If it is killed
instead, the reaper undoes it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from kintsugi.errors import DeadlineExceeded, KintsugiError
from kintsugi.lab.abilities.catalogue import mechanism_named
from kintsugi.lab.abilities.fault import Fault, Impossible, Scene
from kintsugi.lab.undo import UndoJournal, Who
from kintsugi.runtime import SYSTEM_CLOCK, wait

ORDERS_TIMEOUT_S = 3600.0


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What it says, one a line."""

    what: Literal["ready", "began", "ended", "failed"]
    wall: float = 0.0
    monotonic: float = 0.0
    why: str = ""
    measured: dict[str, float] = {}
    target_ended: float | None = None


class Orders:
    """Lines of a pipe; the end of it is an order too."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._unread = b""
        self.over = False
        os.set_blocking(descriptor, False)

    def attempt_line(self) -> bytes | None:
        """The next line, if there is one."""
        try:
            content = os.read(self.descriptor, 1 << 16)
            self.over = not content
            self._unread += content
        except BlockingIOError:
            pass
        line, newline, rest = self._unread.partition(b"\n")
        if not newline:
            return None
        self._unread = rest
        return line

    def next(self, *, what: str) -> bytes | None:
        """Wait for a line; None when the pipe has ended."""
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)

        def attempt(remaining_s: float) -> tuple[bytes | None] | None:
            if (line := self.attempt_line()) is not None:
                return (line,)
            if self.over:
                return (None,)
            poller.poll(remaining_s * 1000)
            return None

        return wait(attempt, whom="laboratory", what=what, timeout_s=ORDERS_TIMEOUT_S)[0]


class Culprit:
    def __init__(self, orders: Orders, say: Callable[[Word], None]) -> None:
        self._orders = orders
        self._say = say
        self._target_ended: float | None = None

    def run(self) -> int:
        plan = self._orders.next(what="what to do")
        if plan is None:
            return 0
        scene = msgspec.json.decode(plan, type=Scene)
        mechanism = mechanism_named(scene.injection.ability, scene.mechanism)
        fault = mechanism(scene, UndoJournal(Path(scene.journal)))
        try:
            try:
                fault.prepare()
                self._say(Word("ready"))
                if self._orders.next(what="to begin") != b"go":
                    return 0
                self._live(fault)
            finally:
                fault.end()
        except (OSError, KintsugiError) as error:
            self._say(Word("failed", why=str(error)))
            return 1
        ended = SYSTEM_CLOCK.wall()
        if self._target_ended is None and fault.lasts and not scene.target.alive:
            self._target_ended = ended
        self._say(Word("ended", ended, measured=fault.measured, target_ended=self._target_ended))
        return 0

    def _live(self, fault: Fault) -> None:
        """From the fault's beginning to the moment that it is to be undone."""
        _check_alive(fault.scene.target)
        fault.begin()
        wall, began = SYSTEM_CLOCK.wall(), SYSTEM_CLOCK.monotonic()
        self._say(Word("began", wall, began))
        if not fault.lasts:
            return
        poller = select.poll()
        for descriptor in (self._orders.descriptor, *fault.descriptors):
            poller.register(descriptor, select.POLLIN)
        until = began + fault.injection.duration_s
        while (now := SYSTEM_CLOCK.monotonic()) < until:
            if self._target_ended is None and not fault.scene.target.alive:
                self._target_ended = SYSTEM_CLOCK.wall()
            ramp_s = fault.injection.ramp_s
            strength = min(1.0, (now - began) / ramp_s) if ramp_s > 0 else 1.0
            pause_s = min(fault.tick(strength), until - now)
            try:
                wait(
                    lambda remaining_s: poller.poll(remaining_s * 1000) or None,
                    whom="laboratory",
                    what="the fault's end",
                    timeout_s=max(0.0, pause_s),
                )
            except DeadlineExceeded:
                continue
            if self._orders.attempt_line() == b"end" or self._orders.over:
                return


def _check_alive(target: Who) -> None:
    """The trigger may have taken long to come, and another process may have the target's number by now."""
    if not target.alive:
        raise Impossible(f"process {target.pid} ended before the fault could begin")


def main(arguments: list[str]) -> int:
    orders, words = map(int, arguments)
    # Whoever ends a laboratory from its terminal does not mean the fault, which the end of the pipe undoes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def say(word: Word) -> None:
        try:
            os.write(words, msgspec.json.encode(word) + b"\n")
        except BrokenPipeError:
            return

    try:
        return Culprit(Orders(orders), say).run()
    except Exception as error:  # noqa: BLE001 - the outermost boundary: the laboratory tells it.
        # The laboratory tells people what went wrong; a terminal that others write to is no place for it.
        say(Word("failed", why=f"the injector failed: {type(error).__name__}: {error}"))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
