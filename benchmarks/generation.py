"""How fast tokens are sampled: our engine and its peers, their rounds alternating in one run.

    python benchmarks/generation.py [--device cpu|cuda] [--model tiny|135m|0.6b|1.5b] [--part …] [--rounds 5] [--json F]

Random weights of the model's shape (the same for all sides), random prompts (new ones each round), end tokens ignored,
nothing cut off the distribution, every side warm. Prefill and sampling are counted. Ours also computes the
log-probability of every token, which of the others only `vllm` is asked for. A ratio above 1 means that ours is faster.
A peer whose environment is missing is skipped, and the report says why.

On a CPU every side has one thread:
    generate   the whole batch at once (tiny 64, 135m 32), 32 + 128 tokens: `transformers.generate` in fp32 and bf16,
               llama.cpp in bf16; the tiny one also in our deterministic mode
    batches    1, 16 and 64 sequences in bf16: llama.cpp, vLLM
    growth     our tokens per second by batch and context
On an accelerator, in bf16:
    generate   128 + 512 tokens at 64 and 256 sequences: `transformers.generate`
    vllm       the same, and the mixed workload: vLLM with the log-probability of every sampled token
    workload   256 sequences, prompts and completions of 100 to 1024 tokens, temperature 0.6 (nano-vLLM's benchmark)
    roofline   decoding at a context of 384 against the time to read weights and keys and values once
    samples    prefill and pages of 16 samples of a prompt against 1
    logprobs   decoding with the most likely tokens' log-probabilities asked for, against without
    swap       new weights while requests run
    growth     tokens per second by batch and context
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.generation_rounds import Order
from benchmarks.generation_sides import (
    MODELS,
    Case,
    MixedCase,
    SideProcess,
    alternate,
    present,
    running,
    write_model,
)

ROOT = Path(__file__).resolve().parents[1]
CPU_PARTS = ("generate", "batches", "growth")
CUDA_PARTS = ("generate", "vllm", "workload", "roofline", "samples", "logprobs", "swap", "growth")
GENERATE_BATCH = {"tiny": 64, "135m": 32}
PEERS_NEED_WEIGHTS = ("generate", "vllm")
"""Parts on an accelerator whose sides read the model from a folder."""
VLLM_MEMORY_SHARE = 0.4
"""Ours and vLLM are on the card together; each has room for all sequences."""


def cpu_sides(part: str, *, model: str) -> dict[str, tuple[str, str, bool]]:
    """Name: (program, dtype, deterministic)."""
    peers = {"llama.cpp": ("generation_llama", "bfloat16", False)}
    if part == "batches":
        return {
            "ours bf16": ("generation_ours", "bfloat16", False),
            **peers,
            "vllm": ("generation_vllm", "bfloat16", False),
        }
    sides = {
        "ours fp32": ("generation_ours", "float32", False),
        "transformers fp32": ("generation_transformers", "float32", False),
        "ours bf16": ("generation_ours", "bfloat16", False),
        "transformers bf16": ("generation_transformers", "bfloat16", False),
        **peers,
    }
    if model == "tiny":
        sides["ours fp32 deterministic"] = ("generation_ours", "float32", True)
        sides["ours bf16 deterministic"] = ("generation_ours", "bfloat16", True)
    return sides


def cpu_part(part: str, *, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of one part. Both dtypes stand in one case, so that they alternate too."""
    model: str = arguments.model
    chosen = cpu_sides(part, model=model)
    batches = (1, 16, 64) if part == "batches" else (GENERATE_BATCH[model],)
    sides = present(
        {
            name: SideProcess(
                program,
                pythons(arguments)[program],
                Order(str(folder), dtype, "cpu", max(batches), 32 + 128, deterministic),
                folder / f"{name.replace(' ', '-')}.log",
            )
            for name, (program, dtype, deterministic) in chosen.items()
        },
        skipped=arguments.skipped,
    )
    chosen = {name: chosen[name] for name in sides}
    cases = [Case(batch, 32, 128, list(chosen)) for batch in batches]
    with running(sides):
        figures = alternate(
            cases,
            sides=sides,
            rounds=arguments.rounds,
            vocab_size=MODELS[model].vocab_size,
            whole_warm_up=False,
        )
    rows = []
    for each in figures:
        for ours in [name for name in chosen if name.startswith("ours")]:
            peers = [name for name in chosen if comparable(ours, peer=name)]
            each.case = Case(each.case.batch, 32, 128, [ours, *peers])
            mode = " deterministic" if "deterministic" in ours else ""
            rows.append(each.row(part=part, model=model, dtype=chosen[ours][1] + mode))
    return rows


def comparable(ours: str, *, peer: str) -> bool:
    """The same dtype, or an engine that has only one."""
    if peer.startswith("ours"):
        return False
    return peer in {"llama.cpp", "vllm"} or peer.split()[1] == ours.split()[1]


def cuda_sides(
    programs: dict[str, str], order: Order, *, arguments: argparse.Namespace, folder: Path
) -> dict[str, SideProcess]:
    """Sides on an accelerator, without those that are not installed."""
    sides = {
        name: SideProcess(
            program,
            pythons(arguments)[program],
            order,
            folder / f"{name}.log",
            path=arguments.vllm_path if program == "generation_vllm" else "",
        )
        for name, program in programs.items()
    }
    return present(sides, skipped=arguments.skipped)


