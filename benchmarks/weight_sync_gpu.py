"""The part of `weight_sync.py` for one accelerator: 1.5 B parameters are swapped in while a server decodes.

A second process holds the weights, as a rank does, and publishes them in place (CUDA IPC) or through shared memory.
Here 32 requests decode all the time; a thread fetches, verifies and stages. Measured on the device: from the end of the
last step with the old weights to the beginning of the first with the new ones. Measured by the host: from the order to
swap until a token of the new version is seen.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks.generation_ours import new_requests
from benchmarks.weight_sync import Meeting, came_by
from benchmarks.weight_sync_sides import Told
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.factory import build_engine
from kintsugi.generation.weight_loading import WeightLoad, WeightLoader, in_thread
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.tokenizer import character_tokenizer
from kintsugi.protocol.weights import LoadWeights
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.transport import Delivery
from kintsugi.weights.device_digests import piece_digests
from kintsugi.weights.transports.device import MappedSlots

LIMIT_S = 220.0
"""Of all of it; what has been measured by then is written."""
ROUNDS = {"in_place": 8, "shared_memory": 5}
SLOTS, PROMPT_TOKENS, NEW_TOKENS, MAX_LENGTH = 32, 16, (384, 768), 1024
WARM_S, STEADY_S = 4.0, 1.0
ROUND_TIMEOUT_S = 40.0
MOST_PAUSE_MS, MOST_TO_TOKEN_MS = 5.0, 60.0
QWEN2_1500M: dict[str, Any] = {
    "family": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_layers": 28,
    "num_heads": 12,
    "num_kv_heads": 2,
    "head_dim": 128,
    "max_positions": 32768,
    "rope_theta": 1e6,
    "tie_embeddings": True,
    "attention_bias": True,
}
"""The shape of Qwen2.5-1.5B."""


class OutOfTime(BaseException):
    """All of it took too long; nothing but the end may catch it."""


class Visits:
    """Marks the device's stream around every visit, so that gaps between visits show. Wraps a runner's `decode`."""

    def __init__(self, engine: Engine) -> None:
        self._runner = cast(Any, engine.runner)
        self._decode = self._runner.decode
        self._runner.decode = self._marked
        self._marks: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque(maxlen=64)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._runner._stream)
        return event

    def _marked(self, slots: Sequence[int], *, num_steps: int) -> Any:
        begin = self.mark()
        pending = self._decode(slots, num_steps=num_steps)
        self._marks.append((begin, self.mark(), num_steps))
        return pending

    def step_ms(self) -> float:
        """Of the visits marked so far; then they are forgotten."""
        torch.cuda.synchronize()
        found = [begin.elapsed_time(end) / steps for begin, end, steps in self._marks]
        self._marks.clear()
        return statistics.median(found) if found else float("nan")

    def forget(self) -> None:
        self._marks.clear()

    def first(self) -> tuple[torch.cuda.Event, torch.cuda.Event, int]:
        return self._marks[0]


class Decoding:
    """An engine that always has something to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.visits = Visits(engine)
        self._numbers = count()
        self._random = np.random.default_rng(0)
        self._running: set[tuple[int, int]] = set()
        self.num_tokens = 0

    def step(self) -> set[int]:
        """One visit; gives the versions of the tokens that were sampled last."""
        self._fill()
        seen = set()
        for output in self.engine.step():
            self._running.discard(output.request.id)
            self.num_tokens += len(output.tokens.ids)
            if len(output.tokens.versions):
                seen.add(int(output.tokens.versions[-1]))
        for request_id in list(self._running)[:2]:
            tokens = self.engine.produced(request_id)
            if tokens is not None and len(tokens.versions):
                seen.add(int(tokens.versions[-1]))
        return seen

    def _fill(self) -> None:
        missing = SLOTS - len(self._running)
        if missing:
            prompts = self._random.integers(5, 1000, (missing, PROMPT_TOKENS)).tolist()
            budgets = self._random.integers(*NEW_TOKENS, missing).tolist()
            first = next(self._numbers) * SLOTS
            requests = new_requests(prompts, new_tokens=budgets, first=first)
            self._running |= {request.id for request in requests}
            self.engine.submit(requests)

    def run(self, seconds: float) -> float:
        """For so long; gives decode steps per second."""
        begun, steps = time.perf_counter(), self.engine.num_steps
        while time.perf_counter() < begun + seconds:
            self.step()
        return (self.engine.num_steps - steps) / (time.perf_counter() - begun)


