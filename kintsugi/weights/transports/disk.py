"""A Hugging Face folder as a version of the weights: described and read without torch.

The manifest describes the stored type; the reader converts. The folder must not change while it may be read: a server
that starts later checks every byte against the original digests.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kintsugi.errors import IntegrityError, ModelError, StorageError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import (
    WEIGHTS_FILE,
    StoredTensor,
    check_index,
    read_header,
    stored_names,
    weight_files,
)
from kintsugi.runtime.digests import piece_digest
from kintsugi.runtime.disk import storage_errors
from kintsugi.types import Piece, PieceKind, WeightManifest
from kintsugi.weights.manifest import aligned, check_digest, check_whole, copy_and_digest, manifest_of

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORED = {name: stored for stored, name in _DTYPES.items()}


def folder_manifest(folder: Path, *, config: ModelConfig, version: int) -> WeightManifest:
    """Describe the weights in a folder, with a digest of every byte; ModelError if they do not fit `config`."""
    pieces = []
    offset = 0
    with _opened(folder) as stored:
        shapes = {name: tensor.shape for name, (tensor, _) in stored.items()}
        names = stored_names(shapes, config=config, head="refused", where=str(folder))
        for name in sorted(names):
            tensor, data = stored[names[name]]
            piece = Piece(
                name=name,
                dtype=_DTYPES[tensor.dtype],
                shape=tensor.shape,
                slice=tuple((0, extent) for extent in tensor.shape),
                mesh={},
                kind=PieceKind.FULL,
                offset=offset,
                size=len(data),
                digest=piece_digest(data),
            )
            pieces.append(piece)
            offset += aligned(len(data))
    return manifest_of(pieces, version=version, step=0)


def read_folder(manifest: WeightManifest, folder: Path, *, into: memoryview) -> None:
    """Copy the weights that `manifest` describes and verify the copy; IntegrityError if they are missing or
    different."""
    try:
        with _opened(folder) as stored:
            for piece in manifest.pieces:
                tensor, data = stored.get(piece.name, (None, memoryview(b"")))
                if tensor is None or len(data) != piece.size:
                    raise IntegrityError(
                        f"{piece.name} of version {manifest.version} from {folder}: expected {piece.size} bytes, "
                        f"got {len(data)}"
                    )
                found = copy_and_digest(data, into[piece.offset : piece.offset + piece.size])
                check_digest(manifest, piece, found=found, source=f"folder {folder}")
    except ModelError as error:
        raise IntegrityError(f"{folder} has changed since it was described: {error}") from error
    check_whole(manifest, source=f"folder {folder}")


def write_folder(manifest: WeightManifest, buffer: memoryview, folder: Path) -> Path:
    """Write a version as a folder that `read_folder` reads; it appears as a whole, and replaces an existing one."""
    header, end = {}, 0
    for piece in manifest.pieces:
        stored = _STORED[piece.dtype]
        header[piece.name] = StoredTensor(stored, piece.shape, (end, end + piece.size))
        end += piece.size
    content = msgspec.json.encode(header)
    content += b" " * (-len(content) % 8)
    unfinished = folder.with_name(f".{folder.name}")
    with storage_errors(f"could not write {folder}"):
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            with (unfinished / WEIGHTS_FILE).open("wb") as file:
                file.write(len(content).to_bytes(8, "little") + content)
                for piece in manifest.pieces:
                    file.write(buffer[piece.offset : piece.offset + piece.size])
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        except OSError:
            # A partial version is useless, and takes disk space.
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return folder


def remove_folders(parent: Path, *, but: Sequence[str]) -> None:
    """Remove old versions; a server that is still reading one gets an error and uses another source."""
    for folder in parent.iterdir():
        if folder.name not in but:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, tuple[StoredTensor, memoryview]]]:
    """Every tensor of the folder by its stored name, as its bytes in the mapped files."""
    stored: dict[str, tuple[StoredTensor, memoryview]] = {}
    maps: list[mmap.mmap] = []
    try:
        for path, promised in weight_files(folder):
            tensors = read_header(path)
            check_index(path, present=tensors.keys(), promised=promised)
            mapped = _mapped(path)
            maps.append(mapped)
            data_start = len(mapped) - max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
            for name, tensor in tensors.items():
                start, stop = tensor.data_offsets
                stored[name] = tensor, memoryview(mapped)[data_start + start : data_start + stop]
        yield stored
    finally:
        for _, view in stored.values():
            view.release()
        for mapped in maps:
            mapped.close()


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StorageError(f"{path} can not be read: {error.strerror or error}") from error
