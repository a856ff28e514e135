"""The checks of `gpu_kernels.py`: every kernel of the CUDA runner against torch.

Inputs are drawn afresh, outputs poisoned, references computed in float64 or by the functions that training uses.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor
from triton.errors import TritonError

from kintsugi.generation.cuda import layers, logits_processors, matmul, sampling
from kintsugi.generation.cuda.attention import PagedAttention
from kintsugi.generation.cuda.runner import PAGE_SIZE
from kintsugi.generation.cuda.slot_state import RNG_KEY, packed_rows
from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.generation.engine.rng import stream_key, uniforms
from kintsugi.generation.engine.runner import DecodeRow
from kintsugi.generation.engine.sampler import LogitsEditing, sample
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.rotary import inverse_frequencies, rotate, rotation_at
from kintsugi.types import SamplingParams

QWEN3_06B = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_positions=40960,
    rope_theta=1e6,
    tie_embeddings=True,
    qk_norm=True,
)
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
"""Without an accelerator, for Triton's interpreter."""
FAILURES = (RuntimeError, TritonError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
POISON = 777.0
report: dict[str, Any] = {"checks": {}, "failures": []}


def failed(what: str, error: BaseException) -> None:
    text = f"{what}: {type(error).__name__}: {str(error).strip()[:160]}"
    report["failures"].append(text)
    print("FAILED", text, flush=True)


def check(name: str, error: float, *, limit: float) -> None:
    is_good = bool(np.isfinite(error)) and error <= limit
    report["checks"][name] = {"error": error, "limit": limit, "good": is_good}
    if not is_good:
        print(f"WRONG {name}: {error:.3g} > {limit:.3g}", flush=True)


def wrong_checks() -> list[str]:
    return [name for name, each in report["checks"].items() if not each["good"]] + report["failures"]


def relative(result: Tensor, expected: Tensor) -> float:
    difference = torch.linalg.vector_norm(result.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))


def run_part(name: str, part: Callable[[], None]) -> None:
    start = time.monotonic()
    try:
        part()
    except FAILURES as error:
        failed(name, error)
    torch.cuda.empty_cache()
    print(f"({name}: {time.monotonic() - start:.0f} s)", flush=True)


