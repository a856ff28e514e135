"""Requests of the master that have no answer yet: their names, deadlines and rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.protocol import Request
from kintsugi.protocol.agents import Inspect, StopProcess
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import (
    DeviceClean,
    DeviceStop,
    NotifyNormal,
    PreLock,
    RebuildGroup,
    Repair,
    Rollback,
)
from kintsugi.runtime.deadlines import AdaptiveDeadline
from kintsugi.types import Wait, kind_of

OPERATIONS = frozenset({PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, Rollback, NotifyNormal})
"""Requests of the recovery protocol: a rank that does not answer soon has a fault itself."""
AGENT_REQUESTS = frozenset({StopProcess, Inspect})
"""Requests that an agent can always serve immediately."""
OPERATION_FLOOR_S = 10.0


class Purpose(StrEnum):
    """Reason for a request. It decides which part of the master takes the answer."""

    START = "start"
    STOP = "stop"
    RETIRE = "retire"
    INSPECT = "inspect"
    EPISODE = "episode"
    CALL = "call"
    LOAD = "load"
    """The manager is to load a new version."""
    RELOAD = "weights"
    """A new manager is to load the version that is already current."""
    OPERATION = "rank"
    """A step of the recovery protocol."""
    SAVE = "save"
    """A rank is to write a checkpoint, while the run continues."""
    DUMP = "dump"
    """The last checkpoint before the run is given up."""
    ROUND = "round"
    """One of the requests of a round, which ends when all are answered."""


_BY_INCARNATION = (Purpose.START, Purpose.STOP, Purpose.RETIRE, Purpose.INSPECT)


class RequestId(msgspec.Struct, frozen=True):
    """Name of one request. It is unique in a run, except for requests that are named by an incarnation: these may be
    repeated, and all their answers mean the same.

    For example `RequestId(Purpose.OPERATION, "PreLock", 2, 14, "model-0")`, stored as `rank:2.14:PreLock:model-0`.
    """

    purpose: Purpose
    subject: str
    """Incarnation of the process (START, STOP, RETIRE, INSPECT), ticket (EPISODE), name of the model call (CALL), or
    kind of the message."""
    scope: int = 0
    """Term of the master; for CALL the step."""
    number: int = 0
    """Number of the request in its term; for CALL the generation of the process group."""
    process: str = ""
    """Process that is asked, where several are asked the same."""

    @property
    def token(self) -> str:
        """Stored form, as in the events of `<run>/inputs`. A replay compares it, so it never changes."""
        if self.purpose in _BY_INCARNATION:
            return f"{self.purpose}:{self.subject}"
        place = f"{self.scope}.{self.number}"
        if self.purpose is Purpose.EPISODE:
            return f"{self.purpose} {place} {self.subject}"
        if self.purpose is Purpose.CALL:
            return f"{self.purpose}:{self.subject}:{place}:{self.process}"
        return f"{self.purpose}:{place}:{self.subject}:{self.process}"


class PendingRequest(msgspec.Struct, frozen=True):
    """A request that has no answer yet."""

    id: RequestId
    process: str
    kind: str
    """Class of the message."""
    since: float
    until: float


class PendingRequests:
    """All requests that have no answer yet, by token, and the current round.

    An answer to a token that is not pending any more is late and changes nothing.
    """

    def __init__(self, decision: DecisionBuilder, *, first_s: float) -> None:
        self._decision = decision
        self._deadlines = AdaptiveDeadline(first_s=first_s)
        self._open: dict[str, PendingRequest] = {}
        self._num_asked = 0
        self._round: set[str] = set()
        """Tokens of the current round that are not answered yet."""
        self.answers: dict[str, Body] = {}
        """Answers of the current round, by process."""
        self.num_tokens = 0
        """Most tokens that one step samples or trains: the first answer of a kind is given time for as many."""

    def ask(self, request_id: RequestId, to: str, body: Body, now: float) -> None:
        """Send a request."""
        kind, token = type(body), request_id.token
        deadline_s = self.deadline_s(kind)
        self._open[token] = PendingRequest(request_id, to, kind.__name__, now, now + deadline_s)
        self._decision.add_effect(Request(token, to, body, deadline_s))

    def ask_each(self, purpose: Purpose, bodies: Mapping[str, Body], now: float) -> list[RequestId]:
        """Send a request to each of several processes."""
        request_ids = []
        for to, body in bodies.items():
            self._num_asked += 1
            term = self._decision.state.term
            request_id = RequestId(purpose, kind_of(body), term, self._num_asked, to)
            self.ask(request_id, to, body, now)
            request_ids.append(request_id)
        return request_ids

    def ask_all(self, bodies: Mapping[str, Body], now: float) -> None:
        """Begin a round, and abandon the one before."""
        self.abandon_round()
        self.answers = {}
        self._round = {request_id.token for request_id in self.ask_each(Purpose.ROUND, bodies, now)}

    def deadline_s(self, kind: type[Body]) -> float:
        """Return how long to wait for an answer to a request of this kind."""
        if kind in AGENT_REQUESTS:
            return OPERATION_FLOOR_S
        if kind in OPERATIONS:
            return self._deadlines.deadline_s(kind.__name__, floor_s=OPERATION_FLOOR_S)
        return self._deadlines.deadline_s(kind.__name__, num_tokens=self.num_tokens)

    def close(self, token: str, sender: str) -> PendingRequest | None:
        """Take the request that was answered or has failed; None if no such request to this sender is pending."""
        request = self._open.get(token)
        if request is None or request.process != sender:
            self._decision.explain(f"{token} is not pending at {sender}")
            return None
        del self._open[token]
        return request

    def observed(self, kind: str, duration_s: float, now: float) -> None:
        """Adapt the deadline of a kind of request to the time that an answer took. Failures do not count."""
        self._deadlines.observed(kind, duration_s, now)

    def longest_s(self, kind: str) -> float | None:
        """Return the longest time that an answer to a kind of request has taken recently."""
        return self._deadlines.longest_s(kind)

    def is_asked(self, purpose: Purpose) -> bool:
        """Return whether any request of this purpose is pending."""
        return any(request.id.purpose is purpose for request in self._open.values())

    def is_open(self, token: str) -> bool:
        return token in self._open

    def open_requests(self) -> Iterator[tuple[str, str, str, float]]:
        """Yield (token, process, kind, since) of every pending request."""
        for token, request in self._open.items():
            yield token, request.process, request.kind, request.since

    def waits(self) -> tuple[Wait, ...]:
        """Return the oldest pending request of each kind to each process, as waits of the master."""
        oldest: dict[tuple[str, str], Wait] = {}
        for request in self._open.values():
            wait = Wait(request.process, request.kind, request.since, request.until)
            oldest.setdefault((request.process, request.kind), wait)
        return tuple(oldest.values())

    def in_round(self, token: str) -> bool:
        return token in self._round

    def answered(self, token: str, sender: str, body: Body) -> bool:
        """Take an answer of the current round; True if it was the last."""
        if token not in self._round:
            self._decision.explain(f"{token} is not of this round")
            return False
        self._round.remove(token)
        self.answers[sender] = body
        return not self._round

    def abandon_round(self) -> None:
        """Ignore the answers of the current round that have not come."""
        for token in self._round:
            self._open.pop(token, None)
        self._round = set()

    def withdraw(self, *tokens: str) -> None:
        """Ignore the answers to these requests."""
        for token in tokens:
            self._open.pop(token, None)

    def withdraw_all(self, purpose: Purpose) -> None:
        """Ignore the answers to all requests of this purpose."""
        self.withdraw(*[token for token, request in self._open.items() if request.id.purpose is purpose])

    def abandon(self, process: str) -> None:
        """Ignore the answers of this process."""
        self.withdraw(*[token for token, request in self._open.items() if request.process == process])
