"""The master's durable state: a fold over the journal's facts and nothing else."""

from __future__ import annotations

from collections import deque

from kintsugi.buffer.ledger import Ledger
from kintsugi.control.membership import Membership
from kintsugi.errors import Fault
from kintsugi.facts import (
    CauseDiagnosed,
    CheckpointFailed,
    CheckpointSaved,
    EpochStarted,
    EvaluationDone,
    Fact,
    FaultNoted,
    IncidentClosed,
    IncidentOpened,
    LedgerFact,
    PaceChanged,
    ProcessJoined,
    ProcessLost,
    ProcessRequested,
    ProcessRetired,
    RolledBack,
    RunEnded,
    RunStarted,
    ScaleRefused,
    ServersScaled,
    StageStarted,
    StepCommitted,
    StopAccepted,
    StrategyChosen,
    VersionCurrent,
)
from kintsugi.incidents import IncidentBook

PAUSES_KEPT = 10_000


class Tally:
    """A stage's committed steps, added up. Steps that a rollback can still reach are kept one by one."""

    def __init__(self) -> None:
        self.reachable: dict[int, dict[str, float]] = {}
        self.first: dict[str, float] | None = None
        self._settled: dict[str, float] | None = None
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, step: int, metrics: dict[str, float]) -> None:
        if self.first is None:
            self.first = metrics
        self.reachable[step] = metrics

    def roll_back(self, step: int) -> None:
        undone = [other for other in self.reachable if other > step]
        for other in undone:
            if self.reachable.pop(other) is self.first:
                self.first = None

    def settle(self, step: int) -> None:
        """No rollback reaches `step` or anything before it any more."""
        for other in sorted(other for other in self.reachable if other <= step):
            self._settled = self.reachable.pop(other)
            _add_up(self._settled, self._sums, self._counts)

    @property
    def last(self) -> dict[str, float] | None:
        """Metrics of the latest step that stands."""
        return self.reachable[max(self.reachable)] if self.reachable else self._settled

    def totals(self) -> tuple[dict[str, float], dict[str, int]]:
        """Sum of every metric over the steps, and in how many steps it occurred."""
        sums, counts = dict(self._sums), dict(self._counts)
        for metrics in self.reachable.values():
            _add_up(metrics, sums, counts)
        return sums, counts


def _add_up(metrics: dict[str, float], sums: dict[str, float], counts: dict[str, int]) -> None:
    for name, value in metrics.items():
        sums[name] = sums.get(name, 0.0) + value
        counts[name] = counts.get(name, 0) + 1


