"""Verdicts of the watcher, and notices of the host manager, for the master: files in `<run>/requests` that appear whole
and are removed by the master.

There is no reply. A verdict that can not be written or read is lost; the watcher repeats it while it holds. The loss
of a host is then known by its silence.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

from kintsugi.errors import UntrustedFile
from kintsugi.protocol.agents import DiagnosisVerdict
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.owned_files import read_owned

WATCHER = "watcher-0"
SUFFIX = ".verdict"
NOTICE_SUFFIX = ".host"
_T = TypeVar("_T")


class HostNotice(msgspec.Struct, frozen=True):
    """Knowledge of the host manager about a host: `HostNotice("agent-2", 1763210000, 1763219999, "it is silent …")`."""

    agent: str
    first: int
    """Lowest incarnation of the agents that the host has had under its present ticket."""
    last: int
    """The highest one: an agent outside of these numbers belongs to another ticket."""
    why: str
    leaves: bool = False
    """It still runs, and its processes are to be moved before its machine is taken away."""

    def covers(self, incarnation: str) -> bool:
        """Whether this incarnation of the agent belongs to the ticket that the notice is about."""
        return incarnation.isdecimal() and self.first <= int(incarnation) <= self.last


def hand_over(run_dir: Path, verdict: DiagnosisVerdict) -> None:
    """Write a verdict to the folder that the master polls five times a second. Raises OSError of the disk."""
    _write(run_dir, verdict, suffix=SUFFIX)


def give_notice(run_dir: Path, notice: HostNotice) -> Path:
    """Write a notice to the same folder; return its file, which exists until the master has acted on it. Raises OSError
    of the disk."""
    return _write(run_dir, notice, suffix=NOTICE_SUFFIX)


def take_verdicts(run_dir: Path) -> list[DiagnosisVerdict]:
    """Read and remove all verdicts, the oldest first."""
    taken = _read(run_dir, DiagnosisVerdict, suffix=SUFFIX)
    for path, _ in taken:
        with contextlib.suppress(OSError):
            path.unlink()
    return [verdict for _, verdict in taken]


def read_notices(run_dir: Path) -> list[tuple[Path, HostNotice]]:
    """Read all notices with their files, the oldest first."""
    return _read(run_dir, HostNotice, suffix=NOTICE_SUFFIX)


def _write(run_dir: Path, content: DiagnosisVerdict | HostNotice, *, suffix: str) -> Path:
    folder = RunFolder(run_dir).requests_folder
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns():020d}-{uuid4().hex[:8]}{suffix}"
    write_atomically(path, msgspec.json.encode(content), durable=False)
    return path


def _read(run_dir: Path, kind: type[_T], *, suffix: str) -> list[tuple[Path, _T]]:
    """Read the files of one kind; those that can not be read are removed."""
    folder = RunFolder(run_dir).requests_folder
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(suffix))
    except OSError:
        return []
    found = []
    for name in names:
        try:
            found.append((folder / name, msgspec.json.decode(read_owned(folder / name), type=kind)))
        except (OSError, msgspec.MsgspecError, UntrustedFile):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    return found
