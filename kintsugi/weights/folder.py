"""A Hugging Face folder as a version of the weights: described and read without torch.

What is described is what is stored, in its stored type; whoever loads it converts. The folder must not change while
somebody may still read it: a server that starts later checks every byte against the digests of then.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from kintsugi.errors import IntegrityError, ModelError, StorageError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import StoredTensor, check_index, read_header, stored_names, weight_files
from kintsugi.types import Piece, PieceKind, WeightManifest
from kintsugi.weights.manifest import ALIGNMENT

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def folder_manifest(folder: Path, *, config: ModelConfig, version: int) -> WeightManifest:
    """Describe the weights in a folder, every byte of them digested; ModelError where they do not fit `config`."""
    pieces = []
    whole = xxhash.xxh3_64()
    offset = end = 0
    with _opened(folder) as stored:
        shapes = {name: tensor.shape for name, (tensor, _) in stored.items()}
        names = stored_names(shapes, config=config, head="refused", where=str(folder))
        for name in sorted(names):
            tensor, data = stored[names[name]]
            whole.update(data)
            piece = Piece(
                name=name,
                dtype=_DTYPES[tensor.dtype],
                shape=tensor.shape,
                slice=tuple((0, extent) for extent in tensor.shape),
                mesh={},
                kind=PieceKind.FULL,
                offset=offset,
                size=len(data),
                digest=xxhash.xxh3_64_hexdigest(data),
            )
            pieces.append(piece)
            end = offset + len(data)
            offset += -(-len(data) // ALIGNMENT) * ALIGNMENT
    return WeightManifest(version=version, step=0, pieces=tuple(pieces), size=end, digest=whole.hexdigest())


def read_folder(manifest: WeightManifest, folder: Path) -> memoryview:
    """The weights that `manifest` describes in memory of our own, not verified yet; IntegrityError if they are gone."""
    buffer = memoryview(mmap.mmap(-1, max(1, manifest.size)))
    try:
        with _opened(folder) as stored:
            for piece in manifest.pieces:
                tensor, data = stored.get(piece.name, (None, memoryview(b"")))
                if tensor is None or len(data) != piece.size:
                    raise IntegrityError(
                        f"{piece.name} of version {manifest.version} from {folder}: expected {piece.size} bytes, "
                        f"got {len(data)}"
                    )
                buffer[piece.offset : piece.offset + piece.size] = data
    except ModelError as error:
        raise IntegrityError(f"{folder} has changed since it was described: {error}") from error
    return buffer


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
