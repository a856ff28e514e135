"""The parts of `generation.py` that look at our engine alone: all of them on an accelerator, `growth` on a CPU too."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.generation_ours import new_engine, new_requests, outputs_of
from benchmarks.generation_sides import MODELS, MixedCase, random_prompts
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.requests import GenerationRequest
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.transformer import Transformer

DEVICE = "cuda"
SLOTS = 512
MAX_LENGTH = 2048
ROOFLINE_CONTEXT = 384
ROOFLINE_BATCHES = (64, 256, 512)
STEPS = 64
"""Decode steps that are timed; the context grows by so much meanwhile, with the stated one in the middle."""
GROWTH_BATCHES = {"cpu": (1, 4, 16, 64), "cuda": (1, 8, 64, 256, 512)}
GROWTH_CONTEXTS = {"cpu": (128, 256, 512, 1024), "cuda": (128, 512, 1024, 2048, 4096, 8192)}
GROWTH_KV_GIB = {"cpu": 1.0, "cuda": 90.0}
NUMBERS = count(step=100_000)
"""Of requests: no two have the same."""

Row = dict[str, Any]


@cache
def weights_of(model: str, *, seed: int = 0, device: str = DEVICE) -> dict[str, Tensor]:
    """Made on the device: a billion random numbers take the CPU long."""
    made = Transformer(MODELS[model], dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for name, parameter in made.named_parameters():
        values = parameter.detach()
        found[name] = values.fill_(1.0) if "norm" in name else values.normal_(std=0.02, generator=generator)
    return found


@cache
def engine_of(
    model: str,
    *,
    max_length: int = MAX_LENGTH,
    slots: int = SLOTS,
    device: str = DEVICE,
    kv_cache_gib: float | None = None,
) -> Engine:
    """In bf16; built once for all parts that want the same, and warmed up."""
    engine = new_engine(
        MODELS[model],
        weights_of(model, device=device),
        slots=slots,
        max_length=max_length,
        dtype="bfloat16",
        device=device,
        kv_cache_gib=kv_cache_gib,
    )
    for batch in (1, slots):
        outputs_of(engine, requests_of(model, batch, prompt_tokens=64, new_tokens=32))
    return engine


def requests_of(
    model: str, batch: int, *, prompt_tokens: int, new_tokens: int, **further: Any
) -> list[GenerationRequest]:
    """With prompts that no earlier request had."""
    first = next(NUMBERS)
    prompts = random_prompts(batch, length=prompt_tokens, vocab_size=MODELS[model].vocab_size, seed=first)
    return new_requests(prompts, new_tokens=new_tokens, first=first, **further)


def a_row(part: str, case: dict[str, Any], *, unit: str, ours: float, **further: Any) -> Row:
    return {"part": part, "case": case, "unit": unit, "ours": round(ours, 3), "further": further}


def workload(model: str, *, rounds: int) -> list[Row]:
    """The mixed workload, ours alone."""
    mixed = MixedCase()
    prompts, budgets = mixed.drawn()
    engine = engine_of(model)
    speeds = []
    for number in range(rounds + 1):
        work = mixed.work(seed=number, vocab_size=MODELS[model].vocab_size)
        requests = new_requests(
            work.prompts, new_tokens=budgets, first=next(NUMBERS), temperature=work.temperature
        )
        start = time.perf_counter()
        outputs = outputs_of(engine, requests)
        seconds = time.perf_counter() - start
        assert [len(output.tokens.ids) for output in outputs] == budgets, "a completion stopped early"
        speeds.append(sum(budgets) / seconds)
    case = {"model": model, "sequences": 256, "prompt_tokens": sum(map(len, prompts)), "tokens": sum(budgets)}
    return [
        a_row(
            "workload", case, unit="tokens/s", ours=statistics.median(speeds[1:]), rounds=rounded(speeds[1:])
        )
    ]


def decode_seconds(engine: Engine, prompts: Sequence[Sequence[int]], **further: Any) -> tuple[float, float]:
    """Of one decode step while all of these decode, and the mean context meanwhile.

    Their prompts are prefilled beforehand, so that all begin together; none ends before the time has been taken.
    """
    outputs_of(engine, new_requests(prompts, new_tokens=1, first=next(NUMBERS)))
    requests = new_requests(prompts, new_tokens=4 * STEPS, first=next(NUMBERS), **further)
    engine.submit(requests)
    while num_produced(engine, requests[-1:]) < STEPS // 2:
        engine.step()
    start = time.perf_counter()
    before = num_produced(engine, requests)
    while num_produced(engine, requests[-1:]) < STEPS // 2 + STEPS:
        engine.step()
    seconds = time.perf_counter() - start
    after = num_produced(engine, requests)
    for request in requests:
        engine.interrupt(request.id)
    steps = (after - before) / len(requests)
    return seconds / steps, len(prompts[0]) + (before + after) / 2 / len(requests)


def num_produced(engine: Engine, requests: Sequence[GenerationRequest]) -> int:
    """Tokens that the host has seen so far."""
    found = [engine.produced(request.id) for request in requests]
    return sum(len(tokens.ids) for tokens in found if tokens is not None)


def prompts_for(context: int, *, batch: int, model: str) -> list[list[int]]:
    """Of a length that has the context in the middle of what is timed, and all but its last token in whole pages."""
    length = max(context - STEPS, 0) // 64 * 64 + 1
    return random_prompts(batch, length=length, vocab_size=MODELS[model].vocab_size, seed=next(NUMBERS))


def kv_bytes_per_token(config: ModelConfig) -> int:
    return 2 * 2 * config.num_layers * config.kv_size


def read_bandwidth() -> float:
    """Bytes per second, the best of two ways to read 8 GB once."""
    numbers = torch.ones(2**31, dtype=torch.float32, device=DEVICE)
    matrix, vector = numbers.view(torch.bfloat16).view(-1, 8192), torch.ones(8192, device=DEVICE).bfloat16()
    ways: tuple[Callable[[], object], ...] = (numbers.sum, lambda: matrix @ vector)
    return max(numbers.nbytes / device_seconds(way) for way in ways)


def device_seconds(work: Callable[[], object], *, times: int = 7) -> float:
    """The median by the device's own clock, after one that does not count."""
    work()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def roofline(model: str, *, rounds: int) -> list[Row]:
    """The least time is what it takes to read all weights once, and the keys and values of all that was fed so far."""
    config, bandwidth = MODELS[model], read_bandwidth()
    torch.cuda.empty_cache()
    engine = engine_of(model)
    rows = []
    for batch in ROOFLINE_BATCHES:
        found = [
            decode_seconds(engine, prompts_for(ROOFLINE_CONTEXT, batch=batch, model=model))
            for _ in range(rounds)
        ]
        seconds, context = (statistics.median(column) for column in zip(*found, strict=True))
        read = 2 * num_parameters(config) + batch * context * kv_bytes_per_token(config)
        rows.append(
            a_row(
                "roofline",
                {"model": model, "batch": batch, "context": round(context)},
                unit="% of the roofline",
                ours=100 * read / bandwidth / seconds,
                step_ms=round(1e3 * seconds, 3),
                least_ms=round(1e3 * read / bandwidth, 3),
                tokens_per_s=round(batch / seconds),
                read_TB_per_s=round(bandwidth / 1e12, 2),
            )
        )
    return rows


