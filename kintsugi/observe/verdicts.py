"""How the watcher hands its verdicts to the master: files in `<run>/requests` that appear whole and are taken away.

Nobody waits for an answer. What can not be written or read is lost, and said again if it still holds.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.supervision import Verdict

WATCHER = "watcher-0"
DIAGNOSES_FILE = "diagnoses.jsonl"
"""Of the run folder: its verdicts, as they changed."""
SUFFIX = ".verdict"


def hand_over(run_dir: Path, verdict: Verdict) -> None:
    """Leave a verdict where the master looks five times a second. Raises OSError where the disk does."""
    folder = run_dir / "requests"
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns():020d}-{uuid4().hex[:8]}{SUFFIX}"
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.encode(verdict))
        new.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def take_verdicts(run_dir: Path) -> list[Verdict]:
    """What was handed over since the last look, the oldest first."""
    folder = run_dir / "requests"
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError:
        return []
    verdicts = []
    for name in names:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            verdicts.append(msgspec.json.decode((folder / name).read_bytes(), type=Verdict))
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return verdicts