class Cache:
    """Random pages of one layer, and tables of rows over them."""

    def __init__(self, config: ModelConfig, *, num_tokens: int, page_size: int, dtype: torch.dtype) -> None:
        self.config, self.page_size, self.dtype = config, page_size, dtype
        self.num_pages = num_tokens // page_size
        shape = (self.num_pages, config.num_kv_heads, page_size, config.head_dim)
        self.keys = torch.randn(shape, dtype=dtype, device=DEVICE)
        self.values = torch.randn(shape, dtype=dtype, device=DEVICE)

    def tables(self, num_rows: int, length: int, *, most: int = 4) -> list[Tensor]:
        width = -(-length // self.page_size)
        order = torch.randperm(self.num_pages, device=DEVICE).int()
        count = max(1, min(most, self.num_pages // (num_rows * width)))
        return [
            each.view(num_rows, width).contiguous() for each in order[: count * num_rows * width].chunk(count)
        ]

    def read(self, pages: Tensor, table: Tensor, length: int) -> Tensor:
        """[kv_heads, length, head_dim] in float64."""
        return pages[table.long()].transpose(0, 1).flatten(1, 2)[:, :length].double()


def attention_for(cache: Cache, *, max_rows: int, max_length: int, **tilings: Any) -> PagedAttention:
    return PagedAttention(
        cache.config,
        page_size=cache.page_size,
        max_rows=max_rows,
        max_length=max_length,
        dtype=cache.dtype,
        device=DEVICE,
        **tilings,
    )


def check_attention(config: ModelConfig, dtype: torch.dtype, *, limit: float) -> None:
    cache = Cache(config, num_tokens=1 << 15, page_size=PAGE_SIZE, dtype=dtype)
    attention = attention_for(cache, max_rows=8, max_length=2048)
    lengths = torch.tensor([1, 17, 64, 384, 1023, 1025, 1500, 2048], dtype=torch.int32, device=DEVICE)
    table = cache.tables(8, 2048)[0]
    width = config.query_size + 2 * config.kv_size
    qkv = torch.randn(8, width, dtype=dtype, device=DEVICE)
    slots = torch.arange(8, dtype=torch.int32, device=DEVICE)
    outputs = []
    for order in (slots, slots.flip(0).contiguous()):
        output = torch.full((8, config.query_size), POISON, dtype=dtype, device=DEVICE)
        picked = order.long()
        attention.decode(
            qkv[picked],
            key_pages=cache.keys,
            value_pages=cache.values,
            tables=table,
            slots=order,
            lengths=lengths[picked],
            output=output,
            num_splits=attention.max_splits,
        )
        outputs.append(output[torch.argsort(picked)])
    check(f"decode bits by row {config.head_dim} {dtype}", float((outputs[0] != outputs[1]).sum()), limit=0)
    expected = torch.stack(
        [_attended(qkv[i : i + 1], cache, table[i], int(lengths[i]) - 1)[0] for i in range(8)]
    )
    check(f"decode {config.head_dim} {dtype}", relative(outputs[0], expected), limit=limit)
    chunks = torch.tensor([[0, 200, 0], [200, 256, 256], [456, 3, 512]], dtype=torch.int32, device=DEVICE)
    qkv = torch.randn(459, width, dtype=dtype, device=DEVICE)
    output = torch.full((459, config.query_size), POISON, dtype=dtype, device=DEVICE)
    attention.prefill(
        qkv,
        key_pages=cache.keys,
        value_pages=cache.values,
        tables=table[:3],
        chunks=chunks,
        max_tokens=256,
        output=output,
    )
    parts = [_attended(qkv[a : a + n], cache, table[i], s) for i, (a, n, s) in enumerate(chunks.tolist())]
    check(f"prefill {config.head_dim} {dtype}", relative(output, torch.cat(parts)), limit=limit)


def _attended(qkv: Tensor, cache: Cache, table: Tensor, start: int) -> Tensor:
    config, count = cache.config, qkv.shape[0]
    query = qkv[:, : config.query_size].double().unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
    keys, values = (cache.read(pages, table, start + count) for pages in (cache.keys, cache.values))
    visible = (
        torch.arange(start + count, device=DEVICE) <= start + torch.arange(count, device=DEVICE)[:, None]
    )
    return (
        functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
        .transpose(0, 1)
        .flatten(1)
    )


def check_layers(config: ModelConfig, dtype: torch.dtype, *, limit: float) -> None:
    size, count = config.hidden_size, 37
    new: Any = {"dtype": dtype, "device": DEVICE}
    hidden, update, weight = (
        torch.randn(count, size, **new),
        torch.randn(count, size, **new),
        torch.randn(size, **new),
    )
    residual, output = hidden.clone(), torch.full((count, size), POISON, **new)
    layers.add_and_normalize(residual, update, weight=weight, epsilon=1e-6, output=output)
    check(f"add {dtype}", relative(residual, hidden + update), limit=0)
    check(
        f"norm {dtype}",
        relative(output, functional.rms_norm(hidden + update, (size,), weight, 1e-6)),
        limit=limit,
    )
    gate_up, output = torch.randn(count, 6000, **new), torch.full((count, 3000), POISON, **new)
    layers.silu_and_multiply(gate_up, output=output)
    check(
        f"silu {dtype}", relative(output, functional.silu(gate_up[:, :3000]) * gate_up[:, 3000:]), limit=limit
    )
    cache = Cache(config, num_tokens=1 << 12, page_size=PAGE_SIZE, dtype=dtype)
    cache.keys.fill_(POISON), cache.values.fill_(POISON)
    qkv = torch.randn(count, config.query_size + 2 * config.kv_size, **new)
    positions = torch.randint(0, 4000, (count,), device=DEVICE).int()
    places = torch.randperm(1 << 12, device=DEVICE)[:count].int()
    places[5] = -1
    weights = torch.randn(2, config.head_dim, **new)
    rotary = layers.RotaryTables.of(config, max_length=4096, dtype=dtype, device=DEVICE)
    frequencies = inverse_frequencies(config, device=DEVICE)
    rotation = rotation_at(positions, frequencies=frequencies, config=config, dtype=dtype)
    parts = (
        qkv.clone()
        .unflatten(-1, (-1, config.head_dim))
        .split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    )
    expected = [
        rotate(functional.rms_norm(part, (config.head_dim,), each, 1e-6), rotation)
        for part, each in zip(parts, weights, strict=False)
    ]
    layers.rotate_and_store(
        qkv,
        cache_positions=layers.CachePositions(positions, positions, places),
        rotary=rotary,
        query_weight=weights[0],
        key_weight=weights[1],
        epsilon=1e-6,
        key_pages=cache.keys,
        value_pages=cache.values,
    )
    check(f"query {dtype}", relative(qkv[:, : config.query_size], expected[0].flatten(1)), limit=limit)
    at = places.long()
    for name, pages, wanted in (("key", cache.keys, expected[1]), ("value", cache.values, parts[2])):
        stored = pages[at // PAGE_SIZE, :, at % PAGE_SIZE]
        kept = at >= 0
        check(f"{name} {dtype}", relative(stored[kept], wanted[kept]), limit=limit)
        num_written = int((pages != POISON).any(-1).any(1).sum())
        check(f"{name} places {dtype}", abs(num_written - (count - 1)), limit=0)


def check_products(dtype: torch.dtype, *, num_columns: int, depth: int, limit: float) -> None:
    """In parts, and what adds them; and that a row's bits are those it has alone, or in another tile of rows."""
    new: Any = {"dtype": dtype, "device": DEVICE}
    count, name = 70, f"{num_columns} × {depth} {dtype}"
    rows, weight = torch.randn(count, depth, **new), torch.randn(num_columns, depth, **new) / depth**0.5
    tiling = matmul.split_tiling(1, num_columns=num_columns, depth=depth, dtype=dtype)
    assert tiling is not None
    parts = torch.full((tiling.num_splits, count, num_columns), POISON, device=DEVICE)
    matmul.multiply_in_parts(rows, weight, parts=parts, tiling=tiling)
    # Tensor cores take 16 values at a time and cut off what their running sum in fp32 has no place for, instead of
    # rounding it: half a unit in the last place on average, always towards zero, so that errors grow with the depth.
    truncated = tiling.split_depth(depth) / 16 * torch.finfo(torch.float32).eps / 2
    expected = rows.double() @ weight.double().t()
    check(f"product in parts {name}", relative(parts.double().sum(0), expected), limit=truncated)
    alone = torch.full_like(parts[:, :1], POISON)
    matmul.multiply_in_parts(rows[66:67], weight, parts=alone, tiling=tiling)
    check(f"product in parts alone {name}", relative(alone, parts[:, 66:67]), limit=0)

    residual, update = torch.randn(count, num_columns, **new), torch.zeros(count, num_columns, device=DEVICE)
    for part in parts:
        update += part
    added, scale = residual + update.to(dtype), torch.randn(num_columns, **new)
    output = torch.full_like(residual, POISON)
    layers.add_and_normalize(residual, parts, weight=scale, epsilon=1e-6, output=output)
    check(f"add in parts {name}", relative(residual, added), limit=0)
    norm = functional.rms_norm(added, (num_columns,), scale, 1e-6)
    check(f"norm in parts {name}", relative(output, norm), limit=limit)


def rows_of(samplings: Sequence[SamplingParams], *, length: int = 1) -> list[DecodeRow]:
    prompt = np.zeros(length, np.int32)
    return [
        DecodeRow(
            i,
            GenerationRequest((i, 0), prompt, stream_key("k", seed=0, sample=i, turn=0), each),
            length - 1,
            prompt,
            (),
        )
        for i, each in enumerate(samplings)
    ]


def check_sampling(vocab_size: int, *, count: int = 512) -> None:
    """Against the CPU's sampler, with and without rows that are bent."""
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6),
        SamplingParams(),
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=0.8, top_k=20),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.05),
        SamplingParams(
            temperature=1.2, top_k=50, top_p=0.9, repetition_penalty=1.5, logit_bias=((3, 9.0), (4, -9.0))
        ),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
    )
    for is_processed in (False, True):
        samplings = [each for each in kinds if is_processed or not logits_processors.is_processed(each)]
        samplings = [samplings[i % len(samplings)] for i in range(count)]
        _check_draw(samplings, vocab_size=vocab_size, is_processed=is_processed)