def samples(model: str, *, rounds: int) -> list[Row]:
    """Prefill is what a prompt costs cold more than when its pages are all there; pages are those that hold prompts."""
    engine, num_prompts, length = engine_of(model), SLOTS // 16, 1025
    found: dict[int, list[tuple[float, float, float]]] = {1: [], 16: []}
    for _ in range(rounds + 1):
        for num_samples, measurements in found.items():
            prompts = random_prompts(
                num_prompts, length=length, vocab_size=MODELS[model].vocab_size, seed=next(NUMBERS)
            )
            before = engine.stats()["prefilled_tokens"]
            cold, pages = first_tokens(engine, prompts, num_samples=num_samples)
            prefilled = engine.stats()["prefilled_tokens"] - before
            warm, _ = first_tokens(engine, prompts, num_samples=num_samples)
            measurements.append((cold - warm, prefilled, pages - num_prompts * num_samples))
    one, many = (
        [statistics.median(column) for column in zip(*measurements[1:], strict=True)]
        for measurements in found.values()
    )
    case = {"model": model, "prompts": num_prompts, "prompt": length}
    return [
        a_row(
            "samples",
            case,
            unit="× the prefill of n = 1 with n = 16",
            ours=many[0] / one[0],
            prefill_ms=[round(1e3 * seconds, 2) for seconds in (one[0], many[0])],
            prefilled_tokens=[one[1], many[1]],
            prompt_pages=[one[2], many[2]],
        )
    ]


def first_tokens(
    engine: Engine, prompts: Sequence[Sequence[int]], *, num_samples: int
) -> tuple[float, float]:
    """Seconds until every sample has its first token, and the pages in use then: the prompts', and one that each
    sample writes to."""
    requests = new_requests(prompts, new_tokens=16, first=next(NUMBERS), num_samples=num_samples)
    start = time.perf_counter()
    engine.submit(requests)
    while num_produced(engine, requests[-1:]) == 0:
        engine.step()
    seconds = time.perf_counter() - start
    pages = engine.stats()["pages_used"]
    for request in requests:
        engine.interrupt(request.id)
    return seconds, pages


