"""What a rollout worker asks of the generation manager, and asks again of the next one when a manager dies."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from kintsugi.errors import DeadlineExceeded, KintsugiError, ProcessDied, RefusedError
from kintsugi.messages import Generate, Generated
from kintsugi.rollout.episode import whole
from kintsugi.rollout.groups import Group
from kintsugi.runtime import COUNTERS, SPANS, Clock
from kintsugi.transport import Endpoint, PendingReply
from kintsugi.types import Completion, Role, Sampling, process_id

MANAGER = process_id(Role.MANAGER, 0)
MOST_ASKED = 1024
"""Requests that are unanswered at once; a manager refuses when all workers together have a few thousand."""

Then = Callable[[tuple[Completion, ...] | KintsugiError], None]


class _Ask(msgspec.Struct, eq=False):
    """One request, however often it has to be sent."""

    group: Group
    body: Generate
    then: Then
    since: float


class Generating:
    """Requests on their way. Each ends with completions or an error, also when its group was dropped meanwhile."""

    def __init__(self, endpoint: Endpoint, *, clock: Clock) -> None:
        self._endpoint, self._clock = endpoint, clock
        self._unsent: deque[_Ask] = deque()
        self._sent: dict[int, _Ask] = {}

    def ask(
        self,
        group: Group,
        *,
        prompt: bytes,
        sampling: Sampling,
        then: Then,
        turn: int = 0,
        samples: tuple[int, ...] = (),
    ) -> None:
        """Have `prompt` continued for these samples of a group, or for all of them."""
        body = Generate(group.ticket, turn, prompt, sampling, group.request.version, samples)
        self._unsent.append(_Ask(group, body, then, self._clock.monotonic()))

    def turn(self) -> None:
        """Send what was not sent, once the address book has a manager; what has no time left fails."""
        manager = self._endpoint.peers.get(MANAGER)
        unsent, self._unsent = self._unsent, deque()
        for ask in unsent:
            now = self._clock.monotonic()
            if not ask.group.is_open:
                ask.then(RefusedError(f"{ask.group.ticket} was dropped"))
            elif now >= ask.group.deadline:
                what = f"Generate {ask.group.ticket}"
                ask.then(DeadlineExceeded(whom=MANAGER, what=what, waited_s=now - ask.group.since))
            elif manager is None or not manager.address or len(self._sent) >= MOST_ASKED:
                self._unsent.append(ask)
            else:
                self._send(ask, timeout_s=ask.group.deadline - now)

    def oldest(self) -> Group | None:
        """Of the groups that wait for an answer, the one that asked first."""
        waiting = itertools.chain(self._sent.values(), self._unsent)
        return next((ask.group for ask in waiting if ask.group.is_open), None)

    def _send(self, ask: _Ask, *, timeout_s: float) -> None:
        """The manager spreads requests over the servers and moves those of a dead one."""
        self._sent[id(ask)] = ask
        body = msgspec.structs.replace(ask.body, timeout_s=timeout_s)
        self._endpoint.request(MANAGER, body, deadline_s=timeout_s, on_done=partial(self._done, ask))

    def _done(self, ask: _Ask, pending: PendingReply) -> None:
        del self._sent[id(ask)]
        try:
            generated = pending.result().expect(Generated)
            completions = whole(generated)
        except (ProcessDied, DeadlineExceeded):  # A later order may have given it more time.
            self._unsent.append(ask)
            return
        except KintsugiError as error:
            ask.then(error)
            return
        COUNTERS.add("completions", len(completions))
        about = {"ticket": ask.body.ticket, "turn": ask.body.turn, "server": generated.server}
        SPANS.add("actor_generate", about, since=ask.since)
        ask.then(completions)
