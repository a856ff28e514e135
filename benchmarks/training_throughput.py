"""Forward and backward pass of training alone: tokens/s, TFLOP/s and memory by length, and which part takes the time.

    python benchmarks/training_throughput.py --model 1.5b --lengths 320,4096,16384,65536 --json training.json

Each length fills a block of `--block-tokens`, or is one sequence if it is longer. Every length is measured with the
fused parts, with torch's operations in their place, and with recomputation. Then: GPU time by kind of kernel of one
pass; each kernel alone against the memory's bandwidth; each product, attention and the head alone against the peak.

FLOPs are those of the model: 6 per token and parameter of a matrix, plus causal attention; what recomputation and the
logits' second computation add is not counted. Random weights; in deterministic mode unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kintsugi.model.architecture import ModelConfig
from kintsugi.model.attention import PackedLayout, packed_attention
from kintsugi.model.device import use_deterministic_kernels
from kintsugi.model.fused_layers import UNFUSED, FusedParts
from kintsugi.model.logprobs import chunk_size_of, token_logprobs
from kintsugi.model.transformer import Transformer

PEAK_TFLOPS = 790.0
"""Dense bf16 products that an H200 sustains."""
PEAK_TB_S = 4.8
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "family": "qwen3",
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "qk_norm": True,
    },
    "135m": {
        "family": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "tie_embeddings": True,
    },
    "0.6b": {
        "family": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "qk_norm": True,
        "tie_embeddings": True,
    },
    "1.5b": {
        "family": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_layers": 28,
        "num_heads": 12,
        "num_kv_heads": 2,
        "attention_bias": True,
    },
    "4b": {
        "family": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "qk_norm": True,
        "tie_embeddings": True,
    },
}
KINDS = {
    "norm": ("_add_and_normalize", "_gradient_of_norm", "_add_rows", "rms_norm", "layer_norm", "gammabeta"),
    "rotary": ("_rotate", "_gradient_of_rotation"),
    "gate": ("activate_rows", "_gradient_of_activation", "silu"),
    "attention": ("flash", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitkreduce"),
    "embedding": ("embedding", "radix", "sort", "krn_partial", "sum_and_scatter"),
    "copies and fills": ("memcpy", "memset", "fill", "copy", "catarray"),
}
"""Kinds of kernels of the body by parts of their names, in lower case, tried in this order; the rest are others."""


class Benchmark(NamedTuple):
    model: Transformer
    device: torch.device
    deadline: float
    report: dict[str, Any]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def is_out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


def new_model(name: str, device: torch.device) -> Transformer:
    """Random weights as views of one flat tensor, matrices first, as a rank has them."""
    config = ModelConfig(
        **{"vocab_size": 151936, "head_dim": 128, "max_positions": 1 << 17, "rope_theta": 1e6, **SHAPES[name]}
    )
    model = Transformer(config, dtype=torch.bfloat16, device=device)
    parameters = sorted(model.parameters(), key=lambda parameter: parameter.dim() < 2)
    flat = torch.empty(sum(each.numel() for each in parameters), dtype=torch.bfloat16, device=device)
    flat.normal_(std=0.02)
    start = 0
    for parameter in parameters:
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
        if parameter.dim() < 2:
            parameter.data.fill_(1.0)
    return model


def matrix_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied with; the embedding is only looked up."""
    attention = 2 * config.query_size + 2 * config.kv_size
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    return config.num_layers * layer + config.hidden_size * config.vocab_size


def pass_flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    products = 6.0 * matrix_parameters(config) * sum(lengths)
    return products + 6.0 * config.num_layers * config.query_size * sum(length**2 for length in lengths)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_pass(model: Transformer, tokens: Tensor, layout: PackedLayout) -> None:
    hidden = model.forward_packed(tokens, layout.positions, layout)
    logprobs, _ = model.token_logprobs(hidden, tokens)
    logprobs.mean().backward()


def timed_passes(bench: Benchmark, lengths: Sequence[int], *, count: int) -> dict[str, float]:
    """Median of some passes after one that is not counted, host included."""
    model, device = bench.model, bench.device
    layout = PackedLayout.from_lengths(lengths, device=device)
    tokens = torch.randint(0, bench.config.vocab_size, (layout.num_tokens,), device=device)
    times, launch_times, resident = [], [], 0
    for index in range(count + 1):
        model.zero_grad(set_to_none=True)
        synchronize(device)
        if device.type == "cuda" and index == 1:
            torch.cuda.reset_peak_memory_stats(device)
            resident = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        one_pass(model, tokens, layout)
        launched = time.perf_counter() - start
        synchronize(device)
        times.append(time.perf_counter() - start)
        launch_times.append(launched)
    taken = statistics.median(times[1:])
    tflops = pass_flops(bench.config, lengths) / taken / 1e12
    found = {
        "tokens": layout.num_tokens,
        "ms": round(taken * 1000, 2),
        "host_ms": round(statistics.median(launch_times[1:]) * 1000, 2),
        "tokens_s": round(layout.num_tokens / taken),
        "tflops": round(tflops, 1),
        "share_of_790": round(tflops / PEAK_TFLOPS, 3),
        "first_pass_s": round(times[0], 2),
    }
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        found |= {"peak_gb": round(peak / 1e9, 2), "of_pass_gb": round((peak - resident) / 1e9, 2)}
    return found


