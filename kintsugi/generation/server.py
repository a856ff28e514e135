"""One generation server: a back end that takes requests and weights between two of its steps, and reports its
progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import NoReturn

import torch

from kintsugi.bulk.endpoint import open_bulk
from kintsugi.cluster.shared_memory import SegmentClient
from kintsugi.config.recipe import load_config
from kintsugi.device_lease.client import UNSHARED, LeaseHandle, open_lease
from kintsugi.errors import (
    DeviceError,
    IntegrityError,
    KintsugiError,
    Miscomputed,
    RefusedError,
    WorldError,
    damage_of,
)
from kintsugi.generation.backend import Backend, Pause, Running
from kintsugi.generation.engine.factory import memory_of, note_of, open_backend, verification_of, warm_up
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, Tokens
from kintsugi.generation.engine.rng import stream_key
from kintsugi.generation.server_jobs import (
    Incarnation,
    ServerJob,
    check,
    incarnation_of,
    produced_of,
    prompt_of,
)
from kintsugi.generation.weight_loading import (
    Background,
    Fetch,
    WeightLoad,
    WeightLoader,
    in_thread,
    superseded,
)
from kintsugi.model.device import choose_device, identity
from kintsugi.model.device_errors import as_world_error
from kintsugi.model.device_usage import device_gauges
from kintsugi.process.main import run_worker
from kintsugi.process.shell import Mailbox, Shell
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.generation import Cancel, Generate, Interrupt, Produced
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.weights import FetchWeights, HoldDelta, HoldWeights, LoadWeights, WeightsLoaded
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.peak_memory import PEAKS
from kintsugi.runtime.spans import SPANS
from kintsugi.telemetry.events import Note, WeightsFromFallback
from kintsugi.transport import Delivery, Reply
from kintsugi.types import Fragment, WeightManifest, WeightSource
from kintsugi.weights.fetch import Fetched, Fetcher, describe
from kintsugi.weights.transports.collective import receive
from kintsugi.weights.transports.device import MappedSlots
from kintsugi.weights.transports.stream import StreamFetch

IDLE_WAIT_S = 5.0
MAX_WAITING_SAMPLES = 1 << 16
"""Largest number of samples in the engine; further requests are refused."""
STREAM_S = 0.01
"""Interval between messages to requesters that stream: a message per token and sample would cost more than the
token."""
PROGRESS_S = 0.25
"""Interval between progress messages to other requesters, which bounds the tokens that are lost with this server. Most
requests finish earlier."""
MAX_STREAMING_SHARE, MAX_PROGRESS_SHARE = 0.1, 0.02
"""Largest share of the time for messages; with many requests they are sent less often."""
REPORT_S = 0.25
ORPHANED_S = 10.0
"""Time for which work continues after its requester is gone: the requester's successor may send the same request and
join it."""


class GenerationServer:
    """Consumes `Generate`, `Cancel`, `Interrupt` and `LoadWeights`, produces their replies and `Produced`. Waits only
    while the back end has nothing to do; the next request, or weights that are ready, unblock it."""

    def __init__(
        self,
        shell: Mailbox,
        backend: Backend,
        *,
        fetch: Fetch,
        clock: Clock = SYSTEM_CLOCK,
        background: Background = in_thread,
        lease: LeaseHandle = UNSHARED,
        verify: Callable[[], None] = lambda: None,
        note_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """`verify` raises if computed results can not be trusted; called before finished samples are sent.
        `note_memory` notes the peak of device memory; called with every report."""
        self._shell = shell
        self._lease = lease
        self._verify = verify
        self._note_memory = note_memory
        self._backend = backend
        self._clock = clock
        self._loader = WeightLoader(fetch, backend.stage, wake=shell.wake, background=background, clock=clock)
        self._swapped: list[tuple[WeightLoad, float, Pause | None]] = []
        """Weights that were swapped in during this turn, with the pause by our clock and by the device's."""
        self._gauges: dict[str, float] = {}
        self._jobs: dict[int, ServerJob] = {}
        self._numbers: dict[str, list[int]] = {}
        """Numbers of the jobs of each ticket."""
        self._requested: dict[tuple[Incarnation, int], int] = {}
        """Job by requester and the requester's number."""
        self._requesters: dict[Incarnation, float | None] = {}
        """All requesters, and since when each is gone."""
        self._streaming: dict[int, ServerJob] = {}
        self._num_jobs = 0
        self._held: WeightsLoaded | None = None
        self._stream_at = 0.0
        self._progress_at = 0.0
        self._reported = (clock.monotonic(), 0.0)
        """Time of the last report and the tokens decoded until then."""

    def serve(self) -> NoReturn:
        """Run until the shell raises ShuttingDown."""
        while True:
            self.turn(IDLE_WAIT_S)

    def turn(self, idle_wait_s: float) -> None:
        """Process incoming messages, then run one step of the back end. A device error ends the server under its own
        name: its work continues on another server, from the tokens that were reported."""
        try:
            self._take_all(idle_wait_s)
            self._swap_all()
            self._advance()
            self._acknowledge_all()
            self._lease.leave(wants_more=self._has_work)
        except RuntimeError as error:
            fault = as_world_error(error)
            if fault is error:
                raise
            raise fault from error

    @property
    def _has_work(self) -> bool:
        """Whether there is work for the device."""
        return self._loader.is_ready or not self._backend.idle

    def _take_all(self, idle_wait_s: float) -> None:
        if self._has_work:
            if not self._lease.try_enter():
                self._lease.await_turn()
        else:
            self._report(self._clock.monotonic())
            first = self._shell.next_request(idle_wait_s)
            if first is not None:
                self._take(first)
        for delivery in self._shell.take_all():
            self._take(delivery)

    def _advance(self) -> None:
        if self._backend.idle or not self._lease.try_enter():
            return
        num_steps = self._backend.num_steps
        outputs = self._backend.step()
        if outputs:
            self._verify()
        for output in outputs:
            self._finish(output)
        COUNTERS.add("steps", self._backend.num_steps - num_steps)
        now = self._clock.monotonic()
        if self._streaming and now >= self._stream_at:
            spent_s = self._send_progress(self._streaming)
            self._stream_at = now + max(STREAM_S, spent_s / MAX_STREAMING_SHARE)
        if now >= self._progress_at:
            spent_s = self._send_progress(
                {key: job for key, job in self._jobs.items() if job.since <= now - PROGRESS_S}
            )
            self._progress_at = now + max(PROGRESS_S, spent_s / MAX_PROGRESS_SHARE)
        if now >= self._reported[0] + REPORT_S:
            self._report(now)
            self._drop_orphans(now)

    def _take(self, delivery: Delivery) -> None:
        body = delivery.body
        try:
            match body:
                case Generate():
                    self._start(delivery, body)
                case Cancel():
                    self._cancel(delivery, body.number)
                case Interrupt():
                    self._interrupt()
                    self._shell.reply(delivery, Ok())
                case LoadWeights():
                    self._load_weights(delivery, body)
                case _ if delivery.wants_reply:
                    raise RefusedError(f"a generation server does not answer {type(body).__name__}")
        except KintsugiError as error:
            self._shell.fail(delivery, error)

    def _load_weights(self, delivery: Delivery, body: LoadWeights) -> None:
        """Fetch and verify weights in the background, unless they are loaded already."""
        held = self._held
        manifest = body.manifest
        is_held = held is not None and (held.version, held.digest) == (manifest.version, manifest.digest)
        if held is not None and is_held and not self._loader.is_busy:
            self._shell.reply(delivery, held)
            return
        for superseded_deliveries in self._loader.request(delivery, body):
            self._shell.fail(superseded_deliveries, superseded(manifest.version))
        self._swap_all()

    def _swap_all(self) -> None:
        while self._loader.is_ready and self._lease.try_enter() and (load := self._loader.take()) is not None:
            if isinstance(load.error, AssertionError):
                raise load.error  # A bug of this program: it ends the process, and is not retried as a fault.
            # A shared device may be out of memory for a moment: the load fails, the server continues.
            error = None if load.error is None else as_world_error(load.error)
            try:
                if error is None:
                    self._swap(load)
            except KintsugiError as failure:
                error = failure
            if error is None:
                continue
            if isinstance(error, DeviceError) or not isinstance(error, KintsugiError):
                raise error
            load.release()
            for delivery in load.deliveries:
                self._shell.fail(delivery, error)

    def _swap(self, load: WeightLoad) -> None:
        """Change to weights that have been verified."""
        since = self._clock.monotonic()
        manifest = load.order.manifest
        load.check()
        if load.order.running == "interrupt":
            self._interrupt()
        running: Running = "recompute" if load.order.running == "recompute" else "keep"
        # If the load fails, the memory may hold parts of both versions.
        self._held = None
        pause = self._backend.load(manifest.version, load.tensors, running=running)
        self._held = WeightsLoaded(manifest.version, manifest.digest, (self._shell.process,))
        self._swapped.append((load, (self._clock.monotonic() - since) * 1e3, pause))

    def _acknowledge_all(self) -> None:
        """Acknowledge new weights. Runs after the next step has started, because only then the device knows how long it
        paused."""
        swapped, self._swapped = self._swapped, []
        for load, pause_ms, pause in swapped:
            if pause is not None:
                pause_ms = pause()
            # An error ends this process: its memory holds parts of two versions.
            load.check()
            load.swapped(pause_ms)
            manifest, process = load.order.manifest, self._shell.process
            self._gauges |= {"weight_pause_ms": round(pause_ms, 3), "weight_fetch_s": round(load.fetch_s, 4)}
            loaded = WeightsLoaded(
                manifest.version,
                manifest.digest,
                (process,),
                pause_ms={process: pause_ms},
                fetch_s={process: load.fetch_s},
            )
            for delivery in load.deliveries:
                self._shell.reply(delivery, loaded)

    def _start(self, delivery: Delivery, request: Generate) -> None:
        for number in self._numbers.get(request.ticket, ()):
            job = self._jobs[number]
            if job.weights is self._held and job.serves(request):
                job.join(delivery)
                self._note_requester(delivery, request, number)
                return
        version = self._backend.version
        if version < request.version:
            raise RefusedError(f"server at version {version}, expected at least {request.version}")
        if self._backend.num_requests + len(request.wanted) > MAX_WAITING_SAMPLES:
            raise RefusedError(f"{self._backend.num_requests} samples are under way; try again later")
        check(request)
        number = self._num_jobs
        self._backend.submit(_samples_of(request, number=number))
        self._num_jobs += 1
        job = ServerJob(delivery, request, weights=self._held, now=self._clock.monotonic())
        self._jobs[number] = job
        self._numbers.setdefault(request.ticket, []).append(number)
        self._note_requester(delivery, request, number)
        COUNTERS.add("requests")

    def _note_requester(self, delivery: Delivery, request: Generate, number: int) -> None:
        requester = incarnation_of(delivery.peer)
        self._requesters.setdefault(requester, None)
        self._requested[requester, request.number] = number
        if request.stream:
            self._streaming[number] = self._jobs[number]

    def _cancel(self, delivery: Delivery, number: int) -> None:
        """Remove a requester that has left or moved its request; the last one takes the job with it."""
        requester = incarnation_of(delivery.peer)
        key = self._requested.pop((requester, number), None)
        if key is None:
            return
        job = self._jobs[key]
        for left in job.leave(requester, number):
            COUNTERS.add("cancelled")
            # Not a fault, and not read by the requester: the reply only closes the request.
            self._shell.reply(left, Ok())
        if not job.deliveries:
            self._drop(key)

    def _drop_orphans(self, now: float) -> None:
        """Drop the jobs of dead requesters, which can not cancel. A successor requests again, here or at another
        server."""
        for requester, since in list(self._requesters.items()):
            peer = self._shell.peer(requester[0])
            if peer is not None and incarnation_of(peer) == requester:
                self._requesters[requester] = None
            elif since is None:
                self._requesters[requester] = now
            elif now >= since + ORPHANED_S:
                del self._requesters[requester]
                self._drop_all_of(requester)

    def _drop_all_of(self, requester: Incarnation) -> None:
        for number, job in list(self._jobs.items()):
            if job.leave(requester) and not job.deliveries:
                COUNTERS.add("cancelled")
                self._drop(number)
        self._requested = {key: number for key, number in self._requested.items() if key[0] != requester}

    def _interrupt(self) -> None:
        """Reply to all requests with the tokens they have."""
        for number, job in list(self._jobs.items()):
            for sample in job.unfinished:
                output = self._backend.interrupt((number, sample))
                if output is not None:
                    job.add(output)
            COUNTERS.add("interrupted")
            # A sample that has ended and was not returned yet is returned by the next step, which then completes the
            # job.
            if not job.unfinished:
                self._answer(self._remove(number))

    def _finish(self, output: GenerationOutput) -> None:
        """Store a finished sample. The last one of its job, or a broken one, completes the request."""
        number, _ = output.request.id
        COUNTERS.add("tokens", len(output.tokens.ids) - output.request.num_produced)
        job = self._jobs.get(number)
        if job is None:
            return  # Answered or dropped already.
        error: KintsugiError | None = output.user_error
        if not output.finite:
            error = IntegrityError(
                f"the logits of {job.request.ticket} are not finite at version {self._backend.version}",
                detail=Miscomputed("logits"),
            )
        if error is not None:
            self._drop(number)
            for delivery in job.deliveries:
                self._shell.fail(delivery, error)
            return
        job.add(output)
        if not job.unfinished:
            self._answer(self._remove(number))

    def _answer(self, job: ServerJob) -> None:
        generated = job.answer(server=self._shell.process)
        for delivery in job.deliveries:
            self._shell.reply(delivery, generated)

    def _drop(self, number: int) -> None:
        job = self._remove(number)
        for sample in job.unfinished:
            self._backend.interrupt((number, sample))

    def _remove(self, number: int) -> ServerJob:
        job = self._jobs.pop(number)
        self._streaming.pop(number, None)
        for requested in job.requested():
            self._requested.pop(requested, None)
        same_ticket = self._numbers[job.request.ticket]
        same_ticket.remove(number)
        if not same_ticket:
            del self._numbers[job.request.ticket]
        return job

    def _send_progress(self, jobs: Mapping[int, ServerJob]) -> float:
        """Send one message to each requester, with all new tokens of its requests; return how long it took."""
        since = self._clock.monotonic()
        unsent: dict[str, dict[int, tuple[Fragment, ...]]] = {}
        for number, job in jobs.items():
            fragments = job.unsent(partial(self._produced, number))
            if fragments:
                for (process, _), requested in job.requested():
                    unsent.setdefault(process, {})[requested] = fragments
        for process, fragments_of in unsent.items():
            self._shell.send(process, Produced(fragments_of))
        return self._clock.monotonic() - since

    def _produced(self, number: int, sample: int) -> Tokens | None:
        return self._backend.produced((number, sample))

    def _report(self, now: float) -> None:
        """Set the load and the metrics for the next heartbeat."""
        load = sum(job.num_tokens for job in self._jobs.values())
        stats = self._backend.stats()
        decoded = stats.get("decoded_tokens", 0.0)
        since, before = self._reported
        if now > since:
            stats["tokens_per_s"] = round(max(0.0, decoded - before) / (now - since), 1)
        self._reported = (now, decoded)
        self._note_memory()
        self._shell.report(load=float(load), gauges=stats | self._gauges | device_gauges())


