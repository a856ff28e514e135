"""Undoes what a killed injector or laboratory left.

    python -m kintsugi.lab.reaper JOURNAL LIFELINE LINK

One beside every journal. It undoes a change when its lease is over (with a moment of patience: whoever made it does so
first), when whoever made it is gone, and everything when the laboratory is gone, which it learns from the end of a pipe
that only the laboratory can write. It ends when nothing is left to undo after that.

A folder lists the journals in use on this machine, each by a link. The journal of a laboratory that was killed together
with its reaper is found there by the next one; of every other laboratory the reaper removes the link, and the folder
with the last of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path

from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.lab.tools import ToolFailed
from kintsugi.lab.undo import Entry, Undo, UndoJournal, Who
from kintsugi.runtime import SYSTEM_CLOCK, Child, SystemProcesses, wait

ROUND_S = 0.1
PATIENCE_S = 1.0
"""After a lease, and after the laboratory's end: for whoever made a change to undo it."""
LAST_S = 30.0
"""How long the reaper tries after the laboratory's end; what is left then is left to the next laboratory."""
END_TIMEOUT_S = PATIENCE_S + LAST_S
LIST_TIMEOUT_S = 5.0


class Guard:
    """What the laboratory holds: the journal, and the reaper that reads it."""

    def __init__(self, journal: Path) -> None:
        reap_abandoned()
        _check_lists()
        self._journal = UndoJournal(journal)
        self._link = _link_for(journal)
        self._lifeline = -1
        self._reaper: Child | None = None
        # The reaper comes before the link that it removes: whenever the laboratory is killed, somebody removes it.
        self.renew()
        _list(self._link, journal)

    @property
    def path(self) -> Path:
        return self._journal.path

    def renew(self) -> None:
        """Start a reaper where there is none: it may have been killed as well."""
        if self._reaper is not None:
            if not self._reaper.ended():
                return
            self._let_go(self._reaper)
        reader, self._lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            self._reaper = SystemProcesses().spawn(
                [sys.executable, "-m", "kintsugi.lab.reaper", str(self.path), str(reader), str(self._link)],
                pass_fds=(reader,),
                new_session=True,
            )
        finally:
            os.close(reader)

    def before(self, undo: Undo, *, lease_s: float) -> Entry:
        """As of the journal, where somebody will undo it whatever happens."""
        self.renew()
        return self._journal.before(undo, lease_s=lease_s)

    def undo(self, entry: Entry) -> None:
        self._journal.undo(entry)

    def forget(self, entry: Entry) -> None:
        """Somebody else answers for undoing it."""
        self._journal.forget(entry)

    def outstanding(self) -> list[Entry]:
        return self._journal.outstanding()

    def close(self) -> None:
        """Undo what is left. When this returns, nothing is.

        DeadlineExceeded if that could not be done: the journal stays listed then, for the next laboratory.
        """
        self.renew()
        assert self._reaper is not None
        os.close(self._lifeline)
        self._lifeline = -1
        try:
            self._reaper.wait_ended(whom="reaper", timeout_s=END_TIMEOUT_S)
        finally:
            self._let_go(self._reaper)
            self._reaper = None
            left = self._journal.outstanding()
            self._journal.close()
        if left:
            what = "to undo " + ", ".join(str(entry.undo) for entry in left)
            raise DeadlineExceeded(whom="reaper", what=what, waited_s=END_TIMEOUT_S)
        _unlist(self._link)

    def _let_go(self, reaper: Child) -> None:
        reaper.status()
        reaper.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def lists_folder() -> Path:
    """Where the journals in use on this machine are listed, each by a link."""
    return Path(tempfile.gettempdir()) / f"kintsugi-lab-{os.getuid()}"


def _check_lists() -> None:
    """UserError where journals can not be listed so that nobody else can change the list."""
    folder = lists_folder()
    if os.path.lexists(folder) and not _is_own(folder):
        raise UserError(f"{folder}: expected a folder of yours that nobody else may enter; remove it")


def _link_for(journal: Path) -> Path:
    """By which a journal is listed: it says who uses it."""
    own = Who.of(os.getpid())
    world = os.stat("/proc/self/ns/pid").st_ino
    name = hashlib.blake2b(str(journal.resolve()).encode(), digest_size=6).hexdigest()
    return lists_folder() / f"{world}-{own.pid}-{own.born}-{name}"


