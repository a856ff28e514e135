"""A whole GRPO step on CPU against TRL's GRPOTrainer, interleaved in one run, with a floor beside them.

    python benchmarks/grpo_step.py [--json FILE] [--trl-python .venv-trl/bin/python] [--rounds 3]
    python benchmarks/grpo_step.py --device cuda [--model 0.6b,135m,1.5b] [--deterministic] [--trl-path FOLDER] …

On an accelerator see `grpo_step_cuda.py`. Where TRL is not installed it is skipped, and the report says why.

The same work for both: 8 prompts × 8 samples, prompts of 16 tokens, completions of up to 32, no reference model, one
update, float32, a reward that costs nothing, random weights of the same shape. Ours is a real run: two model workers,
two generation servers and a rollout worker, one thread each, on the machine's two cores. TRL runs in one process, with
one thread and with two, and the better one counts. A step is the time from one step's record to the next, everything
included: generation, reward, training, new weights. The floor is one plain forward and backward pass over as many
tokens, by the same model code, with one thread or two, whichever is faster: no generation, no optimizer, no processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

HERE = Path(__file__).parent
PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 16, 32
SKIPPED = 5
"""First steps of every run, in which caches and allocators warm up."""
THREADS = (1, 2)
RUN_TIMEOUT_S = 600


class Shape(msgspec.Struct, frozen=True):
    """Of the model that both train."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int = 4
    num_heads: int = 4
    steps: int = 40

    @property
    def intermediate_size(self) -> int:
        return 4 * self.hidden_size


SHAPES = (Shape("small", 64, 128), Shape("large", 160, 512, steps=25))


class Steps(msgspec.Struct, frozen=True):
    """What one run of one side gave: the median step, and how long completions were (both may end early)."""

    seconds: float
    completion_tokens: float


def alphabet(size: int) -> str:
    """As many characters as a model of this vocabulary has besides its two special tokens."""
    plain = string.digits + string.ascii_letters
    further = (chr(code) for code in range(0x100, 0x1000) if chr(code).isalpha())
    return (plain + "".join(character for character, _ in zip(further, range(size), strict=False)))[
        : size - 2
    ]


def prompts(count: int, *, seed: int) -> list[str]:
    stream = random.Random(seed)
    return ["".join(stream.choices(string.hexdigits[:16], k=PROMPT_TOKENS)) for _ in range(count)]


def cheap_reward(completions: list[str], **columns: Any) -> list[float]:
    """Varies within a group, so that there is something to learn, and costs nothing."""
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]


def our_steps(shape: Shape, folder: Path, *, number: int) -> Steps:
    """A run of ours, read from its own metrics."""
    data = folder / "prompts.jsonl"
    rows = prompts(PROMPTS * (shape.steps + 1), seed=0)
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows), encoding="utf-8")
    recipe = {
        "name": "grpo_step",
        "run_dir": str(folder / f"run-{shape.name}-{number}"),
        "model": {
            "new": {
                "hidden_size": shape.hidden_size,
                "intermediate_size": shape.intermediate_size,
                "num_layers": shape.num_layers,
                "num_heads": shape.num_heads,
                "num_kv_heads": shape.num_heads,
                "max_positions": 64,
                "alphabet": alphabet(shape.vocab_size),
            }
        },
        "data": {"source": str(data), "num_eval": 1},
        "sampling": {"max_new_tokens": COMPLETION_TOKENS},
        "generation": {"servers": 2, "slots": 32, "max_length": PROMPT_TOKENS + COMPLETION_TOKENS},
        "rollout": {"workers": 1},
        "actor": {"workers": 2, "logical_shards": 2},
        "algorithm": {
            "name": "grpo",
            "steps": shape.steps,
            "batch_size": PROMPTS,
            "group_size": SAMPLES,
            "reward": ["grpo_step.cheap_reward"],
        },
        "eval": {"num_samples": 0},
        "checkpoint": {"every": 0},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "kintsugi", "train", str(path)],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=RUN_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE.parent), str(HERE)))},
    )
    lines = (Path(str(recipe["run_dir"])) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "timing/step" in line]
    times = [line["time"] for line in steps]
    return Steps(
        median_step(times), statistics.mean(line["completions/mean_length"] for line in steps[SKIPPED:])
    )


def median_step(times: Sequence[float]) -> float:
    """From the moments at which steps ended."""
    return statistics.median(
        after - before for before, after in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)
    )


