"""Files that are acted upon or kept secret: opened only if no other user could have written, or read, them.

The checks are made on the open descriptor, so the file that was checked is the file that is used. A symbolic link in
the last part of the path, a FIFO or a device, a foreign owner and permissions for others are refused by name.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

from kintsugi.errors import UntrustedFile

_WRITABLE_BY_OTHERS = 0o022
_OPEN_TO_OTHERS = 0o077


def open_owned(
    path: Path,
    flags: int,
    *,
    mode: int = 0o600,
    secret: bool = False,
    owners: frozenset[int] = frozenset(),
) -> int:
    """Open a regular file of this user (or root, or one of `owners`) and return its descriptor.

    Raises UntrustedFile if others may write the file or, with `secret`, read it; OSError as `os.open` does.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO that was put there would never return.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedFile(
                f"{path}: expected a file, found a symbolic link; it is not followed"
            ) from None
        if error.errno == errno.ENXIO:
            raise UntrustedFile(f"{path}: expected a regular file, found a FIFO or a socket") from None
        raise
    try:
        problem = problem_of(os.fstat(descriptor), secret=secret, owners=owners)
        if problem is not None:
            raise UntrustedFile(f"{path}: {problem}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_folders(path: Path) -> None:
    """Refuse a file below a folder in which another user could replace it: UntrustedFile names the folder.

    A folder of this user or of root that others may write is accepted only with the sticky bit, as /tmp has it.
    """
    for folder in Path(os.path.realpath(path)).parents:
        found = folder.stat()
        if found.st_uid not in (os.geteuid(), 0):
            raise UntrustedFile(
                f"{path}: {folder} belongs to user {found.st_uid}, which could replace the file"
            )
        if found.st_mode & _WRITABLE_BY_OTHERS and not found.st_mode & stat.S_ISVTX:
            raise UntrustedFile(
                f"{path}: others can write {folder} and replace the file (`chmod go-w {folder}`)"
            )


def check_owner(folder: Path, *, action: str) -> None:
    """Refuse to act on a folder of another user, also as root: its files say which process is signalled, which code is
    imported, where files are written. UntrustedFile names the owner."""
    owner = folder.stat().st_uid
    if owner == os.geteuid():
        return
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = str(owner)
    raise UntrustedFile(f"{folder} belongs to user {name}: expected a run of this user; {action} as {name}")


def problem_of(found: os.stat_result, *, secret: bool, owners: frozenset[int] = frozenset()) -> str | None:
    """Return why a file cannot be trusted (`expected permissions 0600, found 0644: …`); None if it can."""
    if not stat.S_ISREG(found.st_mode):
        return "expected a regular file"
    own = os.geteuid()
    if found.st_uid not in owners | {own, 0}:
        return f"expected a file of user {own}, found one of user {found.st_uid}"
    permissions = stat.S_IMODE(found.st_mode)
    if permissions & (_OPEN_TO_OTHERS if secret else _WRITABLE_BY_OTHERS) == 0:
        return None
    action = "write" if permissions & _WRITABLE_BY_OTHERS else "read"
    wanted = 0o600 if secret else permissions & ~_WRITABLE_BY_OTHERS
    return f"expected permissions {wanted:04o}, found {permissions:04o}: others can {action} it (`chmod {wanted:04o}`)"


def read_owned(path: Path, *, secret: bool = False, owners: frozenset[int] = frozenset()) -> bytes:
    """Read a whole file after the checks of `open_owned`."""
    descriptor = open_owned(path, os.O_RDONLY, secret=secret, owners=owners)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
