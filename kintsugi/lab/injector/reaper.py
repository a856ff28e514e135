"""Process that undoes the changes of a killed injector or laboratory.

    python -m kintsugi.lab.injector.reaper JOURNAL LIFELINE LINK

There is one per journal. It undoes a change when its lease is over (after a grace period, in which the process that
made the change can undo it), when the process that made it has ended, and all changes when the laboratory has ended,
which it learns from the end of a pipe that only the laboratory can write. It exits when nothing is left to undo after
that.

A folder lists the journals in use on this machine, each as a symbolic link. A laboratory that was killed together with
its reaper leaves its link there, and the next laboratory undoes its changes. In all other cases the reaper removes the
link, and the folder with the last link.
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

from kintsugi.errors import DeadlineExceeded, UntrustedFile, UserError
from kintsugi.lab.injector.undo_log import ProcessIdentity, Undo, UndoEntry, UndoJournal, group_mounts
from kintsugi.lab.testbed.tools import ToolFailed
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.printable import printable
from kintsugi.runtime.proc import boot_id
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.waits import wait

ROUND_S = 0.1
GRACE_S = 1.0
"""Grace period after a lease, and after the laboratory's end, in which the process that made a change can undo it."""
LAST_S = 30.0
"""How long the reaper tries after the laboratory's end; the next laboratory undoes the remaining changes."""
END_TIMEOUT_S = GRACE_S + LAST_S
LIST_TIMEOUT_S = 5.0
UNDO_TIMEOUT_S = 15.0
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 3.0
"""Pauses between attempts to undo the same change: the first, and the longest."""


class ReaperGuard:
    """The laboratory's side: the journal, and the reaper process that reads it."""

    def __init__(self, journal: Path) -> None:
        reap_abandoned()
        _check_lists()
        self._journal = UndoJournal(journal)
        self._link = _link_for(journal)
        self._lifeline = -1
        self._reaper: Child | None = None
        # The reaper is started before the link is created, so the link is removed whenever the laboratory is
        # killed.
        self.renew()
        _list(self._link, journal)

    @property
    def path(self) -> Path:
        return self._journal.path

    def renew(self) -> None:
        """Start a reaper if none is running: it may have been killed as well."""
        if self._reaper is not None:
            if not self._reaper.ended():
                return
            self._release(self._reaper)
        reader, self._lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            self._reaper = SystemProcesses().spawn(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kintsugi.lab.injector.reaper",
                    str(self.path),
                    str(reader),
                    str(self._link),
                ],
                pass_fds=(reader,),
                new_session=True,
            )
        finally:
            os.close(reader)

    def before(self, undo: Undo, *, lease_s: float) -> UndoEntry:
        """Journal an undo entry, with a running reaper that guarantees the undo."""
        self.renew()
        return self._journal.before(undo, lease_s=lease_s)

    def undo(self, entry: UndoEntry) -> None:
        self._journal.undo(entry)

    def forget(self, entry: UndoEntry) -> None:
        """Mark an entry as done without undoing it: another process is responsible now."""
        self._journal.forget(entry)

    def outstanding(self) -> list[UndoEntry]:
        return self._journal.outstanding()

    def undo_all_of(self, pid: int) -> None:
        """Undo the changes of a killed process; the reaper does the same, and the second undo has no effect."""

        def attempt(remaining_s: float) -> bool | None:
            mine = [entry for entry in self.outstanding() if entry.owner.pid == pid]
            for entry in mine:
                with contextlib.suppress(OSError, ToolFailed, DeadlineExceeded):
                    self.undo(entry)
            return None if mine else True

        wait(attempt, whom="injector", what="its changes to be undone", timeout_s=UNDO_TIMEOUT_S)

    def close(self) -> None:
        """Undo all remaining changes.

        Raises DeadlineExceeded if that could not be done; the journal then stays listed for the next laboratory.
        """
        self.renew()
        assert self._reaper is not None
        os.close(self._lifeline)
        self._lifeline = -1
        try:
            self._reaper.wait_ended(whom="reaper", timeout_s=END_TIMEOUT_S)
        finally:
            self._release(self._reaper)
            self._reaper = None
            left = self._journal.outstanding()
            self._journal.close()
        if left:
            what = "to undo " + ", ".join(str(entry.undo) for entry in left)
            raise DeadlineExceeded(whom="reaper", what=what, waited_s=END_TIMEOUT_S)
        _unlist(self._link)

    def _release(self, reaper: Child) -> None:
        reaper.status()
        reaper.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def lists_folder() -> Path:
    """Return the folder that lists the journals in use on this machine, each as a link."""
    return Path(tempfile.gettempdir()) / f"kintsugi-lab-{os.getuid()}"


def _check_lists() -> None:
    """Raise UserError when another user could change the list of journals."""
    folder = lists_folder()
    if os.path.lexists(folder) and not _is_own(folder):
        raise UserError(f"{folder}: expected a folder of yours with mode 0700; remove it")


