"""Kernels of the CUDA runner: each checked against torch, then timed; and the decode step that is made of them.

    python benchmarks/gpu_kernels.py --json kernels.json

Checks draw fresh inputs and poison outputs. Timings are medians of graph replays over data that does not fit into the
cache. Bandwidths are compared with a read measured in the same run. A variant that fails is reported and passed over.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_checks import (
    DEVICE,
    FAILURES,
    QWEN3_06B,
    Cache,
    attention_for,
    check_everything,
    failed,
    report,
    rows_of,
    run_part,
)
from kintsugi.generation.cuda import matmul
from kintsugi.generation.cuda.attention import DecodeTiling
from kintsugi.generation.cuda.matmul import ProductTiling, multiply_in_parts
from kintsugi.generation.cuda.runner import PAGE_SIZE, CudaRunner
from kintsugi.generation.engine.runner import PrefillChunk
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.transformer import Transformer
from kintsugi.types import SamplingParams

QWEN2_15B = ModelConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    max_positions=32768,
    rope_theta=1e6,
    tie_embeddings=True,
    attention_bias=True,
)


SMOLLM2_135M = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    rope_theta=1e5,
    tie_embeddings=True,
)


def new_model(config: ModelConfig) -> Transformer:
    model = Transformer(config, packed=True, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def median_us(calls: Sequence[Callable[[], object]], *, num_replays: int = 7) -> float:
    """Of one call, when all of them run in turn in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def measured_read_tb_s() -> float:
    data = torch.randn(1 << 30, device=DEVICE)
    taken = median_us([lambda: data.view(1 << 15, -1).sum(1), lambda: data.view(1 << 13, -1).sum(1)])
    return data.nbytes / taken / 1e6


def time_decode(cache: Cache, tiling: DecodeTiling, *, num_rows: int, length: int) -> float:
    """Microseconds of one layer's attention."""
    attention = attention_for(cache, max_rows=num_rows, max_length=length, decode=tiling)
    config = cache.config
    qkv = torch.randn(num_rows, config.query_size + 2 * config.kv_size, dtype=cache.dtype, device=DEVICE)
    output = torch.empty(num_rows, config.query_size, dtype=cache.dtype, device=DEVICE)
    slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    lengths = torch.full_like(slots, length)

    def call(table: Tensor) -> Callable[[], None]:
        return lambda: attention.decode(
            qkv,
            key_pages=cache.keys,
            value_pages=cache.values,
            tables=table,
            slots=slots,
            lengths=lengths,
            output=output,
            num_splits=attention.max_splits,
        )

    return median_us([call(table) for table in cache.tables(num_rows, length)] * 3)


def compare_decode(bandwidth: float) -> None:
    """Percent of the measured read bandwidth, by variant."""
    config = QWEN3_06B
    tilings = [DecodeTiling(), DecodeTiling(64, 4, 3), DecodeTiling(128, 4, 3)]
    shapes = [(8, 4096), (64, 384), (64, 1024), (64, 4096), (128, 384), (256, 384), (256, 4096), (512, 1024)]
    cache = Cache(config, num_tokens=1 << 21, page_size=PAGE_SIZE, dtype=torch.bfloat16)
    table: dict[str, dict[str, float]] = {}
    for tiling, (num_rows, length) in itertools.product(tilings, shapes):
        name = f"block {tiling.block_size} warps {tiling.num_warps}"
        name += f" stages {tiling.num_stages}"
        try:
            taken = time_decode(cache, tiling, num_rows=num_rows, length=length)
        except FAILURES as error:
            failed(f"decode {name}", error)
            continue
        num_bytes = num_rows * length * 2 * config.kv_size * 2
        share = 100 * num_bytes / taken / 1e6 / bandwidth
        table.setdefault(name, {})[f"{num_rows}x{length}"] = round(share, 1)
    report["decode_percent"] = table
    columns = [f"{num_rows}x{length}" for num_rows, length in shapes]
    print(f"decode attention, % of {bandwidth:.2f} TB/s\n{'':36}" + "".join(f"{each:>9}" for each in columns))
    for name, row in table.items():
        print(f"{name:36}" + "".join(f"{row.get(each, 0):9.1f}" for each in columns))


def time_products(model: Transformer) -> None:
    """Over all layers' weights, microseconds per launch: the library's, and ours in parts (which leave their sum to the
    launch that follows) by splits, columns, depth and rows of a tile, warps and stages."""
    decoders: list[Any] = list(model.model.layers)
    weights = {
        "out": [each.self_attn.o_proj.weight.detach() for each in decoders],
        "down": [each.mlp.down_proj.weight.detach() for each in decoders],
    }
    counts = (8, 16, 32, 64, 128)
    table: dict[str, dict[str, float]] = {}
    for (name, each), count in itertools.product(weights.items(), counts):
        for variant, calls in product_variants(each, count=count).items():
            try:
                taken = median_us(calls, num_replays=5)
            except FAILURES as error:
                failed(f"{name} {variant}", error)
                continue
            table.setdefault(f"{name} {variant}", {})[str(count)] = round(taken, 2)
    report["products_us"] = table
    print(f"{'products, µs, by rows':44}" + "".join(f"{each:>8}" for each in counts))
    for name, row in table.items():
        print(f"{name:44}" + "".join(f"{row.get(str(each), 0):8.2f}" for each in counts))


