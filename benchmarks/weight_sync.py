"""New weights from a rank to a server: every transport against memcpy, and against torch.save and torch.load.

    python benchmarks/weight_sync.py [--megabytes 256] [--rounds 9] [--json FILE]
    python benchmarks/weight_sync.py --between-hosts [--chain 4] --json FILE
    python benchmarks/weight_sync.py --between-hosts --deltas 0.01 0.03 --json FILE
    python benchmarks/weight_sync.py --device cuda --json FILE

On the CPU: a process that publishes, one that stands for the node agent and one that fetches, one thread each. Every
round measures memcpy of as many bytes in the same process right before, then the transports one after the other; shown
are medians over rounds of speeds and of shares of memcpy. `fetch` includes the verification, `swap` is the copy into
the model's parameters. What arrived is compared with what was sent after every fetch.

With `--between-hosts` (`weight_sync_hosts.py`, root): by stream between network namespaces, against raw TCP.

With `--deltas` as differences to the version before.

With `--device cuda` (`weight_sync_gpu.py`): 1.5 B parameters in bfloat16 on one card between two processes, swapped in
while the second one decodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.weight_sync_sides import HOST, CopyBaseline, Order, Setup, Side, Told, endpoint_of
from kintsugi.cluster.shared_memory import SegmentClient
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.transformer import Transformer
from kintsugi.protocol.membership import AddressBook
from kintsugi.protocol.weights import Publish
from kintsugi.runtime.digests import piece_digest
from kintsugi.transport import Endpoint, new_key_pair
from kintsugi.types import WeightSource
from kintsugi.weights.fetch import DeviceFetch, Fetched, Fetcher
from kintsugi.weights.transports.collective import receive

MEGABYTES, ROUNDS, WARM_ROUNDS = 256, 9, 3
TRANSPORTS = ("shared_memory", "collective", "disk")
TARGETS = {
    ("shared_memory", "publish"): 0.60,
    ("shared_memory", "fetch_and_swap"): 0.50,
    ("shared_memory", "end_to_end"): 0.25,
}
"""Shares of memcpy's speed."""


def model_of(megabytes: int) -> dict[str, Any]:
    """Of about so many megabytes in float32, with the mix of sizes that a language model has."""
    per_layer = 4 * 512 * 512 + 3 * 512 * 1536
    num_layers = max(1, round((megabytes * 1e6 / 4 - 16000 * 512) / per_layer))
    return {
        "family": "llama",
        "vocab_size": 16000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_layers": num_layers,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 64,
        "max_positions": 1024,
        "tie_embeddings": True,
    }


class Meeting:
    """The three processes, of which this one is the server."""

    def __init__(
        self,
        model: Mapping[str, Any],
        *,
        device: str = "cpu",
        dtype: str = "float32",
        card: DeviceFetch | None = None,
        folder: Path,
    ) -> None:
        self._resources = ExitStack()
        self.job = f"bench{uuid4().hex[:8]}"
        self._setups = {
            process: _setup(
                role, process, job=self.job, model=model, device=device, dtype=dtype, folder=folder
            )
            for role, process in (("agent", "agent-0"), ("rank", "model-0"), ("server", "server-0"))
        }
        agent = self._start("agent-0")
        self.rank = self._start("model-0")
        self.endpoint: Endpoint = endpoint_of(self._setups["server-0"])
        self._resources.callback(self.endpoint.close)
        peers = (*agent.told.peers, *self.rank.told.peers, self.endpoint.peer(host=HOST))
        self.endpoint.set_book(AddressBook(1, peers))
        agent.ask(Order(peers=peers))
        self.rank.ask(Order(peers=peers))
        self.segments = self._resources.enter_context(closing(SegmentClient(f"kintsugi-{self.job}-{HOST}")))
        own = self._setups["server-0"]
        self.fetcher = Fetcher(
            process="server-0",
            host=HOST,
            device=card,
            join=partial(receive, keys=(own.public_key, own.secret_key)),
        )
        self.version = 0

    def _start(self, process: str) -> Side:
        side = Side(self._setups[process])
        self._resources.callback(side.close)
        return side

    def publish(self, transport: str) -> Told:
        self.version += 1
        order = Publish(
            self.version,
            self.version,
            transports=(transport,),
            servers=("server-0",) if transport == "collective" else (),
        )
        return self.rank.ask(Order(order))

    def fetch(self, told: Told) -> Fetched:
        assert told.published is not None
        return self.fetcher.fetch(told.published.manifest, told.published.sources, segments=self.segments)

    def close(self) -> None:
        self._resources.close()


