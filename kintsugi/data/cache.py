"""Files derived from data, keyed by what they were derived from: found again, checked, rebuilt if damaged.

    file = magic · length of the header · header (JSON) · body · xxh3-128 of everything before

A key is a digest of content and settings, so that what is found under it can not be out of date; the checksum at the
end tells a damaged or half-written file, which is as good as none.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from kintsugi.errors import StorageError

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
    """A name for what follows from these values, and from nothing else."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


def cache_path(cache_dir: str, kind: str, key: str) -> Path:
    return Path(cache_dir).expanduser() / kind / key


def new_file(path: Path) -> Path:
    """Where to write what shall appear under `path` by a rename; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"`data.cache_dir`: expected a folder that can be written, {path.parent}: {error.strerror}"
        ) from error
    return path.with_name(f"{path.name}.{os.getpid()}.new")


def write(path: Path, *, header: bytes, body: Sequence[bytes | memoryview]) -> None:
    """Write a cache file; it is there whole or not at all."""
    temporary = new_file(path)
    digest = xxhash.xxh3_128()
    try:
        with temporary.open("wb") as file:
            for part in (_MAGIC, len(header).to_bytes(8, "little"), header, *body):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"`data.cache_dir`: could not write {path}: {error.strerror}") from error


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
