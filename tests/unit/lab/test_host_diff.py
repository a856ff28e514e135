from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from kintsugi.lab.residue.host_diff import HostSnapshot, difference, host_snapshot


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    mark = uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "MARK": mark}
    ) as process:
        process.mark = mark  # type: ignore[attr-defined]
        yield process
        process.kill()


def test_what_is_new_gone_or_changed_is_told() -> None:
    before = HostSnapshot({"mount": {"/a": "", "/b": ""}, "setting": {"x": "1"}})
    after = HostSnapshot({"mount": {"/b": "", "/c": ""}, "setting": {"x": "2"}})
    assert difference(before, after) == [
        "mount /c: is new",
        "mount /a: is gone",
        "setting x: was '1', is '2'",
    ]
    assert difference(before, before) == []


def test_a_process_of_the_experiment_that_is_left_is_told(sleeper: subprocess.Popen[bytes]) -> None:
    mark: str = sleeper.mark  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5.0
    found: list[str] = []
    while not found:  # The kernel shows an environment a moment after the program began.
        assert time.monotonic() < deadline
        snapshot = host_snapshot(mark=mark)
        found = [name for name in snapshot.parts["process of the experiment"] if str(sleeper.pid) in name]
    without = HostSnapshot({**snapshot.parts, "process of the experiment": {}})
    (line,) = difference(without, snapshot)
    assert line.startswith(f"process of the experiment {sleeper.pid} ")


def test_somebody_else_who_was_stopped_or_bound_is_told(sleeper: subprocess.Popen[bytes]) -> None:
    before = host_snapshot()
    os.sched_setaffinity(sleeper.pid, {min(os.sched_getaffinity(sleeper.pid))})
    os.kill(sleeper.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{sleeper.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    lines = [line for line in difference(before, host_snapshot()) if f" {sleeper.pid} " in line]
    assert len(lines) == 1
    assert "stopped" in lines[0]