def _link_for(journal: Path) -> Path:
    """Return the link that lists a journal; its name contains the process that uses it."""
    own = ProcessIdentity.of(os.getpid())
    name = hashlib.blake2b(str(journal.resolve()).encode(), digest_size=6).hexdigest()
    return lists_folder() / f"{own_world()}-{own.pid}-{own.born}-{name}"


def own_world() -> str:
    """Name of this boot of this machine and its pid namespace, within which pid and start time name a process."""
    return f"{boot_id().replace('-', '')[:12]}.{os.stat('/proc/self/ns/pid').st_ino}"


def _list(link: Path, journal: Path) -> None:
    """List a journal as in use by this process."""

    def attempt(remaining_s: float) -> bool | None:
        link.parent.mkdir(mode=0o700, exist_ok=True)
        _check_lists()
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(journal.resolve())
        except (
            FileNotFoundError
        ):  # Another laboratory has just removed its last link, and the folder with it.
            return None
        return True

    wait(attempt, whom="other laboratories", what="the list of journals", timeout_s=LIST_TIMEOUT_S)


def _unlist(link: Path) -> None:
    """Remove a link; no effect when another process has removed it."""
    link.unlink(missing_ok=True)
    _forget_empty(link.parent)


def _is_own(folder: Path) -> bool:
    """Whether a folder belongs to this user alone; only then its entries are trusted, since they are executed."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _owner_of(link: Path) -> tuple[str, ProcessIdentity] | None:
    """Return boot and pid namespace, and the process that listed a journal; None for a file that is no such link."""
    try:
        world, pid, born, _ = link.name.split("-")
        return world, ProcessIdentity(int(pid), int(born))
    except ValueError:
        return None


def _forget_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def reap_abandoned() -> int:
    """Undo the changes of laboratories that were killed with their reapers; return the number of changes.

    Journals of another pid namespace or machine (a container or a host that shares the folder) are left alone: their
    processes are not visible from here and may be alive. Journals that another user could have written are too.
    """
    folder, count = lists_folder(), 0
    world = own_world()
    if not _is_own(folder):
        return 0
    for name in _names_in(folder):
        link = folder / name
        owner = _owner_of(link)
        if owner is None or owner[0] != world or owner[1].alive:
            continue
        path = link.resolve()
        if path.exists():
            try:
                journal = UndoJournal(path)
            except UntrustedFile:
                continue
            # A reaper that is still running undoes them too; the second undo has no effect.
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


def _undo(journal: UndoJournal, entry: UndoEntry) -> bool:
    """Kill the process that made the change, if it is still running, and undo the change; False when it must be
    retried.

    The laboratory, which is the reaper's parent, is not killed: it does not make a change twice.
    """
    if entry.owner.pid not in (os.getpid(), os.getppid()):
        entry.owner.signal(signal.SIGKILL)
    try:
        journal.undo(entry)
    except (OSError, ToolFailed, DeadlineExceeded) as error:
        sys.stderr.write(f"not undone yet: {printable(str(entry.undo))}: {error}\n")
        return False
    return True


def reap(journal: UndoJournal, lifeline: int) -> int:
    """Loop of the reaper: consumes the journal, waits for leases and for the laboratory's end, which unblocks it."""
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    size, open_entries = -1, list[UndoEntry]()
    retries: dict[str, tuple[float, float]] = {}
    """Entry that failed → time of its next attempt, pause after that."""
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
            is_due = now > entry.until + GRACE_S or not entry.owner.alive
            at, pause_s = retries.get(entry.number, (now, FIRST_RETRY_S))
            is_due = is_due or (ended_at is not None and now > ended_at + GRACE_S)
            if is_due and now >= at and not _undo(journal, entry):
                retries[entry.number] = (now + pause_s, min(2 * pause_s, LAST_RETRY_S))
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

    wait(attempt, whom="timer", what="a moment", timeout_s=seconds * 2)


def leave_groups() -> None:
    """Leave the control groups of the laboratory, for the highest ones that the host lets this process enter.

    The end of a service, of a login session or of a group that ran out of memory kills all processes of its group at
    once; the reaper must not be among them. In a container it can not leave the container's.
    """
    roots = {each.path: each.controllers for each in group_mounts()}
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        for root in (root for root, found in roots.items() if set(controllers.split(",")) <= found):
            ancestors = [root / path.lstrip("/"), *(root / path.lstrip("/")).parents]
            above = [each for each in reversed(ancestors[1:]) if each.is_relative_to(root)]
            for group in above:
                try:
                    (group / "cgroup.procs").write_text(str(os.getpid()))
                    break
                except OSError:
                    continue


def main(arguments: list[str]) -> int:
    journal, lifeline, link = arguments
    # Ctrl-C in the laboratory's terminal must not kill the process that cleans up after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_groups()
    code = reap(UndoJournal(Path(journal)), int(lifeline))
    if code == 0:
        _unlist(Path(link))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
