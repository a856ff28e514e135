from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.cluster.handover import PROGRAMS
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError
from kintsugi.lab.testbed.run import MarkedRun, cold, signal_ours
from kintsugi.runtime.processes import Child
from tests.unit.lab.sleepers import TWO_SLEEPERS


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MarkedRun]:
    run = MarkedRun(
        Config(name="lab"), run_dir=tmp_path / "run", command=(sys.executable, "-c", TWO_SLEEPERS)
    )
    yield run
    run.close()


@pytest.fixture
def stranger() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def launcher_of(run: MarkedRun) -> Child:
    run.start()
    assert run.launcher is not None
    return run.launcher


def test_the_configuration_is_in_the_folder_before_anything_starts(run: MarkedRun) -> None:
    assert load_config(run.run_dir / "config.yaml") == run.config
    assert not run.running


def test_a_run_folder_is_used_once(run: MarkedRun) -> None:
    with pytest.raises(ConfigError):
        MarkedRun(run.config, run_dir=run.run_dir)


def test_a_process_of_the_run_is_recognised_and_a_stranger_is_not(run: MarkedRun, stranger: int) -> None:
    launcher = launcher_of(run)
    assert launcher.pid in run.pids()
    assert not run.is_ours(stranger) and not run.is_ours(os.getpid())


def test_a_stranger_is_never_signalled(run: MarkedRun, stranger: int) -> None:
    assert not signal_ours(run, stranger, signal.SIGKILL)
    assert Path(f"/proc/{stranger}").exists()


def test_a_process_that_has_ended_is_not_hit(run: MarkedRun) -> None:
    launcher = launcher_of(run)
    assert signal_ours(run, launcher.pid, signal.SIGKILL)
    launcher.wait_ended(whom="the sleeper", timeout_s=5.0)
    assert not signal_ours(run, launcher.pid, signal.SIGKILL)


def test_closing_ends_everything_that_carries_the_mark(run: MarkedRun) -> None:
    launcher_of(run)
    run.close()
    assert run.pids() == []


def test_a_cold_run_has_the_same_programs_and_no_template() -> None:
    programs = cold(PROGRAMS)
    assert (programs.entries, programs.preload, programs.forked) == (PROGRAMS.entries, (), ())