def _samples_of(request: Generate, *, number: int) -> list[GenerationRequest]:
    prompt, sampling = prompt_of(request), request.sampling
    return [
        GenerationRequest(
            (number, sample),
            prompt=prompt,
            rng_key=stream_key(request.ticket, seed=sampling.seed, sample=sample, turn=request.turn),
            sampling=sampling,
            produced=produced_of(request, sample),
        )
        for sample in request.wanted
    ]


def main(bootstrap: Bootstrap) -> int:
    """Open the back end that the run folder describes, register with the master, and serve until shutdown."""
    torch.set_num_threads(1)
    config = load_config(RunFolder(bootstrap.run_dir).config_file)
    with SPANS.around("open_device"):
        device = choose_device(bootstrap.process, broken=bootstrap.broken_chips)
    with SPANS.around("open_backend"):
        backend = open_backend(bootstrap, config, device=device)
    policy = config.cluster.share_device
    memory = memory_of(backend, policy=policy, device=device)

    def body(shell: Shell) -> None:
        if note := note_of(backend):
            shell.events.emit(Note(note))
        bulk = resources.enter_context(closing(open_bulk(shell)))
        fetcher = Fetcher(
            process=shell.process,
            host=bootstrap.host,
            stream=StreamFetch(
                shell.process,
                call=partial(_call, shell),
                client=bulk.client,
                agent=bootstrap.agent,
                emit=shell.events.emit,
            ),
            device=MappedSlots(device) if device.type == "cuda" else None,
            join=partial(receive, keys=shell.keys),
        )
        lease = open_lease(shell, policy=policy, device=identity(device), memory=memory)
        with SPANS.around("warm_up"):
            warm_up(backend, policy=policy, device=device)
        fetch, verify = partial(_fetch, shell, fetcher), verification_of(backend)
        GenerationServer(
            shell, backend, fetch=fetch, lease=lease, verify=verify, note_memory=partial(_note_memory, device)
        ).serve()

    with ExitStack() as resources:
        return run_worker(bootstrap, body, capabilities={"device": str(device), "chip": identity(device)})


