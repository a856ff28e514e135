"""Changes of a run's files, by polling their sizes, inodes and times: which parts of the page are out of date."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kintsugi.run_folder.layout import RunFolder

FileState = tuple[int, int, int]


class ChangeDetector:
    """Compares the files of one run with their last state."""

    def __init__(self, run_dir: Path) -> None:
        self._run = RunFolder(run_dir)
        self._seen = self._look()

    def changes(self) -> set[str]:
        """Return the parts that have changed since the last call: `metrics`, `samples`, `incidents`, …"""
        before, self._seen = self._seen, self._look()
        return {what for what, state in self._seen.items() if before.get(what) != state}

    def _look(self) -> Mapping[str, object]:
        run = self._run
        journal = _state(run.journal_file)
        return {
            "metrics": _state(run.metrics_file),
            "samples": _state(run.samples_file),
            "state": (_state(run.launcher_file), _state(run.summary_file), _state(run.config_file)),
            "incidents": (journal, _state(run.diagnoses_file)),
            "learning": _state(run.learning_file),
            "health": (_state(run.processes_file), _state(run.launcher_file)),
            "timeline": _states(run.events_folder),
            "logs": (_states(run.events_folder, without=".spans."), _states(run.logs_folder)),
        }


def _state(path: Path) -> FileState | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _states(folder: Path, *, without: str = "\0") -> tuple[int, int, int]:
    """Return the number of files, their total size, and the latest change."""
    count = size = latest = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if without in entry.name:
                    continue
                status = entry.stat()
                count, size, latest = count + 1, size + status.st_size, max(latest, status.st_mtime_ns)
    except OSError:
        return 0, 0, 0
    return count, size, latest
