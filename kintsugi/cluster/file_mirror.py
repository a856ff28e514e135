"""Mirror of a host's telemetry: what its processes append to events, readings and logs is appended to the run folder.

    supervisor ── MirrorFiles (whole lines, a few MiB at a time) ──► host manager ─► events/ figures/ logs/

A message is sent again until it is answered and taken once, so lines arrive once and in order. A successor of the host
manager may take the last message of each host a second time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kintsugi.errors import RefusedError
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.telemetry.disk_budget import (
    DISK_BUDGET,
    EVENTS_SIZE,
    LARGEST_LOG,
    READINGS_SIZE,
    bound_log,
)
from kintsugi.telemetry.jsonl_log import LineFile

MOST_BYTES = 1 << 20
"""Bytes of one message."""
_LINES = ".jsonl"
DECODE_STEP = str(RELATIVE.decode_step_file)
_ROTATED = re.compile(r"\.\d+\.(jsonl|log)$")
_NAME = re.compile(
    rf"^({RELATIVE.events_folder}|{RELATIVE.readings_folder}|{RELATIVE.logs_folder})/[\w.-]+\.(jsonl|log)$"
)


class FileReader:
    """Reads what was appended to the files of a scratch folder since the last message that was taken."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._taken: dict[int, int] = {}
        """Inode → bytes that were taken."""
        self._sent: dict[int, int] = {}

    def next_parts(self) -> dict[str, bytes]:
        """Return path → bytes to append, whole lines where the file has lines; to be followed by `taken`."""
        parts: dict[str, bytes] = {}
        self._sent = {}
        left = MOST_BYTES
        for path in self._files():
            try:
                with path.open("rb") as file:
                    inode = path.stat().st_ino
                    offset = self._taken.get(inode, 0)
                    file.seek(0, 2)
                    if file.tell() < offset:
                        offset = 0  # A log that was put aside and emptied.
                    file.seek(offset)
                    content = file.read(left)
            except OSError:
                continue
            if path.suffix == _LINES:
                content = content[: content.rfind(b"\n") + 1]
            if content:
                parts[str(path.relative_to(self._scratch))] = content
                self._sent[inode] = offset + len(content)
                left -= len(content)
            if left <= 0:
                break
        self._add_decode_step(parts)
        return parts

    def _add_decode_step(self, parts: dict[str, bytes]) -> None:
        """Add the decision of this host's servers whether they compile their steps, once."""
        path = RunFolder(self._scratch).decode_step_file
        if path.exists() and (inode := path.stat().st_ino) not in self._taken:
            parts[DECODE_STEP] = path.read_bytes()
            self._sent[inode] = len(parts[DECODE_STEP])

    def taken(self) -> None:
        """The last parts have arrived."""
        self._taken |= self._sent

    def _files(self) -> Iterator[Path]:
        run = RunFolder(self._scratch)
        for folder in (run.events_folder, run.logs_folder, run.readings_folder):
            if folder.is_dir():
                yield from sorted(
                    path
                    for path in folder.iterdir()
                    if path.suffix in (_LINES, ".log") and _ROTATED.search(path.name) is None
                )


class FileWriter:
    """Appends parts of hosts' files to those of the run folder, within the run's budget of disk space."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files: dict[str, LineFile] = {}
        self.conflict = ""
        """Why two hosts can not take part in one deterministic run; empty if they can."""

    def append(self, sizes: dict[str, int], content: bytes) -> None:
        """Append the bytes of a message. RefusedError for a path that no process of a host writes to, and for sizes
        that are not those of the bytes."""
        if sum(sizes.values()) != len(content) or any(size < 0 for size in sizes.values()):
            raise RefusedError(f"expected {sum(sizes.values())} bytes, got {len(content)}")
        if strange := [name for name in sizes if name != DECODE_STEP and _NAME.match(name) is None]:
            raise RefusedError(f"expected files of events, readings and logs, got {strange[0]!r}")
        offset = 0
        for name, size in sizes.items():
            self._append(name, content[offset : offset + size])
            offset += size

    def _append(self, name: str, content: bytes) -> None:
        path = self._run_dir / name
        if name == DECODE_STEP:
            if not path.exists():
                path.write_bytes(content)
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