def logprobs(model: str, *, rounds: int) -> list[Row]:
    """A sampled token's log-probability costs at most the kernel that draws the token and computes it on the way: the
    sums that it needs are those for drawing. Those of the most likely tokens cost what a step with them takes longer.
    """
    engine, batch = engine_of(model), 256
    found: dict[int, list[float]] = {0: [], 1: [], 5: []}
    for _ in range(rounds):
        for top_logprobs, seconds in found.items():
            prompts = prompts_for(ROOFLINE_CONTEXT, batch=batch, model=model)
            seconds.append(decode_seconds(engine, prompts, top_logprobs=top_logprobs)[0])
    plain = statistics.median(found[0])
    case = {"model": model, "batch": batch}
    share = share_of_kernel("_draw", engine, prompts_for(ROOFLINE_CONTEXT, batch=batch, model=model))
    return [
        a_row("logprobs", {**case, "of": "the sampled token, at most"}, unit="% of a step", ours=100 * share),
        *(
            a_row(
                "logprobs",
                {**case, "of": f"the {top_logprobs} most likely"},
                unit="% longer step",
                ours=100 * (statistics.median(found[top_logprobs]) / plain - 1),
                step_ms=[
                    round(1e3 * seconds, 3) for seconds in (plain, statistics.median(found[top_logprobs]))
                ],
            )
            for top_logprobs in (1, 5)
        ),
    ]


def share_of_kernel(name: str, engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Of the time of all kernels while these decode, their prompts being in the cache already."""
    decode_seconds(engine, prompts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decode_seconds(engine, prompts)
    times = {event.key: event.self_device_time_total for event in profile.key_averages()}
    return sum(time for key, time in times.items() if name in key) / sum(times.values())


def swap(model: str, *, rounds: int) -> list[Row]:
    """Weights that lie ready on the device are taken over while 64 requests decode."""
    engine, batch = engine_of(model), 64
    staged = weights_of(model, seed=1)
    stream = engine._runner._stream  # type: ignore[attr-defined]  # That of the CUDA runner.
    waits, gaps = [], []
    for _ in range(rounds + 1):
        requests = requests_of(model, batch, prompt_tokens=128, new_tokens=4 * STEPS)
        engine.submit(requests)
        while num_produced(engine, requests[-1:]) < STEPS:
            engine.step()
        last_old, first_new = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        version, start = engine.version + 1, time.perf_counter()
        last_old.record(stream)
        engine.load(version, staged)
        first_new.record(stream)
        while not has_version(engine, requests, version=version):
            engine.step()
        waits.append(time.perf_counter() - start)
        gaps.append(last_old.elapsed_time(first_new))
        for request in requests:
            engine.interrupt(request.id)
    return [
        a_row(
            "swap",
            {"model": model, "batch": batch, "GB": sum(tensor.nbytes for tensor in staged.values()) / 1e9},
            unit="ms from the request to the first new token",
            ours=1e3 * statistics.median(waits[1:]),
            gap_between_steps_ms=round(statistics.median(gaps[1:]), 3),
        )
    ]


def has_version(engine: Engine, requests: Sequence[GenerationRequest], *, version: int) -> bool:
    found = engine.produced(requests[0].id)
    return found is not None and int(found.versions[-1]) == version


def growth(model: str, *, rounds: int, device: str = DEVICE) -> list[Row]:
    """Combinations whose keys and values do not fit into memory are left out."""
    batches, contexts = GROWTH_BATCHES[device], GROWTH_CONTEXTS[device]
    engine_of.cache_clear()
    if device == DEVICE:
        gc.collect()
        torch.cuda.empty_cache()
    engine = engine_of(
        model,
        max_length=contexts[-1] + 4 * STEPS,
        slots=batches[-1],
        device=device,
        kv_cache_gib=GROWTH_KV_GIB[device],
    )
    rows = []
    for context in contexts:
        for batch in batches:
            if not fits(engine, tokens=batch * (context + 4 * STEPS)):
                continue
            prompts = prompts_for(context, batch=batch, model=model)
            seconds = statistics.median(decode_seconds(engine, prompts)[0] for _ in range(rounds))
            case = {"model": model, "batch": batch, "context": context}
            rows.append(
                a_row("growth", case, unit="tokens/s", ours=batch / seconds, step_ms=round(1e3 * seconds, 3))
            )
    return rows


def fits(engine: Engine, *, tokens: int) -> bool:
    shape = engine._shape
    return tokens <= shape.num_pages * shape.page_size


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]


PARTS: dict[str, Callable[..., list[Row]]] = {
    "workload": workload,
    "roofline": roofline,
    "samples": samples,
    "logprobs": logprobs,
    "swap": swap,
    "growth": growth,
}
