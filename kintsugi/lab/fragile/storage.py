"""Checkpoints of the latest step, written where they will be read, and those before the last removed afterwards.

The disk is taken for one that sometimes has to be waited for, as a network file system is: a write that finds no space
is tried again, for an hour.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from kintsugi.errors import DeadlineExceeded, StorageError
from kintsugi.runs import CHECKPOINTS_FOLDER
from kintsugi.runtime import SYSTEM_CLOCK, wait

log = logging.getLogger("storage")

T = TypeVar("T")

_BLOCK = 64 << 10
_RETRY_S = 0.1
KEPT = 2
"""Checkpoints: the one of an odd step and the one of an even step."""
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def latest_folder(run_dir: Path, *, step: int) -> Path:
    """`latest_folder(Path("run"), step=10) == Path("run/checkpoints/step_10_even")`."""
    return run_dir / CHECKPOINTS_FOLDER / f"step_{step}_{'odd' if step % 2 else 'even'}"


def write_checkpoint(folder: Path, files: Iterable[tuple[str, bytes]], *, timeout_s: float) -> None:
    """All files; StorageError when they are not on the disk in time."""
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    _patiently(lambda: folder.mkdir(parents=True, exist_ok=True), deadline=deadline)
    for name, content in files:
        log.info("Saving %s (%.1f KiB)", folder / name, len(content) / 1024)
        _write(folder / name, content, deadline=deadline)
    _remove_all_but(KEPT, folder.parent)


def _remove_all_but(count: int, folder: Path) -> None:
    by_age = sorted(folder.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    for path in by_age[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def write_at_once(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """The same without patience: an error of the disk is raised as it comes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files:
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _write(path: Path, content: bytes, *, deadline: float) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = _patiently(lambda: os.open(path, flags, 0o644), deadline=deadline)
    try:
        for start in range(0, len(content), _BLOCK):
            _write_block(descriptor, content[start : start + _BLOCK], deadline=deadline)
        log.info("Checkpoint file written, calling fsync...")
        _patiently(lambda: os.fsync(descriptor), deadline=deadline)
    finally:
        os.close(descriptor)
    if SYSTEM_CLOCK.monotonic() > deadline:
        raise StorageError(f"Write timeout: {path}")


def _write_block(descriptor: int, block: bytes, *, deadline: float) -> None:
    written = 0
    while written < len(block):
        written += _patiently(partial(os.write, descriptor, block[written:]), deadline=deadline)


def _patiently(action: Callable[[], T], *, deadline: float) -> T:
    """Try again while there is no space, after twice the time each."""
    pause_s = _RETRY_S

    def attempt(remaining_s: float) -> tuple[T] | None:
        nonlocal pause_s
        try:
            return (action(),)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise StorageError(f"Write error: {error.strerror}") from error
            time.sleep(max(0.0, min(pause_s, remaining_s)))
            pause_s *= 2
            return None

    try:
        return wait(attempt, whom="storage", what="space", timeout_s=deadline - SYSTEM_CLOCK.monotonic())[0]
    except DeadlineExceeded as error:
        raise StorageError("Write timeout") from error
