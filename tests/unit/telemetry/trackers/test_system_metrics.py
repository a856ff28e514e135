from __future__ import annotations

from pathlib import Path

import pytest

from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.readings import HostReading, LinkReading, ReadingsLog
from kintsugi.telemetry.trackers.system_metrics import SystemMetrics

FIRST = {
    "cpu_count": 4.0,
    "cpu_busy_s": 100.0,
    "memory_total_bytes": 16e9,
    "memory_available_bytes": 10e9,
    "disk_write_bytes": 1e6,
    "network_out_bytes": 5e6,
    "load_1": 1.5,
    "device_0_utilization": 0.75,
}


def record(
    folder: Path, at: float, values: dict[str, float], *, agent: str = "agent-0", host: str = "host-0"
) -> None:
    """Write a reading of a host, followed by some of its links, as an agent does."""
    RunFolder(folder).readings_folder.mkdir(exist_ok=True)
    log = ReadingsLog(folder, process=agent, clock=VirtualClock(wall=at))
    links = [LinkReading("model-0", f"model-{number}", 1, "ESTABLISHED") for number in range(50)]
    log.write(HostReading(host, values), *links)
    log.close()


def test_levels_are_there_at_once_and_rates_from_the_second_look_on(tmp_path: Path) -> None:
    metrics = SystemMetrics(tmp_path)
    record(tmp_path, 100.0, FIRST)
    assert metrics.due(100.0) == {
        "system/host-0/memory_used_bytes": 6e9,
        "system/host-0/load_1": 1.5,
        "system/host-0/device_0_utilization": 0.75,
    }
    record(tmp_path, 110.0, {**FIRST, "cpu_busy_s": 120.0, "disk_write_bytes": 3e6, "network_out_bytes": 1e6})
    figures = metrics.due(111.0)
    assert figures["system/host-0/cpu_share"] == pytest.approx(0.5)
    assert figures["system/host-0/disk_write_bytes_per_s"] == pytest.approx(2e5)
    assert "system/host-0/network_out_bytes_per_s" not in figures, "a total that fell says nothing"


def test_nothing_is_looked_up_too_early_or_twice(tmp_path: Path) -> None:
    metrics = SystemMetrics(tmp_path)
    record(tmp_path, 100.0, FIRST)
    assert metrics.due(100.0)
    record(tmp_path, 105.0, FIRST)
    assert metrics.due(105.0) == {}
    assert metrics.due(111.0)
    assert metrics.due(130.0) == {}, "there is no newer reading"


def test_every_host_has_its_own_figures_and_a_run_without_readings_has_none(tmp_path: Path) -> None:
    metrics = SystemMetrics(tmp_path)
    assert metrics.due(50.0) == {}
    record(tmp_path, 100.0, FIRST)
    record(tmp_path, 100.0, FIRST, agent="agent-1", host="host-1")
    assert {name.split("/")[1] for name in metrics.due(100.0)} == {"host-0", "host-1"}