def cuda_generate(*, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Whole batches against `transformers.generate`, whose shapes have to be warm."""
    order = Order(str(folder), "bfloat16", "cuda", 256, 128 + 512)
    programs = {"ours": "generation_ours", "transformers": "generation_transformers"}
    sides = cuda_sides(programs, order, arguments=arguments, folder=folder)
    cases = [Case(batch, 128, 512, list(sides)) for batch in (64, 256)]
    return cuda_rows("generate", cases, sides=sides, arguments=arguments)


def cuda_vllm(*, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Whole batches and the mixed workload against vLLM; both compute the log-probability of every sampled token."""
    order = Order(str(folder), "bfloat16", "cuda", 256, 2048, logprobs=True, memory_share=VLLM_MEMORY_SHARE)
    programs = {"ours": "generation_ours", "vllm": "generation_vllm"}
    sides = cuda_sides(programs, order, arguments=arguments, folder=folder)
    cases = [*(Case(batch, 128, 512, list(sides)) for batch in (64, 256)), MixedCase(sides=list(sides))]
    return cuda_rows("vllm", cases, sides=sides, arguments=arguments)


def cuda_rows(
    part: str, cases: Sequence[Case], *, sides: dict[str, SideProcess], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    with running(sides):
        figures = alternate(
            cases,
            sides=sides,
            rounds=arguments.rounds,
            vocab_size=MODELS[arguments.model].vocab_size,
            whole_warm_up=True,
        )
    versions = {name: side.version for name, side in sides.items()}
    return [
        {**each.row(part=part, model=arguments.model, dtype="bfloat16"), "versions": versions}
        for each in figures
    ]


def pythons(arguments: argparse.Namespace) -> dict[str, Path]:
    """Interpreter of each side. On an accelerator's host one environment has all there is."""
    own = Path(sys.executable)
    vllm = own if arguments.vllm_python is None and arguments.device == "cuda" else arguments.vllm_python
    return {
        "generation_ours": own,
        "generation_transformers": own,
        "generation_llama": arguments.llama_python,
        "generation_vllm": vllm or ROOT / ".venv-vllm/bin/python",
    }


def show(row: dict[str, Any]) -> None:
    case = "  ".join(f"{key} {value}" for key, value in row["case"].items())
    others = "  ".join(
        f"{peer} {value:g} ({row['ratio'][peer]}×, by CPU time {row['ratio_of_cpu_seconds'][peer]}×)"
        for peer, value in row.get("peers", {}).items()
    )
    further = "  ".join(f"{key} {value}" for key, value in row.get("further", {}).items())
    print(
        f"{row['part']:<9} {case:<60} ours {row['ours']:g} {row['unit']}  {others}  {further}".rstrip(),
        flush=True,
    )


def host(device: str) -> str:
    words = [f"{platform.machine()}, {os.cpu_count()} cores"]
    if device == "cuda":
        words.append(torch.cuda.get_device_name())
    words.append(f"Python {platform.python_version()}, torch {torch.__version__}")
    words.append(f"load {os.getloadavg()[0]:.1f} before")
    return ", ".join(words)


def measured(part: str, *, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    from benchmarks import generation_parts

    if part == "growth":
        return generation_parts.growth(arguments.model, rounds=arguments.rounds, device=arguments.device)
    if arguments.device == "cpu":
        return cpu_part(part, arguments=arguments, folder=folder)
    if part == "generate":
        return cuda_generate(arguments=arguments, folder=folder)
    if part == "vllm":
        return cuda_vllm(arguments=arguments, folder=folder)
    return generation_parts.PARTS[part](arguments.model, rounds=arguments.rounds)


def main() -> None:
    arguments = parsed(sys.argv[1:])
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    report: dict[str, Any] = {
        "host": host(arguments.device),
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["benchmarks/generation.py", *sys.argv[1:]]),
        "rows": [],
        "skipped": arguments.skipped,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.device == "cpu" or not set(PEERS_NEED_WEIGHTS).isdisjoint(arguments.part):
            dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
            write_model(MODELS[arguments.model], folder=folder, dtype=dtype, device=arguments.device)
        for part in arguments.part:
            for row in measured(part, arguments=arguments, folder=folder):
                show(row)
                report["rows"].append(row)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(MODELS))
    parser.add_argument("--part", help="some of the device's parts, with commas between; otherwise all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--llama-python", type=Path, default=ROOT / ".venv-llama/bin/python")
    parser.add_argument("--vllm-python", type=Path, help="on a CPU .venv-vllm, else this interpreter")
    parser.add_argument("--vllm-path", default="", help="folder of unpacked wheels with vLLM")
    arguments = parser.parse_args(words)
    arguments.skipped = {}
    if arguments.model is None:
        arguments.model = "tiny" if arguments.device == "cpu" else "0.6b"
    known = CPU_PARTS if arguments.device == "cpu" else CUDA_PARTS
    arguments.part = list(known) if arguments.part is None else arguments.part.split(",")
    unknown = set(arguments.part) - set(known)
    if unknown:
        parser.error(
            f"--part knows {', '.join(known)} on {arguments.device}, not {', '.join(sorted(unknown))}"
        )
    if arguments.device == "cpu" and arguments.model not in GENERATE_BATCH:
        parser.error(f"on a CPU --model is {' or '.join(GENERATE_BATCH)}")
    return arguments


if __name__ == "__main__":
    main()
