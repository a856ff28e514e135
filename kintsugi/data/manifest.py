"""`<run>/data.json`: the record of the data at the beginning of a run. Every process of the run reads the data as
recorded there. A resumed run continues with the same rows or not at all: a position means nothing in other data."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.data.jsonl_rows import RowTable
from kintsugi.errors import StorageError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically


class FoundData(msgspec.Struct, frozen=True):
    """Index of the files of one source."""

    field: str
    """Recipe field of the source: `data.source`, `data.sources[1].eval_source`."""
    source: str
    table: RowTable

    @property
    def num_rows(self) -> int:
        return self.table.num_rows


class DataManifest(msgspec.Struct, frozen=True):
    """All files of a run, with their digests, the number of good rows, and the bad rows."""

    num_positions: int
    """Number of prompts in an epoch."""
    num_held_out: int
    found: tuple[FoundData, ...]

    @property
    def left_out(self) -> list[str]:
        """A sentence for each source with rows that cannot be used."""
        return [
            f"{each.source}: {each.table.num_bad} of {each.table.num_bad + each.num_rows} rows are left out; "
            f"the first is {each.table.bad[0]}"
            for each in self.found
            if each.table.num_bad
        ]


def read_record(run_dir: Path) -> DataManifest | None:
    """Read the record of a run folder; None if it has none."""
    path = RunFolder(run_dir).data_file
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=DataManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError(f"{path}: expected a record of the run's data: {error}") from error


def write_record(record: DataManifest, run_dir: Path) -> None:
    path = RunFolder(run_dir).data_file
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    try:
        write_atomically(path, text + b"\n", durable=False, mode=0o600)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}") from error
