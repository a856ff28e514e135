from __future__ import annotations

import os
import select
import signal

from kintsugi.runtime.signals import Signals


def test_signals_become_readable_events_and_none_is_lost() -> None:
    signals = Signals(signal.SIGTERM, signal.SIGINT)
    try:
        assert signals.received() == []
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        readable, _, _ = select.select([signals], [], [], 5)
        assert readable
        assert signals.received() == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    finally:
        signals.close()


def test_closing_gives_signals_their_former_meaning_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    Signals(signal.SIGINT).close()
    assert signal.getsignal(signal.SIGINT) is before


def test_another_signal_that_is_handled_wakes_but_is_not_taken_for_one_of_these() -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    signals = Signals(signal.SIGTERM)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        readable, _, _ = select.select([signals], [], [], 5)
        assert readable and handled == [signal.SIGUSR1]
        assert signals.received() == []
    finally:
        signals.close()
        signal.signal(signal.SIGUSR1, before)