def product_variants(weights: Sequence[Tensor], *, count: int) -> dict[str, list[Callable[[], Any]]]:
    num_columns, depth = weights[0].shape
    new: Any = {"dtype": weights[0].dtype, "device": DEVICE}
    rows, output = torch.randn(count, depth, **new), torch.empty(count, num_columns, **new)
    variants: dict[str, list[Callable[[], Any]]] = {
        "library": [partial(torch.mm, rows, each.t(), out=output) for each in weights]
    }
    tilings = [ProductTiling(4), ProductTiling(8, 64, 64)]
    tilings += [ProductTiling(4, block_rows=block_rows) for block_rows in (16, 32) if count <= block_rows]
    for tiling in tilings:
        parts = torch.empty(tiling.num_splits, count, num_columns, dtype=torch.float32, device=DEVICE)
        variants[f"in parts {tuple(tiling)}"] = [
            partial(multiply_in_parts, rows, each, parts=parts, tiling=tiling) for each in weights
        ]
    return variants


def new_runner(model: Transformer, *, num_slots: int, max_length: int, **options: Any) -> CudaRunner:
    # A runner before this one has cycles, and much memory.
    gc.collect()
    torch.cuda.empty_cache()
    num_pages = num_slots * -(-max_length // PAGE_SIZE)
    runner = CudaRunner(
        model, num_slots=num_slots, max_length=max_length, num_pages=num_pages, deterministic=False, **options
    )
    torch.cuda.synchronize()
    for layer in runner._network.kv_pages:
        layer.normal_()
    order = np.random.default_rng(0).permutation(num_pages).reshape(num_slots, -1)
    runner.set_pages({slot: pages.tolist() for slot, pages in enumerate(order)})
    torch.cuda.synchronize()
    return runner


def visit_ms(runner: CudaRunner, count: int, *, length: int, num_steps: int) -> float:
    """Milliseconds per step of one visit, from the host's call to the host's result."""
    runner.start(rows_of([SamplingParams(max_new_tokens=num_steps + 8)] * count, length=length))
    torch.cuda.synchronize()
    start = time.perf_counter()
    runner.decode(range(count), num_steps=num_steps).result()
    return (time.perf_counter() - start) * 1000 / num_steps


def step_ms(runner: CudaRunner, count: int, *, length: int, num_steps: int) -> float:
    return statistics.median(visit_ms(runner, count, length=length, num_steps=num_steps) for _ in range(5))


def time_steps(
    model: Transformer, bandwidth: float, *, title: str, counts: Sequence[int], lengths: Sequence[int]
) -> None:
    config, num_steps = model.config, 32
    runner = new_runner(model, num_slots=max(counts), max_length=max(lengths) + 80)
    weight_bytes = num_parameters(config) * 2
    rows = report.setdefault("steps", [])
    print(f"{title:30} context   rows      ms   tok/s  roofline %   first visit ms")
    for length, count in itertools.product(lengths, counts):
        first = visit_ms(runner, count, length=length, num_steps=1)
        taken = step_ms(runner, count, length=length, num_steps=num_steps)
        kv_bytes = config.num_layers * 2 * config.kv_size * 2 * count * (length + num_steps / 2)
        share = 100 * (weight_bytes + kv_bytes) / bandwidth / 1e9 / taken
        rows.append({"model": title, "rows": count, "context": length + num_steps / 2, "ms": taken,
                     "percent": share, "first_ms": first})  # fmt: skip
        print(f"{length + num_steps // 2:38} {count:6} {taken:7.3f} {count / taken * 1000:7.0f} {share:11.1f}"
              f" {first:16.0f}", flush=True)  # fmt: skip
    if 64 in counts and len(lengths) == 1:
        profile_step(runner, 64, length=lengths[0])


@contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module, for a comparison."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def compare_steps(model: Transformer) -> None:
    """Whole steps at context 384, with no products in parts, and with those of twice as many rows."""
    counts = (1, 8, 16, 32, 64, 96, 128)
    print(f"{'whole step, ms, by rows':34}" + "".join(f"{each:>8}" for each in counts))
    for most in (0, 2 * matmul.MAX_SPLIT_ROWS):
        with changed(matmul, MAX_SPLIT_ROWS=most):
            runner = new_runner(model, num_slots=129, max_length=448)
            taken = [step_ms(runner, count, length=368, num_steps=32) for count in counts]
        report.setdefault("step_by_split_rows", {})[most] = dict(zip(counts, taken, strict=True))
        print(f"{f'in parts up to {most} rows':34}" + "".join(f"{each:8.3f}" for each in taken), flush=True)


def time_prefill(model: Transformer) -> None:
    """Few chunks as they are, and launched one by one; then what an admission costs rows that decode."""
    for uses_graphs in (True, False):
        runner = new_runner(model, num_slots=512, max_length=448, uses_graphs=uses_graphs)
        sizes = [(1, 60), (1, 256), (2, 256), (4, 256), (8, 256), (16, 256), (64, 60), (64, 256)]
        for count, size in sizes if uses_graphs else sizes[1::3]:
            chunks = [PrefillChunk(np.arange(size, dtype=np.int32), 0, list(range(-(-size // 16))))] * count
            for _ in range(2):
                runner.prefill(chunks)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                runner.prefill(chunks)
            launched_ms = (time.perf_counter() - start) * 200
            torch.cuda.synchronize()
            taken_ms = (time.perf_counter() - start) * 200
            name = f"prefill {count} × {size}" + ", launched one by one" * (not uses_graphs)
            report.setdefault("prefill_ms", {})[name] = (taken_ms, launched_ms)
            print(f"{name}: {taken_ms:.2f} ms ({launched_ms:.2f} to launch), "
                  f"{count * size / taken_ms * 1000:,.0f} tok/s", flush=True)  # fmt: skip
        if uses_graphs:
            plain = step_ms(runner, 64, length=368, num_steps=8) * 8
            admitting = statistics.median(_admitting_ms(runner, chunks[:1]) for _ in range(5))
            report["visit_ms"] = {"plain": plain, "admitting": admitting}
            print(f"visit of 8 steps of 64 rows: {plain:.2f} ms; beginning with 1 × 256: {admitting:.2f} ms")


def _admitting_ms(runner: CudaRunner, chunks: Sequence[PrefillChunk]) -> float:
    runner.start(rows_of([SamplingParams(max_new_tokens=16)] * 64, length=368))
    torch.cuda.synchronize()
    start = time.perf_counter()
    runner.prefill(chunks)
    runner.decode(range(64), num_steps=8).result()
    return (time.perf_counter() - start) * 1000


def profile_step(runner: CudaRunner, count: int, *, length: int) -> None:
    """Where a step's time goes, by kernel."""
    runner.start(rows_of([SamplingParams(max_new_tokens=64)] * count, length=length))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runner.decode(range(count), num_steps=4).result()
    events = [each for each in profile.key_averages() if each.device_time_total > 0]
    events.sort(key=lambda each: -each.device_time_total)
    total = sum(each.device_time_total for each in events) / 4
    print(f"kernels of a step of {count} rows, {total:.0f} µs busy: µs per step, launches per step")
    report[f"profile_{count}"] = [(each.key, each.device_time_total / 4, each.count / 4) for each in events]
    for each in events[:12]:
        print(f"{each.device_time_total / 4:9.1f} {each.count / 4:6.1f}  {each.key[:90]}")


def time_swap() -> None:
    model = new_model(QWEN2_15B)
    runner = new_runner(model, num_slots=8, max_length=64)
    host = {name: each.detach().cpu() for name, each in model.named_parameters()}
    start = time.perf_counter()
    staged = runner.stage(host)
    staging_s = time.perf_counter() - start
    times = []
    visit_ms(runner, 8, length=8, num_steps=1)
    for _ in range(5):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        runner.decode(range(8), num_steps=4)
        before.record(runner._stream)
        runner.load(staged)
        after.record(runner._stream)
        runner.decode(range(8), num_steps=1).result()
        times.append(before.elapsed_time(after))
    report["swap_ms"], report["staging_s"] = statistics.median(times), staging_s
    print(f"swap of 1.5 B parameters: {report['swap_ms']:.2f} ms on the device; staged from pageable host memory in "
          f"{staging_s:.2f} s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns())
    report["torch"], report["device"] = torch.__version__, torch.cuda.get_device_name(DEVICE)
    check_everything()
    bandwidth = measured_read_tb_s()
    report["read_tb_s"] = bandwidth
    print(f"read {bandwidth:.2f} TB/s", flush=True)
    model, small_model = new_model(QWEN3_06B), new_model(SMOLLM2_135M)
    counts = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
    name, small_name = "Qwen3-0.6B", "SmolLM2-135M"
    parts: dict[str, Callable[[], None]] = {
        "steps": partial(time_steps, model, bandwidth, title=name, counts=counts, lengths=[368]),
        "products in steps": partial(compare_steps, model),
        "long contexts": partial(
            time_steps, model, bandwidth, title=name, counts=[64], lengths=[1008, 4080, 8176]
        ),
        "small steps": partial(
            time_steps, small_model, bandwidth, title=small_name, counts=counts[::2], lengths=[368]
        ),
        "prefill": partial(time_prefill, model),
        "products": partial(time_products, model),
        "decode attention": partial(compare_decode, bandwidth),
        "swap": time_swap,
    }
    for name, part in parts.items():
        with torch.no_grad():
            run_part(name, part)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
