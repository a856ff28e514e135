"""Estimates for models that are larger than a card: memory, time of a training step, and recovery, by layout.

    python benchmarks/layout_model.py [--json FILE]

Nothing is measured here, and nothing of it was run on more than one card. Memory is the estimate of `kintsugi check`
(`kintsugi/model/memory.py`) for the part of the model that one stage and one tensor slice hold. Time is

    computation   matrix FLOPs, attention FLOPs and bytes of the other kernels; the rate of these is fitted on `FITTED`
    bubble        (stages - 1) / (micro-batches + stages - 1) of the pipeline
    tensors       four ordered sums per layer and micro-batch, over the links inside of a host
    stages        activations and their gradients, once per micro-batch and stage boundary
    exchange      gradients in float32 to the shards and replicas, weights back in bfloat16
    update        AdamW and digest of the part of the state that one rank holds

of which nothing is taken to overlap. Weights to the servers: the model of `weight_sync_model.py`. `CHECKED` are
measured"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.config.schema import ActorSection, Config, GenerationSection, LayoutSection
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.memory import RunMemory
from kintsugi.model.plan import Companions

GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """Rates that are assumed; those of the device were measured on one H200."""

    device_gb: float = 141.0
    devices_per_host: int = 8
    inside_bytes_per_s: float = 300e9
    """Between devices of a host, per device and direction: NVLink of 450 GB/s, two thirds of it reached."""
    outside_bytes_per_s: float = 40e9
    """Between hosts, per device and direction: 400 Gbit/s for each device, four fifths of it reached."""
    memory_bytes_per_s: float = 4.3e12
    host_copy_bytes_per_s: float = 11.8e9
    """From host memory to a device, verified: 21 GB in 1.8 s (kill of a rank at 1.78 B parameters)."""
    fetch_bytes_per_s: float = 1.05e9
    """Of one rank that fetches its part from another host: the bulk channel on two cores, authenticated."""
    digest_bytes_per_s: float = 3.25e12
    notice_rank_s: float = 1.5
    notice_host_s: float = 15.0
    """Silence after which a host is given up; 2.5 s if its connections were closed."""
    start_s: float = 3.4
    group_s: float = 1.4
    """New groups of a few ranks; `group_of` adds to it."""

    def group_of(self, num_ranks: int) -> float:
        """Seconds to make new groups: assumed to grow with the logarithm of the ranks."""
        return self.group_s + 0.5 * math.log2(max(1, num_ranks))


@dataclass(frozen=True)
class Load:
    """One step of training."""

    num_samples: int = 512
    length: int = 4096
    block_tokens: int = 16384

    @property
    def num_tokens(self) -> int:
        return self.num_samples * self.length


class Layout(NamedTuple):
    replicas: int = 1
    shards: int = 1
    stages: int = 1
    tensors: int = 1

    @property
    def num_ranks(self) -> int:
        return self.replicas * self.shards * self.stages * self.tensors

    @property
    def width(self) -> int:
        """Ranks among which the samples are divided."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        return " × ".join(map(str, self))


class Rates(NamedTuple):
    """FLOP/s of products and of attention, bytes per second of everything else in a layer."""

    other: float
    """Fitted."""
    matrix: float = 0.9 * 790e12
    """Assumed for all products: nine tenths of the highest rate that was measured."""
    attention: float = 6.0 / (2.0 / 303e12 + 5.0 / 263e12)
    """Measured forward and backward, deterministic, at 16 k tokens; in the FLOPs that are counted here."""


FORWARD_OF_ATTENTION = (2.0 / 303e12) / (2.0 / 303e12 + 5.0 / 263e12)
"""Share of the forward pass in the time of attention: what recomputation adds."""


def qwen(
    layers: int, hidden: int, inner: int, heads: int, kv: int, *, tied: bool, **given: Any
) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=given.get("vocab", 151936),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=given.get("head_dim", 128),
        max_positions=131072,
        tie_embeddings=tied,
    )


SMALLEST = 0.5e9
"""Parameters below which launches of kernels, which are not modelled, take most of the time."""

