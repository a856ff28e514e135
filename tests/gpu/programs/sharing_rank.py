"""A rank that publishes the weights with which it computes, in a process of its own, as a reader needs it.

    python -m tests.gpu.programs.sharing_rank

It carries out the words of its standard input, one per line (`publish`, `begin`, `commit`, `roll_back`), and answers
each with a line of JSON.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from kintsugi.model.architecture import ModelConfig
from kintsugi.protocol.weights import Published
from kintsugi.training.state import TrainingState
from kintsugi.weights.manifest import build_manifest
from kintsugi.weights.transports.device import DeviceSlots
from tests.unit.training.world import new_stage, new_state

CUDA = torch.device("cuda", 0)
MODEL = ModelConfig(
    family="qwen3",
    vocab_size=2000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=1024,
    qk_norm=True,
)


class SharingRank:
    """One step at a time; every update changes all weights."""

    def __init__(self) -> None:
        self._state: TrainingState = new_state(
            new_stage(name="sft"), config=MODEL, dtype=torch.bfloat16, device=CUDA, shares_weights=True
        )
        self._slots = DeviceSlots(CUDA, host="host-0", versions_kept=1, shared=self._state.shared_weights)

    def carry_out(self, word: str) -> Published | None:
        state = self._state
        match word:
            case "begin":
                state.begin_update()
                state.gradient.normal_()
                state.update(state.gradient)
                torch.cuda.synchronize(CUDA)
            case "commit":
                step = state.committed_step + 1
                state.end_update(step)
                state.commit(step)
            case "roll_back":
                state.rollback(state.committed_step)
            case "publish":
                step = state.committed_step
                held, source = self._slots.hold(state.weights(), version=step)
                return Published(build_manifest(held, version=step, step=step, mesh={}), (source,))
            case _:
                raise ValueError(f"expected a word of this program, got {word!r}")
        return None


def main() -> None:
    rank = SharingRank()
    for line in sys.stdin:
        sys.stdout.buffer.write(msgspec.json.encode(rank.carry_out(line.strip())) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
