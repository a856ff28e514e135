"""The generation manager: one address for all servers. Sends requests where `router` says, on if a server dies.

What a server says while it works is kept (`transcript`), so that another goes on from the last token when it dies or is
retired: nothing is lost, nothing is sampled or told twice. In deterministic mode whoever goes on gives the same tokens,
because a `Generate` names its own noise. New weights go to all servers at once, and to later ones when they appear
(`distribution`); a server gets requests only while it holds the weights that were sent last.

What is known here is learned again after a restart: servers from the address book, weights from the master, requests
from those who wait for an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import Strategy
from kintsugi.errors import DeadlineExceeded, KintsugiError, ProcessDied, RefusedError, RemoteError
from kintsugi.generation.distribution import DEADLINE_S, Distribution, Loaded, ModelVersion
from kintsugi.generation.fleet import Fleet, Member, identity
from kintsugi.generation.router import Choice, ServerView, choose
from kintsugi.generation.transcript import Transcript, verify_answer
from kintsugi.messages import (
    Cancel,
    Failed,
    Generate,
    Generated,
    Interrupt,
    LoadWeights,
    Ok,
    Produced,
    Retire,
    WeightsLoaded,
)
from kintsugi.observe.events import EventLog, Note, events_path
from kintsugi.recipe import load_config
from kintsugi.runtime import COUNTERS, SPANS, SYSTEM_CLOCK, WAITS, Clock, WaitTable
from kintsugi.transport import Delivery, Endpoint, PendingReply, subject
from kintsugi.types import Fragment, Wait
from kintsugi.worker import HEARTBEAT_S, Membership, open_endpoint

MAX_REQUESTS = 4096
"""Unanswered requests; a further one is refused."""
MAX_ATTEMPTS = 5
"""Faults that living servers may answer one request with. Deaths do not count: they are not the request's doing, and
its deadline bounds them."""
INTERRUPT_TIMEOUT_S = 30.0
FLUSH_S = 1.0
"""Longest time that the last replies may take to leave."""

_USER_ERRORS = {"UserError", "ConfigError", "DataError", "ModelError"}


class Asker(Protocol):
    """Whoever waits for a `Generate`. It is told of the end once, by `done` or by `failed`, unless it cancels."""

    def produced(self, fragments: tuple[Fragment, ...]) -> None:
        """New tokens of a request with `stream`: before `done`, every token comes here exactly once and in order, the
        last ones of a sample with its `finish`."""
        ...

    def done(self, generated: Generated) -> None: ...

    def failed(self, error: KintsugiError) -> None:
        """A `RemoteError` whose cause is a `UserError` is the asker's own mistake, as a server saw it."""
        ...

    @property
    def is_gone(self) -> bool:
        """Nobody would hear the answer; asked whenever the address book changes."""
        ...


class Job:
    """A `Generate` on its way to an answer: what `Manager.submit` gives and `Manager.cancel` takes."""

    def __init__(self, request: Generate, asker: Asker, *, now: float) -> None:
        self.request = request
        self.asker = asker
        self.transcript = Transcript(request)
        self.since = now
        self.deadline = now + request.timeout_s
        self.ended = False
        self.number = 0
        """Under which it was sent last; 0 before."""
        self.num_faults = 0
        self.last_error: KintsugiError | None = None

    @property
    def num_tokens(self) -> int:
        """Most tokens that its unfinished samples take, prompts included."""
        per_sample = len(self.request.prompt) // 4 + self.request.sampling.max_new_tokens
        return self.transcript.num_unfinished * per_sample

    def begin_again(self) -> None:
        """Forget what was produced, unless the asker has been told of it."""
        if not self.request.stream:
            self.transcript = Transcript(self.request)

    def open_request(self) -> Generate:
        """What is left to be done of it."""
        unfinished = self.transcript.unfinished
        return msgspec.structs.replace(
            self.request,
            samples=self.request.samples if unfinished == self.request.wanted else unfinished,
            produced=self.transcript.produced(),
            number=self.number,
        )


class _Sent(msgspec.Struct, frozen=True, eq=False):
    """A job on its way through a server."""

    job: Job
    member: Member
    request: Generate


class _Remote:
    """Another process that asked, and wants the whole answer only."""

    def __init__(self, endpoint: Endpoint, fleet: Fleet, delivery: Delivery) -> None:
        self._endpoint = endpoint
        self._fleet = fleet
        self._delivery = delivery

    def produced(self, fragments: tuple[Fragment, ...]) -> None:
        pass

    def done(self, generated: Generated) -> None:
        self._endpoint.reply(self._delivery, generated)

    def failed(self, error: KintsugiError) -> None:
        if isinstance(error, RemoteError) and error.cause is not None and error.cause.kind in _USER_ERRORS:
            self._endpoint.reply(self._delivery, Failed(error.cause))
        else:
            self._endpoint.fail(self._delivery, error)

    @property
    def is_gone(self) -> bool:
        return not self._fleet.is_known(self._delivery.peer)


