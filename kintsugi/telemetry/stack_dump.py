"""Stack dumps in a process's log: `runtime/stacks.py` has them written, this module finds and reads them.

An agent that requests a dump appends a header with the time first; the interpreter itself writes none:

    === stacks of model-0 1.4 (pid 4711) at 1763000000.250 ===
    Thread 0x00007f1c (most recent call first):
      File "/…/kintsugi/process/shell.py", line 71 in _turn
      …

    Current thread 0x00007f2d (most recent call first):
      File "/…/kintsugi/training/worker.py", line 212 in _forward

The main thread comes last: threads are listed from the newest to the oldest.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

READ_BYTES = 256 << 10
"""How much of the end of a log is searched."""
QUOTED_FRAMES = 5
FATAL = "Fatal Python error: "

_HEADER = re.compile(r"=== stacks of (\S+) (\S*) \(pid (\d+)\) at (\d+\.\d+) ===")
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_OTHER = re.compile(r"  \.\.\.|  <no Python frame>|Extension modules: .*|<Cannot show all threads .*")
_PACKAGES = ("kintsugi/", "site-packages/")
"""A file is quoted from the last of these on."""


class StackDump(msgspec.Struct, frozen=True):
    """Stacks of all threads of a process at one moment."""

    threads: tuple[tuple[str, ...], ...]
    """Frames of each thread, innermost first: "wait (kintsugi/runtime/waits.py:64)". The main thread is the last."""
    time: float = 0.0
    """Wall clock at which the dump was requested; 0.0 where there is no header."""
    reason: str = ""
    """Why the interpreter wrote it without a request: "Segmentation fault"."""

    @property
    def main_thread(self) -> str:
        """Innermost frames of the main thread, each followed by its caller."""
        frames = self.threads[-1]
        return " < ".join(frames[:QUOTED_FRAMES]) + (" < …" if len(frames) > QUOTED_FRAMES else "")


def header(*, process: str, incarnation: str, pid: int, time: float) -> str:
    """Line that announces a requested dump in the process's log."""
    return f"\n=== stacks of {process} {incarnation} (pid {pid}) at {time:.3f} ===\n"


def newest_dump(log: Path, *, since: float = 0.0) -> StackDump | None:
    """Read the newest dump of a log that was requested at or after `since` (wall clock); None when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    found = [dump for dump in dumps_in(text) if dump.time >= since]
    return found[-1] if found else None


def dumps_in(text: str) -> list[StackDump]:
    """Parse all dumps of a text, in order. A dump ends at the first line that does not belong to one."""
    dumps, _ = _split(text)
    return dumps


def without_dumps(text: str) -> str:
    """Remove dumps from a text. A fatal error keeps its name and is followed by the main thread's innermost frames."""
    _, rest = _split(text)
    return rest


def _split(text: str) -> tuple[list[StackDump], str]:
    dumps: list[StackDump] = []
    rest: list[str] = []
    threads: list[list[str]] = []
    time, reason = 0.0, ""

    def end_dump() -> None:
        nonlocal time, reason
        stacks = tuple(tuple(frames) for frames in threads if frames)
        if stacks:
            dumps.append(StackDump(stacks, time, reason))
            if reason:
                rest.append(f"in {dumps[-1].main_thread}")
        threads.clear()
        time, reason = 0.0, ""

    for line in text.split("\n"):
        if (found := _HEADER.fullmatch(line)) is not None:
            end_dump()
            time = float(found[4])
        elif _THREAD.fullmatch(line):
            threads.append([])
        elif (found := _FRAME.fullmatch(line)) is not None:
            if threads:
                threads[-1].append(_frame(found))
        elif line and not _OTHER.fullmatch(line):
            end_dump()
            reason = line.removeprefix(FATAL) if line.startswith(FATAL) else ""
            rest.append(line)
        elif not line and not (threads or time or reason):
            rest.append(line)
    end_dump()
    return dumps, "\n".join(rest)


def _frame(found: re.Match[str]) -> str:
    file = found["file"]
    start = max(file.rfind(package) for package in _PACKAGES)
    short = file[start:] if start >= 0 else file.rpartition("/")[2]
    return f"{found['function']} ({short.removeprefix('site-packages/')}:{found['line']})"
