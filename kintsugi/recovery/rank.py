"""Recovery on the side of a rank, independent of the training framework.

A framework registers its callbacks (stop, clean, rebuild group, repair, rollback) as an `Adapter`; the `Processor`
implements the protocol around them: the lock, the order of sequence numbers, the source of a repair, and the answer.
The process and its memory survive the recovery.

Two flows, sent to the master when a rank registers (`capabilities["flow"]`):

    rollback   pre-lock → device stop → device clean → rebuild group → repair (newcomers) → rollback (all) → normal
    restore    pre-lock → device stop → device clean → rebuild group → repair (all, from their snapshots) → normal

Sequence numbers grow with every round of recovery. An operation of an earlier round than the latest is refused: a
late message must not undo a later attempt. An operation of the same round is a repetition: until the round is over it
is carried out again, which changes nothing, and afterwards it is only answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from kintsugi.errors import IntegrityError, RefusedError, WorldError, no_source
from kintsugi.protocol.recovery import (
    BoxCopies,
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
"""Prefix of a source: snapshots of the named process in the memory of this host's agent."""
OWN_STATE = "own"
"""Source of a repair that found nothing to repair."""
OTHER_BOXES = "boxes"
"""Source of a repair that assembled the state from boxes of another mesh."""


class Flow(StrEnum):
    """Sequence of operations that recovers a rank of this framework; sent in `Register.capabilities["flow"]`."""

    ROLLBACK = "rollback"
    RESTORE = "restore"


FLOWS: Mapping[Flow, tuple[type[Operation], ...]] = {
    Flow.ROLLBACK: (PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, Rollback, NotifyNormal),
    Flow.RESTORE: (PreLock, DeviceStop, DeviceClean, RebuildGroup, Repair, NotifyNormal),
}


class Adapter(Protocol):
    """Callbacks that a framework registers. Each may be repeated; a fault of the environment raises a WorldError."""

    @property
    def flow(self) -> Flow: ...

    def standing(self) -> RankReady:
        """Return the state of the rank, without its source. Called often: it must compute nothing."""
        ...

    def stop(self, generation: int) -> None:
        """End all groups up to this generation: their collectives raise, device work is aborted or awaited."""
        ...

    def clean(self) -> None:
        """Drop the remains of an aborted step."""
        ...

    def rebuild(self, request: RebuildGroup) -> None:
        """Leave the group, join its next generation, and test it with a collective."""
        ...

    def repair(self, step: int, *, source: str, digest: str) -> None:
        """Load the committed state of `step` from this source; verified (by `digest`, unless empty) before use."""
        ...

    def assemble(self, step: int, *, boxes: Sequence[BoxCopies], digest: str, begun: str) -> None:
        """Load the committed state of `step` from the boxes of another mesh; each is verified before use. They may be
        those with which the stage `begun` has begun."""
        ...

    def rollback(self, step: int) -> None:
        """Return to the committed state of `step`; a prepared one is adopted."""
        ...


class Processor:
    """Recovery of one rank: `carry_out` performs an operation, `admit` checks a step in between."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._locked_after: int | None = None
        self._sequence = -1
        self._is_normal = True
        self._is_busy = False

    @property
    def sequence(self) -> int:
        """Sequence number of the latest round that this rank has seen; -1 before the first."""
        return self._sequence

    @property
    def is_normal(self) -> bool:
        """Whether no recovery is under way: every round that began has been ended by `NotifyNormal`."""
        return self._is_normal and self._locked_after is None

    def admit(self, step: int, *, goes_on: bool = False) -> None:
        """Refuse to run a step that is not the next one, or that must not run now. A rank that `goes_on` is half
        updated as expected: it has finished some of the step's training calls, and another one follows."""
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
        """Return whether an operation that has arrived interrupts the current work of this rank.

        A call is interrupted by every round that is not over; an operation only by a later round than its own,
        otherwise a repeated message would end what its original began.
        """
        if self._is_busy or self._is_normal:
            return operation.sequence > self._sequence
        return operation.sequence >= self._sequence

    def carry_out(self, operation: Operation) -> RankReady:
        """Perform an operation, and return the state of the rank after it. May be called again while it waits."""
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
        # Recorded before it is performed: an attempt that fails has still ended the rounds before it.
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
        """Try one source after the other; return the one that worked."""
        if self._adapter.flow is Flow.ROLLBACK and request.digest and self._fault_of(request) is None:
            return OWN_STATE
        failures: list[tuple[str, WorldError]] = []
        for source in (*request.sources, *([OTHER_BOXES] if request.boxes else [])):
            try:
                if source == OTHER_BOXES:
                    self._adapter.assemble(
                        request.step, boxes=request.boxes, digest=request.digest, begun=request.begun
                    )
                else:
                    self._adapter.repair(request.step, source=source, digest=request.digest)
                fault = self._fault_of(request)
                if fault is not None:
                    raise IntegrityError(fault)
            except WorldError as error:
                if request.sequence < self._sequence:
                    raise  # A later round has interrupted this one; the remaining sources are not at fault.
                failures.append((source, error))
            else:
                return source
        tried = "; ".join(f"{source}: {error}" for source, error in failures) or "none was given"
        what = f"no source has the state of step {request.step}: {tried}"
        raise no_source(what, [error for _, error in failures])

    def _fault_of(self, request: Repair) -> str | None:
        """Return why the current state of the rank is not the one that a repair has to give."""
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
