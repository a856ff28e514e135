"""One generation server: an engine that takes requests and weights between two of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.segments import SegmentClient
from kintsugi.config import Config
from kintsugi.errors import DataError, IntegrityError, KintsugiError, RefusedError, UserError, WorldError
from kintsugi.generation.engine import Engine, Output, Request
from kintsugi.generation.noise import stream_key
from kintsugi.messages import Body, FetchWeights, Generate, Generated, LoadWeights, WeightsLoaded
from kintsugi.model.device import choose_device, identity
from kintsugi.model.faults import as_world_error
from kintsugi.model.plan import plan_model
from kintsugi.model.transformer import Transformer
from kintsugi.observe.events import Note
from kintsugi.recipe import load_config
from kintsugi.runtime import COUNTERS
from kintsugi.transport import Delivery, Reply
from kintsugi.types import Completion, WeightManifest, WeightSource
from kintsugi.weights.fetch import describe, fetch
from kintsugi.worker import Shell, run_worker

IDLE_WAIT_S = 5.0
FETCH_TIMEOUT_S = 60.0
"""Of one request of a bulk stream."""
MAX_WAITING_SAMPLES = 1 << 16
"""Samples in the engine; a further request is refused."""

Fetch = Callable[[WeightManifest, Sequence[WeightSource]], Mapping[str, Tensor]]
"""Gets the tensors of a manifest, verified against its digests."""


class Speaker(Protocol):
    """What the server needs of a `worker.Shell`."""

    @property
    def process(self) -> str: ...

    def next_request(self, timeout_s: float) -> Delivery | None: ...

    def take_all(self) -> list[Delivery]: ...

    def reply(self, delivery: Delivery, body: Body) -> None: ...

    def fail(self, delivery: Delivery, error: BaseException) -> None: ...

    def set_load(self, load: float) -> None: ...


@dataclass(eq=False)
class _Job:
    """A `Generate` under way, and its samples that are done."""

    deliveries: list[Delivery]
    """All that asked for it, to be answered alike: a manager that was restarted asks again."""
    request: Generate
    weights: WeightsLoaded | None
    """That were there when it began."""
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Most tokens that its unfinished samples take, prompts included."""
        num_unfinished = len(self.request.wanted) - len(self.completions)
        return num_unfinished * (len(self.request.prompt) // 4 + self.request.sampling.max_new_tokens)


class Server:
    """Consumes `Generate` and `LoadWeights`, produces their replies; waits only while the engine has nothing to do,
    and is unblocked by the next request."""

    def __init__(self, shell: Speaker, engine: Engine, *, fetch: Fetch) -> None:
        self._shell = shell
        self._engine = engine
        self._fetch = fetch
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = 0
        self._held: WeightsLoaded | None = None

    def serve(self) -> NoReturn:
        """Until the shell raises ShuttingDown."""
        while True:
            self.turn(IDLE_WAIT_S)

    def turn(self, idle_wait_s: float) -> None:
        """Take what has come in, then run one step of the engine. A device that fails ends the server, by its own name:
        what the engine was doing is lost with it, and the manager gives the requests to another one."""
        try:
            self._take_all(idle_wait_s)
            self._advance()
        except RuntimeError as error:
            fault = as_world_error(error)
            if fault is error:
                raise
            raise fault from error

    def _take_all(self, idle_wait_s: float) -> None:
        if self._engine.idle:
            first = self._shell.next_request(idle_wait_s)
            if first is not None:
                self._take(first)
        for delivery in self._shell.take_all():
            self._take(delivery)

    def _advance(self) -> None:
        if self._engine.idle:
            return
        for output in self._engine.step():
            self._finish(output)
        COUNTERS.add("steps")
        self._shell.set_load(sum(job.num_tokens for job in self._jobs.values()))

    def _take(self, delivery: Delivery) -> None:
        body = delivery.body
        try:
            if isinstance(body, Generate):
                self._start(delivery, body)
            elif isinstance(body, LoadWeights):
                self._shell.reply(delivery, self._load(body))
            elif delivery.wants_reply:
                raise RefusedError(f"a generation server does not answer {type(body).__name__}")
        except KintsugiError as error:
            self._shell.fail(delivery, error)

    def _load(self, body: LoadWeights) -> WeightsLoaded:
        """Copy a version in, unless it is there; all of it is verified before the first byte is overwritten."""
        manifest = body.manifest
        wanted = WeightsLoaded(manifest.version, manifest.digest, (self._shell.process,))
        if self._held != wanted:
            tensors = self._fetch(manifest, body.sources)
            self._engine.load(manifest.version, tensors)
            self._held = wanted
        return wanted

    def _start(self, delivery: Delivery, request: Generate) -> None:
        if (running := self._running(request)) is not None:
            running.deliveries.append(delivery)
            return
        version = self._engine.version
        if version < request.version:
            raise RefusedError(f"server at version {version}, expected at least {request.version}")
        if self._engine.num_requests + len(request.wanted) > MAX_WAITING_SAMPLES:
            raise RefusedError(f"{self._engine.num_requests} samples are under way; try again later")
        if not request.wanted or len(set(request.wanted)) < len(request.wanted):
            raise UserError(f"expected samples of {request.ticket}, each once, got {request.wanted}")
        if len(request.prompt) % 4:
            raise DataError(
                f"expected int32 tokens as prompt of {request.ticket}, got {len(request.prompt)} bytes"
            )
        sampling = request.sampling
        prompt = np.frombuffer(request.prompt, dtype="<i4")
        number = self._num_jobs
        self._engine.submit(
            Request(
                (number, sample),
                prompt=prompt,
                noise_key=stream_key(request.ticket, seed=sampling.seed, sample=sample, turn=request.turn),
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                stop_token_ids=sampling.stop_token_ids,
            )
            for sample in request.wanted
        )
        self._num_jobs += 1
        self._jobs[number] = _Job([delivery], request, self._held)
        COUNTERS.add("requests")

    def _running(self, request: Generate) -> _Job | None:
        """The job that will give what is asked, to the bit: begun with the same weights, for the same request."""
        for job in self._jobs.values():
            if job.weights is self._held and _is_same(job.request, request):
                return job
        return None

    def _finish(self, output: Output) -> None:
        """Keep a finished sample; the last one of its job, or a broken one, answers the request."""
        number, sample = output.request.id
        job = self._jobs.get(number)
        COUNTERS.add("tokens", len(output.tokens.ids))
        if job is None:
            return  # Another sample of the request was broken, and it has been answered.
        if not output.finite:
            self._abandon(number, job)
            return
        assert output.finish is not None, "only `interrupt` gives an unfinished output"
        job.completions[sample] = Completion(
            sample,
            output.tokens.ids.astype("<i4").tobytes(),
            output.tokens.logprobs.astype("<f4").tobytes(),
            output.tokens.versions.astype("<i4").tobytes(),
            output.finish,
        )
        wanted = job.request.wanted
        if len(job.completions) == len(wanted):
            del self._jobs[number]
            completions = tuple(job.completions[sample] for sample in wanted)
            generated = Generated(job.request.ticket, job.request.turn, completions, self._shell.process)
            for delivery in job.deliveries:
                self._shell.reply(delivery, generated)

    def _abandon(self, number: int, job: _Job) -> None:
        del self._jobs[number]
        for sample in job.request.wanted:
            self._engine.interrupt((number, sample))
        version = self._engine.version
        error = IntegrityError(f"the logits of {job.request.ticket} are not finite at version {version}")
        for delivery in job.deliveries:
            self._shell.fail(delivery, error)


def _is_same(request: Generate, other: Generate) -> bool:
    """However long each of those who ask would wait for it."""
    return request.ticket == other.ticket and request == msgspec.structs.replace(
        other, timeout_s=request.timeout_s
    )


def build_engine(config: Config, *, device: torch.device) -> Engine:
    """The engine that a run's configuration describes; its weights arrive by `LoadWeights`."""
    architecture, tokenizer = plan_model(config)
    model = Transformer(architecture, dtype=getattr(torch, config.actor.dtype), device=device)
    return Engine(
        model,
        slots=config.generation.slots,
        max_length=config.generation.max_length,
        end_token_ids=tuple({*architecture.eos_token_ids, tokenizer.eos_token_id}),
    )


def main(bootstrap: Bootstrap) -> int:
    """Build the model that the run folder describes, report to the master, and serve until told to end."""
    torch.set_num_threads(1)
    device = choose_device(bootstrap.process, broken=bootstrap.broken_chips)
    engine = build_engine(load_config(Path(bootstrap.run_dir) / "config.yaml"), device=device)
    return run_worker(
        bootstrap,
        lambda shell: Server(shell, engine, fetch=partial(_fetch, shell)).serve(),
        capabilities={"device": str(device), "chip": identity(device)},
    )


def _fetch(shell: Shell, manifest: WeightManifest, sources: Sequence[WeightSource]) -> Mapping[str, Tensor]:
    """Through shared memory of this host if its agent answers, else from the process that published."""

    def fetch_stream(process: str, request: FetchWeights) -> Reply:
        return shell.call(process, request, deadline_s=FETCH_TIMEOUT_S)

    with ExitStack() as stack:
        segments = None
        if shell.bootstrap.segments:
            try:
                segments = stack.enter_context(closing(SegmentClient(shell.bootstrap.segments)))
            except WorldError as error:
                shell.events.emit(Note(f"no shared memory on {shell.bootstrap.host}: {error}"))
        host = shell.bootstrap.host
        fetched = fetch(manifest, sources, host=host, segments=segments, fetch_stream=fetch_stream)
    for failure in fetched.failures:
        shell.events.emit(
            Note(f"version {manifest.version} came by {describe(fetched.source)}, because {failure}")
        )
    return fetched.tensors()
