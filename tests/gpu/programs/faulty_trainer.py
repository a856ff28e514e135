"""A training rank that breaks once, in the middle of an update, and the launcher of a run of such ranks.

    python -m tests.gpu.programs.faulty_trainer RUN_DIR start warm

What happens is in the run folder's `fault`; that it happened, in `injected`, so that the successor is spared. Another
rank notes, at the beginning of every training call, how much of the card's memory is taken by everybody.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kintsugi.cluster.handover import PROGRAMS
from kintsugi.lab.testbed.run import launch_for_a_lab
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.training import RunCall
from kintsugi.training import worker
from kintsugi.training.calls import CallResult
from kintsugi.training.group import Groups
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.packing import BatchSample
from kintsugi.training.rank_state import RankState, Update
from kintsugi.training.state import TrainingState
from kintsugi.types import Role

WITNESS, VICTIM = "model-0", "model-1"
STEP = 4
FAULT_FILE, DONE_FILE, MEMORY_FILE = "fault", "injected", "memory.jsonl"
GIBIBYTE = 1 << 30


class MemoryTaken(msgspec.Struct, frozen=True):
    """Of the whole card, when a training call began."""

    step: int
    used_bytes: int


def memory_taken() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def take_all_but(left: int) -> Tensor:
    """Leave the others what they need to go on until somebody notices."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(free - left, dtype=torch.uint8, device="cuda")


def die_with_the_memory_full() -> None:
    held = take_all_but(GIBIBYTE)
    assert held.nbytes > GIBIBYTE
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory() -> None:
    held = [take_all_but(GIBIBYTE)]
    held.append(torch.empty(2 * GIBIBYTE, dtype=torch.uint8, device="cuda"))


class WildArray:
    """Memory that begins where a tensor does and ends where nothing is."""

    def __init__(self, start: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1 << 44,), "typestr": "|u1", "data": (start.data_ptr(), False), "version": 3
        }  # fmt: skip


def write_through_a_wild_pointer() -> None:
    """Nothing is raised here: whoever looks at the device next learns of it."""
    torch.as_tensor(WildArray(torch.zeros(1, device="cuda")), device="cuda")[-1:].fill_(1)


FAULTS = {
    "killed": die_with_the_memory_full,
    "out of memory": run_out_of_memory,
    "illegal access": write_through_a_wild_pointer,
}


def disturb(run_dir: Path) -> None:
    """Whatever becomes of this process, the next one does not do it again."""
    fault = (run_dir / FAULT_FILE).read_text()
    os.close(os.open(run_dir / DONE_FILE, os.O_CREAT | os.O_EXCL))
    FAULTS[fault]()


def main(bootstrap: Bootstrap) -> int:
    """Body of a rank: the usual one, which notes or breaks something on the way."""
    run_dir = Path(bootstrap.run_dir)
    run, update = ModelCalls.run, TrainingState.update

    def noting(
        self: ModelCalls, call: RunCall, shards: Mapping[int, Sequence[BatchSample]], *, groups: Groups
    ) -> CallResult:
        with (run_dir / MEMORY_FILE).open("ab") as file:
            file.write(msgspec.json.encode(MemoryTaken(call.step, memory_taken())) + b"\n")
        return run(self, call, shards, groups=groups)

    def breaking(
        self: RankState, gradient: Tensor, *, part: str = "actor", groups: Groups | None = None
    ) -> Update:
        if self.committed_step + 1 == STEP and not (run_dir / DONE_FILE).exists():
            disturb(run_dir)
        return update(self, gradient, part=part, groups=groups)

    if bootstrap.process == WITNESS:
        ModelCalls.run = noting  # type: ignore[method-assign]
    elif bootstrap.process == VICTIM and (run_dir / FAULT_FILE).exists():
        TrainingState.update = breaking  # type: ignore[method-assign]
    return worker.main(bootstrap)


def launch(run_dir: Path) -> int:
    """Body of the launcher's process."""
    entries = {**PROGRAMS.entries, Role.MODEL: "tests.gpu.programs.faulty_trainer:main"}
    programs = msgspec.structs.replace(PROGRAMS, entries=entries)
    return launch_for_a_lab(run_dir, resume=False, programs=programs)


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1])))
