"""Kernels of the CUDA runner: each checked against torch, then timed; and the decode step that is made of them.

    python benchmarks/gpu_kernels.py --json kernels.json

Checks draw fresh inputs and poison outputs. Timings are medians of graph replays over data that does not fit into the
cache. Bandwidths are compared with a read measured in the same run. A variant that fails is reported and passed over.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
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
    check,
    check_everything,
    failed,
    relative,
    report,
    rows_of,
    run_part,
)
from benchmarks.gpu_products import TILINGS, new_partials, product
from kintsugi.generation.cuda import PAGE_SIZE, CudaRunner
from kintsugi.generation.kernels.attention import DecodeTiling
from kintsugi.generation.runner import Chunk
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.transformer import Transformer
from kintsugi.types import Sampling

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


def tune_decode(bandwidth: float, *, limit_s: float) -> None:
    """Percent of the measured read bandwidth, by variant."""
    config, deadline = QWEN3_06B, time.monotonic() + limit_s
    table: dict[str, dict[str, float]] = {}

    def measure(cache: Cache, tiling: DecodeTiling, num_rows: int, length: int) -> float:
        name = f"page {cache.page_size} block {tiling.block_size} warps {tiling.num_warps}"
        name += f" stages {tiling.num_stages} split {tiling.split_length}"
        if time.monotonic() > deadline:
            return 0.0
        try:
            taken = time_decode(cache, tiling, num_rows=num_rows, length=length)
        except FAILURES as error:
            failed(f"decode {name}", error)
            return 0.0
        num_bytes = num_rows * length * 2 * config.kv_size * 2
        share = 100 * num_bytes / taken / 1e6 / bandwidth
        table.setdefault(name, {})[f"{num_rows}x{length}"] = round(share, 1)
        return share

    best: list[tuple[float, int, DecodeTiling]] = []
    for page_size in (16, 32):
        cache = Cache(config, num_tokens=1 << 21, page_size=page_size, dtype=torch.bfloat16)
        shapes = [
            (64, 4, 3),
            (64, 4, 4),
            (64, 4, 2),
            (32, 4, 3),
            (32, 4, 5),
            (32, 2, 4),
            (128, 4, 3),
            (128, 8, 3),
            (64, 8, 4),
        ]
        for block, warps, stages in shapes if page_size == 16 else shapes[:4]:
            tiling = DecodeTiling(512, block, warps, stages)
            score = measure(cache, tiling, 256, 384) + measure(cache, tiling, 64, 384)
            best.append((score, page_size, tiling))
        del cache
    best.sort(key=lambda each: -each[0])
    _, page_size, winner = best[0]
    cache = Cache(config, num_tokens=1 << 21, page_size=page_size, dtype=torch.bfloat16)
    for split in (512, 256, 1024, 128):
        tiling = DecodeTiling(split, winner.block_size, winner.num_warps, winner.num_stages)
        for num_rows, length in itertools.product((64, 256, 512), (384, 1024, 4096)):
            measure(cache, tiling, num_rows, length)
        measure(cache, tiling, 8, 4096)
    report["decode_percent"] = table
    columns = list(dict.fromkeys(itertools.chain.from_iterable(table.values())))
    print(f"decode attention, % of {bandwidth:.2f} TB/s\n{'':44}" + "".join(f"{each:>9}" for each in columns))
    for name, row in table.items():
        print(f"{name:44}" + "".join(f"{row.get(each, 0):9.1f}" for each in columns))


def time_products(model: Transformer) -> None:
    """The library's, over all layers' weights, microseconds per launch."""
    config = model.config
    decoders: list[Any] = list(model.model.layers)
    products = {
        "qkv": [each.self_attn.qkv_weight for each in decoders],
        "out": [each.self_attn.o_proj.weight for each in decoders],
        "gate_up": [each.mlp.gate_up_weight for each in decoders],
        "down": [each.mlp.down_proj.weight for each in decoders],
    }
    rows: dict[str, dict[str, float]] = {}
    for library, count in itertools.product(("cublas", "cublaslt"), (16, 64, 256, 512)):
        torch.backends.cuda.preferred_blas_library(library)
        for name, weights in products.items():
            data = torch.randn(count, weights[0].shape[1], dtype=model.dtype, device=DEVICE)
            output = torch.empty(count, weights[0].shape[0], dtype=model.dtype, device=DEVICE)
            calls = [partial(torch.mm, data, each.t(), out=output) for each in weights]
            rows.setdefault(f"{name} {library}", {})[str(count)] = median_us(calls)
        logits = torch.empty(count, config.vocab_size, device=DEVICE)
        data = torch.randn(count, config.hidden_size, dtype=model.dtype, device=DEVICE)
        project = partial(torch.mm, data, model.output_weight.t(), out_dtype=torch.float32, out=logits)
        rows.setdefault(f"logits {library}", {})[str(count)] = median_us([project] * 3)
    torch.backends.cuda.preferred_blas_library("default")
    report["products_us"] = rows
    print("matrix products, µs" + "".join(f"{each:>9}" for each in (16, 64, 256, 512)))
    for name, row in rows.items():
        print(f"{name:19}" + "".join(f"{row[str(each)]:9.1f}" for each in (16, 64, 256, 512)))


def time_candidates(model: Transformer) -> None:
    """Our own products of few rows: the best tiling of each, microseconds per launch."""
    decoders: list[Any] = list(model.model.layers)
    products = {
        "qkv": [each.self_attn.qkv_weight for each in decoders],
        "out": [each.self_attn.o_proj.weight.detach() for each in decoders],
        "gate_up": [each.mlp.gate_up_weight for each in decoders],
        "down": [each.mlp.down_proj.weight.detach() for each in decoders],
    }
    found: dict[str, dict[str, float]] = {}
    for name, weights in products.items():
        for count, tiling in itertools.product((16, 64, 128), TILINGS):
            data = torch.randn(count, weights[0].shape[1], dtype=model.dtype, device=DEVICE)
            partials = new_partials(data, weights[0], tiling=tiling)
            calls = [partial(product, data, each, partials=partials, tiling=tiling) for each in weights]
            try:
                taken = median_us(calls, num_replays=5)
            except FAILURES as error:
                failed(f"product {name} {tiling}", error)
                continue
            off = relative(partials.float().sum(0), data @ weights[-1].t())
            check(f"product {name} {count} {tuple(tiling)}", off, limit=8e-3)
            found.setdefault(f"{name} {count}", {})[str(tuple(tiling))] = taken
    report["candidates_us"] = found
    print("our products: µs of the best tilings (rows, columns, depth, splits, warps, stages)")
    for name, times in found.items():
        best = sorted(times.items(), key=lambda each: each[1])[:2]
        print(f"{name:12} " + "   ".join(f"{taken:6.2f} {tiling}" for tiling, taken in best))


def new_runner(model: Transformer, *, num_slots: int, max_length: int, **options: Any) -> CudaRunner:
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
    runner.start(rows_of([Sampling(max_new_tokens=num_steps + 8)] * count, length=length))
    torch.cuda.synchronize()
    start = time.perf_counter()
    runner.decode(range(count), num_steps=num_steps).result()
    return (time.perf_counter() - start) * 1000 / num_steps


def time_steps(model: Transformer, bandwidth: float) -> None:
    runner = new_runner(model, num_slots=512, max_length=448)
    config, num_steps, length = model.config, 32, 368
    weight_bytes = num_parameters(config) * 2
    rows = []
    print("whole step at context 368 … 400:  rows     ms   tok/s  roofline %   first visit ms")
    for count in (1, 8, 16, 32, 64, 128, 256, 512):
        first = visit_ms(runner, count, length=length, num_steps=1)
        taken = statistics.median(
            visit_ms(runner, count, length=length, num_steps=num_steps) for _ in range(5)
        )
        kv_bytes = config.num_layers * 2 * config.kv_size * 2 * count * (length + num_steps / 2)
        share = 100 * (weight_bytes + kv_bytes) / bandwidth / 1e9 / taken
        rows.append({"rows": count, "ms": taken, "percent": share, "first_ms": first})
        print(f"{count:38} {taken:6.3f} {count / taken * 1000:7.0f} {share:11.1f} {first:16.0f}", flush=True)
    report["steps"] = rows
    for count in (64, 256):
        profile_step(runner, count, length=length)
    chunk = Chunk(np.arange(256, dtype=np.int32), 0, list(range(16)))
    for count in (1, 8, 64):
        runner.prefill([chunk] * count)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            runner.prefill([chunk] * count)
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        taken = (time.perf_counter() - start) / 3
        report[f"prefill_{count}x256_ms"] = taken * 1000
        print(f"prefill {count} × 256: {taken * 1000:.2f} ms ({launched / 3 * 1000:.2f} to launch), "
              f"{count * 256 / taken:,.0f} tok/s")  # fmt: skip


def profile_step(runner: CudaRunner, count: int, *, length: int) -> None:
    """Where a step's time goes, by kernel."""
    runner.start(rows_of([Sampling(max_new_tokens=64)] * count, length=length))
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
    model = Transformer(QWEN2_15B, packed=True, dtype=torch.bfloat16, device=DEVICE)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
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
    parser.add_argument("--tuning-s", type=float, default=75.0, help="how long variants may be tried")
    arguments = parser.parse_args()
    torch.manual_seed(time.time_ns())
    report["torch"], report["device"] = torch.__version__, torch.cuda.get_device_name(DEVICE)
    check_everything()
    bandwidth = measured_read_tb_s()
    report["read_tb_s"] = bandwidth
    print(f"read {bandwidth:.2f} TB/s", flush=True)
    model = Transformer(QWEN3_06B, packed=True, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    parts: dict[str, Callable[[], None]] = {
        "steps": partial(time_steps, model, bandwidth),
        "products": partial(time_products, model),
        "decode attention": partial(tune_decode, bandwidth, limit_s=arguments.tuning_s),
        "candidates": partial(time_candidates, model),
        "swap": time_swap,
    }
    for name, part in parts.items():
        with torch.no_grad():
            run_part(name, part)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
