"""SAVING: one rank writes a durable checkpoint of a committed step; a failure is reported to the operator.

The rank writes beside training: once it is asked, the run continues, and the answer is taken in whatever phase it
comes. Only the last save, after which nothing comes that could save again, is waited for. A new master does not know of
a save that its predecessor requested: it asks again, and the rank answers when that save has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kintsugi.config.schema import Config
from kintsugi.control import due
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.pending import PendingRequests, Purpose
from kintsugi.control.phases.table import DONE, RUNNING, PhaseReport, PhaseResult
from kintsugi.control.protocol import Raise
from kintsugi.errors import DeadlineExceeded, Fault, RefusedError, StorageError, StorageFull
from kintsugi.journal.facts import CheckpointFailed, CheckpointSaved, EvaluationDone
from kintsugi.protocol.messages import Body
from kintsugi.protocol.training import Save, Saved
from kintsugi.runtime.backoff import growing_pause
from kintsugi.telemetry.events import FaultHandled

_DISK_FAULTS = (StorageError.__name__, StorageFull.__name__, DeadlineExceeded.__name__)
"""Faults of the disk. A save that exceeds its deadline is one too: a writer that hangs is found by its heartbeats."""

RETRY_S, LONGEST_RETRY_S = 2.0, 60.0
"""Pause before the last save is repeated when the disk did not accept it, or when the rank was not ready; it doubles
while the disk refuses for another reason than lack of space."""
BEST_NAMED = 16
"""Evaluated steps that a save names; the best of them with a checkpoint is kept."""
MOST_REFUSALS = 5
"""Times that a rank may refuse to make the last save, before the ranks have to recover."""


class SavePhase:
    """One save at a time. The previous checkpoint stays valid until the new one is verified."""

    def __init__(
        self, config: Config, folder: str, *, decision: DecisionBuilder, pending: PendingRequests
    ) -> None:
        self._config, self._folder = config, folder
        self._decision, self._pending = decision, pending
        self._writer = ""
        self._stage = ""
        self.step = 0
        """Step that was requested last."""
        self._is_awaited = False
        """The phase waits for the answer."""
        self._retry_at = math.inf
        self._num_refusals = 0
        self._num_attempts = 0
        """Times that the disk has not accepted the last save."""
        self._alerted: set[str] = set()
        """Kinds of faults of which the operator was told that the last save waits; messages name temporary files."""

    @property
    def is_under_way(self) -> bool:
        """Whether a save was requested that has not been answered; not after the loss of the rank that made it."""
        return self._pending.is_asked(Purpose.SAVE)

    def begin(self, writer: str, now: float, *, stage: str) -> PhaseReport:
        """Request a save of the committed step, unless an earlier one is under way; DONE if the run continues."""
        state = self._decision.state
        self._writer, self._stage = writer, stage
        self._retry_at = math.inf
        if not self.is_under_way:
            self.step = state.step
            body = Save(self.step, stage, self._folder, best_steps(state.evaluations))
            self._pending.ask_each(Purpose.SAVE, {writer: body}, now)
        self._is_awaited = self._is_last(state.step)
        return RUNNING if self._is_awaited else DONE

    def tick(self, now: float) -> None:
        """Repeat the last save when its pause is over."""
        if now >= self._retry_at:
            self.begin(self._writer, now, stage=self._stage)

    def abandon(self) -> None:
        """Do not wait for a save, and do not repeat one that failed. A save that is under way continues."""
        self._is_awaited = False
        self._retry_at = math.inf

    def saved(self, answer: Body) -> PhaseReport:
        """Take the answer of the writer. If it saved an earlier step, a save that is awaited is still due."""
        self.record(answer)
        return self._end()

    def record(self, saved: Body) -> None:
        """Journal a checkpoint, whichever phase requested it."""
        assert isinstance(saved, Saved), f"expected Saved, got {type(saved).__name__}"
        if saved.step not in self._decision.state.saved_steps:
            self._decision.add_fact(CheckpointSaved(saved.step, saved.path, saved.digest))

    def failed(self, process: str, fault: Fault, now: float) -> PhaseReport:
        """Decide what follows from a failed save.

        A fault of the disk is reported, and the run continues without this checkpoint. The last one waits instead for
        a disk that accepts it (full, read-only, not permitted), with everything in the memory of the ranks, until the
        operator stops the run. A rank that refuses is asked again.
        """
        state, is_last = self._decision.state, self._is_last(self.step)
        if fault.kind == RefusedError.__name__ and self._num_refusals < MOST_REFUSALS:
            self._num_refusals += self._is_awaited
            self._retry_at = now + RETRY_S if self._is_awaited else math.inf
            return RUNNING
        if fault.kind not in _DISK_FAULTS:
            return PhaseReport(PhaseResult.RANK_FAILED, process=process, fault=fault)
        if is_last and state.stop_reason is None:
            self._wait_for_disk(fault, now)
            return RUNNING
        self._decision.add_fact(CheckpointFailed(self.step, fault))
        message = f"checkpoint of step {self.step} failed: {fault.message}"
        self._decision.add_effect(Raise.of(FaultHandled(message, of=fault.process, fault=fault.id)))
        return PhaseReport(PhaseResult.UNRECOVERABLE, fault=fault) if is_last else self._end()

    def _wait_for_disk(self, fault: Fault, now: float) -> None:
        """Repeat the last save after a pause; the operator is alerted once per kind of fault, until the save ends."""
        is_full = fault.kind == StorageFull.__name__
        if fault.kind not in self._alerted:
            what = "room" if is_full else "the disk"
            message = f"checkpoint of step {self.step} waits for {what}: {fault.message}"
            self._decision.add_effect(Raise.of(FaultHandled(message, of=fault.process, fault=fault.id)))
            self._alerted.add(fault.kind)
        self._num_attempts += 1
        number = 1 if is_full else self._num_attempts
        self._retry_at = now + growing_pause(number, first_s=RETRY_S, longest_s=LONGEST_RETRY_S)

    def _end(self) -> PhaseReport:
        was_awaited, self._is_awaited = self._is_awaited, False
        self._num_refusals = self._num_attempts = 0
        self._alerted.clear()
        return DONE if was_awaited else RUNNING

    def _is_last(self, step: int) -> bool:
        """Return whether no later step of this session can be saved."""
        state = self._decision.state
        stopping = state.stop_reason is not None and step == state.step
        return stopping or due.is_last(self._config, step=step)


def best_steps(evaluations: Iterable[EvaluationDone]) -> tuple[int, ...]:
    """Evaluated steps by held-out accuracy, the best first, of equal ones the latest."""
    ranked = sorted(evaluations, key=lambda done: (-done.metrics.get("eval/accuracy", 0.0), -done.step))
    return tuple(done.step for done in ranked[:BEST_NAMED])
