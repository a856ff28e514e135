from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kintsugi.observe.probes import PAUSE_S, DiskProbe, NameProbe, Probe, is_name
from kintsugi.runtime import VirtualClock


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


def test_names_are_told_from_addresses_and_resolved() -> None:
    assert [is_name(host) for host in ("127.0.0.1", "::1", "*", "", "localhost")] == [*[False] * 4, True]
    assert NameProbe("localhost")() == {}