class Round:
    """One version: published by the other process, staged beside the decoding, swapped in."""

    def __init__(self, decoding: Decoding, meeting: Meeting, stager: WeightLoader, transport: str) -> None:
        self._decoding, self._meeting, self._stager = decoding, meeting, stager
        self._transport = transport
        self._told: Told | None = None
        self._failure: BaseException | None = None

    def run(self) -> dict[str, Any]:
        steady = self._decoding.run(STEADY_S)
        step_ms = self._decoding.visits.step_ms()
        begun, steps = time.perf_counter(), self._decoding.engine.num_steps
        threading.Thread(target=self._publish, name="publish", daemon=True).start()
        load = self._staged(begun)
        staged_s = time.perf_counter() - begun
        during = (self._decoding.engine.num_steps - steps) / staged_s
        found = self._swap(load, step_ms=step_ms)
        assert self._told is not None
        return found | {
            "publish_s": self._told.publish_s,
            "fetch_verify_stage_s": load.fetch_s,
            "published_to_staged_s": staged_s,
            "step_ms": step_ms,
            "steps_per_s": steady,
            "steps_per_s_while_staging": during,
        }

    def _publish(self) -> None:
        try:
            self._told = self._meeting.publish(self._transport)
        except RuntimeError as error:
            self._failure = error

    def _staged(self, begun: float) -> WeightLoad:
        asked = False
        while time.perf_counter() < begun + ROUND_TIMEOUT_S:
            if self._failure is not None:
                raise self._failure
            if self._told is not None and not asked:
                published = self._told.published
                assert published is not None
                # Nobody has to be answered.
                self._stager.request(cast(Delivery, None), LoadWeights(published.manifest, published.sources))
                asked = True
            self._decoding.step()
            if (load := self._stager.take()) is not None:
                if load.error is not None:
                    raise load.error
                return load
        raise TimeoutError(f"{self._transport}: nothing was staged in {ROUND_TIMEOUT_S} s")

    def _swap(self, load: WeightLoad, *, step_ms: float) -> dict[str, Any]:
        engine, visits = self._decoding.engine, self._decoding.visits
        assert load.fetched is not None and came_by(load.fetched.source, self._transport)
        version = load.order.manifest.version
        visits.forget()
        old_end = visits.mark()
        requested = time.perf_counter()
        pause = engine.load(version, load.tensors)
        loaded = time.perf_counter()
        while version not in self._decoding.step():
            if time.perf_counter() > requested + ROUND_TIMEOUT_S:
                raise TimeoutError("no token of the new version came")
        first_token = time.perf_counter()
        assert pause is not None
        copy_ms = pause()
        begin, end, steps = visits.first()
        torch.cuda.synchronize()
        load.check()
        self._check(load)
        load.release()
        return {
            "pause_ms": old_end.elapsed_time(begin),
            "pause_by_difference_ms": old_end.elapsed_time(end) - steps * step_ms,
            "copy_ms": copy_ms,
            "host_ms": (loaded - requested) * 1e3,
            "request_to_first_token_ms": (first_token - requested) * 1e3,
        }

    def _check(self, load: WeightLoad) -> None:
        """What the runner computes with is what was published."""
        runner: Any = self._decoding.engine.runner
        pieces = load.order.manifest.pieces
        found = piece_digests([runner._parameters[piece.name] for piece in pieces])
        for piece, digest in zip(pieces, found, strict=True):
            assert digest == piece.digest, f"{piece.name} is not what was published"


