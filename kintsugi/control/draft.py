"""The decision in progress, and the requests under way: what the master's parts write into while they decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kintsugi.control.protocol import Decision, Effect, Request
from kintsugi.control.state import MasterState
from kintsugi.facts import Fact
from kintsugi.messages import Body
from kintsugi.operations import DeviceClean, DeviceStop, NotifyNormal, PreLock, RebuildGroup, Repair, Rollback
from kintsugi.patience import Patience
from kintsugi.supervision import Inspect, StopProcess
from kintsugi.types import Wait

OPERATIONS = frozenset({PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, Rollback, NotifyNormal})
"""What recovery asks of a rank: who does not answer soon is part of the trouble."""
LOOKS = frozenset({StopProcess, Inspect})
"""What an agent can always do at once."""
OPERATION_FLOOR_S = 10.0


class Draft:
    """Collects facts (applied to the state at once), effects and reasons until the decision is taken."""

    def __init__(self, state: MasterState) -> None:
        self.state = state
        self._facts: list[Fact] = []
        self._effects: list[Effect] = []
        self._reasons: list[str] = []

    def fact(self, fact: Fact) -> None:
        self.state.apply(fact)
        self._facts.append(fact)

    def do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def because(self, reason: str) -> None:
        self._reasons.append(reason)

    def take(self) -> Decision:
        """The decision; the draft is empty afterwards."""
        decision = Decision(tuple(self._facts), tuple(self._effects), "; ".join(self._reasons))
        self._facts, self._effects, self._reasons = [], [], []
        return decision


class Conversation:
    """Requests that are under way, and what follows when the answers of a round are all in.

    A token names one request and is never used again; an answer whose token is not open any more is late and changes
    nothing.
    """

    def __init__(self, draft: Draft, *, first_s: float) -> None:
        self._draft = draft
        self._patience = Patience(first_s=first_s)
        self._open: dict[str, tuple[str, str, float, float]] = {}
        """Token → process, kind of request, since when, until when."""
        self._serial = 0
        self._round: set[str] = set()
        self._then: Callable[[float], None] | None = None
        self.answers: dict[str, Body] = {}
        """Of the current round, by process."""
        self.num_tokens = 0
        """At most so many tokens are sampled or trained in one step: what a first answer is allowed to take."""

    def ask(self, token: str, to: str, body: Body, now: float) -> None:
        kind = type(body)
        deadline_s = self.deadline_s(kind)
        self._open[token] = (to, kind.__name__, now, now + deadline_s)
        self._draft.do(Request(token, to, body, deadline_s))

    def ask_each(self, purpose: str, bodies: Mapping[str, Body], now: float) -> list[str]:
        """Ask several processes under tokens that begin with `purpose`; gives the tokens."""
        tokens = []
        for to, body in bodies.items():
            self._serial += 1
            token = f"{purpose}:{self._draft.state.epoch}.{self._serial}:{type(body).__name__}:{to}"
            self.ask(token, to, body, now)
            tokens.append(token)
        return tokens

    def deadline_s(self, kind: type[Body]) -> float:
        """How long to wait for an answer to a request of this kind."""
        if kind in LOOKS:
            return OPERATION_FLOOR_S
        if kind in OPERATIONS:
            return self._patience.deadline_s(kind.__name__, floor_s=OPERATION_FLOOR_S)
        return self._patience.deadline_s(kind.__name__, num_tokens=self.num_tokens)

    def ask_all(self, bodies: Mapping[str, Body], now: float, *, then: Callable[[float], None]) -> None:
        """Begin a round, and give up the one before: `then` follows when every process has answered."""
        self.abandon_round()
        self.answers, self._then = {}, then
        self._round = set(self.ask_each("round", bodies, now))

    def close(self, token: str, sender: str) -> tuple[str, float] | None:
        """An answer or a failure came: what was asked and since when; None if nobody waits for it from this sender."""
        asked = self._open.get(token)
        if asked is None or asked[0] != sender:
            self._draft.because(f"nobody waits for {token} from {sender}")
            return None
        del self._open[token]
        return asked[1], asked[2]

    def observed(self, kind: str, duration_s: float) -> None:
        """An answer, not a failure, took this long: the measure of patience."""
        self._patience.observed(kind, duration_s)

    def longest_s(self, kind: str) -> float | None:
        """The longest answer to a kind of request so far."""
        return self._patience.longest_s(kind)

    def is_asked(self, purpose: str) -> bool:
        """Whether any request of this purpose is under way."""
        return any(token.startswith(purpose) for token in self._open)

    def is_open(self, token: str) -> bool:
        return token in self._open

    def open_requests(self) -> Iterator[tuple[str, str, str, float]]:
        """(token, process, kind, since) of everything that is under way."""
        for token, (to, kind, since, _) in self._open.items():
            yield token, to, kind, since

    def waits(self) -> tuple[Wait, ...]:
        """For whom the master waits: of each kind of request to each process the oldest."""
        oldest: dict[tuple[str, str], Wait] = {}
        for to, kind, since, until in self._open.values():
            oldest.setdefault((to, kind), Wait(to, kind, since, until))
        return tuple(oldest.values())

    def in_round(self, token: str) -> bool:
        return token in self._round

    def answered(self, token: str, sender: str, body: Body, now: float) -> None:
        """Take an answer of the current round, and go on when it was the last."""
        if token not in self._round:
            self._draft.because(f"{token} is not of this round")
            return
        self._round.remove(token)
        self.answers[sender] = body
        if not self._round and self._then is not None:
            then, self._then = self._then, None
            then(now)

    def abandon_round(self) -> None:
        for token in self._round:
            self._open.pop(token, None)
        self._round, self._then = set(), None

    def withdraw(self, *tokens: str) -> None:
        """Answers to these requests do not matter any more."""
        for token in tokens:
            self._open.pop(token, None)

    def withdraw_all(self, purpose: str) -> None:
        """Nor to any request of this purpose."""
        self.withdraw(*[token for token in self._open if token.startswith(purpose)])

    def abandon(self, process: str) -> None:
        """Nothing that was asked of this process matters any more."""
        self.withdraw(*[token for token, asked in self._open.items() if asked[0] == process])