class Manager:
    """Consumes `Generate`, `LoadWeights`, `Retire` and `Produced`, or the calls that mean the same from within its
    process, and produces answers. It never blocks: `turn` is called after every poll of the endpoint, and what it waits
    for is unblocked by a reply, a new address book or a deadline. Everything belongs to the endpoint's thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        note: Callable[[str], None],
        strategy: Strategy = "least_loaded",
        max_requests: int = MAX_REQUESTS,
        weights_deadline_s: float = DEADLINE_S,
        clock: Clock = SYSTEM_CLOCK,
        waits: WaitTable = WAITS,
    ) -> None:
        """`note` records a change that is worth a line."""
        self._endpoint = endpoint
        self._note = note
        self._strategy = strategy
        self._max_requests = max_requests
        self._clock = clock
        self._waits = waits
        self._declared: dict[str, tuple[int, Wait]] = {}
        self._fleet = Fleet(endpoint, note=note)
        self._distribution = Distribution(
            endpoint, self._fleet, note=note, clock=clock, deadline_s=weights_deadline_s
        )
        self._waiting: deque[Job] = deque()
        self._sent: dict[int, _Sent] = {}
        # Numbers of another incarnation, which a server may still use, are not ours.
        self._num_sent = xxhash.xxh32_intdigest(endpoint.incarnation.encode()) << 31
        self._retiring: list[tuple[Member, Callable[[], None]]] = []

    # From within the process.

    def submit(self, request: Generate, asker: Asker) -> Job:
        """Take a request in; RefusedError while too many are unanswered."""
        if self.num_unanswered >= self._max_requests:
            raise RefusedError(f"{self.num_unanswered} requests are unanswered; try again later")
        COUNTERS.add("requests")
        job = Job(request, asker, now=self._clock.monotonic())
        self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Nobody wants the answer any more, and nobody is told of it: what the request holds is given back."""
        if job.ended:
            return
        job.ended = True
        COUNTERS.add("cancelled")
        self._recall(job)

    def load_weights(self, weights: LoadWeights, then: Loaded) -> None:
        """Let all servers load these weights, and later ones when they appear; `then` hears when all who live have."""
        current, new = self._fleet.current, identity(weights.manifest)
        self._distribution.distribute(weights, then)
        if current is not None and new != current and new[0] <= current[0]:
            self._begin_again()

    def retire(self, process: str, then: Callable[[], None], *, incarnation: str = "") -> None:
        """Send a server nothing more and let others go on with what it does; `then` is called when it has nothing left
        to lose, or is gone. With an `incarnation`, only that one: the request may come late."""
        member = self._fleet.living(process)
        if member is None or incarnation not in ("", member.peer.incarnation):
            then()
            return
        self._retiring.append((member, then))
        if not member.retired:
            member.retired = True
            self._note(f"{process} {member.peer.incarnation} is retired, {len(member.sent)} requests move")
            # What does not come by this comes when the server is gone.
            self._endpoint.request(process, Interrupt(), deadline_s=INTERRUPT_TIMEOUT_S)

    def servers(self) -> list[ServerView]:
        """Every server and its health; the dead are listed until they are replaced."""
        return self._fleet.views()

    def versions(self) -> tuple[ModelVersion, ...]:
        """The versions that were given lately, the current one last, and who holds each."""
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
        """What there is to say of it, as of now."""
        return {"waiting": len(self._waiting), "sent": len(self._sent), "servers": len(self._fleet.in_use())}

    # From other processes.

    def handle(self, delivery: Delivery) -> None:
        """Take one message in. Whoever the address book had before is known before."""
        self._follow_book()
        body = delivery.body
        try:
            match body:
                case Generate():
                    self.submit(body, _Remote(self._endpoint, self._fleet, delivery))
                case Produced():
                    self._produced(delivery.peer.process, body)
                case LoadWeights():
                    self.load_weights(body, partial(self._answer_weights, delivery))
                case Retire():
                    done = partial(self._endpoint.reply, delivery, Ok())
                    self.retire(body.process, done, incarnation=body.incarnation)
                case _:
                    raise RefusedError(f"a generation manager does not answer {type(body).__name__}")
        except KintsugiError as error:
            if delivery.wants_reply:
                self._endpoint.fail(delivery, error)

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
            if job.asker.is_gone:
                self.cancel(job)

    def _begin_again(self) -> None:
        """The run went back: what was drawn with weights that are no part of it any more does not count, nor would what
        servers add to it with older ones. Who streams has been told of it, and goes on."""
        taken_back = [sent.job for sent in self._sent.values() if not sent.job.request.stream]
        for job in taken_back:
            self._recall(job)
        self._waiting.extendleft(reversed(taken_back))
        for job in self._waiting:
            job.begin_again()

    def _recall(self, job: Job) -> None:
        """From the server that has it, if one has."""
        if (sent := self._take_back(job.number)) is not None:
            self._endpoint.send(sent.member.process, Cancel(job.number))

    def _unanswered(self) -> list[Job]:
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
        """Send on what can be sent; gives the reason why the rest, if any, waits."""
        unservable: dict[int, Choice] = {}
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

    def _choose(self, job: Job) -> Choice:
        return choose(
            self._fleet.views(),
            version=job.request.version,
            strategy=self._strategy,
            prompt=job.request.prompt,
            num_tokens=job.num_tokens,
            turn=self._num_sent,
        )

    def _send(self, job: Job, process: str, *, timeout_s: float) -> None:
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
        """Keep what a server says of requests that it was sent, under the numbers that they were sent with: what comes
        late, of an attempt that was given up, may be other tokens than those of the next one."""
        for number, fragments in body.fragments.items():
            sent = self._sent.get(number)
            if sent is None or sent.member.process != process:
                continue
            try:
                self._take(sent.job, sent.job.transcript.add(fragments))
            except KintsugiError as error:
                self._distrust(sent.member, error)

    def _take(self, job: Job, new: tuple[Fragment, ...]) -> None:
        if new and job.request.stream and not job.ended:
            job.asker.produced(new)

    def _settled(self, number: int, pending: PendingReply) -> None:
        sent = self._take_back(number)
        if sent is None:
            return  # It was cancelled.
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
            return  # By the asker, when it was told of the tokens.
        self._go_on(job, member)

    def _go_on(self, job: Job, member: Member) -> None:
        """With what is left to be done of it; nothing may be, though its server died before it could answer."""
        if job.transcript.num_unfinished:
            self._waiting.append(job)
            return
        job.ended = True
        request, completions = job.request, job.transcript.completions()
        SPANS.add("request", {**subject(request), "server": member.process}, since=job.since)
        job.asker.done(Generated(request.ticket, request.turn, completions, member.process))

    def _failed(self, job: Job, member: Member, error: KintsugiError) -> None:
        """Tell the asker of its own mistakes; try everything else on another server, while that may help."""
        if not isinstance(error, ProcessDied):
            job.num_faults += 1
        if isinstance(error, DeadlineExceeded):
            self._endpoint.send(member.process, Cancel(job.number))
        is_user_error = (
            isinstance(error, RemoteError) and error.cause is not None and error.cause.kind in _USER_ERRORS
        )
        if not is_user_error:
            self._distrust(member, error)
        if is_user_error or isinstance(error, DeadlineExceeded) or job.num_faults >= MAX_ATTEMPTS:
            job.ended = True
            job.asker.failed(error)
        else:
            job.last_error = error
            self._go_on(job, member)

    def _distrust(self, member: Member, error: KintsugiError) -> None:
        if not member.suspect and not isinstance(error, ProcessDied):
            self._note(f"{member.process} is suspect: {error}")
        member.doubt(self._clock.monotonic())

    def _expire(self, job: Job, *, now: float, reason: str) -> None:
        cause = None if job.last_error is None else job.last_error.cause
        what = f"Generate {job.request.ticket}: {reason}"
        job.ended = True
        job.asker.failed(
            DeadlineExceeded(whom="a generation server", what=what, waited_s=now - job.since, cause=cause)
        )

    # Declared waits.

    def _declare(self, reason: str) -> None:
        """Say for whom this process waits: a server that owes answers, weights that are being loaded, a queue."""
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
    """Run the manager's loop until the master, or the end of the lifeline, tells it to end."""
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    endpoint = open_endpoint(bootstrap)
    membership = Membership(endpoint, bootstrap, capabilities={})

    def lifeline_ended() -> None:
        endpoint.unwatch(bootstrap.lifeline)
        membership.shutdown_reason = "agent and launcher are gone"

    endpoint.watch(bootstrap.lifeline, lifeline_ended)
    with closing(
        EventLog(events_path(bootstrap.run_dir, bootstrap.process), process=bootstrap.process)
    ) as events:
        manager = Manager(
            endpoint,
            note=lambda message: events.emit(Note(message)),
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
