from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.lab.testbed.process_tags import carriers, carries
from tests.unit.lab.sleepers import ASLEEP

MARK = "a1b2c3"
RESTLESS = 'if [ "$1" -gt 0 ]; then exec sh "$0" $(($1 - 1)); fi; exec sleep 60'
"""A process that becomes another program again and again, and then sleeps."""


@pytest.fixture
def restless(tmp_path: Path) -> Iterator[int]:
    script = tmp_path / "restless.sh"
    script.write_text(RESTLESS)
    with subprocess.Popen(["sh", str(script), "400"], env={**os.environ, "MARK": MARK}) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def without_environment() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", ASLEEP], env={}) as process:
        yield process.pid
        process.kill()


def test_a_process_carries_its_mark_at_every_moment_at_which_its_program_changes(restless: int) -> None:
    programs = set()
    while b"sleep" not in (command := Path(f"/proc/{restless}/cmdline").read_bytes()):
        assert carries(restless, MARK)
        programs.add(command)
    assert carries(restless, MARK)
    assert len(programs) > 20


def test_whoever_carries_no_mark_is_a_stranger_whatever_its_environment(without_environment: int) -> None:
    assert not carries(without_environment, MARK)
    assert not carries(os.getpid(), MARK)
    assert carriers(MARK) == []


def test_a_thread_of_the_kernel_and_somebody_who_ended_carry_nothing() -> None:
    with subprocess.Popen(["true"], env={"MARK": MARK}) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not carries(ended.pid, MARK)
    assert not carries(ended.pid, MARK)
    assert not carries(2, MARK)
