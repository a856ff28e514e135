"""The generation manager: one address for all servers. Sends requests where `router` says, again if a server dies.

A request is answered once, however many servers it was sent to: a `Generate` names its own noise, so that whoever
carries it out gives the same tokens. New weights go to all servers at once, and to later ones when they appear; a
server gets requests only while it holds the weights that were sent last, a later one only after it has shown with a
tiny request of our own that it can generate with them.

What is known here is learned again after a restart: servers from the address book, weights from the master, requests
from those who wait for an answer.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial

from kintsugi.bootstrap import Bootstrap
from kintsugi.errors import (
    DeadlineExceeded,
    IntegrityError,
    KintsugiError,
    ProcessDied,
    RefusedError,
    RemoteError,
)
from kintsugi.generation.router import Choice, Health, ServerView, choose
from kintsugi.messages import Failed, Generate, Generated, LoadWeights, WeightsLoaded
from kintsugi.observe.events import EventLog, Note, events_path
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, WAITS, Clock, WaitTable
from kintsugi.transport import Delivery, Endpoint, PendingReply
from kintsugi.types import Peer, Role, Sampling, Wait, WeightManifest, role_of
from kintsugi.worker import HEARTBEAT_S, Membership, open_endpoint

MAX_REQUESTS = 4096
"""Unanswered requests; a further one is refused."""
MAX_ATTEMPTS = 5
"""Faults that living servers may answer one request with. Deaths do not count: they are not the request's doing, and
its deadline bounds them."""
MAX_LOAD_ATTEMPTS = 3
LOAD_TIMEOUT_S = 120.0
PROBE_TIMEOUT_S = 30.0
FLUSH_S = 1.0
"""Longest time that the last replies may take to leave."""

_USER_ERRORS = {"UserError", "ConfigError", "DataError", "ModelError"}


class _Server:
    """A server in the address book, and what is under way on it."""

    def __init__(self, peer: Peer, *, proven: bool) -> None:
        self.peer = peer
        self.proven = proven
        """False until a server that joined later has answered the probe."""
        self.loaded: WeightsLoaded | None = None
        """What it was admitted with last."""
        self.loading = False
        self.load_faults = 0
        self.suspect = False
        self.jobs: dict[_Job, None] = {}
        """Sent to it and unanswered, in the order of sending."""
        self.tokens_in_flight = 0

    def view(self, current: LoadWeights | None) -> ServerView:
        if not self.holds(current):
            health = Health.STALE
        else:
            health = Health.SUSPECT if self.suspect else Health.HEALTHY
        version = -1 if self.loaded is None else self.loaded.version
        return ServerView(self.peer.process, health, version, self.tokens_in_flight)

    def add(self, job: _Job) -> None:
        self.jobs[job] = None
        self.tokens_in_flight += job.num_tokens

    def remove(self, job: _Job) -> None:
        del self.jobs[job]
        self.tokens_in_flight -= job.num_tokens

    def holds(self, weights: LoadWeights | None) -> bool:
        if weights is None or self.loaded is None:
            return False
        return _identity(self.loaded) == _identity(weights.manifest)


class _Job:
    """A request of ours to answer."""

    def __init__(self, delivery: Delivery, request: Generate, *, now: float) -> None:
        self.delivery = delivery
        self.request = request
        self.since = now
        self.deadline = now + request.timeout_s
        self.num_sent = 0
        self.num_faults = 0
        self.last_error: KintsugiError | None = None
        prompt_tokens = len(request.prompt) // 4
        self.num_tokens = len(request.wanted) * (prompt_tokens + request.sampling.max_new_tokens)


class Manager:
    """Consumes `Generate` and `LoadWeights`, produces their replies. It never blocks: `turn` is called after every
    poll of the endpoint, and what it waits for is unblocked by a reply, a new address book or a deadline."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        note: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
        waits: WaitTable = WAITS,
    ) -> None:
        """`note` records a change that is worth a line."""
        self._endpoint = endpoint
        self._note = note
        self._clock = clock
        self._waits = waits
        self._declared: dict[str, tuple[int, Wait]] = {}
        self._book_number = -1
        self._servers: dict[str, _Server] = {}
        self._waiting: deque[_Job] = deque()
        self._weights: LoadWeights | None = None
        self._weights_asked: list[Delivery] = []
        """The requests that `_weights` came with, until they are answered."""
        self._weights_deadline = 0.0

    @property
    def load(self) -> float:
        """Tokens that the unanswered requests may still need."""
        in_flight = sum(server.tokens_in_flight for server in self._servers.values())
        return float(in_flight + sum(job.num_tokens for job in self._waiting))

    def handle(self, delivery: Delivery) -> None:
        """Take one request in. Whoever the address book had before is known before."""
        self._follow_book()
        body = delivery.body
        if isinstance(body, Generate):
            self._accept(delivery, body)
        elif isinstance(body, LoadWeights):
            self._accept_weights(delivery, body)
        elif delivery.wants_reply:
            error = RefusedError(f"a generation manager does not answer {type(body).__name__}")
            self._endpoint.fail(delivery, error)

    def turn(self) -> None:
        """Act on everything that has changed."""
        self._follow_book()
        self._send_weights()
        self._answer_weights()
        reason = self._dispatch()
        self._declare(reason)

    def _follow_book(self) -> None:
        """Servers come and go with the address book. Those who come while the run is under way are probed."""
        if self._endpoint.book_number == self._book_number:
            return
        self._book_number = self._endpoint.book_number
        listed = {
            process: peer
            for process, peer in self._endpoint.peers.items()
            if role_of(process) is Role.SERVER and peer.address
        }
        for process, server in list(self._servers.items()):
            if process not in listed or listed[process].incarnation != server.peer.incarnation:
                del self._servers[process]
                self._note(f"{process} {server.peer.incarnation} has left")
        for process, peer in listed.items():
            if process not in self._servers:
                self._servers[process] = _Server(peer, proven=self._weights is None)
                self._note(f"{process} {peer.incarnation} has joined, stale until it has loaded the weights")

    # Requests.

    def _accept(self, delivery: Delivery, request: Generate) -> None:
        num_unanswered = len(self._waiting) + sum(len(server.jobs) for server in self._servers.values())
        if num_unanswered >= MAX_REQUESTS:
            self._endpoint.fail(
                delivery, RefusedError(f"{num_unanswered} requests are unanswered; try again later")
            )
            return
        COUNTERS.add("requests")
        self._waiting.append(_Job(delivery, request, now=self._clock.monotonic()))

    def _dispatch(self) -> str:
        """Send on what can be sent; gives the reason why the rest, if any, waits."""
        unservable: dict[int, Choice] = {}
        now = self._clock.monotonic()
        jobs, self._waiting = self._waiting, deque()
        for job in jobs:
            if not self._is_known(job.delivery.peer):
                continue
            version = job.request.version
            choice = unservable.get(version) or self._choose(version)
            if now >= job.deadline:
                self._expire(job, now=now, reason=choice.reason)
            elif choice.server is not None:
                self._send(job, self._servers[choice.server], timeout_s=job.deadline - now)
            else:
                unservable[version] = choice
                self._waiting.append(job)
        return "; ".join(choice.reason for choice in unservable.values())

    def _is_known(self, peer: Peer) -> bool:
        known = self._endpoint.peers.get(peer.process)
        return known is not None and known.incarnation == peer.incarnation

    def _choose(self, version: int) -> Choice:
        return choose([server.view(self._weights) for server in self._servers.values()], version=version)

    def _send(self, job: _Job, server: _Server, *, timeout_s: float) -> None:
        job.num_sent += 1
        if job.num_sent > 1:
            COUNTERS.add("resent")
        server.add(job)
        self._endpoint.request(
            server.peer.process,
            job.request,
            deadline_s=timeout_s,
            on_done=partial(self._settled, job, server),
        )

    def _settled(self, job: _Job, server: _Server, pending: PendingReply) -> None:
        server.remove(job)
        try:
            reply = pending.result()
            generated = reply.expect(Generated)
            _verify(generated, job.request, server=server.peer.process)
        except KintsugiError as error:
            self._failed(job, server, error)
            return
        server.suspect = False
        self._endpoint.reply(job.delivery, generated)

    def _failed(self, job: _Job, server: _Server, error: KintsugiError) -> None:
        """Answer the user's mistakes as they are; try everything else on another server, while that may help."""
        server.suspect = True
        if not isinstance(error, ProcessDied):
            job.num_faults += 1
        fault = error.cause if isinstance(error, RemoteError) else None
        if fault is not None and fault.kind in _USER_ERRORS:
            server.suspect = False
            self._endpoint.reply(job.delivery, Failed(fault))
        elif isinstance(error, DeadlineExceeded) or job.num_faults >= MAX_ATTEMPTS:
            self._endpoint.fail(job.delivery, error)
        else:
            job.last_error = error
            self._waiting.append(job)

    def _expire(self, job: _Job, *, now: float, reason: str) -> None:
        cause = None if job.last_error is None else job.last_error.cause
        what = f"Generate {job.request.ticket}: {reason}"
        error = DeadlineExceeded(whom="a generation server", what=what, waited_s=now - job.since, cause=cause)
        self._endpoint.fail(job.delivery, error)

    # Weights.

    def _accept_weights(self, delivery: Delivery, weights: LoadWeights) -> None:
        """Take the weights that count from now on. The same ones come again when a master took over or a rank that
        published them was replaced: whoever holds them keeps them, and later ones get them from the new sources."""
        manifest = weights.manifest
        if not self._is_current(manifest):
            self._fail_weights(
                RefusedError(f"superseded by version {manifest.version} before all servers had loaded it")
            )
        self._weights = weights
        self._weights_asked.append(delivery)
        self._weights_deadline = self._clock.monotonic() + LOAD_TIMEOUT_S
        for server in self._servers.values():
            server.load_faults = 0

    def _is_current(self, manifest: WeightManifest) -> bool:
        return self._weights is not None and _identity(self._weights.manifest) == _identity(manifest)

    def _send_weights(self) -> None:
        """Let every server load the current weights that has not, newcomers included."""
        weights = self._weights
        if weights is None:
            return
        for server in list(self._servers.values()):
            if server.holds(weights) or server.loading or server.load_faults >= MAX_LOAD_ATTEMPTS:
                continue
            server.loading = True
            self._endpoint.request(
                server.peer.process,
                weights,
                deadline_s=LOAD_TIMEOUT_S,
                on_done=partial(self._loaded, server, weights.manifest),
            )

    def _loaded(self, server: _Server, manifest: WeightManifest, pending: PendingReply) -> None:
        process = server.peer.process
        try:
            loaded = pending.result().expect(WeightsLoaded)
            _verify_loaded(loaded, manifest, server=process)
        except KintsugiError as error:
            self._load_failed(server, manifest, error)
            return
        if server.proven:
            self._admit(server, loaded)
            return
        self._endpoint.request(
            process,
            probe(manifest.version),
            deadline_s=PROBE_TIMEOUT_S,
            on_done=partial(self._probed, server, manifest, loaded),
        )

    def _probed(
        self, server: _Server, manifest: WeightManifest, loaded: WeightsLoaded, pending: PendingReply
    ) -> None:
        process = server.peer.process
        try:
            _verify_probe(pending.result().expect(Generated), version=manifest.version, server=process)
        except KintsugiError as error:
            self._load_failed(server, manifest, error)
            return
        server.proven = True
        self._note(
            f"{process} {server.peer.incarnation} is admitted: it answered the probe of version {manifest.version}"
        )
        self._admit(server, loaded)

    def _admit(self, server: _Server, loaded: WeightsLoaded) -> None:
        server.loading = False
        server.loaded = loaded
        server.suspect = False

    def _load_failed(self, server: _Server, manifest: WeightManifest, error: KintsugiError) -> None:
        """A living server is asked again, a few times; one that died is gone with the next address book."""
        server.loading = False
        if isinstance(error, ProcessDied):
            return
        self._note(f"{server.peer.process} did not load version {manifest.version}: {error}")
        server.load_faults += 1
        if server.load_faults >= MAX_LOAD_ATTEMPTS:
            self._fail_weights(error)

    def _answer_weights(self) -> None:
        """A version is loaded when every server that lives has acknowledged it."""
        if not self._weights_asked or self._weights is None:
            return
        manifest = self._weights.manifest
        missing = self._without_weights()
        if self._servers and not missing:
            loaded = WeightsLoaded(manifest.version, manifest.digest, tuple(sorted(self._servers)))
            for delivery in self._take_asked():
                self._endpoint.reply(delivery, loaded)
        elif self._clock.monotonic() >= self._weights_deadline:
            whom = ", ".join(missing) or "any generation server"
            what = f"loading version {manifest.version}"
            self._fail_weights(DeadlineExceeded(whom=whom, what=what, waited_s=LOAD_TIMEOUT_S))

    def _without_weights(self) -> list[str]:
        return sorted(process for process, server in self._servers.items() if not server.holds(self._weights))

    def _fail_weights(self, error: KintsugiError) -> None:
        for delivery in self._take_asked():
            self._endpoint.fail(delivery, error)

    def _take_asked(self) -> list[Delivery]:
        asked, self._weights_asked = self._weights_asked, []
        return asked

    # Declared waits.

    def _declare(self, reason: str) -> None:
        """Say for whom this process waits: a server that owes answers, weights that are being loaded, a queue."""
        waits: dict[str, Wait] = {}
        for process, server in self._servers.items():
            if server.jobs:
                oldest = next(iter(server.jobs))
                waits[process] = Wait(process, "Generated", oldest.since, oldest.deadline)
        if self._weights_asked and self._weights is not None:
            deadline = self._weights_deadline
            whom = ", ".join(self._without_weights()) or "server"
            what = f"loading version {self._weights.manifest.version}"
            waits["weights"] = Wait(whom, what, deadline - LOAD_TIMEOUT_S, deadline)
        if self._waiting:
            waits["queue"] = Wait("server", reason, self._waiting[0].since, self._waiting[0].deadline)
        for key, (token, declared) in list(self._declared.items()):
            if waits.get(key) != declared:
                self._waits.end(token)
                del self._declared[key]
        for key, wait in waits.items():
            if key not in self._declared:
                self._declared[key] = (self._waits.begin(wait), wait)