class MasterState:
    """Where the run stands. Two facts per step: `step` is committed, `version` is what all servers have."""

    def __init__(self, *, min_valid: int, keep_checkpoints: int) -> None:
        self._keep_checkpoints = keep_checkpoints
        self.job = ""
        self.epoch = 0
        self.outcome: str | None = None
        self.faults: tuple[Fault, ...] = ()
        """That the run ended with."""
        self.weights_sha256 = ""
        self.wall_s = 0.0
        """Of all sessions that ended by themselves."""
        self.stage = ""
        self.step = 0
        self.version = -1
        """-1 while nobody can say: a master has just begun, or steps were undone."""
        self.pace: PaceChanged | None = None
        """As the master last set it."""
        self.pauses_ms: deque[float] = deque(maxlen=PAUSES_KEPT)
        """Of servers at their last changes of weights."""
        self.lineage = 0
        """How often steps were undone."""
        self.num_incarnations = 0
        self.members = Membership()
        self.num_servers: int | None = None
        """Generation servers that were asked for while the run went on; None: as configured."""
        self.answered: set[str] = set()
        """Requests that people were given an answer to."""
        self.ledger = Ledger(min_valid=min_valid)
        self.tallies: dict[str, Tally] = {}
        """By stage."""
        self.evaluations: list[EvaluationDone] = []
        self.saved_steps: list[int] = []
        """Of durable checkpoints, oldest first."""
        self.checkpoint_paths: dict[int, str] = {}
        self.failed_save_step = -1
        self.digests: dict[int, str] = {}
        """Of the trainers' state, by step that a rollback can reach."""
        self.stop_reason: str | None = None
        """Someone asked for a stop."""
        self.incidents = IncidentBook()
        self.num_incidents = 0
        self.open_incident = 0
        """Number of the incident that is not over; 0 for none."""

    def apply(self, fact: Fact) -> None:
        self.incidents.take(fact)
        if isinstance(fact, LedgerFact):
            self.ledger.apply(fact)
        match fact:
            case ProcessRequested() | ProcessJoined() | ProcessRetired() | ProcessLost():
                self.members.apply(fact)
                self.num_incarnations += isinstance(fact, ProcessRequested)
            case ServersScaled() | ScaleRefused():
                self.answered.add(fact.request)
                if isinstance(fact, ServersScaled):
                    self.num_servers = fact.servers
            case StepCommitted():
                self._commit(fact)
            case RolledBack():
                self._roll_back(fact)
            case VersionCurrent():
                self.version = fact.version
                self.pauses_ms.extend(fact.pause_ms.values())
            case PaceChanged():
                self.pace = fact
            case EvaluationDone():
                self.evaluations.append(fact)
            case CheckpointSaved():
                self._save(fact)
            case CheckpointFailed():
                self.failed_save_step = fact.step
            case IncidentOpened():
                self.num_incidents = self.open_incident = fact.incident
            case IncidentClosed():
                self.open_incident = 0
            case _ if not isinstance(fact, LedgerFact | FaultNoted | StrategyChosen | CauseDiagnosed):
                self._apply_to_run(fact)

    def _apply_to_run(self, fact: RunStarted | EpochStarted | StageStarted | StopAccepted | RunEnded) -> None:
        match fact:
            case RunStarted():
                self.job = fact.job
            case EpochStarted():
                self.epoch, self.outcome, self.version = fact.epoch, None, -1
                self.members.begin_epoch(fact.epoch)
                if not fact.adopting:
                    self.stop_reason, self.open_incident = None, 0
            case StageStarted():
                self.stage = fact.stage
            case StopAccepted():
                self.stop_reason = fact.reason
            case RunEnded():
                self.outcome, self.weights_sha256 = fact.outcome, fact.weights_sha256
                self.faults = () if fact.fault is None else (fact.fault,)
                self.wall_s += fact.wall_s
                self.stop_reason = None

    def _commit(self, fact: StepCommitted) -> None:
        self.step = fact.step
        self.digests[fact.step] = fact.state_digest
        self.tallies.setdefault(self.stage, Tally()).add(fact.step, fact.metrics)

    def _roll_back(self, fact: RolledBack) -> None:
        self.step, self.version = fact.step, -1
        self.lineage += 1
        self.digests = {step: digest for step, digest in self.digests.items() if step <= fact.step}
        for tally in self.tallies.values():
            tally.roll_back(fact.step)
        self.evaluations = [done for done in self.evaluations if done.step <= fact.step]
        self.saved_steps = [step for step in self.saved_steps if step <= fact.step]
        self.checkpoint_paths = {step: self.checkpoint_paths[step] for step in self.saved_steps}
        if self.failed_save_step > fact.step:
            self.failed_save_step = -1

    def _save(self, fact: CheckpointSaved) -> None:
        """A checkpoint more than are kept: what lies before the oldest kept one can not come back."""
        self.saved_steps = [*self.saved_steps, fact.step][-self._keep_checkpoints :]
        paths = {**self.checkpoint_paths, fact.step: fact.path}
        self.checkpoint_paths = {step: paths[step] for step in self.saved_steps}
        if len(self.saved_steps) == self._keep_checkpoints:
            # What the last step trained may still have to be told to its rollout workers, by the next master.
            self.ledger.forget_before(min(self.saved_steps[0] + 1, self.step))
            self.digests = {s: digest for s, digest in self.digests.items() if s >= self.saved_steps[0]}
            for tally in self.tallies.values():
                tally.settle(self.saved_steps[0])
