from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.collect.probes import PAUSE_S, DiskProbe, NameProbe, Probe, is_name


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_disk_is_measured_without_using_more_space(tmp_path: Path) -> None:
    disk = DiskProbe(tmp_path / "figures" / "agent-0.probe")
    probe = Probe("fsync", disk)
    probe.begin()
    until(probe.values)
    values = probe.values()
    assert 0 < values["fsync_s"] < 10
    assert 0 < values["disk_free_bytes"] <= values["disk_total_bytes"]
    probe.close()
    disk.close()
    assert list(tmp_path.rglob("*.probe")) == []


def test_a_try_that_does_not_come_back_is_told_while_it_lasts() -> None:
    clock, hangs = VirtualClock(), threading.Event()

    def hang() -> dict[str, float]:
        hangs.wait(10)
        return {}

    probe = Probe("fsync", hang, clock=clock)
    probe.begin()
    until(lambda: probe._since is not None)
    assert probe.values() == {}
    clock.advance(3.0 + PAUSE_S)
    assert probe.values() == {"fsync_pending_s": 3.0 + PAUSE_S}
    hangs.set()
    until(lambda: "fsync_s" in probe.values())
    assert "fsync_pending_s" not in probe.values()
    probe.close()


def test_errors_of_the_disk_are_counted() -> None:
    def refuse() -> dict[str, float]:
        raise OSError("input/output error")

    probe = Probe("fsync", refuse)
    probe.begin()
    until(probe.values)
    assert probe.values() == {"fsync_errors": 1.0}
    probe.close()


def test_after_an_error_nothing_is_said_of_how_long_it_took_until_it_works_again() -> None:
    answers: list[dict[str, float] | Exception] = [{"free": 5.0}, socket.gaierror("no name server"), {}]

    def attempt() -> dict[str, float]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    probe = Probe("resolve", attempt, clock=VirtualClock())
    told = []
    while answers:
        probe._try()
        told.append(probe.values())
    assert told == [
        {"resolve_s": 0.0, "free": 5.0},
        {"resolve_errors": 1.0, "free": 5.0},
        {"resolve_s": 0.0, "resolve_errors": 1.0},
    ]


def test_an_error_that_nobody_thought_of_is_noted_once_and_does_not_end_the_probe() -> None:
    def attempt() -> dict[str, float]:
        raise UnicodeError("label too long")

    notes: list[str] = []
    probe = Probe("resolve", attempt, note=notes.append)
    probe._try()
    probe._try()
    assert probe.values() == {"resolve_errors": 2.0}
    assert notes == ["resolve probe: UnicodeError('label too long')"]


def test_names_are_told_from_addresses_and_resolved() -> None:
    assert [is_name(host) for host in ("127.0.0.1", "::1", "*", "", "localhost")] == [*[False] * 4, True]
    assert NameProbe("localhost")() == {}