MODELS = {
    "135m": qwen(30, 576, 1536, 9, 3, tied=True, vocab=49152, head_dim=64),
    "0.6b": qwen(28, 1024, 3072, 16, 8, tied=True),
    "1.5b": qwen(28, 1536, 8960, 12, 2, tied=True),
    "1.78b": qwen(28, 1536, 8960, 12, 2, tied=False),
    "4b": qwen(36, 2560, 9728, 32, 8, tied=True),
    "8b": qwen(36, 4096, 12288, 32, 8, tied=False),
    "14b": qwen(40, 5120, 17408, 40, 8, tied=False),
    "32b": qwen(64, 5120, 25600, 64, 8, tied=False),
    "70b": qwen(80, 8192, 28672, 64, 8, tied=False, vocab=128256),
}
"""Sizes of Qwen3, Qwen2.5 (1.5b, 1.78b), SmolLM2 (135m) and Llama 3.1 (70b), without biases."""


class Plan(NamedTuple):
    devices: int
    num_samples: int
    layouts: tuple[Layout, ...]


PLANS = {
    "8b": Plan(16, 512, (Layout(1, 16), Layout(2, 8), Layout(2, 4, 1, 2), Layout(2, 2, 2, 2))),
    "32b": Plan(
        64,
        1024,
        (
            Layout(2, 16, 1, 2),
            Layout(2, 8, 1, 4),
            Layout(2, 8, 2, 2),
            Layout(2, 4, 2, 4),
            Layout(1, 8, 1, 8),
        ),
    ),
    "70b": Plan(
        512,
        4096,
        (
            Layout(2, 32, 1, 8),
            Layout(2, 32, 2, 4),
            Layout(2, 16, 2, 8),
            Layout(2, 16, 4, 4),
            Layout(2, 8, 4, 8),
        ),
    ),
}


class Throughput(NamedTuple):
    """Tokens per second of forward and backward pass on one H200 (benchmarks/RESULTS.md)."""

    model: str
    length: int
    tokens_per_s: float
    what: str
    recompute: bool = False


FITTED = (
    Throughput("1.5b", 320, 57_300, "training alone"),
    Throughput("1.5b", 16384, 28_600, "training alone"),
    Throughput("0.6b", 320, 111_000, "training alone"),
    Throughput("0.6b", 4096, 66_100, "training alone"),
)
CHECKED = (
    Throughput("1.5b", 4096, 43_600, "training alone"),
    Throughput("1.5b", 65536, 12_200, "training alone"),
    Throughput("1.5b", 320, 57_300 * 51.9 / 67.8, "training alone, recompute", recompute=True),
    Throughput("1.5b", 65536, 12_200 * 32.4 / 40.5, "training alone, recompute", recompute=True),
    Throughput("1.78b", 336, 172_000 / 3.06, "`train` of a GRPO step on GSM8K"),
    Throughput("1.78b", 480, 247_000 / 4.45, "`train` of a GRPO step, random weights"),
    Throughput("0.6b", 320, 32 * 8 * 320 / 0.79, "`train` of a GRPO step"),
    Throughput("135m", 320, 32 * 8 * 320 / 0.71, "`train` of a GRPO step"),
)


class MeasuredMemory(NamedTuple):
    """Bytes per parameter of state, gradient and compute weights on one rank."""

    what: str
    dtype: str
    shards: int
    measured: float


MEMORY = (
    MeasuredMemory("0.47 B, peak of the update, H200", "bfloat16", 1, 18.3),
    MeasuredMemory("135 M, resident, CPU", "bfloat16", 1, 18.04),
    MeasuredMemory("135 M, resident, CPU", "bfloat16", 2, 12.02),
    MeasuredMemory("135 M, resident, CPU", "bfloat16", 4, 9.02),
    MeasuredMemory("0.4 M, resident, CPU", "float32", 1, 16.93),
    MeasuredMemory("0.4 M, resident, CPU", "float32", 2, 14.80),
    MeasuredMemory("0.4 M, resident, CPU", "float32", 4, 11.79),
)


# FLOPs and bytes of one token.