def _check_draw(samplings: Sequence[SamplingParams], *, vocab_size: int, is_processed: bool) -> None:
    count = len(samplings)
    state = torch.from_numpy(packed_rows(rows_of(samplings))).to(DEVICE)
    slots = torch.arange(count, dtype=torch.int32, device=DEVICE)
    logits = torch.randn(count, vocab_size, device=DEVICE) * 4
    summary = sampling.SamplingSummary.empty(count, vocab_size=vocab_size, device=DEVICE)
    tokens = torch.full((1, count), -1, dtype=torch.int32, device=DEVICE)
    logprobs = torch.full((1, count), POISON, device=DEVICE)
    keys = state[:, RNG_KEY].clone()
    cursors = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    edits = logits_processors.LogitsEdits.none(count, vocab_size=vocab_size, device=DEVICE)
    for each, biases in zip(samplings, edits.biases, strict=True):
        for token, bias in each.logit_bias:
            biases[token] = bias
    sampling.summarize(logits, slots=slots, state=state, is_scaled=False, summary=summary)
    top = torch.full((2, 1, count, 3), -1, dtype=torch.int32, device=DEVICE)
    top_logprobs = top[1].view(torch.float32)
    logits_processors.report_top(
        logits,
        summary,
        slots=slots,
        state=state,
        cursors=cursors,
        result_tokens=top[0],
        result_logprobs=top_logprobs,
    )
    processed = None
    if is_processed:
        processed_logits = torch.full_like(logits, POISON)
        cuts = torch.from_numpy(logits_processors.packed_cuts(samplings)).to(DEVICE)
        logits_processors.process_logits(
            logits, slots=slots, state=state, cuts=cuts, edits=edits, output=processed_logits
        )
        processed = (
            processed_logits,
            sampling.SamplingSummary.empty(count, vocab_size=vocab_size, device=DEVICE),
        )
        sampling.summarize(processed_logits, slots=slots, state=state, is_scaled=True, summary=processed[1])
    sampling.draw(
        logits,
        summary,
        processed=processed,
        slots=slots,
        state=state,
        known=torch.zeros(count, 8, dtype=torch.int32, device=DEVICE),
        cursors=cursors,
        result_tokens=tokens,
        result_logprobs=logprobs,
    )
    expected = sample(
        logits.clone(),
        temperatures=torch.tensor([each.temperature for each in samplings], device=DEVICE),
        uniforms=uniforms(keys, counters=torch.ones_like(keys)),
        logits_processors=_bending_of(samplings, edits) if is_processed else None,
        num_top=3,
    )
    name = f"of {vocab_size}" + " bent" * is_processed
    same = tokens[0] == expected.tokens
    # Of 150,000 steps of a cumulative sum, a uniform number is within rounding of one now and then.
    check(f"tokens {name}", int((~same).sum()), limit=0.03 * count)
    check(f"logprobs {name}", float((logprobs[0] - expected.logprobs)[same].abs().max()), limit=2e-5)
    check(f"top {name}", float((top_logprobs[0] - expected.top_logprobs).abs().max()), limit=2e-5)
    check(f"cursors {name}", int((cursors != 1).sum()), limit=0)


