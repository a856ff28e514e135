"""Temporary folder of a gateway, with its options and its servers' logs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kintsugi.errors import UntrustedFile, UserError
from kintsugi.runtime.owned_files import open_owned

PREFIX = "kintsugi-serve-"
LOCK_FILE = "lock"
"""Locked by the gateway while it runs; absent in a folder that is kept."""


@contextmanager
def folder_of_logs(*, print_line: Callable[[str], None]) -> Iterator[Path]:
    """Create the folder. It is removed after success and after a user error; otherwise it is kept for inspection. The
    folder of a gateway that was killed is removed when the next one starts."""
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock_path = folder / LOCK_FILE
    # Renamed only after it is locked: a folder with an unlocked lock file counts as that of a dead gateway.
    new_path = folder / f"{LOCK_FILE}.new"
    new_path.touch(mode=0o600)
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
            print_line(f"the servers' logs are in {folder}")
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left() -> None:
    for lock_path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_FILE}"):
        try:
            if lock_path.parent.lstat().st_uid != os.geteuid():
                continue
            with os.fdopen(open_owned(lock_path, os.O_RDONLY)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
        except (OSError, UntrustedFile):
            continue  # Its gateway is running, it was just removed, or another user put something there.
