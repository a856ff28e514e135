"""The folder that a gateway keeps its plan and its servers' logs in."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kintsugi.errors import UserError

PREFIX = "kintsugi-serve-"
LOCK_FILE = "lock"
"""Locked by the gateway for as long as it lives; not there in a folder that is kept."""


@contextmanager
def folder_of_logs(*, say: Callable[[str], None]) -> Iterator[Path]:
    """It goes when all was well, and when the user was wrong; else it stays, for who wants to know what happened. That
    of a gateway that was killed goes when the next one starts."""
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock_path = folder / LOCK_FILE
    # Under another name until it is locked: one that is not locked is taken for a dead gateway's.
    new_path = folder / f"{LOCK_FILE}.new"
    with new_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new_path.rename(lock_path)
        try:
            yield folder
        except (UserError, KeyboardInterrupt):
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except BaseException:
            lock_path.unlink(missing_ok=True)
            say(f"the servers' logs are in {folder}")
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left() -> None:
    for lock_path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_FILE}"):
        try:
            with lock_path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
        except OSError:
            continue  # Its gateway lives, it has just gone, or it is another user's.
