"""Mirror of a host's telemetry: what its processes append to events, readings and logs is appended to the run folder.

    supervisor ── MirrorFiles (whole lines, a few MiB at a time) ──► host manager ─► events/ figures/ logs/

A message has a number, is sent again until it is answered, and taken once, so lines arrive once and in order. A
successor of the host manager may take the last message of each host a second time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kintsugi.errors import RefusedError
from kintsugi.protocol.hosts import MirrorFiles
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.runtime.disk import write_atomically
from kintsugi.telemetry.disk_budget import (
    DISK_BUDGET,
    EVENTS_SIZE,
    LARGEST_LOG,
    READINGS_SIZE,
    bound_log,
)
from kintsugi.telemetry.jsonl_log import LineFile, LineTail
from kintsugi.types import Peer

MOST_BYTES = 1 << 20
"""Bytes of one message, and of one file in it: it may have twice as many."""
_LINES = ".jsonl"
DECODE_STEP = str(RELATIVE.decode_step_file)
_ROTATED = re.compile(r"\.\d+\.(jsonl|log)$")
_NAME = re.compile(
    rf"({RELATIVE.events_folder}|{RELATIVE.readings_folder}|{RELATIVE.logs_folder})/[\w.-]+\.(jsonl|log)"
)


class FileReader:
    """Reads what was appended to the files of a scratch folder. A message is the same until it is taken."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._tails: dict[Path, LineTail] = {}
        self._offsets: dict[Path, int] = {}
        """Log → bytes that were read."""
        self._parts: dict[str, bytes] = {}
        self._has_decode_step = False
        self.number = 0
        """Number of the message."""

    def next_parts(self) -> dict[str, bytes]:
        """Return path → bytes to append, whole lines where the file has lines; to be followed by `taken`."""
        if not self._parts:
            self._read()
            self.number += bool(self._parts)
        return dict(self._parts)

    def taken(self) -> None:
        """The last parts have arrived."""
        self._parts = {}

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _read(self) -> None:
        left = MOST_BYTES
        for path in self._files():
            try:
                content = self._lines(path) if path.suffix == _LINES else self._logged(path, left)
            except OSError:
                continue
            if content:
                self._parts[str(path.relative_to(self._scratch))] = content
                left -= len(content)
            if left <= 0:
                break
        path = RunFolder(self._scratch).decode_step_file
        if not self._has_decode_step and path.exists():
            # The decision of this host's servers whether they compile their steps, once.
            self._parts[DECODE_STEP] = path.read_bytes()
            self._has_decode_step = True

    def _lines(self, path: Path) -> bytes:
        """Read lines; those of a file that was put aside meanwhile come first."""
        if path not in self._tails:
            self._tails[path] = LineTail(path, most_read=MOST_BYTES)
        return b"".join(line + b"\n" for line in self._tails[path].lines())

    def _logged(self, path: Path, most: int) -> bytes:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < offset:
                offset = 0  # A log that was put aside and emptied.
            file.seek(offset)
            content = file.read(most)
        self._offsets[path] = offset + len(content)
        return content

    def _files(self) -> Iterator[Path]:
        run = RunFolder(self._scratch)
        for folder in (run.events_folder, run.logs_folder, run.readings_folder):
            if folder.is_dir():
                yield from sorted(
                    path
                    for path in folder.iterdir()
                    if path.suffix in (_LINES, ".log") and _ROTATED.search(path.name) is None
                )


@dataclass(slots=True)
class _Progress:
    """How much of the last message of a host was appended."""

    sender: Peer
    number: int
    num_files: int = 0


class FileWriter:
    """Appends parts of hosts' files to those of the run folder, within the run's budget of disk space."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[str, LineFile] = {}
        self._progress: dict[str, _Progress] = {}
        """Supervisor → its last message."""
        self.conflict = ""
        """Why two hosts can not take part in one deterministic run; empty if they can."""

    def append(self, message: MirrorFiles, *, sender: Peer) -> None:
        """Append the bytes of a message. One that is sent again, because a disk was full or its answer was lost, goes
        on where it ended. RefusedError for a path that no process of a host writes to, and for sizes that are not those
        of the bytes."""
        sizes, content = message.sizes, message.content
        if sum(sizes.values()) != len(content) or any(size < 0 for size in sizes.values()):
            raise RefusedError(f"expected {sum(sizes.values())} bytes, got {len(content)}")
        if strange := [name for name in sizes if name != DECODE_STEP and _NAME.fullmatch(name) is None]:
            raise RefusedError(f"expected files of events, readings and logs, got {strange[0]!r}")
        progress = self._progress.get(sender.process)
        if progress is None or (progress.sender, progress.number) != (sender, message.number):
            progress = self._progress[sender.process] = _Progress(sender, message.number)
        offset = 0
        for index, (name, size) in enumerate(sizes.items()):
            if index >= progress.num_files:
                self._append(name, content[offset : offset + size])
                progress.num_files = index + 1
            offset += size

    def _append(self, name: str, content: bytes) -> None:
        path = self._run_dir / name
        if name == DECODE_STEP:
            if not path.exists():
                write_atomically(path, content, durable=False)
            elif (agreed := path.read_bytes()) != content:
                self.conflict = (
                    f"expected decode steps as on the first host of this deterministic run ({agreed.decode()!r}), "
                    f"got {content.decode(errors='replace')!r}"
                )
            return
        if name.endswith(_LINES):
            self._lines(name, path).append(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)
        bound_log(path)

    def _lines(self, name: str, path: Path) -> LineFile:
        if name not in self._files:
            total = EVENTS_SIZE if name.startswith(str(RELATIVE.events_folder)) else READINGS_SIZE
            size = DISK_BUDGET.file_size(total, num_files=4, largest=LARGEST_LOG)
            self._files[name] = LineFile(path, largest_size=size, reserved_size=0)
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
