"""A checkpoint beside training: our save and load against `dd conv=fsync` on the same disk, in the same sitting.

    python benchmarks/checkpoint.py [--gigabytes 4] [--step-s 6] [--rounds 3] [--folder DIR] [--device cuda]

A state of that many gigabytes (fp32 weights and two moments, with the mix of sizes that a language model has) is
prepared and committed in snapshot slots as a rank does, one step every `--step-s` seconds, while the thread that saves
it writes the checkpoint. Measured are the speeds of writing (until everything is durable) and of the whole save (with
the verification that reads it back from the device), the growth of the memory of this process, the longest gap in
which a thread that wakes every 20 ms could not run, the time for which training stood still, and the speed of loading.
The loaded state must have the digest of the saved one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.checkpoint.snapshot import Snapshots
from kintsugi.checkpoint.store import load_checkpoint
from kintsugi.errors import DeadlineExceeded
from kintsugi.model.tensor_file import FileContent, TensorFile
from kintsugi.protocol.training import Save, Saved
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.runtime.waits import wait
from kintsugi.training.saving import CheckpointSaver
from kintsugi.training.snapshots import CopyCounters, HeldState, StateSnapshots
from kintsugi.transport import Delivery
from kintsugi.types import Peer

BEAT_S = 0.02
LAYER = {"q": (1536, 1536), "k": (256, 1536), "v": (256, 1536), "o": (1536, 1536), "norm": (1536,)} | {
    "gate": (8960, 1536),
    "up": (8960, 1536),
    "down": (1536, 8960),
    "norm2": (1536,),
}
"""Shapes of a layer of a model with 1.5 B parameters."""


class Heartbeats:
    """A thread that wakes every `BEAT_S` seconds, as a control thread does; notes its longest gap and the memory."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.most_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(BEAT_S):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - last)
            self.most_bytes = max(self.most_bytes, anonymous_bytes())
            last = time.monotonic()


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def named(flat: Tensor) -> dict[str, Tensor]:
    """The flat state as weights and moments of layers."""
    numel = flat.numel() // 3
    found: dict[str, Tensor] = {}
    for kind, row in zip(("weights", "moment1", "moment2"), flat[: 3 * numel].view(3, -1), strict=True):
        start, layer = 0, 0
        while start < numel:
            for name, shape in LAYER.items():
                size = min(torch.Size(shape).numel(), numel - start)
                if size > 0:
                    view = row[start : start + size]
                    found[f"{kind}/layers.{layer}.{name}"] = (
                        view.view(shape) if size == torch.Size(shape).numel() else view
                    )
                start += size
            layer += 1
    return found


def model_files(held: HeldState, others: object) -> Iterator[tuple[str, FileContent]]:
    yield "model.safetensors", TensorFile(held.weights, dtype=held.dtype, metadata={"format": "pt"})


def written_by_dd(folder: Path, size: int) -> float:
    """Bytes per second of dd with a sync at its end."""
    path = folder / "dd.bin"
    count = max(1, size // (16 << 20))
    since = time.monotonic()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={count}", "conv=fsync", "status=none"],
        check=True,
    )
    elapsed_s = time.monotonic() - since
    path.unlink()
    return count * (16 << 20) / elapsed_s


class Rank:
    """State and snapshots of a rank, its training replaced by a pause."""

    def __init__(self, size: int, *, device: str) -> None:
        numel = size // 4 // 3 * 3
        self.live = torch.empty(numel, device=device)
        for part in self.live.split(64 << 20):
            part.normal_(generator=torch.Generator(device).manual_seed(7))
        self.slots = Snapshots("model-0", size=self.live.nbytes, segments=None)
        self.copies = StateSnapshots(self.live, snapshots=self.slots)
        self.step = 0
        self.stalls: list[float] = []

    def train(self) -> None:
        """Change the state, prepare and commit it; note how long the change had to wait for a save."""
        since = time.monotonic()
        self.copies.settle()
        self.stalls.append(time.monotonic() - since)
        self.step += 1
        self.live[: 1 << 20].add_(1.0)
        self.copies.prepare(CopyCounters(self.step))
        self.copies.commit()

    def held(self) -> HeldState:
        view, await_copy, hold = self.copies.hold_committed(self.step)
        tensors = named(view)
        weights = {
            name.removeprefix("weights/"): t for name, t in tensors.items() if name.startswith("weights/")
        }
        return HeldState(CopyCounters(self.step), tensors, weights, torch.bfloat16, await_copy, hold)


