"""Digests and publications on one card, in less than a minute: how fast the card hashes, and what a version costs.

    python benchmarks/publication_gpu.py [--models 0.6b 1.8b] [--rounds 20] [--state-gb 21] [--json FILE]

Digests: the state of a rank in slices of 32 KiB, as every step hashes it. A part of it
is hashed on the CPU too, and must be equal.

Publications: a second process holds random weights of the model's shape, as a rank does, and publishes them in place
(CUDA IPC); this one verifies them where they are and copies them into its own parameters, as a server does between two
steps. Seconds of each part, without the messages between them, and the memory that the allocator has reserved after the
second version and after the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.generation_sides import MODELS
from benchmarks.weight_sync import Meeting, came_by
from benchmarks.weight_sync_gpu import QWEN2_1500M
from kintsugi.model.torch_internals import copy_all
from kintsugi.training.digests import SLICE_BYTES, digest
from kintsugi.weights.device_digests import device_slice_digests
from kintsugi.weights.transports.device import MappedSlots

CUDA = torch.device("cuda", 0)
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {**msgspec.structs.asdict(MODELS["0.6b"])},
    # Qwen2.5-Coder-1.5B as its GGUF has it: 1.78 B parameters, with an output matrix of its own.
    "1.8b": QWEN2_1500M | {"tie_embeddings": False},
}
MOST_PUBLICATION_S, MOST_STATE_S = 0.05, 0.02


def seconds_of_digest(content: Tensor, *, rounds: int) -> float:
    digest(b"", content)  # Compiles the kernel, or loads it.
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        since = time.perf_counter()
        digest(b"", content)
        times.append(time.perf_counter() - since)
    return statistics.median(times)


def measure_digests(state_gb: float) -> dict[str, Any]:
    free_bytes, _ = torch.cuda.mem_get_info(CUDA)
    size = min(int(state_gb * 1e9), int(0.8 * free_bytes)) // SLICE_BYTES * SLICE_BYTES
    content = torch.empty(size // 8, dtype=torch.int64, device=CUDA).random_().view(torch.uint8)
    part = content[: 2048 * SLICE_BYTES]
    assert digest(b"x", part) == digest(b"x", part.cpu()), "card and CPU compute different digests"
    seconds = seconds_of_digest(content, rounds=5)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    device_slice_digests([content], slice_bytes=SLICE_BYTES)
    end.record()
    torch.cuda.synchronize()
    found = {
        "bytes": size,
        "seconds": round(seconds, 5),
        "gigabytes_per_s": round(size / 1e9 / seconds, 1),
        "without_the_root_s": round(begin.elapsed_time(end) / 1e3, 5),
        "at_most_s": MOST_STATE_S,
        "met": seconds <= MOST_STATE_S,
    }
    del content, part
    torch.cuda.empty_cache()
    return found


def measure_publications(model: Mapping[str, Any], *, rounds: int) -> dict[str, Any]:
    parameters: dict[str, Tensor] = {}
    parts: dict[str, list[float]] = {"publish": [], "verify": [], "swap": [], "together": []}
    reserved: list[int] = []
    with tempfile.TemporaryDirectory(prefix="publication-") as name:
        meeting = Meeting(model, device="cuda:0", dtype="bfloat16", card=MappedSlots(CUDA), folder=Path(name))
        with closing(meeting):
            for _ in range(rounds):
                told = meeting.publish("in_place")
                since = time.perf_counter()
                fetched = meeting.fetch(told)
                verified = time.perf_counter()
                assert came_by(fetched.source, "in_place"), f"fell back to {fetched.source}"
                tensors = fetched.tensors()
                for key, tensor in tensors.items():
                    if key not in parameters:
                        parameters[key] = torch.empty_like(tensor)
                copy_all([parameters[key] for key in tensors], list(tensors.values()))
                torch.cuda.synchronize()
                fetched.check()
                swapped = time.perf_counter()
                fetched.release()
                times = (told.publish_s, verified - since, swapped - verified)
                for part, seconds in zip(parts, (*times, sum(times)), strict=True):
                    parts[part].append(seconds)
                reserved.append(torch.cuda.memory_reserved(CUDA))
    size = sum(tensor.nbytes for tensor in parameters.values())
    # The first versions map and allocate memory, and compile the kernel.
    medians = {f"{part}_s": round(statistics.median(times[2:]), 5) for part, times in parts.items()}
    return medians | {
        "bytes": size,
        "parameters": sum(tensor.numel() for tensor in parameters.values()),
        "first_s": round(parts["together"][0], 3),
        "at_most_s": MOST_PUBLICATION_S,
        "met": medians["together_s"] <= MOST_PUBLICATION_S,
        "reserved_after_two": reserved[1],
        "reserved_at_the_end": reserved[-1],
        "memory_is_constant": len(set(reserved[1:])) == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--state-gb", type=float, default=21.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    assert torch.cuda.is_available(), "this needs an accelerator"
    since = time.perf_counter()
    found: dict[str, Any] = {
        "card": torch.cuda.get_device_name(CUDA),
        "torch": torch.__version__,
        "state_digest": measure_digests(arguments.state_gb),
        "publication": {},
    }
    for model in arguments.models:
        found["publication"][model] = measure_publications(SHAPES[model], rounds=arguments.rounds)
        torch.cuda.empty_cache()
    found["seconds"] = round(time.perf_counter() - since, 1)
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