def trl_steps(shape: Shape, python: Path, *, threads: int) -> tuple[Steps, str]:
    """A run of TRL's trainer in its own environment, and TRL's version."""
    order = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "alphabet": alphabet(shape.vocab_size),
        "prompts": prompts(PROMPTS * (shape.steps + 1), seed=0),
        "num_prompts": PROMPTS,
        "num_samples": SAMPLES,
        "completion_tokens": COMPLETION_TOKENS,
        "steps": shape.steps,
        "threads": threads,
    }
    done = subprocess.run(
        [str(python), str(HERE / "grpo_step_trl.py")],
        input=json.dumps(order),
        check=True,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": str(threads)},
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    return Steps(median_step(answer["times"]), answer["completion_tokens"]), answer["version"]


def floor_seconds(shape: Shape, *, threads: int) -> float:
    """One forward and backward pass over a step's tokens, in a process with this many threads."""
    done = subprocess.run(
        [sys.executable, __file__, "--floor", msgspec.json.encode(shape).decode()],
        check=True,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    return float(done.stdout)


def measure_floor(shape: Shape) -> float:
    import torch

    from kintsugi.config.schema import NewModel
    from kintsugi.model.attention import PackedLayout
    from kintsugi.model.plan import new_model_config
    from kintsugi.model.tokenizer import character_tokenizer
    from kintsugi.model.transformer import Transformer, initialize

    new = NewModel(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        max_positions=64,
        alphabet=alphabet(shape.vocab_size),
    )
    config = new_model_config(new, tokenizer=character_tokenizer(new.alphabet))
    model = Transformer(config, dtype=torch.float32, device=torch.device("cpu"))
    initialize(model, 0)
    length = PROMPT_TOKENS + COMPLETION_TOKENS
    count = PROMPTS * SAMPLES
    layout = PackedLayout.from_lengths([length] * count, device=torch.device("cpu"))
    tokens = torch.randint(0, shape.vocab_size, (count * length,))
    predicted = torch.arange(count * length).view(count, length)[:, PROMPT_TOKENS - 1 : -1].flatten()
    seconds = []
    for _ in range(15):
        start = time.perf_counter()
        hidden = model.forward_packed(tokens, layout.positions, layout)
        logprobs, _ = model.token_logprobs(hidden.index_select(0, predicted), tokens[predicted + 1])
        logprobs.sum().backward()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def row(shape: Shape, *, ours: Steps, trl: dict[int, Steps], floor: float) -> dict[str, Any]:
    peer: dict[str, Any] = {}
    ratio: dict[str, float] = {}
    if trl:
        threads, best = min(trl.items(), key=lambda item: item[1].seconds)
        peer = {"trl_threads": threads, "trl_completion_tokens": round(best.completion_tokens, 1)}
        ratio = {"trl": round(best.seconds / ours.seconds, 2)}
    return {
        "case": {
            **msgspec.to_builtins(shape),
            "ours_completion_tokens": round(ours.completion_tokens, 1),
            **peer,
        },
        "unit": "ms per step",
        "ours": round(1e3 * ours.seconds, 1),
        "peers": {
            **{f"trl, {count} thread(s)": round(1e3 * each.seconds, 1) for count, each in trl.items()},
            "floor": round(1e3 * floor, 1),
        },
        "ratio": {**ratio, "floor": round(floor / ours.seconds, 2)},
    }


def measured(
    shape: Shape, *, rounds: int, trl_python: Path | None, folder: Path
) -> tuple[dict[str, Any], str]:
    """Medians over the rounds; each round runs ours, then the peer with one thread and two, then the floor."""
    ours: list[Steps] = []
    trl: dict[int, list[Steps]] = {threads: [] for threads in THREADS if trl_python is not None}
    floors: dict[int, list[float]] = {threads: [] for threads in THREADS}
    version = ""
    for number in range(rounds):
        ours.append(our_steps(shape, folder, number=number))
        for threads in THREADS:
            if trl_python is not None:
                steps, version = trl_steps(shape, trl_python, threads=threads)
                trl[threads].append(steps)
            floors[threads].append(floor_seconds(shape, threads=threads))
    return row(
        shape,
        ours=median_of(ours),
        trl={threads: median_of(steps) for threads, steps in trl.items()},
        floor=min(statistics.median(seconds) for seconds in floors.values()),
    ), version


def median_of(runs: Sequence[Steps]) -> Steps:
    return Steps(
        statistics.median(run.seconds for run in runs),
        statistics.median(run.completion_tokens for run in runs),
    )


def cpu_rows(
    arguments: argparse.Namespace, *, folder: Path, skipped: dict[str, str]
) -> Iterator[dict[str, Any]]:
    trl_python: Path | None = arguments.trl_python or HERE.parent / ".venv-trl/bin/python"
    if trl_python is not None and not trl_python.exists():
        skipped["trl"] = f"there is no {trl_python}"
        print(f"skipped: trl: {skipped['trl']}", file=sys.stderr, flush=True)
        trl_python = None
    for shape in SHAPES:
        line, version = measured(shape, rounds=arguments.rounds, trl_python=trl_python, folder=folder)
        print(
            f"{shape.name:<8} ours {line['ours']:>8} ms   {line['peers']}   ratio {line['ratio']}   {line['case']}"
        )
        yield {**line, "trl_version": version}


def cuda_rows(
    arguments: argparse.Namespace, *, folder: Path, skipped: dict[str, str]
) -> Iterator[dict[str, Any]]:
    from benchmarks import grpo_step_cuda

    trl = grpo_step_cuda.Trl(arguments.trl_python or Path(sys.executable), arguments.trl_path)
    models = arguments.model.split(",") if arguments.model else grpo_step_cuda.MODELS_HERE
    for line in grpo_step_cuda.rows(
        folder, models=models, trl=trl, deterministic=arguments.deterministic, skipped=skipped
    ):
        grpo_step_cuda.show(line)
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trl-python", type=Path, help="on a CPU .venv-trl, else this interpreter")
    parser.add_argument(
        "--trl-path", default="", help="on an accelerator: folder of wheels with TRL and vLLM"
    )
    parser.add_argument("--model", help="on an accelerator: some of 0.6b, 135m, 1.5b, with commas between")
    parser.add_argument(
        "--deterministic", action="store_true", help="on an accelerator: equal bits, as by default"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.floor is not None:
        print(measure_floor(msgspec.json.decode(arguments.floor, type=Shape)))
        return
    report: dict[str, Any] = {
        "host": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [],
        "skipped": {},
    }
    make = cuda_rows if arguments.device == "cuda" else cpu_rows
    with tempfile.TemporaryDirectory() as folder:
        for line in make(arguments, folder=Path(folder), skipped=report["skipped"]):
            report["rows"].append(line)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
