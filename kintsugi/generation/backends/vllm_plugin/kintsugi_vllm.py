"""The part of weight updates that runs inside the workers of a vLLM server.

vLLM imports this file in an environment that need not contain Kintsugi, so it imports nothing of Kintsugi:

    PYTHONPATH=…/vllm_plugin vllm serve MODEL … --worker-extension-cls kintsugi_vllm.WeightReceipts
        --weight-transfer-config '{"backend": "kintsugi"}'

It is a back end of vLLM's own weight transfer. A run keeps a version in safetensors files, in memory where it can; the
workers map the files, and vLLM's loader copies what each worker needs, which of a split matrix is its own part.

    init_weight_transfer_engine   try to read a file of the run
    start_weight_update           the receipt of the last version is void
    update_weights                map the files, digest them and load all tensors
    finish_weight_update          compare the parameters with the files, and write a receipt

The run asks for the receipts, by `collective_rpc`, and judges them.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "kintsugi"
_DIGEST_THREADS = 4
_HEADER_LENGTH_BYTES = 8
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class Greeting(WeightTransferInitInfo):
    """A file of the run and its contents."""

    path: str
    content: str


@dataclass
class Version(WeightTransferUpdateInfo):
    label: str
    paths: list[str]
    parts: dict[str, list[str]]
    """Parameters that vLLM concatenates, each with the names of its tensors in the files."""


@dataclass
class Receipt:
    """Weights of one worker; the counts are of parameters."""

    reads_memory: bool = False
    """Whether it could read the file of the greeting."""
    label: str = ""
    """Empty from the start of an update to its end."""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file; the ranks of a group share the work."""
    num_equal: int = 0
    num_split: int = 0
    """Those of which this rank has a part; not compared."""
    num_repacked: int = 0
    """Those that a kernel keeps in a layout of its own; not compared."""
    different: list[str] = field(default_factory=list)
    """Parameters that do not have the values of the files, or are not in them."""


class MemoryFiles(WeightTransferEngine):
    """The back end `kintsugi`."""

    init_info_cls = Greeting
    update_info_cls = Version

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.receipt = Receipt()
        self._version: Version | None = None
        self._tensors: dict[str, Tensor] = {}

    def init_transfer_engine(self, init_info: Greeting) -> None:
        try:
            readable = bytes(_mapped(init_info.path)).decode() == init_info.content
        except (OSError, ValueError):
            readable = False
        self.receipt = Receipt(readable, self.receipt.label)

    def start_weight_update(self) -> None:
        self.receipt = Receipt(self.receipt.reads_memory)
        self._version, self._tensors = None, {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Not that of the parent class, which waits for an accelerator even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Version) -> None:
        files = {path: _mapped(path) for path in update_info.paths}
        with ThreadPoolExecutor(_DIGEST_THREADS, "digest") as pool:
            digests: dict[str, Future[str]] = {
                path: pool.submit(_digest, file) for path, file in _own_share(files).items()
            }
            for file in files.values():
                self._tensors |= _tensors_of(file)
            self.model.load_weights(self._tensors.items())
            self.receipt.digests = {path: digest.result() for path, digest in digests.items()}
        self._version = update_info

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self._version is None:
            return  # Nothing was loaded: there is no receipt.
        self._compare(self._version.parts)
        self.receipt.label = self._version.label
        self._version, self._tensors = None, {}

    def shutdown(self) -> None:
        self._tensors = {}

    @staticmethod
    def trainer_send_weights(*arguments: Any, **options: Any) -> None:
        """Abstract in vLLM before 0.32. A run sends by HTTP."""
        raise NotImplementedError

    def _compare(self, parts: dict[str, list[str]]) -> None:
        receipt = self.receipt
        for name, parameter in self.model.named_parameters():
            sources = [self._tensors[part] for part in parts.get(name, [name]) if part in self._tensors]
            num_rows = sum(len(source) for source in sources)
            if not parameter.numel():
                receipt.num_repacked += 1
            elif sources and (parameter.shape[1:] != sources[0].shape[1:] or len(parameter) < num_rows):
                receipt.num_split += 1
            elif sources and _is_equal(parameter.detach(), sources):
                receipt.num_equal += 1
            else:
                receipt.different.append(name)


class WeightReceipts:
    """Method of every worker for `collective_rpc`."""

    weight_transfer_engine: MemoryFiles

    def kintsugi_receipt(self) -> dict[str, Any]:
        return asdict(self.weight_transfer_engine.receipt)


def _mapped(path: str) -> mmap.mmap:
    """A private mapping. Another kind of file than a regular one is refused: reading it could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"expected a regular file at {path}")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _digest(file: mmap.mmap) -> str:
    return hashlib.sha256(file).hexdigest()


def _own_share(files: dict[str, mmap.mmap]) -> dict[str, mmap.mmap]:
    """Files that this rank digests."""
    rank, num_ranks = 0, 1
    if torch.distributed.is_initialized():
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {path: file for number, (path, file) in enumerate(files.items()) if number % num_ranks == rank}


def _tensors_of(file: mmap.mmap) -> dict[str, Tensor]:
    """Views of the tensors of a safetensors file; they keep its mapping."""
    start = _HEADER_LENGTH_BYTES + int.from_bytes(file[:_HEADER_LENGTH_BYTES], "little")
    header: dict[str, Any] = json.loads(file[_HEADER_LENGTH_BYTES:start])
    tensors = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, (first, last) = _DTYPES[about["dtype"]], about["data_offsets"]
        flat = torch.frombuffer(
            file, dtype=dtype, count=(last - first) // dtype.itemsize, offset=start + first
        )
        tensors[name] = flat.view(about["shape"])
    return tensors


def _is_equal(parameter: Tensor, sources: list[Tensor]) -> bool:
    """Whether a parameter consists of these tensors; rows after them are padding."""
    start = 0
    for source in sources:
        rows = parameter[start : start + len(source)]
        if not torch.equal(rows, source.to(device=parameter.device, dtype=parameter.dtype)):
            return False
        start += len(source)
    return True


WeightTransferEngineFactory.register_engine(BACKEND, MemoryFiles)
