"""`kintsugi scale` from the asking side; the run is played by a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kintsugi.cli.scale import scale_run
from kintsugi.config.recipe import dump, load
from kintsugi.control.user_requests import UserRequests
from kintsugi.errors import DeadlineExceeded, ProcessDied, UserError
from kintsugi.journal.facts import Fact, ScaleRefused, ServersScaled
from kintsugi.journal.journal import Journal
from kintsugi.run_folder import reader
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.runtime.waits import wait

GRPO = Path(__file__).parents[3] / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dump(load(GRPO).config, tmp_path / "config.yaml")
    Journal.create(tmp_path / "journal", owner="test").close()
    return tmp_path


@pytest.fixture
def running(folder: Path) -> Path:
    """A folder that this process is said to run."""
    reader.write_launcher(folder, pid=os.getpid())
    return folder


def answering(folder: Path, answer: Callable[[str], Fact]) -> threading.Thread:
    """A master that journals its answer to the first request, and takes the request away."""

    def play() -> None:
        requests = UserRequests(folder)
        waiting = wait(lambda _: requests.waiting() or None, whom="the test", what="a request", timeout_s=10)
        journal, _ = Journal.open(folder / "journal", owner="test", take_over=True)
        journal.append([answer(waiting[0].request)])
        journal.close()
        requests.remove(waiting[0].request)

    thread = threading.Thread(target=play)
    thread.start()
    return thread


def test_it_returns_when_the_run_has_taken_the_number_over(running: Path) -> None:
    thread = answering(running, lambda request: ServersScaled(request, 3))
    scale_run(running, servers=3, timeout_s=10)
    thread.join()
    journal = reader.read_journal(running)
    assert journal.scaled_to == 3 and list(journal.answers.values()) == [""]


def test_a_refusal_is_the_users_mistake_with_the_runs_reason(running: Path) -> None:
    thread = answering(running, lambda request: ScaleRefused(request, "expected at most 2"))
    with pytest.raises(UserError, match="--servers: expected at most 2"):
        scale_run(running, servers=3, timeout_s=10)
    thread.join()


def test_a_run_that_is_over_is_not_asked(folder: Path) -> None:
    with pytest.raises(UserError, match=r"is not running \(it is interrupted\)"):
        scale_run(folder, servers=3, timeout_s=10)
    assert UserRequests(folder).waiting() == []


def test_a_run_that_does_not_answer_is_not_scaled_later(running: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        scale_run(running, servers=3, timeout_s=0.1)
    assert UserRequests(running).waiting() == []


def test_a_run_that_ends_before_it_answers_is_told(folder: Path) -> None:
    child = SystemProcesses().spawn(["sleep", "0.3"])
    reader.write_launcher(folder, pid=child.pid)
    with pytest.raises(ProcessDied, match="the run ended before it answered"):
        scale_run(folder, servers=3, timeout_s=10)
    child.wait_ended(whom="the child", timeout_s=10)
    child.close()
    assert UserRequests(folder).waiting() == []


def test_more_servers_than_there_is_memory_for_are_refused(
    running: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000_000))
    with pytest.raises(UserError, match=r"--servers: expected at most \d: one more takes about .* got 8"):
        scale_run(running, servers=8, timeout_s=10)
    assert UserRequests(running).waiting() == []
