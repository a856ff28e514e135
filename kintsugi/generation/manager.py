"""The generation manager: one address for all generation servers. Routes requests and moves them when a server dies.

The manager keeps the tokens that a server reports while it works (`transcript`), so that another server continues after
the last token when the first one dies or is retired: no token is lost, sampled twice or delivered twice. In
deterministic mode the other server produces the same tokens, because a `Generate` determines its own random numbers.
New weights go to all servers at the same time, and to later servers when they join (`weight_distribution`). A server
gets requests only while it holds the current weights.

After a restart the manager learns its state again: servers from the address book, weights from the master, requests
from the processes that wait for a reply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Protocol

import msgspec
import xxhash

from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Strategy
from kintsugi.errors import (
    USER_ERRORS,
    DeadlineExceeded,
    KintsugiError,
    ProcessDied,
    RefusedError,
    RemoteError,
)
from kintsugi.generation.router import RoutingChoice, ServerView, choose
from kintsugi.generation.server_fleet import ManagedServer, ServerFleet, identity
from kintsugi.generation.transcript import Transcript, verify_answer
from kintsugi.generation.weight_distribution import DEADLINE_S, Loaded, ModelVersion, WeightDistribution
from kintsugi.process.membership import HEARTBEAT_S, Membership, open_endpoint
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.generation import Cancel, Generate, Generated, Interrupt, Produced, Retire
from kintsugi.protocol.membership import Failed, Ok
from kintsugi.protocol.weights import LoadWeights, WeightsLoaded
from kintsugi.protocol.wire import Envelope
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.spans import SPANS
from kintsugi.runtime.waits import WAITS, WaitTable
from kintsugi.telemetry.events import EventLog, Note, NoteEvent
from kintsugi.transport import Delivery, Endpoint, PendingReply, subject
from kintsugi.types import Fragment, Wait

MAX_REQUESTS = 4096
"""Largest number of unanswered requests; further ones are refused."""
MAX_ATTEMPTS = 5
"""Largest number of faults that live servers may reply with to one request. Deaths of servers do not count: the request
did not cause them, and its deadline bounds them."""
INTERRUPT_TIMEOUT_S = 30.0
FLUSH_S = 1.0
"""Longest time to send the last replies before the process exits."""


class Requester(Protocol):
    """Receiver of the result of a `Generate`. Exactly one of `done` and `failed` is called, unless the request is
    cancelled."""

    def produced(self, fragments: tuple[Fragment, ...]) -> None:
        """Receive new tokens of a request with `stream`. Before `done`, every token arrives exactly once and in order,
        the last ones of a sample with its `finish`."""
        ...

    def done(self, generated: Generated) -> None: ...

    def failed(self, error: KintsugiError) -> None:
        """A `RemoteError` caused by a `UserError` is the requester's own mistake, found by a server."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether the result can not be delivered any more; checked whenever the address book changes."""
        ...


class ManagerJob:
    """An unanswered `Generate`: returned by `GenerationManager.submit`, taken by `GenerationManager.cancel`."""

    def __init__(self, request: Generate, requester: Requester, *, now: float) -> None:
        self.request = request
        self.requester = requester
        self.transcript = Transcript(request)
        self.since = now
        self.deadline = now + request.timeout_s
        self.ended = False
        self.number = 0
        """Number that it was last sent with; 0 before."""
        self.num_faults = 0
        self.last_error: KintsugiError | None = None

    @property
    def num_tokens(self) -> int:
        """Upper bound of the tokens of its unfinished samples, prompts included."""
        per_sample = len(self.request.prompt) // 4 + self.request.sampling.max_new_tokens
        return self.transcript.num_unfinished * per_sample

    def restart(self) -> None:
        """Discard the produced tokens, unless the requester has received them."""
        if not self.request.stream:
            self.transcript = Transcript(self.request)

    def open_request(self) -> Generate:
        """Request for the unfinished samples, with the tokens they have."""
        unfinished = self.transcript.unfinished
        return msgspec.structs.replace(
            self.request,
            samples=self.request.samples if unfinished == self.request.wanted else unfinished,
            produced=self.transcript.produced(),
            number=self.number,
        )


class _Sent(msgspec.Struct, frozen=True, eq=False):
    """A job that was sent to a server."""

    job: ManagerJob
    member: ManagedServer
    request: Generate


