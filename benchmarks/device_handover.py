"""What it costs that a trainer and a generation server take turns on one accelerator.

    python benchmarks/device_handover.py [--json FILE] [--steps 3] [--layers 28] [--policies no keep offload]

Whole runs, one rank and one server on the same card, the layers of Qwen3-0.6B with a small vocabulary (0.44 B
parameters), bfloat16 with float32 masters and moments. `no`: both compute whenever they like. `keep`: they take turns.
`offload`: whose turn it is not keeps weights, gradients and optimizer, or keys and values, in the host's memory.

Every turn is an event of its process (`device_turn`), with times of the host's monotonic clock. Of a hand-over:

    recalled ── finishing ──► (stopped) ── leaving ──► left ── granting ──► granted ── entering ──► begun

`finishing and leaving` is what the old holder took, `granting` the messages, `entering` what the new one took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.telemetry.events import Alert, Span, read_events

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = ("model-0", "server-0")
LONGEST_S = 540.0


class Turn(NamedTuple):
    process: str
    wanted_at: float
    granted_at: float
    begun_at: float
    recalled_at: float
    left_at: float


def overrides(policy: str, *, steps: int, layers: int) -> list[str]:
    shape = {
        "family": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": layers,
        "num_heads": 16,
        "num_kv_heads": 8,
        "max_positions": 64,
    }
    return [
        *(f"model.new.{name}={value}" for name, value in shape.items()),
        "actor.workers=1",
        "actor.dtype=bfloat16",
        "actor.warmup_steps=0",
        "generation.servers=1",
        "generation.kv_cache_gib=4",
        "rollout.workers=1",
        "warmup=null",
        f"algorithm.steps={steps}",
        "data.num_eval=16",
        "eval.every=0",
        "checkpoint.every=0",
        f"cluster.share_device={policy}",
    ]


def run(policy: str, folder: Path, *, steps: int, layers: int) -> dict[str, Any]:
    """One run to its end, and what its turns say."""
    run_dir = folder / policy
    recipe = ROOT / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"
    settings = overrides(policy, steps=steps, layers=layers)
    since = time.monotonic()
    finished = subprocess.run(
        [sys.executable, "-m", "kintsugi", "train", str(recipe), f"run_dir={run_dir}", *settings],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    wall_s = time.monotonic() - since
    if finished.returncode != 0:
        raise SystemExit(finished.stdout[-3000:] + finished.stderr[-3000:])
    summary = json.loads((run_dir / "summary.json").read_text())
    alerts = [
        record.event.message
        for record in read_events(run_dir, process="agent-0")
        if isinstance(record.event, Alert)
    ]
    return {
        "policy": policy,
        "wall_s": round(wall_s, 1),
        "weights_sha256": summary["weights_sha256"],
        "alerts": alerts,
        **handovers(turns_of(run_dir)),
    }


def turns_of(run_dir: Path) -> list[Turn]:
    """Of both processes, by the time of the grant."""
    turns = []
    for process in PROCESSES:
        for record in read_events(run_dir, process=process):
            event = record.event
            if isinstance(event, Span) and event.name == "device_turn":
                times = (float(event.attributes[name]) for name in Turn._fields[1:])
                turns.append(Turn(process, *times))
    return sorted(turns, key=lambda turn: turn.granted_at)


def handovers(turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians in milliseconds; and whether two turns ever overlapped, which must not be."""
    result: dict[str, Any] = {"turns": len(turns), "overlaps": 0}
    for receiver in PROCESSES:
        pairs = [
            (before, after)
            for before, after in pairwise(turns)
            if after.process == receiver != before.process
        ]
        result["overlaps"] += sum(after.granted_at < before.left_at for before, after in pairs)
        parts = {
            "finishing_and_leaving_ms": [before.left_at - before.recalled_at for before, _ in pairs],
            "granting_ms": [after.granted_at - before.left_at for before, after in pairs],
            "entering_ms": [after.begun_at - after.granted_at for _, after in pairs],
            "waited_ms": [after.begun_at - after.wanted_at for _, after in pairs],
        }
        if pairs:
            medians = {name: round(statistics.median(each) * 1e3, 2) for name, each in parts.items()}
            result[f"to_{receiver}"] = {"handovers": len(pairs), **medians}
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--policies", nargs="+", default=["no", "keep", "offload"])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            run(policy, Path(folder), steps=options.steps, layers=options.layers)
            for policy in options.policies
        ]
    result = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "same_bits": len({each["weights_sha256"] for each in runs}) == 1,
        "runs": runs,
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