def _bending_of(samplings: Sequence[SamplingParams], edits: logits_processors.LogitsEdits) -> LogitsEditing:
    """In the CPU sampler's words; every row has seen the one token that was fed."""
    seen = torch.zeros_like(edits.seen, dtype=torch.bool)
    seen[:, 0] = True
    cuts = torch.from_numpy(logits_processors.packed_cuts(samplings)).to(DEVICE)
    penalties, top_ks, top_ps, min_ps = cuts.T
    return LogitsEditing(penalties, seen, edits.biases, top_ks.long(), top_ps, min_ps)


def check_everything() -> None:
    small = ModelConfig(
        family="llama", vocab_size=64, hidden_size=576, intermediate_size=1536, num_layers=1, num_heads=9,
        num_kv_heads=3, head_dim=64, max_positions=4096,
    )  # fmt: skip
    one_key_head = msgspec.structs.replace(small, num_heads=40, num_kv_heads=1, head_dim=80)
    limits = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}
    for (dtype, limit), config in itertools.product(limits.items(), (QWEN3_06B, small, one_key_head)):
        name = f"{config.head_dim} {dtype}"
        run_part(f"attention {name}", partial(check_attention, config, dtype, limit=limit))
        run_part(f"layers {name}", partial(check_layers, config, dtype, limit=limit))
    for dtype in (torch.bfloat16, torch.float16):
        for num_columns, depth in ((1024, 3072), (576, 576), (576, 1536), (1536, 8960)):
            part = partial(check_products, dtype, num_columns=num_columns, depth=depth, limit=limits[dtype])
            run_part(f"products {num_columns} × {depth} {dtype}", part)
    for vocab_size in (151936, 49152, 500):
        run_part(f"sampling {vocab_size}", partial(check_sampling, vocab_size))
    print(f"{len(report['checks'])} checks, wrong: {wrong_checks() or 'none'}", flush=True)
