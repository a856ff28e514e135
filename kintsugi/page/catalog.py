"""Runs of a folder, by the names in URLs. Readers are kept for the runs that were looked at last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from kintsugi.errors import UserError
from kintsugi.page.run_reader import RunReader
from kintsugi.page.schema import RunList, RunRow
from kintsugi.run_folder.layout import RunFolder

MOST_READERS = 64
"""Runs whose metrics stay in memory."""
MOST_INDEXED = 3
"""Runs whose samples stay indexed."""
MOST_RUNS = 1000


class RunCatalog:
    """The runs of a folder, or a single run. Safe for several threads."""

    def __init__(self, folder: Path, *, single: str | None = None) -> None:
        self.folder = folder
        self.single = single
        """Name of the only run that is shown."""
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, RunReader] = OrderedDict()

    @classmethod
    def of(cls, name: str) -> RunCatalog:
        """Return the runs of a folder, the run of a folder, or a run by its name in `runs/`. UserError for anything
        else."""
        given = Path(name)
        for candidate in (given, Path("runs") / name):
            if RunFolder(candidate).config_file.is_file():
                resolved = candidate if candidate.name not in ("", ".", "..") else candidate.resolve()
                return cls(resolved.parent, single=resolved.name)
        if not given.is_dir():
            found = "a file" if given.exists() else "nothing"
            raise UserError(
                f"{name}: expected a run folder, a folder of runs, or a name in runs/, found {found}"
            )
        is_empty = not any(given.iterdir())
        if not is_empty and not _run_names(given):
            raise UserError(
                f"{name}: expected a run folder or a folder of runs, found a folder without config.yaml, "
                "in which no folder has one either"
            )
        return cls(given)

    def names(self) -> list[str]:
        """Return the names of the runs, the newest first."""
        return [self.single] if self.single is not None else _run_names(self.folder)

    def reader(self, name: str) -> RunReader | None:
        """Return the reader of a run; None if there is no such run."""
        if not _is_name(name) or (self.single is not None and name != self.single):
            return None
        with self._lock:
            known = self._readers.get(name)
            if known is not None:
                self._readers.move_to_end(name)
                return known
            if not RunFolder(self.folder / name).config_file.is_file():
                return None
            reader = self._readers[name] = RunReader(self.folder / name)
            while len(self._readers) > MOST_READERS:
                _, oldest = self._readers.popitem(last=False)
                oldest.close()
            return reader

    def list_runs(self) -> RunList:
        rows: list[RunRow] = []
        names = self.names()
        for name in names[:MOST_RUNS]:
            reader = self.reader(name)
            if reader is not None:
                rows.append(reader.row())
        problems = []
        if not names:
            problems.append(f"there are no runs in {self.folder} yet")
        if len(names) > MOST_RUNS:
            problems.append(f"only the newest {MOST_RUNS:,} of {len(names):,} runs are shown")
        return RunList(runs=tuple(rows), folder=str(self.folder), problems=tuple(problems))

    def forget_samples(self, *, but: RunReader) -> None:
        """Drop the sample indexes of all but the runs that were looked at last."""
        with self._lock:
            indexed = [each for each in reversed(self._readers.values()) if len(each.sample_index)]
            for reader in indexed[MOST_INDEXED:]:
                if reader is not but:
                    reader.forget_samples()

    def close(self) -> None:
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()


def _is_name(name: str) -> bool:
    """Return whether a name is that of a folder, and no path to elsewhere."""
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


def _run_names(folder: Path) -> list[str]:
    try:
        configs = folder.glob(str(RunFolder("*").config_file))
        found = [(path.stat().st_mtime, path.parent.name) for path in configs]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]
