"""One generation server: a back end that takes requests and weights between two of its steps, and says what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from kintsugi.bootstrap import Bootstrap
from kintsugi.cluster.segments import SegmentClient
from kintsugi.errors import DeviceError, IntegrityError, KintsugiError, RefusedError, WorldError
from kintsugi.generation.backend import Backend, Pause, Running
from kintsugi.generation.building import memory_of, note_of, open_backend, verification_of
from kintsugi.generation.jobs import Incarnation, Job, check, incarnation_of, produced_of, prompt_of
from kintsugi.generation.noise import stream_key
from kintsugi.generation.requests import Output, Request, Tokens
from kintsugi.generation.staging import Beside, Fetch, Load, Stager, in_thread, superseded
from kintsugi.lease.client import UNSHARED, Lease, open_lease
from kintsugi.messages import (
    Body,
    Cancel,
    FetchWeights,
    Generate,
    Interrupt,
    LoadWeights,
    Ok,
    Produced,
    WeightsLoaded,
)
from kintsugi.model.device import choose_device, identity
from kintsugi.model.faults import as_world_error
from kintsugi.observe.events import Alert, Note
from kintsugi.recipe import load_config
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, Clock
from kintsugi.transport import Delivery
from kintsugi.types import Fragment, Peer, WeightManifest, WeightSource
from kintsugi.weights.collective import receive
from kintsugi.weights.device import MappedSlots
from kintsugi.weights.fetch import Fetched, Fetcher, describe
from kintsugi.weights.stream import Answer
from kintsugi.worker import Shell, run_worker

IDLE_WAIT_S = 5.0
MAX_WAITING_SAMPLES = 1 << 16
"""Samples in the engine; a further request is refused."""
STREAM_S = 0.01
"""Askers that want every token at once are told this often: a message per token and sample would cost more than the
token."""
PROGRESS_S = 0.25
"""The others are told this often, so that not much is lost with this server; most requests are done before."""
MAX_STREAMING_SHARE, MAX_PROGRESS_SHARE = 0.1, 0.02
"""Of the time, however many requests there are: then they are told less often."""
REPORT_S = 0.25
ORPHANED_S = 10.0
"""How long work goes on whose asker is gone: its successor may ask for the same, and joins it."""


class Speaker(Protocol):
    """What the server needs of a `worker.Shell`."""

    @property
    def process(self) -> str: ...

    def peer(self, process: str) -> Peer | None: ...

    def next_request(self, timeout_s: float) -> Delivery | None: ...

    def take_all(self) -> list[Delivery]: ...

    def reply(self, delivery: Delivery, body: Body) -> None: ...

    def fail(self, delivery: Delivery, error: BaseException) -> None: ...

    def send(self, process: str, body: Body) -> None: ...

    def report(self, *, load: float, gauges: dict[str, float]) -> None: ...

    def wake(self) -> None: ...


class Server:
    """Consumes `Generate`, `Cancel`, `Interrupt` and `LoadWeights`, produces their replies and `Produced`; waits only
    while the back end has nothing to do, and is unblocked by the next request, or by weights that are ready."""

    def __init__(
        self,
        shell: Speaker,
        backend: Backend,
        *,
        fetch: Fetch,
        clock: Clock = SYSTEM_CLOCK,
        beside: Beside = in_thread,
        lease: Lease = UNSHARED,
        verify: Callable[[], None] = lambda: None,
    ) -> None:
        """`verify` raises when what was computed can not be trusted; called before finished samples are given out."""
        self._shell = shell
        self._lease = lease
        self._verify = verify
        self._backend = backend
        self._clock = clock
        self._stager = Stager(fetch, backend.stage, wake=shell.wake, beside=beside, clock=clock)
        self._swapped: list[tuple[Load, float, Pause | None]] = []
        """Weights that are in place since this turn, and how long that took, by our clock and by the device's."""
        self._gauges: dict[str, float] = {}
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[str, list[int]] = {}
        """Of the jobs of each ticket."""
        self._asked: dict[tuple[Incarnation, int], int] = {}
        """The job that somebody asked for under a number of its own."""
        self._askers: dict[Incarnation, float | None] = {}
        """Those who have asked, and since when each is gone."""
        self._streaming: dict[int, Job] = {}
        self._num_jobs = 0
        self._held: WeightsLoaded | None = None
        self._stream_at = 0.0
        self._progress_at = 0.0
        self._reported = (clock.monotonic(), 0.0)
        """When, and how many tokens there were."""

    def serve(self) -> NoReturn:
        """Until the shell raises ShuttingDown."""
        while True:
            self.turn(IDLE_WAIT_S)

    def turn(self, idle_wait_s: float) -> None:
        """Take what has come in, then run one step of the back end. A device that fails ends the server, by its own
        name: what it was doing goes on elsewhere, from what was told of it."""
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
        """For the device."""
        return self._stager.is_ready or not self._backend.idle

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
            spent_s = self._tell(self._streaming)
            self._stream_at = now + max(STREAM_S, spent_s / MAX_STREAMING_SHARE)
        if now >= self._progress_at:
            spent_s = self._tell(
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
                    self._order(delivery, body)
                case _ if delivery.wants_reply:
                    raise RefusedError(f"a generation server does not answer {type(body).__name__}")
        except KintsugiError as error:
            self._shell.fail(delivery, error)

    def _order(self, delivery: Delivery, body: LoadWeights) -> None:
        """Weights are fetched and verified beside the decoding, unless they are there."""
        held = self._held
        manifest = body.manifest
        is_held = held is not None and (held.version, held.digest) == (manifest.version, manifest.digest)
        if held is not None and is_held and not self._stager.is_busy:
            self._shell.reply(delivery, held)
            return
        for passed_over in self._stager.ask(delivery, body):
            self._shell.fail(passed_over, superseded(manifest.version))
        self._swap_all()

    def _swap_all(self) -> None:
        while self._stager.is_ready and self._lease.try_enter() and (load := self._stager.take()) is not None:
            # Where others use the device too, it may have had no room for a moment; that ends nobody.
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

    def _swap(self, load: Load) -> None:
        """Change the weights, all of which have been verified."""
        since = self._clock.monotonic()
        manifest = load.order.manifest
        if load.order.running == "interrupt":
            self._interrupt()
        running: Running = "recompute" if load.order.running == "recompute" else "keep"
        # If this fails, neither version may be there.
        self._held = None
        pause = self._backend.load(manifest.version, load.tensors, running=running)
        self._held = WeightsLoaded(manifest.version, manifest.digest, (self._shell.process,))
        self._swapped.append((load, (self._clock.monotonic() - since) * 1e3, pause))

    def _acknowledge_all(self) -> None:
        """After the next step has begun, as the device says only then how long it was kept from decoding."""
        swapped, self._swapped = self._swapped, []
        for load, pause_ms, pause in swapped:
            if pause is not None:
                pause_ms = pause()
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
            if job.weights is self._held and job.gives(request):
                job.join(delivery)
                self._note_asker(delivery, request, number)
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
        job = Job(delivery, request, weights=self._held, now=self._clock.monotonic())
        self._jobs[number] = job
        self._numbers.setdefault(request.ticket, []).append(number)
        self._note_asker(delivery, request, number)
        COUNTERS.add("requests")

    def _note_asker(self, delivery: Delivery, request: Generate, number: int) -> None:
        asker = incarnation_of(delivery.peer)
        self._askers.setdefault(asker, None)
        self._asked[asker, request.number] = number
        if request.stream:
            self._streaming[number] = self._jobs[number]

    def _cancel(self, delivery: Delivery, number: int) -> None:
        """Who asked has left, or asks somebody else; the last one takes the work with it."""
        asker = incarnation_of(delivery.peer)
        key = self._asked.pop((asker, number), None)
        if key is None:
            return
        job = self._jobs[key]
        for left in job.leave(asker, number):
            COUNTERS.add("cancelled")
            # Not a fault, and nobody listens: it only must not be asked again.
            self._shell.reply(left, Ok())
        if not job.deliveries:
            self._drop(key)

    def _drop_orphans(self, now: float) -> None:
        """Nobody cancels for an asker that died. Its successor asks again, here or elsewhere, for what is wanted."""
        for asker, since in list(self._askers.items()):
            peer = self._shell.peer(asker[0])
            if peer is not None and incarnation_of(peer) == asker:
                self._askers[asker] = None
            elif since is None:
                self._askers[asker] = now
            elif now >= since + ORPHANED_S:
                del self._askers[asker]
                self._drop_all_of(asker)

    def _drop_all_of(self, asker: Incarnation) -> None:
        for number, job in list(self._jobs.items()):
            if job.leave(asker) and not job.deliveries:
                COUNTERS.add("cancelled")
                self._drop(number)
        self._asked = {key: number for key, number in self._asked.items() if key[0] != asker}

    def _interrupt(self) -> None:
        """Answer everything with what it has."""
        for number, job in list(self._jobs.items()):
            for sample in job.unfinished:
                output = self._backend.interrupt((number, sample))
                if output is not None:
                    job.add(output)
            COUNTERS.add("interrupted")
            # What has ended without having been given out is given by the next step, and then the job is answered.
            if not job.unfinished:
                self._answer(self._remove(number))

    def _finish(self, output: Output) -> None:
        """Keep a finished sample; the last one of its job, or a broken one, answers the request."""
        number, _ = output.request.id
        COUNTERS.add("tokens", len(output.tokens.ids) - output.request.num_produced)
        job = self._jobs.get(number)
        if job is None:
            return  # It was answered, or nobody wants it any more.
        error: KintsugiError | None = output.refusal
        if not output.finite:
            error = IntegrityError(
                f"the logits of {job.request.ticket} are not finite at version {self._backend.version}"
            )
        if error is not None:
            self._drop(number)
            for delivery in job.deliveries:
                self._shell.fail(delivery, error)
            return
        job.add(output)
        if not job.unfinished:
            self._answer(self._remove(number))

    def _answer(self, job: Job) -> None:
        generated = job.answer(server=self._shell.process)
        for delivery in job.deliveries:
            self._shell.reply(delivery, generated)

    def _drop(self, number: int) -> None:
        job = self._remove(number)
        for sample in job.unfinished:
            self._backend.interrupt((number, sample))

    def _remove(self, number: int) -> Job:
        job = self._jobs.pop(number)
        self._streaming.pop(number, None)
        for asked in job.asked():
            self._asked.pop(asked, None)
        same_ticket = self._numbers[job.request.ticket]
        same_ticket.remove(number)
        if not same_ticket:
            del self._numbers[job.request.ticket]
        return job

    def _tell(self, jobs: Mapping[int, Job]) -> float:
        """One message to each who asked, with all that is new of all that it asked for; gives how long it took."""
        since = self._clock.monotonic()
        news: dict[str, dict[int, tuple[Fragment, ...]]] = {}
        for number, job in jobs.items():
            fragments = job.news(partial(self._produced, number))
            if fragments:
                for (process, _), asked in job.asked():
                    news.setdefault(process, {})[asked] = fragments
        for process, fragments_of in news.items():
            self._shell.send(process, Produced(fragments_of))
        return self._clock.monotonic() - since

    def _produced(self, number: int, sample: int) -> Tokens | None:
        return self._backend.produced((number, sample))

    def _report(self, now: float) -> None:
        """Let the next heartbeat say how much there is to do, and how fast it goes."""
        load = sum(job.num_tokens for job in self._jobs.values())
        stats = self._backend.stats()
        decoded = stats.get("decoded_tokens", 0.0)
        since, before = self._reported
        if now > since:
            stats["tokens_per_s"] = round(max(0.0, decoded - before) / (now - since), 1)
        self._reported = (now, decoded)
        self._shell.report(load=float(load), gauges=stats | self._gauges)


def _samples_of(request: Generate, *, number: int) -> list[Request]:
    prompt, sampling = prompt_of(request), request.sampling
    return [
        Request(
            (number, sample),
            prompt=prompt,
            noise_key=stream_key(request.ticket, seed=sampling.seed, sample=sample, turn=request.turn),
            sampling=sampling,
            produced=produced_of(request, sample),
        )
        for sample in request.wanted
    ]


def main(bootstrap: Bootstrap) -> int:
    """Open the back end that the run folder describes, report to the master, and serve until told to end."""
    torch.set_num_threads(1)
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    device = choose_device(bootstrap.process, broken=bootstrap.broken_chips)
    backend = open_backend(bootstrap, config, device=device)
    policy = config.cluster.share_device
    memory = memory_of(backend, policy=policy, device=device)

    def body(shell: Shell) -> None:
        if note := note_of(backend):
            shell.events.emit(Note(note))
        fetcher = Fetcher(
            process=shell.process,
            host=bootstrap.host,
            ask=partial(_ask, shell),
            say=lambda message: shell.events.emit(Alert(message)),
            card=MappedSlots(device) if device.type == "cuda" else None,
            join=receive,
        )
        lease = open_lease(shell, policy=policy, device=identity(device), memory=memory)
        fetch, verify = partial(_fetch, shell, fetcher), verification_of(backend)
        Server(shell, backend, fetch=fetch, lease=lease, verify=verify).serve()

    return run_worker(bootstrap, body, capabilities={"device": str(device), "chip": identity(device)})


def _ask(shell: Shell, process: str, request: FetchWeights, deadline_s: float) -> Answer:
    return shell.submit(process, request, deadline_s=deadline_s)


def _fetch(
    shell: Shell, fetcher: Fetcher, manifest: WeightManifest, sources: Sequence[WeightSource]
) -> Fetched:
    """Through shared memory of this host if its agent answers, else by the ways that are left."""
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
        shell.events.emit(
            Note(f"version {manifest.version} came by {describe(fetched.source)}, because {failure}")
        )
    return fetched
