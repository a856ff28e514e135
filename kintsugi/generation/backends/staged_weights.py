"""Weights for the server of another product: a Hugging Face folder with its large files in memory.

    FOLDER/weights-3/config.json
    FOLDER/weights-3/model.safetensors → /proc/PID/fd/7     an anonymous file of this process

A server on the same host opens the links like files. The memory is freed when the version is released, and in any case
with this process. For a server that does not see this memory the files are real ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self
from urllib.parse import urlsplit

import msgspec

from kintsugi.errors import IntegrityError, WorldError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder_files import folder_files
from kintsugi.model.tensor_file import FileContent, TensorFile, content_pieces
from kintsugi.runtime.disk import storage_errors

if TYPE_CHECKING:
    from torch import Tensor

MAX_FILE_BYTES = 1 << 29
"""Size of a weight file, so that several threads can digest a model."""
_EMBEDDINGS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

Answer = Callable[[Mapping[str, "Tensor"]], Sequence[float]]
"""Log-probabilities that a model of these weights gives after the prompt of the probe."""


class StagedWeights(Mapping[str, "Tensor"]):
    """One version, ready to be read by a server. Its tensors are read from the files."""

    def __init__(
        self, folder: Path, digests: Mapping[str, str], *, answer: Sequence[float], descriptors: list[int]
    ) -> None:
        from kintsugi.model.huggingface import WeightFiles

        self.folder = folder
        self.digests = digests
        """SHA-256 of the weight files, by the path under which another process opens them."""
        self.answer = answer
        self._files = WeightFiles(folder)
        self.release = weakref.finalize(self, _discard, folder, descriptors)
        """Free the memory, or the files."""

    def __getitem__(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.shapes)

    def __len__(self) -> int:
        return len(self._files.shapes)


class Greeting:
    """A small file in memory, by which a server can try whether it sees this process's memory."""

    def __init__(self, content: str) -> None:
        self.content = content
        self._descriptor = os.memfd_create("greeting", os.MFD_CLOEXEC)
        os.write(self._descriptor, content.encode())
        self.path = memory_path(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


class WeightStaging:
    """`stage` may run in any thread."""

    def __init__(self, folder: Path, *, architecture: ModelConfig, answer: Answer) -> None:
        """Folders that a dead predecessor left are removed."""
        self.in_memory = True
        """Whether files are in memory; changed only while nothing is staged."""
        self._folder = folder.absolute()
        self._architecture = msgspec.structs.replace(architecture, tie_embeddings=False)
        self._answer = answer
        self._numbers = count()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedWeights:
        """Write a version; ModelError if these are not the model's parameters. Not synced: after a crash it is written
        again."""
        return self._write(_complete(tensors), answer=self._answer(tensors))

    def copy(self, weights: StagedWeights) -> StagedWeights:
        """Write a version again, as files are written now."""
        return self._write(weights, answer=weights.answer)

    def _write(self, tensors: Mapping[str, Tensor], *, answer: Sequence[float]) -> StagedWeights:
        folder = self._folder / f"weights-{next(self._numbers)}"
        contents = folder_files(tensors, config=self._architecture, max_shard_bytes=MAX_FILE_BYTES)
        digests: dict[str, str] = {}
        descriptors: list[int] = []
        try:
            with storage_errors(f"could not write weights for another server into {folder}"):
                folder.mkdir(parents=True)
                for name, content in contents:
                    path = folder / name
                    if isinstance(content, TensorFile) and self.in_memory:
                        descriptors.append(os.memfd_create(name, os.MFD_CLOEXEC))
                        path.symlink_to(memory_path(descriptors[-1]))
                    with path.open("wb") as file:
                        digest = _write(content, file)
                    if isinstance(content, TensorFile):
                        digests[os.readlink(path) if self.in_memory else str(path)] = digest
            return StagedWeights(folder, digests, answer=answer, descriptors=descriptors)
        except BaseException:
            _discard(folder, descriptors)
            raise


def memory_path(descriptor: int) -> str:
    """Path under which another process of the same user and host opens a file of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def is_local(url: str) -> bool:
    """Whether a URL is an address of this host: one that a socket can be bound to."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as attempt:
                attempt.bind(address)
    except OSError:
        return False
    return True


def check_digests(found: Mapping[str, str], staged: StagedWeights, *, where: str) -> None:
    """Raise an error unless the server has read all files, unchanged."""
    missing = sorted(staged.digests.keys() - found.keys())
    if missing:
        raise WorldError(f"{where} has not read {missing[0]}")
    for path, digest in staged.digests.items():
        if found[path] != digest:
            raise IntegrityError(f"{where} has read other weights than it was given: {path} differs")


def _complete(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Add the output matrix where it is tied to the embeddings: on a CPU, vLLM has a separate copy for the output,
    which is not updated unless it is named."""
    if _HEAD in tensors or _EMBEDDINGS not in tensors:
        return tensors
    return {**tensors, _HEAD: tensors[_EMBEDDINGS]}


def _write(content: FileContent, file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in content_pieces(content):
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()


def _discard(folder: Path, descriptors: list[int]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for descriptor in descriptors:
        os.close(descriptor)
