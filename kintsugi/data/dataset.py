"""All rows of a run: those to train on, in their order and mixture, and those held out.

    source name ─► files as JSON lines ─► every line read once ─► rows by index ─► order, mixture ─► a row
     (config)       (files.py)             (jsonl_rows.py)                          (order.py)

Every process that needs rows, or their number, opens the data itself. The processes of a run agree because
`<run>/data.json` (`manifest.py`) records the files as they were when the run began.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import msgspec

from kintsugi.config.schema import Config, DataSection, MixedSource, SourceSection
from kintsugi.data.arithmetic import ArithmeticTasks, MultiplicationTasks
from kintsugi.data.cache import key_of
from kintsugi.data.columns import held_out_needs_of, needs_of
from kintsugi.data.files import HUB, files_of
from kintsugi.data.jsonl_rows import BadRow, JsonlRows, RowTable, look, look_again
from kintsugi.data.manifest import DataManifest, FoundData, read_record, write_record
from kintsugi.data.order import RowOrder, SourceMixing
from kintsugi.data.reasoning_gym import TASK, ReasoningGymTasks
from kintsugi.data.saved_rollouts import SavedRollouts
from kintsugi.data.streams import STREAM, UNKNOWN_LENGTH, RowStream, check_stream, is_stream, spool_path
from kintsugi.errors import DataError, UserError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.saved_rollouts import is_rollouts
from kintsugi.types import Row

ARITHMETIC, IN_WORDS, PRODUCTS = GENERATED = ("arithmetic", "arithmetic:words", "arithmetic:products")
_BAD_ROWS_SHOWN = 3


class Source(Protocol):
    """Rows with random access, numbered from 0."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...


class SourcePart(msgspec.Struct, frozen=True):
    """One source of a run: its training rows and its held-out rows."""

    section: MixedSource
    train: Source
    held_out: Source
    train_digest: str | None = None
    """Digest of the files' content and of the settings by which they are read; None for a source without files."""
    held_out_digest: str | None = None

    @property
    def name(self) -> str:
        """Label of its rows in a mixture: the last part of its path, or the task."""
        return self.section.source.rstrip("/").rpartition("/")[2].rpartition(":")[2]


class RowPlace(msgspec.Struct, frozen=True):
    """Position of a row: its source and its index there."""

    part: int
    index: int


class DataSet:
    """Rows of all sources: mixed for training, one source after the other for evaluation."""

    def __init__(self, parts: Sequence[SourcePart], *, shuffle: bool) -> None:
        self.parts = tuple(parts)
        self._shuffle = shuffle
        self._mixing = SourceMixing([part.section.weight for part in parts])
        self._orders: dict[tuple[str, int, int], RowOrder] = {}
        self._held_out_ends = list(accumulate(len(part.held_out) for part in parts))
        lengths = [0 if isinstance(part.train, RowStream) else len(part.train) for part in parts]
        self.num_positions = self._mixing.epoch_length(lengths) or UNKNOWN_LENGTH
        """Prompts in an epoch: every row occurs at least once; with one source, exactly once."""

    @property
    def num_held_out(self) -> int:
        return self._held_out_ends[-1]

    def place(self, *, stage: str, seed: int, epoch: int, position: int) -> RowPlace:
        """Return the row at a position of a stage: a pure function of the four arguments."""
        number, met = self._mixing.place(epoch * self.num_positions + position)
        part = self.parts[number]
        if isinstance(part.train, RowStream):
            return RowPlace(number, met)
        if (stage, seed, number) not in self._orders:
            # The order of the first source is the same as in a run with this source alone.
            name = stage if number == 0 else f"{stage}/{number}"
            order = RowOrder(num_rows=len(part.train), seed=seed, stage=name, shuffle=self._shuffle)
            self._orders[stage, seed, number] = order
        round, place = divmod(met, len(part.train))
        return RowPlace(number, self._orders[stage, seed, number].index(epoch=round, position=place))

    def row_at(self, place: RowPlace) -> Row:
        part = self.parts[place.part]
        return self._labelled(part, part.train.row(place.index))

    def training_row(self, *, stage: str, seed: int, epoch: int, position: int) -> Row:
        return self.row_at(self.place(stage=stage, seed=seed, epoch=epoch, position=position))

    def held_out_place(self, position: int) -> RowPlace:
        number = bisect_right(self._held_out_ends, position)
        return RowPlace(number, position - (self._held_out_ends[number - 1] if number else 0))

    def held_out_row(self, position: int) -> Row:
        place = self.held_out_place(position)
        part = self.parts[place.part]
        return self._labelled(part, part.held_out.row(place.index))

    def _labelled(self, part: SourcePart, row: Row) -> Row:
        if len(self.parts) == 1:
            return row
        return msgspec.structs.replace(row, columns={**row.columns, "source": part.name})


