"""`<run>/data.json`: what the data were when the run began. Every process of the run reads them as recorded there, and
a run that is resumed goes on with the same rows or not at all: a position means nothing in other data."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.data.lines import Table
from kintsugi.errors import StorageError

RECORD_FILE = "data.json"


class Found(msgspec.Struct, frozen=True):
    """What the files of one source held."""

    field: str
    """Where the source is named: `data.source`, `data.sources[1].eval_source`."""
    source: str
    table: Table

    @property
    def num_rows(self) -> int:
        return self.table.num_rows


class DataRecord(msgspec.Struct, frozen=True):
    """All files of a run, with their digests, the number of their good rows, and the bad ones by name."""

    num_positions: int
    """Prompts in an epoch."""
    num_held_out: int
    found: tuple[Found, ...]

    @property
    def left_out(self) -> list[str]:
        """A sentence for each source some rows of which can not be used."""
        return [
            f"{each.source}: {each.table.num_bad} of {each.table.num_bad + each.num_rows} rows are left out; "
            f"the first is {each.table.bad[0]}"
            for each in self.found
            if each.table.num_bad
        ]


def read_record(run_dir: Path) -> DataRecord | None:
    """What was recorded; None in a folder where nothing was."""
    path = run_dir / RECORD_FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=DataRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError(f"{path}: expected a record of the run's data: {error}") from error


def write_record(record: DataRecord, run_dir: Path) -> None:
    path = run_dir / RECORD_FILE
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror}") from error