def measure_lengths(bench: Benchmark, lengths: Sequence[int], *, block_tokens: int) -> None:
    """By length: fused, unfused, and with recomputation; those that do not fit are reported as such."""
    variants = {
        "fused": (FusedParts(), False),
        "recompute": (FusedParts(), True),
        "unfused": (UNFUSED, False),
    }
    table: dict[str, Any] = bench.report.setdefault("passes", {})
    print(f"{'':24}{'tokens/s':>10}{'TFLOP/s':>9}{'of 790':>8}{'ms':>10}{'host ms':>9}{'peak GB':>9}")
    # The most important first, should the time end.
    for name, (fused, recompute) in variants.items():
        for length in lengths:
            if bench.is_out_of_time:
                bench.report["skipped"].append(f"{name} {length}")
                continue
            bench.model.fused, bench.model.recompute = fused, recompute
            packed = [length] * max(1, block_tokens // length)
            try:
                found = timed_passes(bench, packed, count=3 if sum(packed) <= 20_000 else 1)
            except torch.OutOfMemoryError:
                table.setdefault(str(length), {})[name] = "out of memory"
                print(f"{name + ' ' + str(length):24} out of memory")
                continue
            finally:
                bench.model.zero_grad(set_to_none=True)
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()
            table.setdefault(str(length), {})[name] = found
            print(
                f"{name + ' ' + str(length):24}{found['tokens_s']:10,}{found['tflops']:9.1f}"
                f"{found['share_of_790']:8.1%}{found['ms']:10.1f}{found['host_ms']:9.1f}{found.get('peak_gb', 0):9.1f}"
            )
    bench.model.fused, bench.model.recompute = FusedParts(), False


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def profile_body(bench: Benchmark, length: int, *, block_tokens: int) -> None:
    """GPU milliseconds by kind of kernel in one pass without the head, fused and unfused, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    layout = PackedLayout.from_lengths([length] * max(1, block_tokens // length), device=bench.device)
    tokens = torch.randint(0, bench.config.vocab_size, (layout.num_tokens,), device=bench.device)
    found: dict[str, Any] = {}
    for name, fused in {"fused": FusedParts(), "unfused": UNFUSED}.items():
        if bench.is_out_of_time:
            bench.report["skipped"].append(f"profile {name}")
            continue
        bench.model.fused = fused
        bench.model.zero_grad(set_to_none=True)
        synchronize(bench.device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            hidden = bench.model.forward_packed(tokens, layout.positions, layout)
            hidden.backward(torch.ones_like(hidden))
            synchronize(bench.device)
        del hidden
        times: dict[str, tuple[float, int]] = {}
        for event in profiler.key_averages():
            taken = float(getattr(event, "self_device_time_total", 0.0)) / 1000
            if taken > 0:
                times[event.key] = (taken, event.count)
        kinds: dict[str, float] = {}
        for kernel, (taken, _) in times.items():
            kinds[kind_of(kernel)] = kinds.get(kind_of(kernel), 0.0) + taken
        longest = sorted(times.items(), key=lambda item: -item[1][0])[:16]
        found[name] = {
            "ms": {kind: round(kinds[kind], 2) for kind in sorted(kinds, key=lambda kind: -kinds[kind])},
            "sum_ms": round(sum(kinds.values()), 2),
            "longest": [
                {"kernel": kernel[:90], "ms": round(taken, 3), "calls": count, "kind": kind_of(kernel)}
                for kernel, (taken, count) in longest
            ],
        }
        print(f"body {name} {length}, GPU ms by kind: {found[name]['ms']}")
    bench.model.fused = FusedParts()
    bench.report["body"] = {"length": length, "tokens": layout.num_tokens, **found}


def event_ms(call: Callable[[], object], *, count: int = 5) -> float:
    """Median GPU time of a call after two that are not counted; the L2 cache is not flushed."""
    for _ in range(2):
        call()
    times = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class KernelCall(NamedTuple):
    run: Callable[[], object]
    num_bytes: int
    """Bytes that it must read and write."""
    per_layer: int = 1


def kernel_calls(config: ModelConfig, *, num_tokens: int, device: torch.device) -> dict[str, KernelCall]:
    """Each kernel of a layer, with inputs of a block's size."""
    from kintsugi.model import layer_kernels as kernels

    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    hidden, update = (new(num_tokens, config.hidden_size) for _ in range(2))
    norm: dict[str, Any] = {"weight": new(config.hidden_size)}
    upstream: dict[str, Any] = {
        "inverses": torch.rand(num_tokens, device=device),
        "normalized_gradient": update,
        "hidden_gradient": update,
    }
    shape = kernels.HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    qkv, half = new(num_tokens, shape.width), config.head_dim // 2
    rotation: dict[str, Any] = {
        "shape": shape,
        "cosine": new(num_tokens, half),
        "sine": new(num_tokens, half),
        "query_weight": new(config.head_dim) if config.qk_norm else None,
        "key_weight": new(config.head_dim) if config.qk_norm else None,
        "epsilon": 1e-6,
    }
    heads: dict[str, Any] = {
        "key_gradient": new(num_tokens, shape.kv_size),
        "value_gradient": new(num_tokens, shape.kv_size),
        "qkv": qkv if config.qk_norm else None,
    }
    query_gradient = new(num_tokens, shape.query_size)
    gate_up, activated = (new(num_tokens, count * config.intermediate_size) for count in (2, 1))
    turned = (shape.query_size + shape.kv_size) * num_tokens * 2
    turned_back = 2 * qkv.nbytes + (turned if config.qk_norm else 0)
    turn_back = partial(kernels.gradient_of_rotation, query_gradient, **heads, **rotation)
    normalize = partial(kernels.add_and_normalize, hidden, update, **norm, epsilon=1e-6)
    return {
        "sum and norm": KernelCall(normalize, 4 * hidden.nbytes, per_layer=2),
        "gradient of norm": KernelCall(
            partial(kernels.gradient_of_norm, hidden, **norm, **upstream), 4 * hidden.nbytes, per_layer=2
        ),
        "rotation": KernelCall(partial(kernels.rotate, qkv, **rotation), 2 * turned),
        "gradient of rotation": KernelCall(turn_back, turned_back),
        "gate": KernelCall(partial(kernels.activate, gate_up), 3 * activated.nbytes),
        "gradient of gate": KernelCall(
            partial(kernels.gradient_of_activation, gate_up, activated), 6 * activated.nbytes
        ),
    }


def measure_kernels(bench: Benchmark, *, num_tokens: int) -> None:
    """Each kernel of a layer alone: microseconds, TB/s, share of the memory's bandwidth, milliseconds per pass."""
    table = bench.report["kernels"] = {}
    for name, call in kernel_calls(bench.config, num_tokens=num_tokens, device=bench.device).items():
        taken = event_ms(call.run)
        tb_s = call.num_bytes / taken / 1e9
        table[name] = {
            "us": round(taken * 1000, 1),
            "tb_s": round(tb_s, 2),
            "share_of_4.8": round(tb_s / PEAK_TB_S, 3),
            "ms_per_pass": round(taken * call.per_layer * bench.config.num_layers, 2),
        }
        print(f"{name:24}{table[name]}")


def measure_products(bench: Benchmark, *, num_tokens: int, lengths: Sequence[int]) -> None:
    """Products of a layer, forward and both gradients, and attention: TFLOP/s and milliseconds per pass."""
    config = bench.config
    new = partial(torch.randn, dtype=torch.bfloat16, device=bench.device)
    hidden, inner, query = config.hidden_size, config.intermediate_size, config.query_size
    shapes = {
        "qkv": (hidden, query + 2 * config.kv_size),
        "out": (query, hidden),
        "gate and up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }
    table = bench.report["products"] = {}
    for name, (inputs, outputs) in shapes.items():
        rows, weight, gradient = new(num_tokens, inputs), new(outputs, inputs), new(num_tokens, outputs)
        kinds: dict[str, Callable[[], object]] = {
            "forward": partial(torch.mm, rows, weight.t()),
            "gradient of input": partial(torch.mm, gradient, weight),
            "gradient of weight": partial(torch.mm, gradient.t(), rows),
        }
        for kind, call in kinds.items():
            taken = event_ms(call, count=3)
            table[f"{name}, {kind}"] = {
                "tflops": round(2.0 * num_tokens * inputs * outputs / taken / 1e9, 1),
                "ms_per_pass": round(taken * config.num_layers, 2),
            }
    for length in lengths:
        layout = PackedLayout.from_lengths([length] * max(1, num_tokens // length), device=bench.device)
        heads = [
            new(layout.num_tokens, count, config.head_dim).requires_grad_()
            for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ]
        flops = 2.0 * query * sum(each**2 for each in layout.lengths)
        for name, repeat_keys in (("shared keys", False), ("repeated keys", True)):
            attend = partial(
                packed_attention,
                heads[0],
                key=heads[1],
                value=heads[2],
                layout=layout,
                repeat_keys=repeat_keys,
            )
            with torch.no_grad():
                forward = event_ms(attend, count=3)

            def both(attend: Callable[[], Tensor] = attend, heads: list[Tensor] = heads) -> object:
                output = attend()
                return torch.autograd.grad(output, heads, output.detach())

            whole = event_ms(both, count=3)
            table[f"attention {length}, {name}"] = {
                "forward_tflops": round(flops / forward / 1e9, 1),
                "backward_tflops": round(2.5 * flops / (whole - forward) / 1e9, 1),
                "ms_per_pass": round(whole * config.num_layers, 2),
            }
    for name, row in table.items():
        print(f"{name:36}{row}")


def measure_head(bench: Benchmark, *, num_tokens: int) -> None:
    """Log-probabilities and their gradients by tokens per chunk; and the gradient of the embedding."""
    config, device = bench.config, bench.device
    hidden = torch.randn(num_tokens, config.hidden_size, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = bench.model.output_weight
    tokens = torch.randint(0, config.vocab_size, (num_tokens,), device=device)
    flops = 8.0 * num_tokens * config.hidden_size * config.vocab_size
    table: dict[str, Any] = {"default_chunk": chunk_size_of(weight)}
    bench.report["head"] = table
    for chunk_size in (1024, chunk_size_of(weight), 4096, 8192):
        if bench.is_out_of_time:
            bench.report["skipped"].append(f"head {chunk_size}")
            continue

        def both(chunk_size: int = chunk_size) -> object:
            logprobs, _ = token_logprobs(hidden, weight=weight, targets=tokens, chunk_size=chunk_size)
            return torch.autograd.grad(logprobs.sum(), (hidden, weight))

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        taken = event_ms(both, count=2)
        table[f"chunks of {chunk_size}"] = {
            "ms": round(taken, 2),
            "tflops_with_recomputation": round(flops / taken / 1e9, 1),
            "memory_gb": round((torch.cuda.max_memory_allocated(device) - before) / 1e9, 2),
        }
    embedding = bench.model.model.embed_tokens.weight
    looked_up = torch.nn.functional.embedding(tokens, embedding)
    table["gradient of embedding"] = {
        "ms": round(
            event_ms(lambda: torch.autograd.grad(looked_up, embedding, hidden.detach(), retain_graph=True)), 3
        )
    }
    selected = hidden.index_select(0, torch.arange(num_tokens, device=device))
    table["gradient of index_select"] = {
        "ms": round(
            event_ms(lambda: torch.autograd.grad(selected, hidden, hidden.detach(), retain_graph=True)), 3
        )
    }
    for name, row in table.items():
        print(f"{name:36}{row}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--lengths", default="320,4096,16384,65536")
    parser.add_argument("--block-tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nondeterministic", action="store_true")
    parser.add_argument("--limit-s", type=float, default=50.0, help="leave out what would begin later")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.nondeterministic:
        use_deterministic_kernels()
    device, began = torch.device(options.device), time.monotonic()
    lengths = [int(each) for each in options.lengths.split(",")]
    report: dict[str, Any] = {"model": options.model, "torch": torch.__version__, "skipped": []}
    report["deterministic"] = not options.nondeterministic
    report["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    bench = Benchmark(new_model(options.model, device), device, began + options.limit_s, report)
    report["matrix_parameters"] = matrix_parameters(bench.config)
    measure_lengths(bench, lengths, block_tokens=options.block_tokens)
    if device.type == "cuda":
        num_tokens = options.block_tokens
        short = [length for length in lengths if length <= num_tokens]
        parts: dict[str, Callable[[], None]] = {
            "body": partial(profile_body, bench, short[0], block_tokens=num_tokens),
            "kernels": partial(measure_kernels, bench, num_tokens=num_tokens),
            "head": partial(measure_head, bench, num_tokens=num_tokens),
            "products": partial(measure_products, bench, num_tokens=num_tokens, lengths=short),
        }
        for name, part in parts.items():
            torch.cuda.empty_cache()
            try:
                part()
            except (RuntimeError, AttributeError, TypeError) as error:
                report["skipped"].append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                print(f"{name} failed: {error}")
    report["taken_s"] = round(time.monotonic() - began, 1)
    print(f"{report['taken_s']} s; left out: {report['skipped']}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
