"""The rank's side of recovery, whatever framework trains in it.

A framework registers its callbacks (stop, clean, rebuild group, repair, rollback) as an `Adapter`; the `Processor`
knows the protocol around them: the lock, the order of sequence numbers, which source a repair takes, and the answer.
The process and its memory outlive all of it.

Two flows, told to the master when a rank registers (`capabilities["flow"]`):

    rollback   pre-lock → device stop → device clean → rebuild group → repair (newcomers) → rollback (all) → normal
    restore    pre-lock → device stop → device clean → rebuild group → repair (all, from their snapshots) → normal

Sequence numbers grow with every round of recovery. An operation of an earlier round than the latest is refused: a
late message must not undo what a later attempt did. One of the same round is a repetition; until the round is over it
is carried out again, which changes nothing, and afterwards it is only answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from kintsugi.errors import IntegrityError, RefusedError, WorldError
from kintsugi.operations import (
    DeviceClean,
    DeviceStop,
    NotifyNormal,
    PreLock,
    RankReady,
    RebuildGroup,
    Repair,
    Rollback,
)

Operation = PreLock | DeviceStop | DeviceClean | RebuildGroup | Repair | Rollback | NotifyNormal

SNAPSHOT_PREFIX = "snapshot:"
"""Of a source: the snapshots of the process that is named after it, in the memory of this host's agent."""
OWN_STATE = "own"
"""The source of a repair that found nothing to repair."""


class Flow(StrEnum):
    """Which operations bring a rank of this framework back; the value travels in `Register.capabilities["flow"]`."""

    ROLLBACK = "rollback"
    RESTORE = "restore"


FLOWS: Mapping[Flow, tuple[type[Operation], ...]] = {
    Flow.ROLLBACK: (PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, Rollback, NotifyNormal),
    Flow.RESTORE: (PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, NotifyNormal),
}


class Adapter(Protocol):
    """What a framework registers. Every callback may be repeated; what the world does wrong raises a WorldError."""

    @property
    def flow(self) -> Flow: ...

    def standing(self) -> RankReady:
        """Where the rank stands, without its source. Asked often: nothing is computed for it."""
        ...

    def stop(self, generation: int) -> None:
        """Groups up to this generation are over: collectives of them raise, device work is aborted or waited out."""
        ...

    def clean(self) -> None:
        """Drop what an aborted step left behind."""
        ...

    def rebuild(self, request: RebuildGroup) -> None:
        """Leave the group, join the next generation of it, and try it out with a collective."""
        ...

    def repair(self, step: int, *, source: str, digest: str) -> None:
        """Become the committed state of `step` from this source; verified (by `digest`, unless empty) before use."""
        ...

    def rollback(self, step: int) -> None:
        """Return to the committed state of `step`; a prepared one is adopted."""
        ...


class Processor:
    """One rank's way through recovery: `carry_out` an operation, and `admit` a step in between."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._locked_after: int | None = None
        self._sequence = -1
        self._is_normal = True
        self._is_busy = False

    @property
    def sequence(self) -> int:
        """Of the latest round that this rank has heard of; -1 before the first."""
        return self._sequence

    def admit(self, step: int, *, goes_on: bool = False) -> None:
        """Refuse to run a step that is not the next one, or that must not run now. A rank that `goes_on` is half
        updated in good order: it has finished some of the step's training calls, and another one follows."""
        if self._locked_after is not None and step > self._locked_after:
            raise RefusedError(
                f"step {step} must not run: this rank is locked after step {self._locked_after}"
            )
        standing = self._adapter.standing()
        if standing.half_updated and not goes_on:
            raise RefusedError(f"step {step} must not run: this rank is half updated and needs a rollback")
        if standing.prepared_step >= 0:
            raise RefusedError(
                f"step {step} must not run: step {standing.prepared_step} is prepared and not committed"
            )
        if step != standing.step + 1:
            raise RefusedError(
                f"step {step} is not the next one: this rank has committed step {standing.step}"
            )

    def interrupts(self, operation: Operation) -> bool:
        """Whether what this rank is doing must give way to an operation that has arrived.

        A call gives way to every round that is not over; an operation only to a later round than its own, or a
        repeated message would end what its original began.
        """
        if self._is_busy or self._is_normal:
            return operation.sequence > self._sequence
        return operation.sequence >= self._sequence

    def carry_out(self, operation: Operation) -> RankReady:
        """Do what is asked and say where the rank stands afterwards. May be called again while it waits in itself."""
        if type(operation) not in FLOWS[self._adapter.flow]:
            raise RefusedError(
                f"a rank of flow {self._adapter.flow.value!r} knows no {type(operation).__name__}"
            )
        if operation.sequence < self._sequence:
            raise RefusedError(
                f"{type(operation).__name__} of round {operation.sequence} comes late: this rank is in round "
                f"{self._sequence}"
            )
        if operation.sequence == self._sequence and self._is_normal:
            return self._adapter.standing()
        # Noted before it is carried out: an attempt that fails has still ended the rounds before it.
        self._sequence, self._is_normal = operation.sequence, False
        was_busy, self._is_busy = self._is_busy, True
        try:
            return self._dispatch(operation)
        finally:
            self._is_busy = was_busy

    def _dispatch(self, operation: Operation) -> RankReady:
        match operation:
            case PreLock(step=step):
                self._locked_after = step
            case DeviceStop(generation=generation):
                self._adapter.stop(generation)
            case DeviceClean():
                self._adapter.clean()
            case RebuildGroup():
                self._adapter.rebuild(operation)
            case Repair():
                source = self._repair(operation)
                return msgspec.structs.replace(self._adapter.standing(), source=source)
            case Rollback(step=step):
                self._adapter.rollback(step)
            case NotifyNormal(step=step):
                self._resume(step)
        return self._adapter.standing()

    def _repair(self, request: Repair) -> str:
        """Try one source after the other; gives the one that worked."""
        if self._adapter.flow is Flow.ROLLBACK and request.digest and self._fault_of(request) is None:
            return OWN_STATE
        failures: list[str] = []
        for source in request.sources:
            try:
                self._adapter.repair(request.step, source=source, digest=request.digest)
                fault = self._fault_of(request)
                if fault is not None:
                    raise IntegrityError(fault)
            except WorldError as error:
                if request.sequence < self._sequence:
                    raise  # The rank was told meanwhile to give up this round; the other sources are not to blame.
                failures.append(f"{source}: {error}")
            else:
                return source
        tried = "; ".join(failures) or "none was given"
        raise RefusedError(f"no source has the state of step {request.step}: {tried}")

    def _fault_of(self, request: Repair) -> str | None:
        """What keeps this rank from being the state that a repair is to give."""
        standing = self._adapter.standing()
        if standing.half_updated or standing.prepared_step >= 0:
            return f"expected step {request.step} committed, got a step that is not"
        if standing.step != request.step:
            return f"expected the state of step {request.step}, got that of {standing.step}"
        if request.digest not in ("", standing.state_digest):
            return f"expected xxh3 {request.digest} of step {request.step}, got {standing.state_digest}"
        return None

    def _resume(self, step: int) -> None:
        standing = self._adapter.standing()
        if standing.step != step or standing.half_updated or standing.prepared_step >= 0:
            state = "half updated" if standing.half_updated else f"prepared {standing.prepared_step}"
            raise RefusedError(
                f"training can not go on from step {step}: this rank has committed {standing.step} and is {state}"
            )
        self._locked_after = None
        self._is_normal = True
