"""Verdicts of the watcher for the master: files in `<run>/requests` that appear whole and are removed by the master.

There is no reply. A verdict that can not be written or read is lost; the watcher repeats it while it holds.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.errors import UntrustedFile
from kintsugi.protocol.agents import DiagnosisVerdict
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.owned_files import read_owned

WATCHER = "watcher-0"
SUFFIX = ".verdict"


def hand_over(run_dir: Path, verdict: DiagnosisVerdict) -> None:
    """Write a verdict to the folder that the master polls five times a second. Raises OSError of the disk."""
    folder = RunFolder(run_dir).requests_folder
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns():020d}-{uuid4().hex[:8]}{SUFFIX}"
    write_atomically(path, msgspec.json.encode(verdict), durable=False)


def take_verdicts(run_dir: Path) -> list[DiagnosisVerdict]:
    """Read and remove all verdicts, the oldest first."""
    folder = RunFolder(run_dir).requests_folder
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError:
        return []
    verdicts = []
    for name in names:
        with contextlib.suppress(OSError, msgspec.MsgspecError, UntrustedFile):
            verdicts.append(msgspec.json.decode(read_owned(folder / name), type=DiagnosisVerdict))
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return verdicts