def matrix_flops(model: ModelConfig) -> float:
    """6 per token and parameter of a matrix; the embedding is only looked up."""
    attention = 2 * model.query_size + 2 * model.kv_size
    layer = model.hidden_size * (attention + 3 * model.intermediate_size)
    return 6.0 * (model.num_layers * layer + model.hidden_size * model.vocab_size)


def attention_flops(model: ModelConfig, length: int) -> float:
    """Causal attention, forward and backward."""
    return 6.0 * model.num_layers * model.query_size * length


def other_bytes(model: ModelConfig) -> float:
    """Bytes that norms, rotation, gate and residuals move, forward and backward, as if each tensor were read and
    written once."""
    layer = 6 * model.hidden_size + 3 * (model.query_size + model.kv_size) + 3 * model.intermediate_size
    return 2.0 * 2.0 * 2.0 * model.num_layers * layer


def token_seconds(model: ModelConfig, *, length: int, rates: Rates, recompute: bool) -> float:
    """Seconds of one token, forward and backward, on one device."""
    again = 1.0 / 3.0 if recompute else 0.0
    head = 6.0 * model.hidden_size * model.vocab_size
    # Logits are always computed twice.
    matrix = (1.0 + again) * (matrix_flops(model) - head) + 4.0 / 3.0 * head
    attention = attention_flops(model, length) * (1.0 + FORWARD_OF_ATTENTION * recompute)
    other = (1.0 + again) * other_bytes(model)
    return matrix / rates.matrix + attention / rates.attention + other / rates.other


def fit(points: Sequence[Throughput] = FITTED) -> Rates:
    """The rate of the other kernels with the least squared relative error."""
    units, rest = [], []
    for point in points:
        model, at_most = MODELS[point.model], Rates(other=math.inf)
        given = token_seconds(model, length=point.length, rates=at_most, recompute=point.recompute)
        units.append(other_bytes(model) * (4.0 / 3.0 if point.recompute else 1.0) * point.tokens_per_s)
        rest.append(1.0 - given * point.tokens_per_s)
    return Rates(other=sum(unit**2 for unit in units) / sum(map(math.prod, zip(units, rest, strict=True))))


# One layout.


class Estimate(msgspec.Struct, frozen=True):
    """One model on one layout."""

    layout: str
    device_gb: float
    host_gb: float
    """Host memory of all ranks of a host: snapshots and published versions."""
    fits: bool
    step_s: float
    communication: float
    """Share of the step."""
    bubble: float
    """Share of the pipeline's time."""
    tokens_per_device_s: float
    weights_s: float
    rank_s: float
    """From the loss of a rank to where the run was, at most: the lost step is trained again."""
    host_s: float


