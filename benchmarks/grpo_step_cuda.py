"""The part of `grpo_step.py` on an accelerator: whole GRPO steps of our runs and of TRL on the same card.

32 prompts × 8 samples, prompts of 64 tokens, completions of up to 256, no reference model, one update, bfloat16, a
cheap reward, random weights of the model's shape. Ours is a real run of one rank and one generation server, which share
the card. TRL runs after it where it is installed, once with its own generation and once with vLLM in its process; what
is missing is skipped with the reason, and the ratio is then to steps that were recorded before (`TRL_SECONDS`).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.generation_sides import MODELS, write_model

HERE = Path(__file__).parent
MODELS_HERE = ("0.6b", "135m", "1.5b")
TRL_SECONDS = {"0.6b": 8.3, "135m": 6.4}
"""Steps of TRL 1.16 on one H200 (2026-11-16), by model."""
TRL_STEPS, TRL_SKIPPED = 6, 2
SEQUENCES_AT_ONCE = {"0.6b": 256, "135m": 256, "1.5b": 64}
"""Sequences of TRL's backward pass; more of the larger model do not fit beside its optimizer."""
VLLM_MEMORY_SHARE = 0.3
TRL_TIMEOUT_S = 420
PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS = 32, 8, 64, 256
STEPS, SKIPPED = 12, 4
MICRO_BATCH_TOKENS = {"0.6b": 16384, "135m": 41984, "1.5b": 16384}
"""A pass of 16,384 tokens of the smallest model takes the host longer (70 ms) than the device (43 ms)."""
RUN_TIMEOUT_S = 240
PROBE_TIMEOUT_S = 60
PARTS = ("generate", "reward", "train", "commit", "weights")
TRAIN_PART = "timing/train_"
"""Parts of a training call, as the rank times them; the rest of `train` is messages and the master."""


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


def recipe(
    folder: Path, *, run_dir: Path, model: str, prompts: int = PROMPTS, deterministic: bool = False
) -> dict[str, Any]:
    return {
        "name": "grpo_step",
        "run_dir": str(run_dir),
        "deterministic": deterministic,
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
            "micro_batch_tokens": MICRO_BATCH_TOKENS[model],
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
    model: str, *, folder: Path, device: str, prompts: int = PROMPTS, deterministic: bool = False
) -> list[dict[str, Any]]:
    """What a run noted of each of its steps."""
    config = MODELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    write_model(config, folder=folder, dtype=torch.bfloat16, device=device)
    write_tokenizer(folder, vocab_size=config.vocab_size)
    write_prompts(folder / "prompts.jsonl", count=prompts * (STEPS + 1), vocab_size=config.vocab_size)
    run_dir = folder / "run"
    path = folder / "recipe.yaml"
    contents = recipe(folder, run_dir=run_dir, model=model, prompts=prompts, deterministic=deterministic)
    path.write_text(yaml.safe_dump(contents), encoding="utf-8")
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


