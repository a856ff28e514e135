"""A rank as a process of its own, driven by lines of JSON: `python -m tests.unit.training.rank_process model-0`."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import torch

from kintsugi.errors import WorldError
from kintsugi.training.model_calls import ModelCalls
from kintsugi.training.process_group import ProcessGroup, join_group
from kintsugi.transport.store import StoreServer
from tests.unit.training.world import CPU, every_length, new_stage, new_state, run_call


class Rank:
    """Holds a group across commands, as a worker does."""

    def __init__(self, name: str, *, keys: tuple[bytes, bytes]) -> None:
        self.name = name
        self.keys = keys
        self.server = StoreServer(keys=keys)
        self.group: ProcessGroup | None = None

    def join(self, *, group_id: int, ranks: list[str], store: str, timeout_s: float) -> int:
        if self.group is not None:
            self.group.close()
        self.group = None
        self.group = join_group(
            group_id=group_id,
            ranks=ranks,
            me=self.name,
            store_address=store,
            keys=self.keys,
            device=CPU,
            timeout_s=timeout_s,
        )
        return self.group.rank

    def sum(self, *, value: float, timeout_s: float) -> float:
        assert self.group is not None
        tensor = torch.full((1000,), value)
        self.group.all_reduce(tensor, timeout_s=timeout_s)
        return tensor[0].item()

    def descriptors(self) -> list[int]:
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]

    def train(self, *, num_steps: int) -> list[str]:
        assert self.group is not None
        stage, batch = new_stage(), every_length()
        state = new_state(stage)
        calls = ModelCalls(state, deterministic=True)
        digests = []
        for step in range(1, num_steps + 1):
            call = batch.call(
                stage, step=step, rank=self.group.rank, world_size=self.group.size, num_shards=4
            )
            run_call(batch, call, calls=calls, group=self.group)
            digests.append(state.digest())
            state.commit(step)
        return digests


def answer(rank: Rank, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": getattr(rank, command.pop("do"))(**command)}
    except WorldError as error:
        detail = msgspec.to_builtins(error.detail)
        return {"error": type(error).__name__, "message": str(error), "detail": detail}


def main() -> None:
    torch.set_num_threads(1)
    public, secret = sys.stdin.readline().split()
    rank = Rank(sys.argv[1], keys=(public.encode(), secret.encode()))
    sys.stdout.write(f"{rank.server.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        reply = answer(rank, msgspec.json.decode(line, type=dict[str, Any]))
        sys.stdout.write(msgspec.json.encode(reply).decode() + "\n")
        sys.stdout.flush()
    if rank.group is not None:
        rank.group.close()
    rank.server.close()


if __name__ == "__main__":
    main()