def part_of(model: ModelConfig, layout: Layout) -> ModelConfig:
    """What the largest stage and one tensor slice hold. Embedding and head are counted at the same stage."""
    tensors = layout.tensors
    return msgspec.structs.replace(
        model,
        num_layers=-(-model.num_layers // layout.stages),
        num_heads=model.num_heads // tensors,
        num_kv_heads=max(1, model.num_kv_heads // tensors),
        intermediate_size=model.intermediate_size // tensors,
        vocab_size=-(-model.vocab_size // tensors),
    )


def memory_of(model: ModelConfig, layout: Layout, load: Load, hardware: Hardware) -> tuple[float, float]:
    """Bytes of one rank on its device, and of all ranks of a host in host memory."""
    config = Config(
        name="estimate",
        actor=ActorSection(
            workers=layout.width,
            dtype="bfloat16",
            recompute=True,
            micro_batch_tokens=load.block_tokens,
            layout=LayoutSection(shards=layout.shards),
        ),
        generation=GenerationSection(backend="vllm"),
    )
    # As many devices as ranks, and no server on them.
    memory = RunMemory(config, part_of(model, layout), Companions(), num_devices=layout.width)
    rank = memory.of_process("model-0")
    device = dict(rank.device)
    # A stage holds the activations of as many micro-batches as there are stages behind it, in layer inputs.
    ahead = min(layout.stages, num_micro_batches(layout, load)) - 1
    inputs = 2 * model.hidden_size * load.block_tokens * -(-model.num_layers // layout.stages)
    return sum(device.values()) + ahead * inputs, hardware.devices_per_host * rank.host_bytes


def num_micro_batches(layout: Layout, load: Load) -> int:
    return max(1, math.ceil(load.num_tokens / layout.width / load.block_tokens))


def link(ranks: int, inner: int, hardware: Hardware) -> float:
    """Rate of a group of so many ranks, of which neighbours are `inner` devices apart: within a host or beyond."""
    return (
        hardware.inside_bytes_per_s
        if ranks * inner <= hardware.devices_per_host
        else hardware.outside_bytes_per_s
    )


def estimate(model: ModelConfig, layout: Layout, *, rates: Rates, load: Load, hardware: Hardware) -> Estimate:
    r, z, p, t = layout
    count = num_parameters(model)
    column = count / (p * t)
    box = column / z
    passes = num_micro_batches(layout, load)
    rows = load.num_tokens / layout.width / passes
    compute = rows * passes * token_seconds(model, length=load.length, rates=rates, recompute=True) / (p * t)
    bubble = (p - 1) / (passes + p - 1)
    pipeline = compute / (1 - bubble)
    # Forward, its repetition and backward: two sums each. To all and back: float32 rows, then bfloat16.
    sums = 6 * model.num_layers / p * passes * rows * model.hidden_size * (4 + 2) * (t - 1) / t
    tensors = sums / hardware.inside_bytes_per_s
    edges = 2 * passes * rows * model.hidden_size * 2 * (p > 1) / link(p, t, hardware)
    among, between = link(z, t * p, hardware), link(r, t * p * z, hardware)
    exchange = (4 + 2) * column * (z - 1) / z / among + 4 * box * (r - 1) / between
    update = 40 * box / hardware.memory_bytes_per_s + 12 * box / hardware.digest_bytes_per_s
    communication = tensors + edges + exchange
    step = pipeline + communication + update
    device, host = memory_of(model, layout, load, hardware)
    hosts = -(-layout.num_ranks // hardware.devices_per_host)
    group = hardware.group_of(layout.num_ranks)
    state = 12 * box / hardware.host_copy_bytes_per_s
    rank = hardware.notice_rank_s + hardware.start_s + group + state + step
    # The ranks of a lost host fetch their parts at the same time, each with the rate of one rank.
    fetched = 12 * box / hardware.fetch_bytes_per_s
    return Estimate(
        layout=str(layout),
        device_gb=device / GB,
        host_gb=host / GB,
        fits=device <= hardware.device_gb * GB,
        step_s=step,
        communication=communication / step,
        bubble=bubble,
        tokens_per_device_s=load.num_tokens / step / layout.num_ranks,
        weights_s=weights_seconds(2 * count, hosts=hosts, rate=hardware.outside_bytes_per_s),
        rank_s=rank,
        host_s=hardware.notice_host_s + hardware.start_s + group + fetched + state + step,
    )


def weights_seconds(size: float, *, hosts: int, rate: float) -> float:
    """The fit of `weight_sync_model.py`: one link of a host, a chain of hosts."""
    return 0.10 + 1.07 * size / rate + (hosts - 1) * (0.08 + 1.07 * 2e6 / rate)


# Measured points, and what others publish.


def deviations(rates: Rates) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for points in (FITTED, CHECKED):
        for point in points:
            kind = "fitted" if points is FITTED else "unseen"
            if num_parameters(MODELS[point.model]) < SMALLEST:
                kind = "outside"
            model = MODELS[point.model]
            seconds = token_seconds(model, length=point.length, rates=rates, recompute=point.recompute)
            what = f"{point.model}, {point.what}, length {point.length}"
            found.append(_row(kind, what, "tokens/s", point.tokens_per_s, 1 / seconds))
    for each in MEMORY:
        width = 2 if each.dtype == "bfloat16" else 4
        weights = width if width < 4 or each.shards > 1 else 0
        what = f"{each.what}, {each.dtype}, shards {each.shards}"
        found.append(_row("unseen", what, "B/parameter", each.measured, 12 / each.shards + 4 + weights))
    hardware = Hardware()
    train = 172_000 * token_seconds(MODELS["1.78b"], length=336, rates=rates, recompute=False)
    lost = hardware.notice_rank_s + hardware.start_s + hardware.group_s
    lost += 12 * num_parameters(MODELS["1.78b"]) / hardware.host_copy_bytes_per_s + train
    # 12.9 s were measured with a step of 4.95 s, of which 1.79 s are generation, which is not repeated here.
    found.append(_row("unseen", "1.78b, SIGKILL of the rank → next step", "s", 12.9, lost))
    return found


def _row(kind: str, what: str, unit: str, measured: float, predicted: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "what": what,
        "unit": unit,
        "measured": measured,
        "predicted": predicted,
        "deviation": predicted / measured - 1,
    }


def peers(rates: Rates) -> list[tuple[str, str, str]]:
    """What others publish, beside the estimate for the same case."""
    hardware = Hardware()
    load = Load(num_samples=64, length=65536, block_tokens=65536)
    prime = estimate(MODELS["4b"], Layout(1, 8), rates=rates, load=load, hardware=hardware)
    three = num_parameters(MODELS["4b"])
    small = estimate(MODELS["4b"], Layout(2, 4), rates=rates, load=Load(), hardware=hardware)
    large = estimate(MODELS["14b"], Layout(2, 4), rates=rates, load=Load(), hardware=hardware)
    return [
        (
            "prime-rl, trainer alone, 4 B at 64 k on 8 H200",
            "29.5 k tokens/s",
            f"{8 * prime.tokens_per_device_s / 1e3:.1f} k tokens/s",
        ),
        (
            "MindCluster, recovery on 8 devices, 3 B",
            "≤ 105 s",
            f"{small.rank_s:.0f} s (4 B, {three / GB:.1f} B)",
        ),
        ("MindCluster, recovery on 8 devices, 15 B", "≤ 245 s", f"{large.rank_s:.0f} s (14 B)"),
        (
            "weights of 32 B, 16 + 16 H200, not verified",
            "2.3 s",
            f"{weights_seconds(64e9, hosts=2, rate=hardware.outside_bytes_per_s):.1f} s, one link, verified",
        ),
    ]


def report() -> dict[str, Any]:
    rates, load, hardware = fit(), Load(), Hardware()
    layouts = {
        name: [
            msgspec.to_builtins(
                estimate(
                    MODELS[name],
                    layout,
                    rates=rates,
                    load=replace(load, num_samples=plan.num_samples),
                    hardware=hardware,
                )
            )
            for layout in plan.layouts
        ]
        for name, plan in PLANS.items()
    }
    return {
        "rates": rates._asdict(),
        "load": asdict(load),
        "hardware": asdict(hardware),
        "deviations": deviations(rates),
        "layouts": layouts,
        "peers": peers(rates),
    }


def show(found: dict[str, Any]) -> None:
    print("assumption | value")
    for name, value in (found["hardware"] | found["load"]).items():
        print(f"{name} | {value:,.4g}")
    for name, value in found["rates"].items():
        print(f"{name} | {value:.3g} per second")
    print("\nkind | point | measured | model | deviation")
    for row in found["deviations"]:
        print(
            f"{row['kind']} | {row['what']} | {row['measured']:,.4g} {row['unit']} | {row['predicted']:,.4g} | "
            f"{row['deviation']:+.0%}"
        )
    for name, rows in found["layouts"].items():
        devices, samples, _ = PLANS[name]
        print(f"\n{name} on {devices} devices, {samples:,} samples: replicas × shards × stages × tensors")
        print(
            "layout | GB of a device | GB of a host | step s | communication | bubble | tokens/s and device | "
            "weights s | rank s | host s"
        )
        for row in rows:
            fits = "" if row["fits"] else " (does not fit)"
            print(
                f"{row['layout']} | {row['device_gb']:.0f}{fits} | {row['host_gb']:.0f} | {row['step_s']:.1f} | "
                f"{row['communication']:.0%} | {row['bubble']:.0%} | {row['tokens_per_device_s']:,.0f} | "
                f"{row['weights_s']:.1f} | {row['rank_s']:.0f} | {row['host_s']:.0f}"
            )
    print("\nothers | published | estimate")
    for each in found["peers"]:
        print(" | ".join(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = report()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    show(found)


if __name__ == "__main__":
    main()
