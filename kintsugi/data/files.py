"""Files of a source, each as JSON lines; other formats are converted once into the cache.

With one format there is one index and one way to find and name a row. Row n of a Parquet file or of a saved data set is
line n of the converted file. Values that JSON does not have are converted: bytes to base 64, times to ISO text, NaN to
null.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.data.cache import cache_path, content_digest, key_of, make_folder_of
from kintsugi.errors import DataError, StorageError
from kintsugi.runtime.disk import write_atomically

_FORMAT = 1
"""Version of the conversion; part of the cache key, so that files of an older version are not used."""
_LARGEST_ARRAY = 2 << 30
_BATCH = 1024
_SUFFIXES = (".jsonl", ".json", ".parquet")
HUB = "hf:"

Records = Iterator[bytes]


class LinesFile(msgspec.Struct, frozen=True):
    """`LinesFile("train.parquet", "/cache/lines/3f….jsonl", "row")`."""

    shown: str
    """File name in messages: the user's file."""
    path: str
    """Path of the JSON lines."""
    unit: str = "line"


def files_of(source: str, *, cache_dir: str) -> list[LinesFile]:
    """Return the files of a source, sorted by name; `DataError` if there are none, or one is not readable."""
    if source.startswith(HUB):
        return [_from_hub(source, cache_dir=cache_dir)]
    saved = _saved_data_set(source)
    if saved is not None:
        folder, split = saved
        return [_from_folder(folder, split=split, shown=source, cache_dir=cache_dir)]
    return [_as_lines(path, cache_dir=cache_dir) for path in _paths(source)]


def _paths(source: str) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES and each.is_file())
        if not found:
            raise DataError(f"expected {', '.join(_SUFFIXES)} files in the folder '{source}', found none")
        return found
    if any(sign in source for sign in "*?[") and not path.exists():
        found = sorted(path for each in glob.glob(source, recursive=True) if (path := Path(each)).is_file())
        if not found:
            raise DataError(f"expected files that match '{source}', found none")
        return found
    if not path.exists():
        raise DataError(
            f"expected 'arithmetic', 'reasoning_gym:TASK', 'hf:NAME:CONFIG:SPLIT', 'stream:PATH', or a file, folder "
            f"or pattern, found nothing at '{source}'"
        )
    if not path.is_file():  # Opening a pipe would block until it has a writer.
        raise DataError(
            f"expected a file, '{source}' is none; rows that come out of a pipe are named 'stream:{source}'"
        )
    return [path]


def _as_lines(path: Path, *, cache_dir: str) -> LinesFile:
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise DataError(f"expected a readable file, {path}: {error.strerror}") from error
    if start.startswith(b"PAR1") or path.suffix == ".parquet":
        return _converted(path, _parquet_records, cache_dir=cache_dir)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise DataError(
            f"{path}: expected UTF-8 text, got UTF-16 or binary data; `iconv -f UTF-16 -t UTF-8` converts the former"
        )
    if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return _converted(path, _array_records, cache_dir=cache_dir)
    return LinesFile(str(path), str(path))


def _converted(path: Path, read: Callable[[Path], Records], *, cache_dir: str) -> LinesFile:
    key = key_of(_FORMAT, read.__name__, content_digest([path]))
    return _kept(key, lambda: read(path), shown=str(path), cache_dir=cache_dir)


def _kept(key: str, read: Callable[[], Records], *, shown: str, cache_dir: str) -> LinesFile:
    """Return the converted records, from the cache if it has an intact copy."""
    lines = cache_path(cache_dir, "lines", f"{key}.jsonl")
    seal = lines.with_suffix(".digest")
    if not (lines.exists() and seal.exists() and seal.read_text() == content_digest([lines])):
        make_folder_of(lines)
        try:
            write_atomically(lines, (part for record in read() for part in (record, b"\n")), durable=False)
            write_atomically(seal, content_digest([lines]).encode(), durable=False)
        except OSError as error:
            raise StorageError(f"`data.cache_dir`: could not write {lines}: {error.strerror}") from error
    return LinesFile(shown, str(lines), "row")


def _array_records(path: Path) -> Records:
    """Elements of a JSON array, unparsed. A line break in JSON is white space, never part of a string."""
    if path.stat().st_size > _LARGEST_ARRAY:
        raise DataError(
            f"{path}: expected at most 2 GiB in one JSON array; write one object per line instead"
        )
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        elements = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: expected one JSON array, or one object per line: {error}") from error
    for element in elements:
        yield bytes(element).replace(b"\r", b" ").replace(b"\n", b" ")


def _parquet_records(path: Path) -> Records:
    parquet, errors = _pyarrow()
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                yield from _encoded(batch.to_pylist())
                number += batch.num_rows
    except errors as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: expected a whole Parquet file, after row {number}: {reason}") from error


def _saved_data_set(source: str) -> tuple[Path, str | None] | None:
    """Folder and split, if the source is a data set saved by the library `datasets`."""
    folder, _, split = source.rpartition(":")
    for path, name in ((Path(source), None), (Path(folder), split)):
        if path.is_dir() and any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            return path, name
    return None


def _from_folder(folder: Path, *, split: str | None, shown: str, cache_dir: str) -> LinesFile:
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    key = key_of(
        _FORMAT, "folder", split, [str(each.relative_to(folder)) for each in files], content_digest(files)
    )

    def read() -> Records:
        datasets = _datasets(shown)
        try:
            yield from _rows_of(datasets.load_from_disk(str(folder)), split=split, shown=shown)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{shown}: expected a whole saved data set: {reason[:200]}") from error

    return _kept(key, read, shown=shown, cache_dir=cache_dir)


def _from_hub(source: str, *, cache_dir: str) -> LinesFile:
    """Load a data set of the hub by name. It may change there, so a run records the converted file and keeps it."""
    name, _, rest = source.removeprefix(HUB).partition(":")
    config, _, split = rest.rpartition(":")
    datasets = _datasets(source)
    try:
        data_set = datasets.load_dataset(name, config or None, split=split or None)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"expected the data set '{source}' from the hub or its local cache: {reason[:200]}; without a network, "
            "give the folder of a saved one"
        ) from error
    key = key_of(_FORMAT, source, getattr(data_set, "_fingerprint", None) or str(data_set))
    return _kept(key, lambda: _rows_of(data_set, split=None, shown=source), shown=source, cache_dir=cache_dir)


def _rows_of(data_set: Any, *, split: str | None, shown: str) -> Records:
    if hasattr(data_set, "keys"):
        splits = ", ".join(data_set.keys())
        if split not in data_set:
            raise DataError(f"{shown}: expected one of its splits ({splits}), as in `{shown}:train`")
        data_set = data_set[split]
    return (record for row in data_set.iter(batch_size=_BATCH) for record in _encoded(_transposed(row)))


def _transposed(columns: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _encoded(rows: Iterable[dict[str, Any]]) -> Records:
    return (msgspec.json.encode(row, enc_hook=str) for row in rows)


def _pyarrow() -> tuple[Any, tuple[type[Exception], ...]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("Parquet files need the extra `data`: pip install 'kintsugi[data]'") from error
    return parquet, (pa.ArrowException, OSError)


def _datasets(shown: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{shown} needs the extra `data`: pip install 'kintsugi[data]'") from error
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(
        logging.ERROR
    )  # It logs every attempt; the last error is enough.
    return datasets
