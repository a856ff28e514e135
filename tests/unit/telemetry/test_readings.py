from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.counters import COUNTERS
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.jsonl_log import MOST_WAITING, old_path
from kintsugi.telemetry.readings import (
    ClockOffsetReading,
    HeartbeatReading,
    HostReading,
    LinkReading,
    ProcessReading,
    ReadingsLog,
    Sample,
    figures_in,
)
from kintsugi.types import Wait

SAMPLES: tuple[Sample, ...] = (
    HeartbeatReading("a", {"steps": 3}, 0.5, (Wait("model-1", "a reply", 1.0, 9.0),), {"idle_s": 2.0}),
    ProcessReading("model-0", 17, "T", {"cpu_s": 1.5}),
    HostReading("host-0", {"load_1": 0.25}),
    LinkReading("model-0", "model-1", 4711, "ESTABLISHED", {"rtt_s": 0.0001}),
    ClockOffsetReading("host-0", 0.25, 0.001),
)


def write(run_dir: Path, *samples: Sample, process: str = "agent-0", clock: VirtualClock) -> None:
    log = ReadingsLog(run_dir, process=process, clock=clock)
    log.write(*samples)
    log.close()


def test_every_sample_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, *SAMPLES, clock=VirtualClock(start=3.0, wall=9.0))
    records = figures_in(tmp_path)
    assert tuple(record.sample for record in records) == SAMPLES
    stamps = {(record.stamp.process, record.stamp.monotonic, record.stamp.time) for record in records}
    assert stamps == {("agent-0", 3.0, 9.0)}


def test_samples_may_be_of_a_moment_before(tmp_path: Path) -> None:
    clock = VirtualClock(wall=9.0)
    log = ReadingsLog(tmp_path, process="agent-0", clock=clock)
    before = log.stamp()
    clock.advance(1.0)
    log.write(HostReading("host-0"), stamp=before)
    log.write(HostReading("host-0"))
    log.close()
    assert [record.stamp.time for record in figures_in(tmp_path)] == [9.0, 10.0]


def test_samples_of_all_processes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    for moment, process in ((5.0, "model-0"), (2.0, "agent-0"), (4.0, "model-0")):
        write(tmp_path, HeartbeatReading("a"), process=process, clock=VirtualClock(wall=moment))
    assert [record.stamp.time for record in figures_in(tmp_path)] == [2.0, 4.0, 5.0]
    assert [record.stamp.time for record in figures_in(tmp_path, process="model-0")] == [4.0, 5.0]
    assert [record.stamp.time for record in figures_in(tmp_path, since=3.0)] == [4.0, 5.0]


def test_old_files_are_read_too(tmp_path: Path) -> None:
    write(tmp_path, HeartbeatReading("old"), clock=VirtualClock(wall=1.0))
    path = RunFolder(tmp_path).readings_file("agent-0")
    path.rename(old_path(path, 1))
    write(tmp_path, HeartbeatReading("new"), clock=VirtualClock(wall=2.0))
    read = [record.sample for record in figures_in(tmp_path)]
    assert read == [HeartbeatReading("old"), HeartbeatReading("new")]
    assert [record.sample for record in figures_in(tmp_path, process="agent-0")] == read


def test_what_follows_the_zeros_of_a_crash_is_read(tmp_path: Path) -> None:
    for incarnation in ("before", "after"):
        write(tmp_path, HeartbeatReading(incarnation), clock=VirtualClock())
        with RunFolder(tmp_path).readings_file("agent-0").open("ab") as file:
            file.write(bytes(100))
    assert [record.sample for record in figures_in(tmp_path)] == [
        HeartbeatReading("before"),
        HeartbeatReading("after"),
    ]


def test_torn_lines_and_unknown_kinds_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, HeartbeatReading("a"), clock=VirtualClock())
    with RunFolder(tmp_path).readings_file("agent-0").open("ab") as file:
        file.write(b'{"time":1.0,"monotonic":1.0,"process":"agent-0","kind":"Later"}\n{"time":1.0,"mono')
    assert [record.sample for record in figures_in(tmp_path)] == [HeartbeatReading("a")]


def test_a_disk_that_hangs_delays_nobody_and_what_it_does_not_take_is_counted(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).readings_file("agent-0")
    path.parent.mkdir()
    os.mkfifo(path)  # Takes so much, and then lets who writes wait.
    dropped = COUNTERS.snapshot().counters.get("figures.dropped", 0)
    log = ReadingsLog(tmp_path, process="agent-0")
    begun = time.monotonic()
    for _ in range(2 * MOST_WAITING):
        log.write(HostReading("host-0", {f"value_{number}": 1.0 for number in range(20)}))
    log.close()
    assert time.monotonic() - begun < 5.0
    assert COUNTERS.snapshot().counters["figures.dropped"] > dropped
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # So that the thread ends.
    thread = log._writer._thread
    assert thread is not None
    while thread.is_alive():
        with suppress(BlockingIOError):
            os.read(reader, 1 << 20)
        thread.join(0.001)
    os.close(reader)


def test_a_disk_that_refuses_is_no_ones_failure(tmp_path: Path) -> None:
    (tmp_path / "figures").write_text("not a folder")
    dropped = COUNTERS.snapshot().counters.get("figures.dropped", 0)
    write(tmp_path, HeartbeatReading("a"), HeartbeatReading("b"), clock=VirtualClock())
    assert COUNTERS.snapshot().counters["figures.dropped"] == dropped + 2