class _Remote:
    """Requester in another process, which receives only the whole result."""

    def __init__(self, endpoint: Endpoint, fleet: ServerFleet, delivery: Delivery) -> None:
        self._endpoint = endpoint
        self._fleet = fleet
        self._delivery = delivery

    def produced(self, fragments: tuple[Fragment, ...]) -> None:
        pass

    def done(self, generated: Generated) -> None:
        self._endpoint.reply(self._delivery, generated)

    def failed(self, error: KintsugiError) -> None:
        if isinstance(error, RemoteError) and error.cause is not None and error.cause.kind in USER_ERRORS:
            self._endpoint.reply(self._delivery, Failed(error.cause))
        else:
            self._endpoint.fail(self._delivery, error)

    @property
    def is_gone(self) -> bool:
        return not self._fleet.is_known(self._delivery.peer)


class GenerationManager:
    """Consumes `Generate`, `LoadWeights`, `Retire` and `Produced`, or the equivalent calls from its own process, and
    produces replies. It never blocks: `turn` is called after every poll of the endpoint; a reply, a new address book or
    a deadline unblocks what it waits for. All methods run in the endpoint's thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        emit: Callable[[NoteEvent], object],
        strategy: Strategy = "least_loaded",
        max_requests: int = MAX_REQUESTS,
        weights_deadline_s: float = DEADLINE_S,
        clock: Clock = SYSTEM_CLOCK,
        waits: WaitTable = WAITS,
    ) -> None:
        """`emit` receives a note of every change of the servers."""
        self._endpoint = endpoint
        self._emit = emit
        self._strategy = strategy
        self._max_requests = max_requests
        self._clock = clock
        self._waits = waits
        self._declared: dict[str, tuple[int, Wait]] = {}
        self._fleet = ServerFleet(endpoint, emit=emit)
        self._latest_load = 0, 0
        """Term and number of the master's last order to load weights."""
        self._distribution = WeightDistribution(
            endpoint, self._fleet, emit=emit, clock=clock, deadline_s=weights_deadline_s
        )
        self._waiting: deque[ManagerJob] = deque()
        self._sent: dict[int, _Sent] = {}
        # Disjoint from the numbers of other incarnations, which a server may still use.
        self._num_sent = xxhash.xxh32_intdigest(endpoint.incarnation.encode()) << 31
        self._retiring: list[tuple[ManagedServer, Callable[[], None]]] = []

    # Calls from this process.

    def submit(self, request: Generate, requester: Requester) -> ManagerJob:
        """Accept a request; RefusedError while too many are unanswered."""
        if self.num_unanswered >= self._max_requests:
            raise RefusedError(f"{self.num_unanswered} requests are unanswered; try again later")
        COUNTERS.add("requests")
        job = ManagerJob(request, requester, now=self._clock.monotonic())
        self._waiting.append(job)
        return job

    def cancel(self, job: ManagerJob) -> None:
        """Drop a request without a result and free what it holds."""
        if job.ended:
            return
        job.ended = True
        COUNTERS.add("cancelled")
        self._recall(job)

    def load_weights(self, weights: LoadWeights, then: Loaded) -> None:
        """Send these weights to all servers, and to later ones when they join; `then` is called when all live servers
        have loaded them."""
        current, new = self._fleet.current, identity(weights.manifest)
        self._distribution.distribute(weights, then)
        if current is not None and new != current and new[0] <= current[0]:
            self._restart_unfinished()

    def retire(self, process: str, then: Callable[[], None], *, incarnation: str = "") -> None:
        """Send a server no further requests and move those it has; `then` is called when it has none left, or is gone.
        With an `incarnation`, only that one is retired: the request may arrive late."""
        member = self._fleet.living(process)
        if member is None or incarnation not in ("", member.peer.incarnation):
            then()
            return
        self._retiring.append((member, then))
        if not member.retired:
            member.retired = True
            self._emit(
                Note(f"{process} {member.peer.incarnation} is retired, {len(member.sent)} requests move")
            )
            # Requests that this does not return are moved when the server is gone.
            self._endpoint.request(process, Interrupt(), deadline_s=INTERRUPT_TIMEOUT_S)

    def servers(self) -> list[ServerView]:
        """Every server and its health; dead servers are listed until they are replaced."""
        return self._fleet.views()

    def versions(self) -> tuple[ModelVersion, ...]:
        """The last versions, the current one last, and the servers that hold each."""
        return self._distribution.versions()

    @property
    def num_unanswered(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def load(self) -> float:
        """Tokens that the unanswered requests may still need."""
        in_flight = sum(member.tokens_in_flight for member in self._fleet)
        return float(in_flight + sum(job.num_tokens for job in self._waiting))

    def gauges(self) -> dict[str, float]:
        """Current metrics for the heartbeat."""
        return {"waiting": len(self._waiting), "sent": len(self._sent), "servers": len(self._fleet.in_use())}

    # Messages from other processes.

    def handle(self, delivery: Delivery) -> None:
        """Process one message, after the current address book."""
        self._follow_book()
        body = delivery.body
        try:
            match body:
                case Generate():
                    self.submit(body, _Remote(self._endpoint, self._fleet, delivery))
                case Produced():
                    self._produced(delivery.peer.process, body)
                case LoadWeights():
                    self._check_latest(delivery.envelope)
                    self.load_weights(body, partial(self._answer_weights, delivery))
                case Retire():
                    done = partial(self._endpoint.reply, delivery, Ok())
                    self.retire(body.process, done, incarnation=body.incarnation)
                case _:
                    raise RefusedError(f"a generation manager does not answer {type(body).__name__}")
        except KintsugiError as error:
            if delivery.wants_reply:
                self._endpoint.fail(delivery, error)

    def _check_latest(self, envelope: Envelope) -> None:
        """Refuse weights that the master ordered before the last ones: it gave that order up, and a repetition of the
        lost message came late. The servers would look for weights that are nowhere any more."""
        number = envelope.term, envelope.sequence
        if number < self._latest_load:
            raise RefusedError("later weights have been ordered since")
        self._latest_load = number

    def _answer_weights(self, delivery: Delivery, outcome: WeightsLoaded | KintsugiError) -> None:
        if isinstance(outcome, KintsugiError):
            self._endpoint.fail(delivery, outcome)
        else:
            self._endpoint.reply(delivery, outcome)

    def turn(self) -> None:
        """Act on everything that has changed."""
        self._follow_book()
        self._distribution.turn()
        reason = self._dispatch()
        self._answer_retiring()
        self._declare(reason)

    def _follow_book(self) -> None:
        if not self._fleet.follow_book():
            return
        for job in self._unanswered():
            if job.requester.is_gone:
                self.cancel(job)

    def _restart_unfinished(self) -> None:
        """Restart all unfinished requests after a rollback of the run: tokens of withdrawn weights do not count, nor
        would the tokens that servers add with older ones. Streams continue, because their tokens have been
        delivered."""
        taken_back = [sent.job for sent in self._sent.values() if not sent.job.request.stream]
        for job in taken_back:
            self._recall(job)
        self._waiting.extendleft(reversed(taken_back))
        for job in self._waiting:
            job.restart()

    def _recall(self, job: ManagerJob) -> None:
        """Take a job back from the server that has it, if any."""
        if (sent := self._take_back(job.number)) is not None:
            self._endpoint.send(sent.member.process, Cancel(job.number))

    def _unanswered(self) -> list[ManagerJob]:
        return [*self._waiting, *(sent.job for sent in self._sent.values())]

    def _answer_retiring(self) -> None:
        retiring, self._retiring = self._retiring, []
        for member, then in retiring:
            if member.sent and not member.dead:
                self._retiring.append((member, then))
            else:
                then()

    # Requests.

    def _dispatch(self) -> str:
        """Send the requests that can be sent; return the reason why the others, if any, wait."""
        unservable: dict[int, RoutingChoice] = {}
        now = self._clock.monotonic()
        jobs, self._waiting = self._waiting, deque()
        for job in jobs:
            if job.ended:
                continue
            version = job.request.version
            choice = unservable.get(version) or self._choose(job)
            if now >= job.deadline:
                self._expire(job, now=now, reason=choice.reason)
            elif choice.server is not None:
                self._send(job, choice.server, timeout_s=job.deadline - now)
            else:
                unservable[version] = choice
                self._waiting.append(job)
        return "; ".join(choice.reason for choice in unservable.values())

    def _choose(self, job: ManagerJob) -> RoutingChoice:
        return choose(
            self._fleet.views(),
            version=job.request.version,
            strategy=self._strategy,
            prompt=job.request.prompt,
            num_tokens=job.num_tokens,
            turn=self._num_sent,
        )

    def _send(self, job: ManagerJob, process: str, *, timeout_s: float) -> None:
        member = self._fleet.living(process)
        assert member is not None, f"{process} was chosen and is dead"
        if job.number:
            COUNTERS.add("resent")
        self._num_sent += 1
        job.number = self._num_sent
        request = job.open_request()
        member.add(job.number, job.num_tokens)
        self._sent[job.number] = _Sent(job, member, request)
        self._endpoint.request(
            process, request, deadline_s=timeout_s, on_done=partial(self._settled, job.number)
        )

    def _take_back(self, number: int) -> _Sent | None:
        sent = self._sent.pop(number, None)
        if sent is not None:
            sent.member.remove(number)
        return sent

    def _produced(self, process: str, body: Produced) -> None:
        """Store the tokens that a server reports, by the number that each request was sent with: late reports of an
        abandoned attempt may have other tokens than the next attempt."""
        for number, fragments in body.fragments.items():
            sent = self._sent.get(number)
            if sent is None or sent.member.process != process:
                continue
            try:
                self._take(sent.job, sent.job.transcript.add(fragments))
            except KintsugiError as error:
                self._distrust(sent.member, error)

    def _take(self, job: ManagerJob, new: tuple[Fragment, ...]) -> None:
        if new and job.request.stream and not job.ended:
            job.requester.produced(new)

    def _settled(self, number: int, pending: PendingReply) -> None:
        sent = self._take_back(number)
        if sent is None:
            return  # Cancelled meanwhile.
        job, member = sent.job, sent.member
        try:
            generated = pending.result().expect(Generated)
            verify_answer(generated, sent.request, server=member.process)
            for completion in generated.completions:
                self._take(job, job.transcript.settle(completion))
        except KintsugiError as error:
            self._failed(job, member, error)
            return
        member.suspect = False
        if job.ended:
            return  # Cancelled by the requester when it received the tokens.
        self._continue(job, member)

    def _continue(self, job: ManagerJob, member: ManagedServer) -> None:
        """Continue with the unfinished samples; there may be none, if the server died before it could reply."""
        if job.transcript.num_unfinished:
            self._waiting.append(job)
            return
        job.ended = True
        request, completions = job.request, job.transcript.completions()
        SPANS.add("request", {**subject(request), "server": member.process}, since=job.since)
        job.requester.done(Generated(request.ticket, request.turn, completions, member.process))

    def _failed(self, job: ManagerJob, member: ManagedServer, error: KintsugiError) -> None:
        """Report the requester's own mistakes; retry everything else on another server while that may help."""
        if not isinstance(error, ProcessDied):
            job.num_faults += 1
        if isinstance(error, DeadlineExceeded):
            self._endpoint.send(member.process, Cancel(job.number))
        is_user_error = (
            isinstance(error, RemoteError) and error.cause is not None and error.cause.kind in USER_ERRORS
        )
        if not is_user_error:
            self._distrust(member, error)
        if is_user_error or isinstance(error, DeadlineExceeded) or job.num_faults >= MAX_ATTEMPTS:
            job.ended = True
            job.requester.failed(error)
        else:
            job.last_error = error
            self._continue(job, member)

    def _distrust(self, member: ManagedServer, error: KintsugiError) -> None:
        if not member.suspect and not isinstance(error, ProcessDied):
            self._emit(Note(f"{member.process} is suspect: {error}"))
        member.doubt(self._clock.monotonic())

    def _expire(self, job: ManagerJob, *, now: float, reason: str) -> None:
        cause = None if job.last_error is None else job.last_error.cause
        what = f"Generate {job.request.ticket}: {reason}"
        job.ended = True
        job.requester.failed(
            DeadlineExceeded(whom="a generation server", what=what, waited_s=now - job.since, cause=cause)
        )

    # Declared waits.

    def _declare(self, reason: str) -> None:
        """Declare what this process waits for: a server with unanswered requests, weights that are being loaded, a
        queue."""
        waits: dict[str, Wait] = {}
        for member in self._fleet:
            if member.sent:
                oldest = self._sent[next(iter(member.sent))].job
                waits[member.process] = Wait(member.process, "Generated", oldest.since, oldest.deadline)
        if (loading := self._distribution.awaited()) is not None:
            waits["weights"] = loading
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
    """Run the manager's loop until the master, or the end of the lifeline, ends it."""
    config = load_config(RunFolder(bootstrap.run_dir).config_file)
    endpoint = open_endpoint(bootstrap)
    membership = Membership(endpoint, bootstrap, capabilities={})
    membership.end_with_lifeline(bootstrap.lifeline)
    with closing(
        EventLog(RunFolder(bootstrap.run_dir).events_file(bootstrap.process), process=bootstrap.process)
    ) as events:
        manager = GenerationManager(
            endpoint,
            emit=events.emit,
            strategy=config.generation.strategy,
            weights_deadline_s=config.weights.deadline_s,
        )
        try:
            while membership.shutdown_reason is None:
                membership.load, membership.gauges = manager.load, manager.gauges()
                membership.tick(SYSTEM_CLOCK.monotonic())
                for delivery in endpoint.poll(HEARTBEAT_S / 2):
                    if not membership.handle(delivery):
                        manager.handle(delivery)
                manager.turn()
            events.emit(Note(f"shutting down: {membership.shutdown_reason}"))
        finally:
            endpoint.close(flush_s=FLUSH_S)
    return 0