class _Slice:
    """Contiguous rows of a source."""

    def __init__(self, source: Source, start: int, stop: int) -> None:
        self._source = source
        self._start = start
        self._count = stop - start

    def __len__(self) -> int:
        return self._count

    def row(self, index: int) -> Row:
        assert 0 <= index < self._count, f"row {index} of {self._count}"
        return self._source.row(self._start + index)


def open_data(config: Config, *, run_dir: Path | None = None, resumed: Path | None = None) -> DataSet:
    """Open the data of a configuration: as recorded in its run folder, or by reading everything now.

    `resumed` is the folder of a run to be resumed, in which streams may have ended. `DataError` names the source, and
    its unusable rows if they are too many.
    """
    record = None if run_dir is None else read_record(run_dir)
    return _Opening(config, run_dir=run_dir, record=record, resumed=resumed).data_set()


def pin_data(config: Config, *, run_dir: Path, like: Path | None = None) -> DataManifest:
    """Record the data before the processes of a run start.

    A resumed run does not start if the data have changed since. The same holds for a run that has to see the same data
    as another one (`like`).
    """
    before = read_record(like or run_dir)
    record = _Opening(config, run_dir=run_dir, record=None, hub=before).described()
    if before is None:
        write_record(record, run_dir)
        return record
    for old, new in zip(before.found, record.found, strict=True):
        if old.table.digest != new.table.digest:
            raise UserError(
                f"`{old.field}`: expected '{old.source}' as it was when the run began ({old.num_rows} rows), because a "
                f"position in it means a row; its content has changed ({new.num_rows} rows now)"
            )
    # Written again: files may have new times or cache paths with the same content.
    write_record(record, run_dir)
    return record


def describe_data(config: Config) -> DataManifest:
    """Describe the data of a configuration as they are now."""
    return _Opening(config, run_dir=None, record=None).described()