def _setup(
    role: str, process: str, *, job: str, model: Mapping[str, Any], device: str, dtype: str, folder: Path
) -> Setup:
    public_key, secret_key = new_key_pair()
    return Setup(
        role, process, public_key, secret_key, job, dict(model), device, dtype, str(folder / process)
    )


def came_by(source: WeightSource, transport: str) -> bool:
    """Whether it was not one of the fall-backs."""
    kinds = {"SegmentSource": "shared_memory", "FolderSource": "disk", "CollectiveSource": "collective"}
    kinds["DeviceSource"] = "in_place"
    return kinds.get(type(source).__name__) == transport


class CpuBench:
    def __init__(self, meeting: Meeting, model: Mapping[str, Any]) -> None:
        self._meeting = meeting
        self._parameters = dict(Transformer(ModelConfig(**model)).named_parameters())
        self.size = sum(parameter.nbytes for parameter in self._parameters.values())
        self._baseline = CopyBaseline(self.size)

    def measure(self, transport: str) -> dict[str, float]:
        """Seconds of each part of one version's way."""
        memcpy_s = statistics.median(self._baseline.seconds() for _ in range(3))
        told = self._meeting.publish(transport)
        begun = time.perf_counter()
        fetched = self._meeting.fetch(told)
        fetched_at = time.perf_counter()
        self._swap(fetched.tensors())
        swapped_at = time.perf_counter()
        fetched.release()
        assert came_by(fetched.source, transport), f"{transport} fell back to {fetched.source}"
        self._check(told)
        fetch_s, swap_s = fetched_at - begun, swapped_at - fetched_at
        return {
            "memcpy": memcpy_s,
            "memcpy_of_rank": told.memcpy_s,
            "publish": told.publish_s,
            "fetch": fetch_s,
            "swap": swap_s,
            "fetch_and_swap": fetch_s + swap_s,
            "end_to_end": told.publish_s + fetch_s + swap_s,
        }

    def measure_torch(self, folder: Path) -> dict[str, float]:
        """The same by torch.save and torch.load through a file, from one process's memory to itself."""
        path = folder / "weights.pt"
        memcpy_s = statistics.median(self._baseline.seconds() for _ in range(3))
        begun = time.perf_counter()
        torch.save({name: each.detach() for name, each in self._parameters.items()}, path)
        saved_at = time.perf_counter()
        loaded = torch.load(path, weights_only=True)
        loaded_at = time.perf_counter()
        self._swap(loaded)
        swapped_at = time.perf_counter()
        path.unlink()
        return {
            "memcpy": memcpy_s,
            "memcpy_of_rank": memcpy_s,
            "publish": saved_at - begun,
            "fetch": loaded_at - saved_at,
            "swap": swapped_at - loaded_at,
            "fetch_and_swap": swapped_at - saved_at,
            "end_to_end": swapped_at - begun,
        }

    @torch.no_grad()
    def _swap(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])

    def _check(self, told: Told) -> None:
        assert told.published is not None
        for piece in told.published.manifest.pieces:
            data = self._parameters[piece.name].detach().numpy().reshape(-1).view("u1").data
            assert piece_digest(data) == piece.digest, f"{piece.name} is not what was published"


