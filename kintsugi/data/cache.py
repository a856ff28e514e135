"""Cache of files derived from data: keyed by their inputs, verified when read, rebuilt if damaged.

    file = magic · length of the header · header (JSON) · body · xxh3-128 of everything before

A key is a digest of content and settings, so that a file found under it is never out of date. The checksum at the end
detects a damaged or half-written file, which counts as missing.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from kintsugi.errors import StorageError
from kintsugi.runtime.disk import write_atomically

_MAGIC = b"kintsugi"
_CHUNK = 1 << 20
_DIGEST_SIZE = 16


def content_digest(paths: Sequence[Path]) -> str:
    """xxh3-128 over the bytes of files, in this order; reads all of them."""
    digest = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def key_of(*parts: object) -> str:
    """Key of a result that depends on these values only."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


def cache_path(cache_dir: str, kind: str, key: str) -> Path:
    return Path(cache_dir).expanduser() / kind / key


def make_folder_of(path: Path) -> None:
    """Create the folder of a cache file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"`data.cache_dir`: expected a folder that can be written, {path.parent}: {error.strerror}"
        ) from error


def write(path: Path, *, header: bytes, body: Sequence[bytes | memoryview]) -> None:
    """Write a cache file atomically."""
    make_folder_of(path)
    try:
        write_atomically(path, _with_digest(header, body), durable=False)
    except OSError as error:
        raise StorageError(f"`data.cache_dir`: could not write {path}: {error.strerror}") from error


def _with_digest(header: bytes, body: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Parts of a cache file, in order; the last one is the digest of the others."""
    digest = xxhash.xxh3_128()
    for part in (_MAGIC, len(header).to_bytes(8, "little"), header, *body):
        digest.update(part)
        yield part
    yield digest.digest()


def read(path: Path) -> tuple[bytes, memoryview] | None:
    """Header and body of a cache file, the body mapped, not loaded; None if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < len(_MAGIC) + 8 + _DIGEST_SIZE:
                return None
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError:
        return None
    content, checksum = whole[:-_DIGEST_SIZE], whole[-_DIGEST_SIZE:]
    if content[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_128_digest(content) != checksum:
        return None
    start = len(_MAGIC) + 8
    end = start + int.from_bytes(content[len(_MAGIC) : start], "little")
    return bytes(content[start:end]), content[end:]
