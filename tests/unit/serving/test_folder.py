"""The folder that a gateway keeps its servers' logs in."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from pathlib import Path

import pytest

from kintsugi.errors import ProcessDied, UserError
from kintsugi.serving.folder import LOCK_FILE, folder_of_logs


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_when_all_was_well() -> None:
    with folder_of_logs(print_line=lambda line: None) as folder:
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("error", "stays"),
    [(UserError, False), (KeyboardInterrupt, False), (ProcessDied, True), (AssertionError, True)],
)
def test_it_stays_when_somebody_may_want_to_know_what_happened(
    error: type[BaseException], stays: bool
) -> None:
    said: list[str] = []
    with pytest.raises(error), folder_of_logs(print_line=said.append) as folder:
        raise error("why")
    assert folder.exists() == stays
    assert said == ([f"the servers' logs are in {folder}"] if stays else [])
    with folder_of_logs(print_line=said.append):
        assert folder.exists() == stays


def test_what_a_killed_gateway_left_goes_with_the_next_start_and_a_living_ones_stays(temporary: Path) -> None:
    with folder_of_logs(print_line=lambda line: None) as living:
        # A lock that nobody holds is all that is left of a process that was killed.
        left = temporary / f"{living.name}left"
        left.mkdir()
        (left / LOCK_FILE).touch()
        other = temporary / "kintsugi-serve-of-somebody-else"
        other.mkdir()
        with folder_of_logs(print_line=lambda line: None):
            assert not left.exists()
            assert living.exists() and other.exists()
        with (living / LOCK_FILE).open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_fifo_that_another_user_put_there_does_not_hang_the_next_start(temporary: Path) -> None:
    trap = temporary / "kintsugi-serve-x"
    trap.mkdir()
    os.mkfifo(trap / LOCK_FILE)
    started = threading.Thread(target=lambda: folder_of_logs(print_line=print).__enter__(), daemon=True)
    started.start()
    started.join(20)
    assert not started.is_alive()
    assert (trap / LOCK_FILE).exists()