def summary(rounds: Sequence[Mapping[str, float]], *, size: int) -> dict[str, Any]:
    """Medians: gigabytes per second, and shares of the speed of memcpy in the same round and process."""
    speeds = {part: size / 1e9 / statistics.median(each[part] for each in rounds) for part in rounds[0]}
    baselines = {"publish": "memcpy_of_rank"}
    shares = {
        part: statistics.median(each[baselines.get(part, "memcpy")] / each[part] for each in rounds)
        for part in ("publish", "fetch", "swap", "fetch_and_swap", "end_to_end")
    }
    return {
        "gigabytes_per_s": {part: round(speed, 2) for part, speed in speeds.items()},
        "share_of_memcpy": {part: round(share, 3) for part, share in shares.items()},
    }


def run_cpu(*, megabytes: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = model_of(megabytes)
    with tempfile.TemporaryDirectory(prefix="weight_sync-") as name:
        folder = Path(name)
        with closing(Meeting(model, folder=folder)) as meeting:
            bench = CpuBench(meeting, model)
            kinds = (*TRANSPORTS, "torch.save")
            measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for number in range(WARM_ROUNDS + rounds):
                for kind in kinds:
                    found = bench.measure_torch(folder) if kind == "torch.save" else bench.measure(kind)
                    if number >= WARM_ROUNDS:
                        measured[kind].append(found)
    result: dict[str, Any] = {
        "bytes": bench.size,
        "rounds": rounds,
        "transports": {kind: summary(each, size=bench.size) for kind, each in measured.items()},
    }
    result["targets"] = [
        {
            "what": f"{kind}, {part}",
            "at_least": target,
            "got": (got := result["transports"][kind]["share_of_memcpy"][part]),
            "met": got >= target,
        }
        for (kind, part), target in TARGETS.items()
    ]
    return result


def show_cpu(found: Mapping[str, Any]) -> None:
    print(f"{found['bytes'] / 1e6:.0f} MB, medians of {found['rounds']} rounds: GB/s (share of memcpy)")
    parts = ("publish", "fetch", "swap", "end_to_end")
    print(f"{'':15}{'memcpy':>8}" + "".join(f"{part:>16}" for part in parts))
    for kind, each in found["transports"].items():
        speeds, shares = each["gigabytes_per_s"], each["share_of_memcpy"]
        row = "".join(f"{speeds[part]:8.2f} ({shares[part]:4.0%}) " for part in parts)
        print(f"{kind:15}{speeds['memcpy']:8.2f} {row}")
    for target in found["targets"]:
        verdict = "met" if target["met"] else "MISSED"
        print(f"{target['what']}: {target['got']:.0%} of memcpy, wanted {target['at_least']:.0%}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--between-hosts", action="store_true")
    parser.add_argument("--chain", type=int, default=4, help="hosts of the chain, with --between-hosts")
    parser.add_argument("--deltas", type=float, nargs="+", default=[], help="shares of elements that change")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "device": arguments.device,
    }
    if arguments.device == "cuda":
        from benchmarks import weight_sync_gpu

        found |= weight_sync_gpu.run(json_path=arguments.json, found=found)
        weight_sync_gpu.show(found)
    elif arguments.between_hosts and arguments.deltas:
        from benchmarks import weight_sync_hosts

        found |= weight_sync_hosts.run_deltas(
            megabytes=arguments.megabytes, rounds=arguments.rounds, shares=arguments.deltas
        )
        weight_sync_hosts.show_deltas(found)
    elif arguments.between_hosts:
        from benchmarks import weight_sync_hosts

        found |= weight_sync_hosts.run(
            megabytes=arguments.megabytes, rounds=arguments.rounds, chain=arguments.chain
        )
        weight_sync_hosts.show(found)
    else:
        found |= run_cpu(megabytes=arguments.megabytes, rounds=arguments.rounds)
        show_cpu(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