def main(bootstrap: Bootstrap) -> int:
    """Run the manager's loop until the master, or the end of the lifeline, tells it to end."""
    endpoint = open_endpoint(bootstrap)
    membership = Membership(endpoint, bootstrap, capabilities={})

    def lifeline_ended() -> None:
        endpoint.unwatch(bootstrap.lifeline)
        membership.shutdown_reason = "agent and launcher are gone"

    endpoint.watch(bootstrap.lifeline, lifeline_ended)
    with closing(
        EventLog(events_path(bootstrap.run_dir, bootstrap.process), process=bootstrap.process)
    ) as events:
        manager = Manager(endpoint, note=lambda message: events.emit(Note(message)))
        try:
            while membership.shutdown_reason is None:
                membership.load = manager.load
                membership.tick(SYSTEM_CLOCK.monotonic())
                for delivery in endpoint.poll(HEARTBEAT_S / 2):
                    if not membership.handle(delivery):
                        manager.handle(delivery)
                manager.turn()
            events.emit(Note(f"shutting down: {membership.shutdown_reason}"))
        finally:
            endpoint.close(flush_s=FLUSH_S)
    return 0


def probe(version: int) -> Generate:
    """The smallest request that goes through all of a server: every vocabulary has these tokens."""
    prompt = array("i", [0, 1]).tobytes()
    sampling = Sampling(temperature=0.0, max_new_tokens=2)
    return Generate("probe", 0, prompt, sampling, version, timeout_s=PROBE_TIMEOUT_S)