def _note_memory(device: torch.device) -> None:
    if device.type == "cuda":
        PEAKS.note_device(torch.cuda, device)


def _call(
    shell: Shell, process: str, request: FetchWeights | HoldWeights | HoldDelta, deadline_s: float
) -> Reply:
    return shell.call(process, request, deadline_s=deadline_s)


def _fetch(
    shell: Shell, fetcher: Fetcher, manifest: WeightManifest, sources: Sequence[WeightSource]
) -> Fetched:
    """Fetch through shared memory of this host if its agent responds, else by the other transports."""
    segments = None
    if shell.bootstrap.segments:
        try:
            segments = SegmentClient(shell.bootstrap.segments)
        except WorldError as error:
            shell.events.emit(Note(f"no shared memory on {shell.bootstrap.host}: {error}"))
    if segments is None:
        fetched = fetcher.fetch(manifest, sources)
    else:
        with closing(segments):
            fetched = fetcher.fetch(manifest, sources, segments=segments)
    for failure in fetched.failures:
        damage = damage_of(failure)
        shell.events.emit(
            WeightsFromFallback(
                f"version {manifest.version} came by {describe(fetched.source)}, because {failure}",
                version=manifest.version,
                is_damaged=damage is not None,
                origin=damage.origin if damage is not None else "",
            )
        )
    return fetched
