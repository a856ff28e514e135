"""Client of the generation manager in a rollout worker; requests are sent again when a manager dies."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from kintsugi.errors import DeadlineExceeded, KintsugiError, ProcessDied, RefusedError
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.rollout.group import RolloutGroup
from kintsugi.rollout.trajectory import whole
from kintsugi.runtime.clock import Clock
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.spans import SPANS
from kintsugi.transport import Endpoint, PendingReply
from kintsugi.types import Completion, Role, SamplingParams, process_id

MANAGER = process_id(Role.MANAGER, 0)
MOST_IN_FLIGHT = 1024
"""Limit of unanswered requests; a manager refuses more than a few thousand of all workers together."""

Then = Callable[[tuple[Completion, ...] | KintsugiError], None]


class _GenerationCall(msgspec.Struct, eq=False):
    """One request, which may be sent several times."""

    group: RolloutGroup
    body: Generate
    then: Then
    since: float


class GenerationClient:
    """Pending requests. Each ends with completions or an error, also if its group was dropped meanwhile."""

    def __init__(self, endpoint: Endpoint, *, clock: Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._unsent: deque[_GenerationCall] = deque()
        self._sent: dict[int, _GenerationCall] = {}

    def request(
        self,
        group: RolloutGroup,
        *,
        prompt: bytes,
        sampling: SamplingParams,
        then: Then,
        turn: int = 0,
        samples: tuple[int, ...] = (),
    ) -> None:
        """Request completions of `prompt` for these samples of a group, or for all of them; `then` gets the result."""
        body = Generate(group.ticket, turn, prompt, sampling, group.request.version, samples)
        self._unsent.append(_GenerationCall(group, body, then, self._clock.monotonic()))

    def turn(self) -> None:
        """Send unsent requests if the address book has a manager; fail those of dropped or expired groups."""
        manager = self._endpoint.peers.get(MANAGER)
        unsent, self._unsent = self._unsent, deque()
        for call in unsent:
            now = self._clock.monotonic()
            if not call.group.is_open:
                call.then(RefusedError(f"{call.group.ticket} was dropped"))
            elif now >= call.group.deadline:
                what = f"Generate {call.group.ticket}"
                call.then(DeadlineExceeded(whom=MANAGER, what=what, waited_s=now - call.group.since))
            elif manager is None or not manager.address or len(self._sent) >= MOST_IN_FLIGHT:
                self._unsent.append(call)
            else:
                self._send(call, timeout_s=call.group.deadline - now)

    def oldest(self) -> RolloutGroup | None:
        """Return the group that has been waiting for a reply longest."""
        waiting = itertools.chain(self._sent.values(), self._unsent)
        return next((call.group for call in waiting if call.group.is_open), None)

    def _send(self, call: _GenerationCall, *, timeout_s: float) -> None:
        """Send a request; the manager distributes requests over the servers and moves those of a dead server."""
        self._sent[id(call)] = call
        body = msgspec.structs.replace(call.body, timeout_s=timeout_s)
        self._endpoint.request(MANAGER, body, deadline_s=timeout_s, on_done=partial(self._done, call))

    def _done(self, call: _GenerationCall, pending: PendingReply) -> None:
        del self._sent[id(call)]
        try:
            generated = pending.result().expect(Generated)
            completions = whole(generated)
        except (ProcessDied, DeadlineExceeded):  # A later request may have extended the group's deadline.
            self._unsent.append(call)
            return
        except KintsugiError as error:
            call.then(error)
            return
        COUNTERS.add("completions", len(completions))
        about = {"ticket": call.body.ticket, "turn": call.body.turn, "server": generated.server}
        SPANS.add("actor_generate", about, since=call.since)
        call.then(completions)