@contextmanager
def saved_to(folder: Path) -> Iterator[tuple[CheckpointSaver, list[object]]]:
    replies: list[object] = []
    saver = CheckpointSaver(
        model_files=model_files,
        keep=1,
        reply=lambda delivery, body: replies.append(body),
        fail=lambda delivery, error: replies.append(error),
    )
    yield saver, replies
    saver.close()


def measure(rank: Rank, folder: Path, *, step_s: float) -> dict[str, float]:
    size = rank.live.nbytes * 7 // 6  # The weights are written in bfloat16 as well.
    dd = written_by_dd(folder, size)
    rank.train()
    rank.copies.settle()
    before = anonymous_bytes()
    envelope = Envelope("job", 1, "master-0", "a", 1, MessageKind.REQUEST)
    delivery = Delivery(envelope, Save(rank.step, "", ""), Peer("master-0", "a", "h", "", b""), b"")
    rank.stalls.clear()
    with saved_to(folder) as (saver, replies), Heartbeats() as heartbeats:
        since = time.monotonic()
        saver.begin(delivery, request=Save(rank.step, "", str(folder / "checkpoints")), held=rank.held())
        while not replies:
            _pause(replies, seconds=step_s)
            if not replies:
                rank.train()
        rank.copies.settle()
    (saved,) = replies
    assert isinstance(saved, Saved), saved
    found = {
        "dd_bytes_per_s": dd,
        "write_bytes_per_s": size / saved.timing["write"],
        "save_bytes_per_s": size / (saved.timing["write"] + saved.timing["verify"]),
        "write_s": saved.timing["write"],
        "verify_s": saved.timing["verify"],
        "of_dd": size / saved.timing["write"] / dd,
        "memory_growth_bytes": float(heartbeats.most_bytes - before),
        "longest_gap_s": heartbeats.longest_s,
        "longest_stall_s": max(rank.stalls, default=0.0),
        "steps_meanwhile": float(len(rank.stalls)),
        "ended_s": time.monotonic() - since,
    }
    return found | load(rank, Path(saved.path), step=saved.step)


def load(rank: Rank, path: Path, *, step: int) -> dict[str, float]:
    """Load the checkpoint into the state, and compare it with what was saved: one of the slots may still have it."""
    expected = {header.step: header.digest for slot in rank.slots.slots if (header := slot.header)}
    rank.live[: 1 << 20].zero_()
    before = anonymous_bytes()
    with Heartbeats() as heartbeats:
        since = time.monotonic()
        stored, _ = load_checkpoint(path)
        found, _ = rank.copies.fill(CopyCounters(step), lambda view: stored.read(named(view)))
        elapsed_s = time.monotonic() - since
    assert expected.get(step, found) == found, "the loaded state differs from the saved one"
    rank.step = step
    return {
        "load_bytes_per_s": rank.live.nbytes / elapsed_s,
        "load_longest_gap_s": heartbeats.longest_s,
        "load_memory_growth_bytes": float(heartbeats.most_bytes - before),
        "compared": float(step in expected),
    }


def _pause(replies: list[object], *, seconds: float) -> None:
    idle = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        if replies:
            return True
        idle.wait(min(0.01, remaining_s))
        return None

    try:
        wait(attempt, whom="this process", what="a step", timeout_s=seconds)
    except DeadlineExceeded:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--step-s", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rank = Rank(int(given.gigabytes * 1e9), device=given.device)
    rounds = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for number in range(given.rounds):
            found = measure(rank, Path(folder), step_s=given.step_s)
            rounds.append(found)
            print(f"round {number + 1}: {_text(found)}", flush=True)
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    print(f"median:  {_text(middle)}")
    if given.json is not None:
        result = {"gigabytes": given.gigabytes, "device": given.device, "median": middle, "rounds": rounds}
        given.json.write_text(json.dumps(result, indent=2) + "\n")


def _text(found: dict[str, float]) -> str:
    return (
        f"dd {found['dd_bytes_per_s'] / 1e9:.2f} GB/s, written {found['write_bytes_per_s'] / 1e9:.2f} GB/s "
        f"({found['of_dd']:.0%} of dd), with verification {found['save_bytes_per_s'] / 1e9:.2f} GB/s; "
        f"memory +{found['memory_growth_bytes'] / 1e6:.0f} MB, longest gap {found['longest_gap_s'] * 1e3:.0f} ms, "
        f"training stood still {found['longest_stall_s'] * 1e3:.0f} ms in {found['steps_meanwhile']:.0f} steps; "
        f"loaded at {found['load_bytes_per_s'] / 1e9:.2f} GB/s (gap {found['load_longest_gap_s'] * 1e3:.0f} ms, "
        f"memory +{found['load_memory_growth_bytes'] / 1e6:.0f} MB)"
    )


if __name__ == "__main__":
    main()
