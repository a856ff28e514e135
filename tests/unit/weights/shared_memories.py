"""Memory of a device that is the host's here: 'sharing' it means finding it again."""

from __future__ import annotations

from typing import Self

import pytest
import torch
from torch import Tensor

from kintsugi.model.torch_internals import SharedGpuMemory
from kintsugi.weights.transports import device as module


class SharedMemories:
    """Memory that was exported, and what was mapped of it."""

    def __init__(self) -> None:
        self.exported: list[Tensor] = []
        self.num_mapped = 0

    def share(self, tensor: Tensor) -> SharedGpuMemory:
        self.exported.append(tensor)
        return SharedGpuMemory(b"%d" % len(self.exported), tensor.nbytes, 0, b"", 0, b"", False)

    def map(self, shared: SharedGpuMemory, *, device: torch.device) -> Tensor:
        self.num_mapped += 1
        return self.exported[int(shared.handle) - 1]

    @classmethod
    def in_place_of_the_device(cls, monkeypatch: pytest.MonkeyPatch) -> Self:
        memories = cls()
        monkeypatch.setattr(module, "share_gpu_memory", memories.share)
        monkeypatch.setattr(module, "map_gpu_memory", memories.map)
        return memories
