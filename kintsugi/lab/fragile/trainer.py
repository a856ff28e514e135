"""Computation of a rank: the same model calls on the same state as a rank of ours, without its recovery."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save as serialize
from torch import Tensor

from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.errors import ModelError, StorageError
from kintsugi.model import huggingface
from kintsugi.model.folder_files import folder_files
from kintsugi.model.plan import plan_companions, plan_model
from kintsugi.model.tensor_file import content_pieces
from kintsugi.protocol.training import CallDone, RunCall
from kintsugi.training.group import Groups
from kintsugi.training.initial_weights import load_model
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.packing import BatchSample, sample_of
from kintsugi.training.process_group import ProcessGroup, join_group
from kintsugi.training.state import TrainingState
from kintsugi.transport import new_key_pair
from kintsugi.transport.store import StoreServer
from kintsugi.types import Trajectory

OPTIMIZER_FILE = "optimizer.safetensors"
CPU = torch.device("cpu")
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 64 << 10


def return_freed_memory() -> None:
    """Return the memory of a batch to the system after it, as such systems do with device memory.

    The next batch has to allocate it again.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class Trainer:
    """One rank's model, optimizer and process group."""

    def __init__(self, config: Config, *, process: str, host: str) -> None:
        torch.set_num_threads(1)
        self._config, self._process = config, process
        _, self._tokenizer = plan_model(config)
        self._stages = {stage.name: stage for stage in stages(config)}
        self._state = TrainingState(
            load_model(config, device=CPU),
            companions=plan_companions(config),
            compute_dtype=getattr(torch, config.actor.dtype),
            process=process,
        )
        self._calls = ModelCalls(self._state, deterministic=config.deterministic)
        self._keys = new_key_pair()
        self._store = StoreServer(host, keys=self._keys)
        self._store.admit(lambda key: True)  # A conventional store: it admits every process.
        self._group: ProcessGroup | None = None
        self._trajectories: dict[str, Trajectory] = {}

    @property
    def store(self) -> str:
        """Address of the rendezvous store, used if this is the first rank."""
        return self._store.address

    def join(self, ranks: Sequence[str], *, store: str, timeout_s: float) -> None:
        self._group = join_group(
            group_id=1,
            ranks=ranks,
            me=self._process,
            store_address=store,
            keys=self._keys,
            device=CPU,
            timeout_s=timeout_s,
        )

    def start_stage(self, name: str, *, step: int) -> None:
        self._state.start_stage(self._stages[name], step=step)

    def run(self, call: RunCall, trajectories: Mapping[str, Trajectory]) -> CallDone:
        """Execute a call on this rank's part of the batch; later calls of a step reuse the samples."""
        assert self._group is not None, "the ranks have joined their process group"
        self._trajectories.update(trajectories)
        shards: dict[int, list[BatchSample]] = {
            shard.index: [sample_of(item, self._trajectories[item.key]) for item in shard.items]
            for shard in call.shards
        }
        result = self._calls.run(call, shards, groups=Groups.of(self._group))
        return CallDone(call.step, self._state.prepared_digest, result.metrics, result.timing, result.outputs)

    def commit(self, step: int) -> None:
        self._state.commit(step)
        self._calls.forget()
        self._trajectories.clear()

    def weights(self) -> dict[str, Tensor]:
        return self._state.weights()

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Return the files of a checkpoint: the optimizer's moments, and a model folder."""
        moments = {
            name: tensor.clone()
            for name, tensor in self._state.tensors().items()
            if name.startswith("moment")
        }
        yield OPTIMIZER_FILE, serialize(moments)
        origin = self._config.model.path
        for name, content in folder_files(
            self.weights(),
            config=self._state.model.config,
            tokenizer_folder=Path(origin) if origin is not None else None,
        ):
            yield name, b"".join(content_pieces(content))
        if origin is None:
            yield from self._tokenizer.files().items()


def read_weights(folder: Path, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the weights of a checkpoint; StorageError when it is invalid."""
    try:
        model = huggingface.load(folder, dtype=dtype)
    except (ModelError, OSError) as error:
        raise StorageError(f"Checkpoint corrupted: {error}") from error
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
