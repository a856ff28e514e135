"""What `async_vs_sync.py` trains on: counting down by a fixed difference, which small models learn in seconds.

`tail`    `93-7=` → `86 79 72 … 2`: until nothing is left. How long an answer is follows from its question, as it does
          for real problems, and the lengths have a long tail: median 29 tokens, mean 47, 99th percentile 263, most 287.
`even`    `37-3:` → `34 31 … 01 62 … 37`: around a clock of 64 numbers, until it is there again: always 192 tokens.

The model is taught both by SFT before anything is measured, so lengths are the model's own: no answer is cut short or
kept from ending. It is so small that a decoding step takes about as long for one row as for some dozen, as it does for
large models on accelerators, where the time goes into reading the weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Task = Literal["tail", "even"]

ROOT = Path(__file__).resolve().parents[1]
ALPHABET = "0123456789-=: "
STARTS, DIFFERENCES = range(10, 100), range(1, 10)
CLOCK, CLOCK_DIFFERENCES = range(64), range(1, 10, 2)
MAX_NEW_TOKENS = 300
MAX_LENGTH = 320
"""Prompt and completion."""
NUM_EVAL = 8
"""A run has to have some; they are asked before the first ticket and after the last commit."""
SFT_STEPS = 500
RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Layout:
    """How many processes of a kind share the cores: `Layout(servers=2, ranks=2)`."""

    servers: int
    ranks: int
    slots: int
    """Sequences that one server decodes at once."""

    def __str__(self) -> str:
        return f"{self.servers} servers × {self.slots} slots, {self.ranks} ranks"


def countdown(start: int, difference: int) -> str:
    """The answer of `tail`.

    >>> countdown(23, 7)
    '16 9 2'
    """
    return " ".join(map(str, range(start - difference, -1, -difference)))


def even_countdown(start: int, difference: int) -> str:
    """The answer of `even`; the difference has to be odd, or it would be there before it has seen all numbers."""
    return " ".join(f"{(start - difference * term) % len(CLOCK):02}" for term in range(1, len(CLOCK) + 1))


def rows(task: Task, *, latency_s: float = 0.0) -> list[dict[str, Any]]:
    """Every problem of a task. `latency_s` is how long its judge takes."""
    if task == "tail":
        problems = itertools.product(STARTS, DIFFERENCES)
        answers = {f"{start}-{by}=": countdown(start, by) for start, by in problems}
    else:
        problems = itertools.product(CLOCK, CLOCK_DIFFERENCES)
        answers = {f"{start:02}-{by}:": even_countdown(start, by) for start, by in problems}
    return [
        {"prompt": prompt, "answer": answer, "completion": answer, "latency_s": latency_s}
        for prompt, answer in answers.items()
    ]


def write_rows(path: Path, content: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return path


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The share of right numbers from the beginning on, so that groups differ even where no answer is all right."""
    return [
        _right_share(text.split(), truth.split()) for text, truth in zip(completions, answer, strict=True)
    ]


def _right_share(given: Sequence[str], truth: Sequence[str]) -> float:
    right = 0
    while right < min(len(given), len(truth)) and given[right] == truth[right]:
        right += 1
    return right / max(len(given), len(truth), 1)


async def judged(
    completions: list[str], answer: list[str], latency_s: list[float], **columns: Any
) -> list[float]:
    """The same from a judge elsewhere, whom one waits for without computing: a model behind an API, a test farm."""
    await asyncio.sleep(latency_s[0])
    return exact(completions, answer)


def recipe(
    layout: Layout,
    *,
    name: str,
    model: Mapping[str, Any],
    data: Path,
    reward: str,
    steps: int,
    batch_size: int,
    group_size: int,
    max_staleness: int,
    seed: int,
) -> dict[str, Any]:
    """A run of GRPO for speed: nothing is evaluated, saved or made to be the same bits twice."""
    return {
        "name": name,
        "seed": seed,
        "deterministic": False,
        "model": dict(model),
        "data": {"source": str(data), "num_eval": NUM_EVAL, "completion_column": "completion"},
        "algorithm": {
            "name": "grpo",
            "steps": steps,
            "batch_size": batch_size,
            "group_size": group_size,
            "reward": [f"async_workloads.{reward}"],
        },
        # So small that lengths stay what they are over a run of some dozen steps.
        "actor": {"workers": layout.ranks, "logical_shards": 2, "learning_rate": 1e-6},
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        "generation": {"servers": layout.servers, "slots": layout.slots, "max_length": MAX_LENGTH},
        "rollout": {"workers": 2, "reward_timeout_s": 60.0},
        "eval": {"num_samples": 0},
        "checkpoint": {"every": 0},
        "asynchrony": {"max_staleness": max_staleness},
    }


def write_recipe(path: Path, content: Mapping[str, Any]) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def kintsugi(*arguments: str | Path) -> None:
    """Run the program as a user would, with this folder's rewards within its reach."""
    words = " ".join(map(str, arguments))
    search_path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kintsugi", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        raise RuntimeError(f"{words} took longer than {RUN_TIMEOUT_S:g} s") from expired
    if done.returncode:
        raise RuntimeError(f"{words} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def countdown_model(folder: Path) -> Path:
    """A model that has learned both tasks; made once for a folder."""
    model = folder / "countdown-model"
    if not model.exists():
        data = write_rows(folder / "countdown.jsonl", rows("tail") + rows("even"))
        new = {
            "seed": 1, "hidden_size": 48, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4,
            "max_positions": MAX_LENGTH, "alphabet": ALPHABET,
        }  # fmt: skip
        layout = Layout(servers=1, ranks=2, slots=64)
        content = recipe(
            layout, name="countdown_sft", model={"new": new}, data=data, reward="exact",
            steps=SFT_STEPS, batch_size=32, group_size=1, max_staleness=0, seed=0,
        )  # fmt: skip
        content["algorithm"]["name"] = "sft"
        content["actor"].update(learning_rate=3e-3, schedule="cosine", warmup_steps=10)
        path = write_recipe(folder / "countdown_sft.yaml", content)
        kintsugi("train", path, f"run_dir={folder / 'countdown-sft'}")
        kintsugi("export", folder / "countdown-sft", "--to", model)
    return model


def addition_model(folder: Path, *, num_eval: int) -> Path:
    """What the warm-up of `recipes/grpo_arithmetic.yaml` leads to; made once for a folder."""
    model = folder / "addition-model"
    if not model.exists():
        kintsugi(
            "train", ROOT / "kintsugi" / "recipes" / "sft_arithmetic.yaml", "seed=1", "model.new.seed=1",
            "algorithm.steps=155", "actor.learning_rate=2.0e-3", "actor.schedule=constant", "actor.warmup_steps=0",
            "eval.every=0", "eval.num_samples=0", f"data.num_eval={num_eval}", f"run_dir={folder / 'addition-sft'}",
        )  # fmt: skip
        kintsugi("export", folder / "addition-sft", "--to", model)
    return model
