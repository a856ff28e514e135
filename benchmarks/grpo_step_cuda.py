"""The part of `grpo_step.py` on an accelerator: whole GRPO steps of our runs, against what TRL took on the same card.

The work is that of TRL's recorded steps (`TRL_SECONDS`): 32 prompts × 8 samples, prompts of 64 tokens, completions of
up to 256, no reference model, one update, bfloat16, a reward that costs nothing, random weights of the model's shape.
Ours is a real run of one rank and one generation server, which share the card.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.generation_sides import MODELS, write_model
from kintsugi.model.architecture import ModelConfig

HERE = Path(__file__).parent
TRL_SECONDS = {"0.6b": 8.3, "135m": 6.4}
"""A step of TRL 1.16 on one H200, by model; it is not installed there, so these were measured once."""
PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS = 32, 8, 64, 256
STEPS, SKIPPED = 12, 4
MICRO_BATCH_TOKENS = 16384
RUN_TIMEOUT_S = 240
PARTS = ("generate", "reward", "train", "commit", "weights")


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """One word per token, `w2 w3 …`, so that every token can be written down and read back."""
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, vocab_size))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab={word: number for number, word in enumerate(words)})
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:2])
    backend.save(str(folder / "tokenizer.json"))
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")


def write_prompts(path: Path, *, count: int, vocab_size: int) -> None:
    stream = random.Random(0)
    texts = (
        " ".join(f"w{stream.randrange(2, vocab_size)}" for _ in range(PROMPT_TOKENS)) for _ in range(count)
    )
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")


def recipe(folder: Path, *, run_dir: Path, prompts: int = PROMPTS) -> dict[str, Any]:
    return {
        "name": "grpo_step",
        "run_dir": str(run_dir),
        "deterministic": False,
        "model": {"path": str(folder)},
        "data": {"source": str(folder / "prompts.jsonl"), "num_eval": 1},
        "sampling": {"max_new_tokens": COMPLETION_TOKENS},
        "generation": {
            "servers": 1,
            "slots": prompts * SAMPLES,
            "max_length": PROMPT_TOKENS + COMPLETION_TOKENS,
        },
        "rollout": {"workers": 1},
        "actor": {
            "workers": 1,
            "logical_shards": 1,
            "dtype": "bfloat16",
            "learning_rate": 1e-6,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
        },
        "algorithm": {
            "name": "grpo",
            "steps": STEPS,
            "batch_size": prompts,
            "group_size": SAMPLES,
            "reward": ["grpo_step.cheap_reward"],
        },
        "eval": {"every": 0, "num_samples": 0},
        "checkpoint": {"every": 0},
    }


def step_metrics(
    config: ModelConfig, *, folder: Path, device: str, prompts: int = PROMPTS
) -> list[dict[str, Any]]:
    """What a run noted of each of its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(config, folder=folder, dtype=torch.bfloat16, device=device)
    write_tokenizer(folder, vocab_size=config.vocab_size)
    write_prompts(folder / "prompts.jsonl", count=prompts * (STEPS + 1), vocab_size=config.vocab_size)
    run_dir = folder / "run"
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(folder, run_dir=run_dir, prompts=prompts)), encoding="utf-8")
    further = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, "-m", "kintsugi", "train", str(path)],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=RUN_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(further)},
    )
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "timing/step" in line]


def row(model: str, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    warm = metrics[SKIPPED:]
    times = [line["time"] for line in warm]
    seconds = [after - before for before, after in pairwise(times)]
    typical = statistics.median(seconds)

    def median(name: str) -> float:
        return round(statistics.median(line.get(name, 0.0) for line in warm), 3)

    return {
        "case": {
            "model": model,
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": median("completions/mean_length"),
        },
        "unit": "s per step",
        "ours": round(typical, 3),
        "parts_s": {part: median(f"timing/{part}") for part in PARTS},
        "peers": {"trl, recorded": TRL_SECONDS[model]},
        "ratio": {"trl": round(TRL_SECONDS[model] / typical, 2)},
        "rounds_s": [round(each, 3) for each in seconds],
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    assert torch.cuda.is_available(), "`--device cuda` needs an accelerator"
    return [
        row(model, step_metrics(MODELS[model], folder=folder / model, device="cuda")) for model in TRL_SECONDS
    ]