def _list(link: Path, journal: Path) -> None:
    """Say that a journal is in use, and by whom."""

    def attempt(remaining_s: float) -> bool | None:
        link.parent.mkdir(mode=0o700, exist_ok=True)
        _check_lists()
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(journal.resolve())
        except FileNotFoundError:  # Somebody else's last link went just now, and the folder with it.
            return None
        return True

    wait(attempt, whom="other laboratories", what="the list of journals", timeout_s=LIST_TIMEOUT_S)


def _unlist(link: Path) -> None:
    """Whoever comes second finds nothing."""
    link.unlink(missing_ok=True)
    _forget_empty(link.parent)


def _is_own(folder: Path) -> bool:
    """What is listed there is carried out, and anybody may make a folder of this name: only this user's is trusted."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _owner_of(link: Path) -> tuple[int, Who] | None:
    """The world and the process that listed a journal; None for what is no such link."""
    try:
        world, pid, born, _ = link.name.split("-")
        return int(world), Who(int(pid), int(born))
    except ValueError:
        return None


def _is_own_journal(path: Path) -> bool:
    found = path.stat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _forget_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def reap_abandoned() -> int:
    """Undo what laboratories left that were killed with their reapers; gives how many changes that were.

    Those of another world of processes, as of a container that shares the folder, can not be seen from here, and are
    left alone: they may well be alive.
    """
    folder, count = lists_folder(), 0
    own_world = os.stat("/proc/self/ns/pid").st_ino
    if not _is_own(folder):
        return 0
    for name in _names_in(folder):
        link = folder / name
        owner = _owner_of(link)
        if owner is None or owner[0] != own_world or owner[1].alive:
            continue
        path = link.resolve()
        if path.exists():
            if not _is_own_journal(path):
                continue
            journal = UndoJournal(path)
            # A reaper that still lives undoes them too, which does no harm.
            count += sum(_undo(journal, entry) for entry in journal.outstanding())
            left = journal.outstanding()
            journal.close()
            if left:
                continue
        link.unlink(missing_ok=True)
    _forget_empty(folder)
    return count


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _undo(journal: UndoJournal, entry: Entry) -> bool:
    """End whoever made the change, if that one is still there, and undo it; False to be tried again.

    Not the laboratory, which is the reaper's parent: it does not make a change twice.
    """
    if entry.owner.pid not in (os.getpid(), os.getppid()):
        entry.owner.signal(signal.SIGKILL)
    try:
        journal.undo(entry)
    except (OSError, ToolFailed, DeadlineExceeded) as error:
        sys.stderr.write(f"not undone yet: {entry.undo}: {error}\n")
        return False
    return True


def reap(journal: UndoJournal, lifeline: int) -> int:
    """The reaper's loop: consumes the journal, waits for leases and for the laboratory's end, which unblocks it."""
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    size, open_entries = -1, list[Entry]()
    ended_at: float | None = None
    while True:
        if ended_at is None:
            if wait(
                lambda remaining_s: (bool(poller.poll(min(remaining_s, ROUND_S) * 1000)),),
                whom="laboratory",
                what="its end",
                timeout_s=ROUND_S * 2,
            )[0]:
                ended_at = SYSTEM_CLOCK.monotonic()
        else:
            _pause(ROUND_S / 4)
        if (now_size := journal.size) != size:
            size, open_entries = now_size, journal.outstanding()
        now = SYSTEM_CLOCK.monotonic()
        for entry in open_entries:
            is_due = now > entry.until + PATIENCE_S or not entry.owner.alive
            if is_due or (ended_at is not None and now > ended_at + PATIENCE_S):
                _undo(journal, entry)
        if ended_at is not None:
            open_entries = journal.outstanding()
            if not open_entries:
                return 0
            if now > ended_at + LAST_S:
                return 1


def _pause(seconds: float) -> None:
    def attempt(remaining_s: float) -> bool | None:
        time.sleep(min(remaining_s, seconds))
        return True

    wait(attempt, whom="nobody", what="a moment", timeout_s=seconds * 2)


def main(arguments: list[str]) -> int:
    journal, lifeline, link = arguments
    # Whoever ends a laboratory from its terminal does not mean the one who cleans up after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = reap(UndoJournal(Path(journal)), int(lifeline))
    if code == 0:
        _unlist(Path(link))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
