"""Model calls of the step that a rank is in: their answers, and what a new master is told about them.

A master that dies leaves calls behind: running, finished, or waiting in a queue of the rank. Its successor asks every
rank for its standing (`AskStanding`) and, if all of them are in one group, sends the calls of the step again. A rank
answers such a repetition from its record: a running call is finished once, a finished one is not run again. A call of
the same name with other contents is no repetition, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kintsugi.errors import RefusedError
from kintsugi.protocol.recovery import RankReady, RankStanding
from kintsugi.protocol.sample_transfer import Routes
from kintsugi.protocol.training import CallDone, RunCall


class StepCalls:
    """Calls of one step on one rank. `forget` when the step is committed or given up."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, str], tuple[RunCall, CallDone]] = {}
        self._running: RunCall | None = None
        self._failed = False

    def is_done(self, step: int, name: str) -> bool:
        return (step, name) in self._done

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the finished calls, in their order."""
        return tuple(name for _, name in self._done)

    def answer_to(self, call: RunCall) -> CallDone | None:
        """Return the answer to a call that has been run; None if it has to be run."""
        known = self._done.get((call.step, call.call))
        if known is None:
            return None
        earlier, answer = known
        if not _is_same(earlier, call):
            raise RefusedError(
                f"{call.call} of step {call.step} was run on other samples or for another group than this request names"
            )
        return answer

    def begin(self, call: RunCall) -> None:
        self._running = call

    def end(self, call: RunCall, answer: CallDone) -> None:
        """Record the answer to the call that was running."""
        self._running = None
        self._done[call.step, call.call] = call, answer

    def fail(self) -> None:
        """Record that the running call has failed: this rank and the others may stand at different collectives."""
        if self._running is not None:
            self._running, self._failed = None, True

    def forget(self) -> None:
        """Drop everything about the step; a call that is running belongs to it."""
        self._done.clear()
        self._failed = False

    def standing(
        self,
        ready: RankReady,
        *,
        group: int,
        ranks: tuple[str, ...],
        is_normal: bool,
        is_between_calls: bool,
        queued: Iterable[RunCall],
    ) -> RankStanding:
        """Return where this rank stands. `queued`: calls that have arrived and wait for another."""
        running = () if self._running is None else (self._running,)
        calls = (*(call for call, _ in self._done.values()), *running, *queued)
        begun = [call for call in calls if call.generation == group]
        is_whole = bool(running) or is_between_calls or not ready.half_updated
        step = max((call.step for call in begun), default=-1)
        return RankStanding(
            msgspec.structs.replace(ready, generation=group, half_updated=not is_whole),
            ranks,
            is_normal and not self._failed,
            step,
            next((call.blocks for call in begun if call.step == step), ()),
        )


def _is_same(one: RunCall, other: RunCall) -> bool:
    """Whether two requests name the same computation; the routes of the samples do not matter to it."""
    plain = Routes()
    return msgspec.structs.replace(one, routes=plain) == msgspec.structs.replace(other, routes=plain)