class _Opening:
    """Opens every source once and collects the descriptions of its files."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path | None,
        record: DataManifest | None,
        hub: DataManifest | None = None,
        resumed: Path | None = None,
    ) -> None:
        self._data = config.data
        self._run_dir = run_dir
        self._resumed = resumed
        self._needs = {"train": needs_of(config), "eval": held_out_needs_of(config)}
        self._recorded = {} if record is None else {each.field: each.table for each in record.found}
        self._from_hub = {} if hub is None else {each.field: each.table for each in hub.found}
        self.found: list[FoundData] = []

    def described(self) -> DataManifest:
        data_set = self.data_set()
        return DataManifest(data_set.num_positions, data_set.num_held_out, tuple(self.found))

    def data_set(self) -> DataSet:
        parts = []
        for prefix, section in named_sources(self._data):
            try:
                parts.append(self._part(section, prefix=prefix))
            except DataError as error:
                named = str(error).startswith("`data.")
                raise error if named else DataError(f"`{prefix}source`: {error}") from error
        return DataSet(parts, shuffle=self._data.shuffle)

    def _part(self, section: MixedSource, *, prefix: str) -> SourcePart:
        source, count = section.source, section.num_eval
        if section.eval_source is not None:
            if is_stream(section.eval_source) or is_rollouts(section.eval_source):
                raise DataError(
                    f"`{prefix}eval_source`: expected rows that are all there and have still to be answered, not a "
                    f"stream or saved rollouts, got '{section.eval_source}'"
                )
            there = self._whole(section, section.eval_source, "eval", field=f"{prefix}eval_source")
            held_out: Source = _Slice(there, 0, min(count, len(there)))
            train = self._whole(section, source, "train", field=f"{prefix}source")
            train_digest = self._digest(f"{prefix}source", section, "train")
            return SourcePart(
                section, train, held_out, train_digest, self._digest(f"{prefix}eval_source", section, "eval")
            )
        if is_stream(source) or is_rollouts(source):
            beside = "a stream" if is_stream(source) else "saved rollouts"
            raise DataError(
                f"`{prefix}eval_source`: expected a source of held-out rows beside {beside}, got none"
            )
        if source in GENERATED or source.startswith(TASK):
            train, held_out = _generated(section, "train"), _generated(section, "eval")
            if len(train) == 0:
                raise _too_many(section, prefix=prefix, there=_num_generated(train, held_out))
            return SourcePart(section, train, held_out)
        whole = self._whole(section, source, "train", field=f"{prefix}source")
        if len(whole) <= count:
            raise _too_many(section, prefix=prefix, there=len(whole))
        cut = len(whole) - count
        digests = (self._digest(f"{prefix}source", section, "train", start=start) for start in (0, cut))
        return SourcePart(section, _Slice(whole, 0, cut), _Slice(whole, cut, len(whole)), *digests)

    def _digest(self, field: str, section: SourceSection, split: str, *, start: int = 0) -> str | None:
        """Digest of the files and settings that determine the rows from `start` on; None for rows without a file."""
        columns = (section.prompt_column, section.completion_column)
        found = [each.table.digest for each in self.found if each.field == field]
        return key_of(found, columns, self._needs[split], start) if found else None

    def _whole(self, section: SourceSection, source: str, split: str, *, field: str) -> Source:
        """Open all rows of a source: of files, of a stream, or of one split of a generated source."""
        if is_rollouts(source):
            return SavedRollouts(Path(source))
        if is_rollouts(within := str(RunFolder(source).rollouts_folder)):
            raise DataError(
                f"`{field}`: expected the folder of the rollouts, '{within}', got that of their run"
            )
        if is_stream(source):
            if self._run_dir is None:  # The run has not begun: nothing may be read from the stream yet.
                check_stream(source, run_dir=self._resumed)
            path = spool_path(self._run_dir or Path(os.devnull), source)
            return RowStream(
                path,
                section,
                needs=self._needs[split],
                max_bad_share=self._data.max_bad_share,
                spooled=source != f"{STREAM}{path}",
            )
        if source in GENERATED or source.startswith(TASK):
            return _generated(msgspec.structs.replace(section, source=source), split)
        return self._lines(section, source, split, field=field)

    def _lines(self, section: SourceSection, source: str, split: str, *, field: str) -> Source:
        needs, cache_dir = self._needs[split], self._data.cache_dir
        if field in self._recorded:
            table, offsets = look_again(self._recorded[field], section, needs=needs, cache_dir=cache_dir)
        else:
            known = self._from_hub.get(field) if source.startswith(HUB) else None
            files = (
                files_of(source, cache_dir=cache_dir)
                if known is None
                else [each.file for each in known.files]
            )
            table, offsets = look(files, section, needs=needs, cache_dir=cache_dir)
            _check_share(table, source=source, field=field, most=self._data.max_bad_share)
        self.found.append(FoundData(field, source, table))
        return JsonlRows(table, offsets, section, needs=needs)


def _num_generated(train: Source, held_out: Source) -> int:
    return train.num_problems if isinstance(train, ReasoningGymTasks) else len(train) + len(held_out)


def _generated(section: SourceSection, split: str) -> Source:
    if section.source.startswith(TASK):
        return ReasoningGymTasks(section, split=split)
    in_words, count = section.source == IN_WORDS, section.num_eval
    if section.source == PRODUCTS:
        return MultiplicationTasks(num_digits=section.max_digits, split=split, num_eval=count)
    return ArithmeticTasks(num_digits=section.max_digits, split=split, num_eval=count, in_words=in_words)


def _too_many(section: SourceSection, *, prefix: str, there: int) -> DataError:
    return DataError(
        f"`{prefix}num_eval`: expected fewer than the {there} rows of '{section.source}', so that some are left to "
        f"train on, got {section.num_eval}"
    )


def named_sources(data: DataSection) -> list[tuple[str, MixedSource]]:
    """Sources with the prefix of their recipe fields: `data.`, or `data.sources[0].` and so on."""
    if data.sources:
        return [(f"data.sources[{number}].", each) for number, each in enumerate(data.sources)]
    fields = {name: getattr(data, name) for name in SourceSection.__struct_fields__}
    return [("data.", MixedSource(**fields))]


def _check_share(table: RowTable, *, source: str, field: str, most: float) -> None:
    total = table.num_rows + table.num_bad
    if total == 0:
        raise DataError(f"`{field}`: expected rows in '{source}', found none")
    if table.num_bad > most * total:
        first_of_kind: dict[str, BadRow] = {}
        for each in table.bad:
            first_of_kind.setdefault(each.reason, each)
        shown = "; ".join(map(str, list(first_of_kind.values())[:_BAD_ROWS_SHOWN]))
        raise DataError(
            f"`{field}`: {table.num_bad} of {total} rows of '{source}' can not be used, more than "
            f"`data.max_bad_share`={most} allows: {shown}"
        )
