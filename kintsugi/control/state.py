"""The master's durable state: a fold over the journal's facts and nothing else."""

from __future__ import annotations

from typing import assert_never

from kintsugi.buffer.ledger import Ledger
from kintsugi.control.membership import Membership
from kintsugi.facts import (
    BatchFormed,
    CheckpointFailed,
    CheckpointSaved,
    EpochStarted,
    EvaluationDone,
    Fact,
    ProcessJoined,
    ProcessLost,
    ProcessRequested,
    RolledBack,
    RunEnded,
    RunStarted,
    SampleQuarantined,
    SamplesScored,
    StageStarted,
    StepCommitted,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketReturned,
    TicketsIssued,
    VersionCurrent,
)


class MasterState:
    """Where the run stands. Two facts per step: `step` is committed, `version` is what all servers have."""

    def __init__(self, *, min_valid: int, keep_checkpoints: int) -> None:
        self._keep_checkpoints = keep_checkpoints
        self.job = ""
        self.epoch = 0
        self.outcome: str | None = None
        self.weights_sha256 = ""
        self.stage = ""
        self.step = 0
        self.version = -1
        self.state_digest = ""
        self.num_incarnations = 0
        self.members = Membership()
        self.ledger = Ledger(min_valid=min_valid)
        self.commits: dict[int, dict[str, float]] = {}
        self.evaluations: list[EvaluationDone] = []
        self.saved_steps: list[int] = []
        """Of durable checkpoints, oldest first."""
        self.failed_save_step = -1

    def apply(self, fact: Fact) -> None:
        match fact:
            case ProcessRequested() | ProcessJoined() | ProcessLost():
                self.members.apply(fact)
                self.num_incarnations += isinstance(fact, ProcessRequested)
            case (
                TicketsIssued()
                | TicketAssigned()
                | TicketReturned()
                | SamplesScored()
                | SampleQuarantined()
                | TicketFiltered()
                | TicketExpired()
                | BatchFormed()
            ):
                self.ledger.apply(fact)
            case StepCommitted():
                self.ledger.apply(fact)
                self.step, self.state_digest = fact.step, fact.state_digest
                self.commits[fact.step] = fact.metrics
            case RolledBack():
                self.ledger.apply(fact)
                self.step = fact.step
                self.commits = {step: m for step, m in self.commits.items() if step <= fact.step}
                self.evaluations = [done for done in self.evaluations if done.step <= fact.step]
                self.saved_steps = [step for step in self.saved_steps if step <= fact.step]
            case RunStarted():
                self.job = fact.job
            case EpochStarted():
                self.epoch, self.outcome, self.version = fact.epoch, None, -1
            case StageStarted():
                self.stage = fact.stage
            case VersionCurrent():
                self.version = fact.version
            case EvaluationDone():
                self.evaluations.append(fact)
            case CheckpointSaved():
                self.saved_steps.append(fact.step)
                if len(self.saved_steps) >= self._keep_checkpoints:
                    self.ledger.forget_before(self.saved_steps[-self._keep_checkpoints] + 1)
            case CheckpointFailed():
                self.failed_save_step = fact.step
            case RunEnded():
                self.outcome, self.weights_sha256 = fact.outcome, fact.weights_sha256
            case _:
                assert_never(fact)
