"""The decision in progress, and the requests under way: what the master's parts write into while they decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kintsugi.control.protocol import Decision, Effect, Request
from kintsugi.control.state import MasterState
from kintsugi.facts import Fact
from kintsugi.messages import Body
from kintsugi.patience import Patience


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

    A token names one request; an answer whose token is not open any more is late and changes nothing.
    """

    def __init__(self, draft: Draft, *, first_s: float) -> None:
        self._draft = draft
        self._patience = Patience(first_s=first_s)
        self._open: dict[str, tuple[str, str, float]] = {}
        self._round: set[str] = set()
        self._then: Callable[[float], None] | None = None
        self.answers: dict[str, Body] = {}
        """Of the current round, by process."""
        self.num_tokens = 0
        """At most so many tokens are sampled or trained in one step: what a first answer is allowed to take."""

    def ask(self, token: str, to: str, body: Body, now: float) -> None:
        kind = type(body)
        self._open[token] = (to, kind.__name__, now)
        self._draft.do(Request(token, to, body, self.deadline_s(kind)))

    def deadline_s(self, kind: type[Body]) -> float:
        """How long to wait for an answer to a request of this kind."""
        return self._patience.deadline_s(kind.__name__, num_tokens=self.num_tokens)

    def ask_all(self, bodies: Mapping[str, Body], now: float, *, then: Callable[[float], None]) -> None:
        """Begin a round: `then` follows when every process has answered."""
        self.answers, self._then, self._round = {}, then, set()
        for to, body in bodies.items():
            token = f"round:{self._draft.state.step}:{type(body).__name__}:{to}"
            self._round.add(token)
            self.ask(token, to, body, now)

    def ask_in_turn(
        self, processes: Sequence[str], bodies: Sequence[Body], now: float, *, then: Callable[[float], None]
    ) -> None:
        """One round per body, each after the previous one is answered by all."""
        if not bodies:
            then(now)
            return
        self.ask_all(
            dict.fromkeys(processes, bodies[0]),
            now,
            then=lambda at: self.ask_in_turn(processes, bodies[1:], at, then=then),
        )

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
        self._round, self._then = set(), None

    def withdraw(self, token: str) -> None:
        """An answer to this request does not matter any more."""
        self._open.pop(token, None)

    def abandon(self, process: str) -> None:
        """Nothing that was asked of this process matters any more."""
        self._open = {token: asked for token, asked in self._open.items() if asked[0] != process}
