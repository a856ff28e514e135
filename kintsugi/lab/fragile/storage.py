"""Checkpoints of the latest step, written directly to their final location; older ones are removed afterwards.

The disk is assumed to be unavailable at times, like a network file system: a write that fails for lack of space is
retried for an hour.
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
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import wait

log = logging.getLogger("storage")

T = TypeVar("T")

_BLOCK = 64 << 10
_RETRY_S = 0.1
KEPT = 2
"""Number of checkpoints kept: that of an odd step and that of an even step."""
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def latest_folder(run_dir: Path, *, step: int) -> Path:
    """`latest_folder(Path("run"), step=10) == Path("run/checkpoints/step_10_even")`."""
    return RunFolder(run_dir).checkpoints_folder / f"step_{step}_{'odd' if step % 2 else 'even'}"


def write_checkpoint(folder: Path, files: Iterable[tuple[str, bytes]], *, timeout_s: float) -> None:
    """Write all files; StorageError when they are not on disk in time."""
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    _retry_without_space(lambda: folder.mkdir(parents=True, exist_ok=True), deadline=deadline)
    for name, content in files:
        log.info("Saving %s (%.1f KiB)", folder / name, len(content) / 1024)
        _write(folder / name, content, deadline=deadline)
    _remove_all_but(KEPT, folder.parent)


def _remove_all_but(count: int, folder: Path) -> None:
    by_age = sorted(folder.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    for path in by_age[:-count]:
        shutil.rmtree(path, ignore_errors=True)


def write_without_retry(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write all files without retries: a disk error is raised immediately."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files:
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _write(path: Path, content: bytes, *, deadline: float) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = _retry_without_space(lambda: os.open(path, flags, 0o644), deadline=deadline)
    try:
        for start in range(0, len(content), _BLOCK):
            _write_block(descriptor, content[start : start + _BLOCK], deadline=deadline)
        log.info("Checkpoint file written, calling fsync...")
        _retry_without_space(lambda: os.fsync(descriptor), deadline=deadline)
    finally:
        os.close(descriptor)
    if SYSTEM_CLOCK.monotonic() > deadline:
        raise StorageError(f"Write timeout: {path}")


def _write_block(descriptor: int, block: bytes, *, deadline: float) -> None:
    written = 0
    while written < len(block):
        written += _retry_without_space(partial(os.write, descriptor, block[written:]), deadline=deadline)


def _retry_without_space(action: Callable[[], T], *, deadline: float) -> T:
    """Retry while there is no space, with exponential back-off."""
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
