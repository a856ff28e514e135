"""The generation manager: one address for all servers. Sends requests where `router` says, again if a server dies.

A request is answered once, however many servers it was sent to: a `Generate` names its own noise, so that whoever
carries it out gives the same tokens. New weights go to all servers at once, and to later ones when they appear; a
server gets requests only while it holds the weights that were sent last.
"""

from __future__ import annotations

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
from kintsugi.types import Peer, Role, Wait, role_of
from kintsugi.worker import HEARTBEAT_S, Membership, open_endpoint

MAX_REQUESTS = 4096
"""Unanswered requests; a further one is refused."""
MAX_ATTEMPTS = 5
"""Servers that one request may be sent to: a request that breaks every server must not break all of them for ever."""
MAX_LOAD_ATTEMPTS = 3
LOAD_TIMEOUT_S = 120.0
FLUSH_S = 1.0
"""Longest time that the last replies may take to leave."""

_USER_ERRORS = {"UserError", "ConfigError", "DataError", "ModelError"}


class _Server:
    """A server in the address book, and what is under way on it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.loaded: WeightsLoaded | None = None
        self.loading = False
        self.load_attempts = 0
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
        manifest = weights.manifest
        return (self.loaded.version, self.loaded.digest) == (manifest.version, manifest.digest)


class _Job:
    """A request of ours to answer."""

    def __init__(self, delivery: Delivery, request: Generate, *, now: float) -> None:
        self.delivery = delivery
        self.request = request
        self.since = now
        self.deadline = now + request.timeout_s
        self.attempts = 0
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
        self._weights_asked: tuple[Delivery, float] | None = None
        """The request that `_weights` came with, and its deadline, until it is answered."""

    @property
    def load(self) -> float:
        """Tokens that the unanswered requests may still need."""
        in_flight = sum(server.tokens_in_flight for server in self._servers.values())
        return float(in_flight + sum(job.num_tokens for job in self._waiting))

    def handle(self, delivery: Delivery) -> None:
        """Take one request in."""
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
        if self._endpoint.book_number != self._book_number:
            self._book_number = self._endpoint.book_number
            self._follow_book()
        self._send_weights()
        self._answer_weights()
        reason = self._dispatch()
        self._declare(reason)

    def _follow_book(self) -> None:
        """Servers come and go with the address book, and so do those who asked."""
        peers = self._endpoint.peers
        listed = {
            process: peer
            for process, peer in peers.items()
            if role_of(process) is Role.SERVER and peer.address
        }
        for process, server in list(self._servers.items()):
            if process not in listed or listed[process].incarnation != server.peer.incarnation:
                del self._servers[process]
                self._note(f"{process} {server.peer.incarnation} has left")
        for process, peer in listed.items():
            if process not in self._servers:
                self._servers[process] = _Server(peer)
                self._note(f"{process} {peer.incarnation} has joined, stale until it has loaded the weights")
        self._waiting = deque(job for job in self._waiting if _is_same(job.delivery.peer, peers))

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

    def _choose(self, version: int) -> Choice:
        return choose([server.view(self._weights) for server in self._servers.values()], version=version)

    def _send(self, job: _Job, server: _Server, *, timeout_s: float) -> None:
        job.attempts += 1
        if job.attempts > 1:
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
        fault = error.cause if isinstance(error, RemoteError) else None
        if fault is not None and fault.kind in _USER_ERRORS:
            server.suspect = False
            self._endpoint.reply(job.delivery, Failed(fault))
        elif isinstance(error, DeadlineExceeded) or job.attempts >= MAX_ATTEMPTS:
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
        if self._weights_asked is not None:
            version = weights.manifest.version
            self._fail_weights(
                RefusedError(f"superseded by version {version} before all servers had loaded it")
            )
        self._weights = weights
        self._weights_asked = (delivery, self._clock.monotonic() + LOAD_TIMEOUT_S)
        for server in self._servers.values():
            server.load_attempts = 0

    def _send_weights(self) -> None:
        """Let every server load the current weights that has not, newcomers included."""
        weights = self._weights
        if weights is None:
            return
        for server in list(self._servers.values()):
            if server.holds(weights) or server.loading or server.load_attempts >= MAX_LOAD_ATTEMPTS:
                continue
            server.loading = True
            server.load_attempts += 1
            self._endpoint.request(
                server.peer.process,
                weights,
                deadline_s=LOAD_TIMEOUT_S,
                on_done=partial(self._loaded, server, weights),
            )

    def _loaded(self, server: _Server, weights: LoadWeights, pending: PendingReply) -> None:
        server.loading = False
        manifest = weights.manifest
        try:
            loaded = pending.result().expect(WeightsLoaded)
            if (loaded.version, loaded.digest) != (manifest.version, manifest.digest):
                raise IntegrityError(
                    f"{server.peer.process}: expected version {manifest.version} with digest {manifest.digest}, "
                    f"got version {loaded.version} with digest {loaded.digest}"
                )
        except ProcessDied:
            return
        except KintsugiError as error:
            self._note(f"{server.peer.process} did not load version {manifest.version}: {error}")
            if server.load_attempts >= MAX_LOAD_ATTEMPTS and weights is self._weights:
                self._fail_weights(error)
            return
        server.loaded = loaded
        server.suspect = False
        if weights is not self._weights:
            server.load_attempts = 0

    def _answer_weights(self) -> None:
        """A version is loaded when every server that lives has acknowledged it."""
        if self._weights_asked is None or self._weights is None:
            return
        delivery, deadline = self._weights_asked
        manifest = self._weights.manifest
        missing = self._without_weights()
        if self._servers and not missing:
            self._weights_asked = None
            servers = tuple(sorted(self._servers))
            self._endpoint.reply(delivery, WeightsLoaded(manifest.version, manifest.digest, servers))
        elif self._clock.monotonic() >= deadline:
            whom = ", ".join(missing) or "any generation server"
            what = f"loading version {manifest.version}"
            self._fail_weights(DeadlineExceeded(whom=whom, what=what, waited_s=LOAD_TIMEOUT_S))

    def _without_weights(self) -> list[str]:
        return sorted(process for process, server in self._servers.items() if not server.holds(self._weights))

    def _fail_weights(self, error: KintsugiError) -> None:
        if self._weights_asked is not None:
            delivery, _ = self._weights_asked
            self._weights_asked = None
            self._endpoint.fail(delivery, error)

    # Declared waits.

    def _declare(self, reason: str) -> None:
        """Say for whom this process waits: a server that owes answers, weights that are being loaded, a queue."""
        waits: dict[str, Wait] = {}
        for process, server in self._servers.items():
            if server.jobs:
                oldest = next(iter(server.jobs))
                waits[process] = Wait(process, "Generated", oldest.since, oldest.deadline)
        if self._weights_asked is not None and self._weights is not None:
            _, deadline = self._weights_asked
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


def _is_same(peer: Peer, peers: dict[str, Peer]) -> bool:
    known = peers.get(peer.process)
    return known is not None and known.incarnation == peer.incarnation


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