def _identity(weights: WeightManifest | WeightsLoaded) -> tuple[int, str]:
    return weights.version, weights.digest


def _verify_loaded(loaded: WeightsLoaded, manifest: WeightManifest, *, server: str) -> None:
    if _identity(loaded) != _identity(manifest):
        raise IntegrityError(
            f"{server}: expected version {manifest.version} with digest {manifest.digest}, "
            f"got version {loaded.version} with digest {loaded.digest}"
        )


def _verify_probe(generated: Generated, *, version: int, server: str) -> None:
    """Something was sampled, all of it with these weights."""
    _verify(generated, probe(version), server=server)
    for completion in generated.completions:
        versions = set(array("i", completion.versions))
        if not completion.tokens or versions != {version}:
            raise IntegrityError(
                f"{server}: expected tokens of version {version} as answer to the probe, "
                f"got {len(completion.tokens) // 4} of versions {sorted(versions)}"
            )


def _verify(generated: Generated, request: Generate, *, server: str) -> None:
    """The answer must be to this request, and complete."""
    found = tuple(sorted(completion.sample for completion in generated.completions))
    if (generated.ticket, generated.turn, found) != (
        request.ticket,
        request.turn,
        tuple(sorted(request.wanted)),
    ):
        raise IntegrityError(
            f"{server}: expected samples {request.wanted} of {request.ticket} turn {request.turn}, "
            f"got {found} of {generated.ticket} turn {generated.turn}"
        )
