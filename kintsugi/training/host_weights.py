"""Initial weights in host memory, without a framework: from a Hugging Face folder, or from the run's seed.

A new model has the weights that `model.transformer.initialize` gives it, but for the rounding of logarithms and sines.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kintsugi.config.schema import Config
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.folder import Head, StoredTensor, check_index, read_header, stored_names, weight_files
from kintsugi.model.plan import actor_head, plan_architecture

Weights = Mapping[str, NDArray[np.float32]]
"""Arrays by Hugging Face name."""

_GROUP = 16
"""Numbers that torch turns from uniform to normal together: half of them radii, half of them angles."""


def fill_initial(parameters: Weights, config: Config) -> None:
    """Fill the parameters of the actor as the run begins."""
    model = plan_architecture(config)
    if config.model.path is not None:
        load_into(parameters, Path(config.model.path), config=model, head=actor_head(config))
        return
    assert config.model.new is not None
    initialize(parameters, config.model.new.seed, num_layers=model.num_layers)


def load_into(parameters: Weights, folder: Path, *, config: ModelConfig, head: Head = "refused") -> None:
    """Fill parameters from a folder, one tensor at a time."""
    stored: dict[str, tuple[Path, StoredTensor]] = {}
    for path, promised in weight_files(folder):
        tensors = read_header(path)
        check_index(path, present=tensors.keys(), promised=promised)
        stored |= {name: (path, tensor) for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, (_, tensor) in stored.items()}
    names = stored_names(shapes, config=config, head=head, where=str(folder))
    for name, parameter in parameters.items():
        parameter[...] = _read(*stored[names[name]]) if name in names else 0.0


def _read(path: Path, tensor: StoredTensor) -> NDArray[np.float32]:
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    kinds: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    kind = kinds[tensor.dtype]
    found = np.memmap(path, dtype=kind, mode="r", offset=start + tensor.data_offsets[0], shape=tensor.shape)
    if tensor.dtype == "BF16":  # The upper half of a float32.
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found.astype(np.float32)


def initialize(parameters: Weights, seed: int, *, num_layers: int) -> None:
    """Fill every parameter from `seed` alone, as `model.transformer.initialize` does."""
    for name, parameter in parameters.items():
        if name.endswith("norm.weight"):
            parameter[...] = 1.0
        elif name.endswith(".bias") or name.startswith("value_head."):
            parameter[...] = 0.0
        else:
            deviation = 0.55 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= math.sqrt(2 * num_layers)
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            noise = normal(parameter.size, seed=int.from_bytes(digest[:8], "little"))
            parameter[...] = (noise * np.float32(deviation)).reshape(parameter.shape)


def normal(count: int, *, seed: int) -> NDArray[np.float32]:
    """Standard normal numbers: those of `torch.empty(count).normal_()` with a CPU generator of this seed."""
    assert count >= _GROUP, f"torch draws fewer than {_GROUP} numbers in another way"
    twister = np.random.MT19937()
    twister._legacy_seeding(seed & 0xFFFFFFFF)
    whole = count // _GROUP * _GROUP
    drawn = count + (_GROUP if whole < count else 0)
    uniform = (twister.random_raw(drawn) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
    found = uniform[:count].copy()
    found[:whole] = _box_muller(found[:whole])
    if whole < count:  # The last group overlaps the one before, and is drawn again.
        found[-_GROUP:] = _box_muller(uniform[count:])
    return found


def _box_muller(uniform: NDArray[np.float32]) -> NDArray[np.float32]:
    half = _GROUP // 2
    groups = uniform.reshape(-1, _GROUP)
    radius = np.sqrt(np.float32(-2.0) * np.log(np.float32(1.0) - groups[:, :half]))
    angle = np.float32(2.0 * math.pi) * groups[:, half:]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1).reshape(-1)