class Trl(NamedTuple):
    """Where TRL is to be found."""

    python: Path
    path: str = ""
    """Further folders for its modules: unpacked wheels of TRL, datasets, vLLM."""

    def why_missing(self, *modules: str) -> str:
        """Why it can not run; empty if it can."""
        if not self.python.exists():
            return f"there is no {self.python}"
        probe = (
            "import importlib.util as u; "
            f"print(', '.join(name for name in {modules!r} if u.find_spec(name) is None))"
        )
        found = subprocess.run(
            [str(self.python), "-c", probe],
            check=False,
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=PROBE_TIMEOUT_S,
        )
        missing = found.stdout.strip() or found.stderr.strip()
        return f"{self.python} has no {missing}" if missing else ""

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (self.path, os.environ.get("PYTHONPATH", ""))))
        return {**os.environ, "PYTHONPATH": path, "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def trl_steps(
    model: str, *, folder: Path, trl: Trl, with_vllm: bool, prompts: int = PROMPTS
) -> tuple[dict[str, Any], str]:
    """Typical step of a TRL run and its generation, and why there is none."""
    why = trl.why_missing("trl", "datasets", *(["vllm"] if with_vllm else []))
    if why:
        return {}, why
    rows = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    order = {
        "folder": str(folder),
        "prompts": [json.loads(row)["prompt"] for row in rows],
        "num_prompts": prompts,
        "num_samples": SAMPLES,
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": COMPLETION_TOKENS,
        "steps": TRL_STEPS,
        "sequences_at_once": SEQUENCES_AT_ONCE.get(model, 256),
        "vllm": with_vllm,
        "vllm_memory_share": VLLM_MEMORY_SHARE,
    }
    try:
        done = subprocess.run(
            [str(trl.python), str(HERE / "grpo_step_trl.py")],
            input=json.dumps(order),
            check=False,
            capture_output=True,
            text=True,
            timeout=TRL_TIMEOUT_S,
            env=trl.environment(),
        )
    except subprocess.TimeoutExpired:
        return {}, f"it took more than {TRL_TIMEOUT_S} s"
    if done.returncode != 0:
        return {}, f"it ended with code {done.returncode}: {done.stderr[-2000:]}"
    answer = json.loads(done.stdout.splitlines()[-1])
    times = answer["times"][TRL_SKIPPED:]
    seconds = statistics.median(after - before for before, after in pairwise(times))
    return {
        "seconds": round(seconds, 3),
        "generate_s": round(statistics.median(answer["generate_s"][TRL_SKIPPED:]), 3),
        "completion_tokens": round(answer["completion_tokens"], 1),
        "version": answer["version"],
    }, ""


def row(
    model: str, metrics: Sequence[dict[str, Any]], *, peers: dict[str, dict[str, Any]], deterministic: bool
) -> dict[str, Any]:
    warm = metrics[SKIPPED:]
    times = [line["time"] for line in warm]
    seconds = [after - before for before, after in pairwise(times)]
    typical = statistics.median(seconds)

    def median(name: str) -> float:
        return round(statistics.median(line.get(name, 0.0) for line in warm), 3)

    found = {name: peer["seconds"] for name, peer in peers.items()}
    if model in TRL_SECONDS and "trl" not in found:
        found["trl, recorded"] = TRL_SECONDS[model]
    return {
        "case": {
            "model": model,
            "deterministic": deterministic,
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": median("completions/mean_length"),
        },
        "unit": "s per step",
        "ours": round(typical, 3),
        "parts_s": {part: median(f"timing/{part}") for part in PARTS},
        "train_parts_s": {
            name.removeprefix(TRAIN_PART): median(name)
            for name in sorted(warm[-1])
            if name.startswith(TRAIN_PART)
        },
        "peers": found,
        "peers_in_detail": peers,
        "ratio": {name: round(each / typical, 2) for name, each in found.items()},
        "rounds_s": [round(each, 3) for each in seconds],
    }


def rows(
    folder: Path, *, models: Sequence[str], trl: Trl, deterministic: bool, skipped: dict[str, str]
) -> Iterator[dict[str, Any]]:
    assert torch.cuda.is_available(), "`--device cuda` needs an accelerator"
    for model in models:
        place = folder / model
        metrics = step_metrics(model, folder=place, device="cuda", deterministic=deterministic)
        peers = {}
        for name, with_vllm in (("trl", False), ("trl with vllm", True)):
            steps, why = trl_steps(model, folder=place, trl=trl, with_vllm=with_vllm)
            if steps:
                peers[name] = steps
            else:
                skipped[f"{name}, {model}"] = why
                print(f"skipped: {name}, {model}: {why}", file=sys.stderr, flush=True)
        yield row(model, metrics, peers=peers, deterministic=deterministic)


def show(line: dict[str, Any]) -> None:
    """A row for people: the step, its parts, and the peers."""
    parts = "  ".join(f"{name} {seconds}" for name, seconds in line["parts_s"].items())
    parts += " (" + ", ".join(f"{name} {seconds}" for name, seconds in line["train_parts_s"].items()) + ")"
    others = "  ".join(
        f"{name} {seconds} ({line['ratio'][name]}×)" for name, seconds in line["peers"].items()
    )
    print(f"{line['case']['model']:<6} ours {line['ours']} s: {parts}   {others}", flush=True)
