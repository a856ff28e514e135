from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster.accelerators import AcceleratorReading
from kintsugi.cluster.exit_recorder import OomAttribution
from kintsugi.cluster.host_monitor import HostSampler, MonitorTargets
from kintsugi.telemetry.collect.tcp import TcpSocket
from kintsugi.telemetry.readings import (
    HostReading,
    LinkReading,
    ProcessReading,
    ReadingsLog,
    Sample,
    figures_in,
)
from tests.unit.cluster.conftest import bootstrap_of_an_agent, until
from tests.unit.telemetry.test_links import INFO


def sampling_of(run_dir: Path, *, note: Callable[[str], None] = lambda text: None) -> HostSampler:
    own = bootstrap_of_an_agent(run_dir)
    figures = ReadingsLog(run_dir, process="agent-0")
    return HostSampler(own, readings=figures, ooms=OomAttribution(), note=note)


def of_processes(samples: list[Sample]) -> dict[str, ProcessReading]:
    return {sample.of: sample for sample in samples if isinstance(sample, ProcessReading)}


def test_the_agent_and_its_children_are_looked_at_and_who_is_gone_is_not(tmp_path: Path) -> None:
    sampling = sampling_of(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as child:
        sampling.update_targets(MonitorTargets({"model-0": child.pid}))
        until(
            lambda: of_processes(sampling.samples())["model-0"].values["rss_bytes"] > 0,
            "memory of a process that has just been started",
        )
        seen = of_processes(sampling.samples())
        assert {name: sample.pid for name, sample in seen.items()} == {
            "agent-0": os.getpid(),
            "model-0": child.pid,
        }
        assert sampling.rss_bytes("model-0") == seen["model-0"].values["rss_bytes"] > 0
        child.kill()
    sampling.update_targets(MonitorTargets())
    assert of_processes(sampling.samples()).keys() == {"agent-0"}
    sampling.close()


def test_memory_that_a_process_has_on_accelerators_is_its_figure_and_the_hosts(tmp_path: Path) -> None:
    sampling = sampling_of(tmp_path)
    chip = AcceleratorReading(
        uuid="a",
        name="GPU 0",
        memory_of={os.getpid(): 512},
        memory_bytes=600,
        memory_total_bytes=1000,
        utilization=0.5,
    )
    sampling.update_targets(MonitorTargets(accelerators=(chip,)))
    samples = sampling.samples()
    assert of_processes(samples)["agent-0"].values["device_memory_bytes"] == 512
    (host,) = (sample for sample in samples if isinstance(sample, HostReading))
    assert (host.values["device_0_utilization"], host.values["device_0_memory_bytes"]) == (0.5, 600)
    sampling.close()


def test_links_are_named_by_the_address_book(tmp_path: Path) -> None:
    sampling = sampling_of(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            sampling.update_targets(MonitorTargets(book={address: "server-0"}))
            links = [sample for sample in sampling.samples() if isinstance(sample, LinkReading)]
    assert ("agent-0", "server-0", address[1]) in {(link.of, link.peer, link.port) for link in links}
    sampling.close()


def test_the_thread_records_without_being_asked_and_leaves_no_probe(tmp_path: Path) -> None:
    sampling = sampling_of(tmp_path)
    sampling.begin()
    until(lambda: bool(figures_in(tmp_path)), "the first samples")
    sampling.close()
    kinds = {type(record.sample) for record in figures_in(tmp_path)}
    assert {ProcessReading, HostReading} <= kinds
    assert list((tmp_path / "figures").glob("*.probe")) == []


class PlayedTable:
    """A kernel with one connection, on which something is acknowledged in some looks only."""

    def __init__(self) -> None:
        self.num_looks = 0

    def read(self) -> list[TcpSocket]:
        self.num_looks += 1
        out_bytes = 100 if self.num_looks < 4 else 900
        info = msgspec.structs.replace(INFO, out_bytes=out_bytes)
        return [TcpSocket("ESTABLISHED", ("10.0.0.1", 4000), ("10.0.0.2", 80), 1, 1, 0, 0, info)]

    def close(self) -> None:
        pass


def test_what_was_left_out_is_told_later_with_the_time_at_which_it_was_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kintsugi.cluster.host_monitor.TcpTable", PlayedTable)
    monkeypatch.setattr("kintsugi.cluster.host_monitor.SAMPLE_S", 0.1)
    monkeypatch.setattr("kintsugi.cluster.host_monitor.socket_inodes", lambda pid: iter([1]))
    sampling = sampling_of(tmp_path)
    sampling.begin()

    def links() -> list[tuple[float, float]]:
        return [
            (record.stamp.time, record.sample.values["out_bytes"])
            for record in figures_in(tmp_path)
            if isinstance(record.sample, LinkReading)
        ]

    until(lambda: len(links()) >= 3, "the look in which something happened")
    sampling.close()
    times = sorted(
        {record.stamp.time for record in figures_in(tmp_path) if isinstance(record.sample, HostReading)}
    )
    assert links()[:3] == [(times[0], 100.0), (times[2], 100.0), (times[3], 900.0)]


class BrokenTable:
    """A kernel that answers in a way that nobody knows."""

    def read(self) -> list[TcpSocket]:
        raise struct.error("unpack_from requires a buffer of at least 72 bytes")

    def close(self) -> None:
        pass


def test_what_nobody_thought_of_costs_the_figures_it_concerns_and_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kintsugi.cluster.host_monitor.TcpTable", BrokenTable)
    notes: list[str] = []
    sampling = sampling_of(tmp_path, note=notes.append)
    for _ in range(2):
        assert {type(sample) for sample in sampling.samples()} == {ProcessReading, HostReading}
    (note,) = notes
    assert note.startswith("readings are left out: error('unpack_from")
    sampling.close()
