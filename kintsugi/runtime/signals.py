"""Signals as readable events, so that one loop waits for them together with sockets, pipes and pidfds."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any


class Signals:
    """From construction to `close`, the given signals make a descriptor readable and do nothing else. Main thread only.

    Signals that arrive before the first was read are counted, so that two Ctrl-C of the user are two signals.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous: dict[signal.Signals, Any] = {
            number: signal.signal(number, _noted_by_the_wakeup) for number in numbers
        }

    def fileno(self) -> int:
        return self._reader

    def received(self) -> list[signal.Signals]:
        """Return the signals that arrived since the last call, in order; does not block."""
        try:
            numbers = os.read(self._reader, 256)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._previous]

    def reopen(self) -> None:
        """After a fork: receive the signals of this process on a pipe of its own."""
        os.close(self._reader)
        os.close(self._writer)
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def close(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._reader)
        os.close(self._writer)


def _noted_by_the_wakeup(number: int, frame: FrameType | None) -> None:
    """The interpreter has already written the number to the pipe."""