def baselines(size: int) -> dict[str, float]:
    """Gigabytes per second of copies on the card, and between it and pinned memory."""
    size = min(size, 1 << 30)
    one, other = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in "ab")
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    found = {}
    for name, target, source in (
        ("on_card", one, other),
        ("to_card", one, pinned),
        ("from_card", pinned, one),
    ):
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        found[name] = round(size / 1e9 / statistics.median(times), 1)
    return found


def measure(found: dict[str, Any], *, model: Mapping[str, Any], json_path: Path | None) -> None:
    device = torch.device("cuda", 0)
    begun = time.perf_counter()
    engine = build_engine(
        ModelConfig(**model),
        character_tokenizer("ab"),
        slots=SLOTS,
        max_length=MAX_LENGTH,
        dtype=torch.bfloat16,
        device=device,
        deterministic=False,
    )
    runner: Any = engine.runner
    size = sum(parameter.nbytes for parameter in runner._parameters.values())
    found |= {
        "card": torch.cuda.get_device_name(),
        "parameters": sum(parameter.numel() for parameter in runner._parameters.values()),
        "bytes": size,
        "gigabytes_per_s": baselines(size),
    }
    with tempfile.TemporaryDirectory(prefix="weight_sync-") as name:
        card = MappedSlots(device)
        folder = Path(name)
        with closing(Meeting(model, device="cuda:0", dtype="bfloat16", card=card, folder=folder)) as meeting:
            first = meeting.publish("shared_memory")
            stager = WeightLoader(
                lambda manifest, sources: meeting.fetcher.fetch(manifest, sources, segments=meeting.segments),
                engine.stage,
                wake=lambda: None,
                background=in_thread,
                clock=SYSTEM_CLOCK,
            )
            fetched = meeting.fetch(first)
            engine.load(meeting.version, engine.stage(fetched.tensors()))
            fetched.release()
            decoding = Decoding(engine)
            decoding.run(WARM_S)
            for transport, rounds in ROUNDS.items():
                measured: list[dict[str, Any]] = []
                try:
                    while len(measured) < rounds:
                        measured.append(Round(decoding, meeting, stager, transport).run())
                except Exception:  # noqa: BLE001 - the other transport is measured all the same.
                    found.setdefault("errors", {})[transport] = traceback.format_exc()
                # The first maps memory and captures what is left to be captured.
                found.setdefault("transports", {})[transport] = _summary(measured[1:])
                found["seconds"] = round(time.perf_counter() - begun, 1)
                if json_path is not None:
                    json_path.write_text(json.dumps(found, indent=2) + "\n")


def _summary(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not measured:
        return {}
    return {
        name: {
            "median": round(statistics.median(each[name] for each in measured), 3),
            "max": round(max(each[name] for each in measured), 3),
        }
        for name in measured[0]
    } | {"rounds": len(measured)}


def run(
    *, json_path: Path | None, found: dict[str, Any], model: Mapping[str, Any] = QWEN2_1500M
) -> dict[str, Any]:
    """Within `LIMIT_S`, whatever happens: what was not measured is named under `errors`."""

    def over(signal_number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"not done after {LIMIT_S:g} s")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        measure(found, model=model, json_path=json_path)
    except (Exception, OutOfTime):  # noqa: BLE001 - reported with what was measured.
        found.setdefault("errors", {})["run"] = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    found["targets"] = [
        {"what": f"{transport}, {what}", "at_most": most, "got": each[what]["median"]}
        | {"met": each[what]["median"] <= most}
        for transport, each in found.get("transports", {}).items()
        for what, most in (("pause_ms", MOST_PAUSE_MS), ("request_to_first_token_ms", MOST_TO_TOKEN_MS))
        if each
    ]
    return found


def show(found: Mapping[str, Any]) -> None:
    print(json.dumps({name: value for name, value in found.items() if name != "errors"}, indent=2))
    for where, trace in found.get("errors", {}).items():
        print(f"{where}: {trace}", file=sys.stderr)
