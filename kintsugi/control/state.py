"""Durable state of the master: a fold over the facts of the journal and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import msgspec

from kintsugi.control.membership import WorkerRegistry, WorkerStatus
from kintsugi.errors import Fault
from kintsugi.journal.facts import (
    CauseDiagnosed,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    Fact,
    FaultNoted,
    IncidentClosed,
    IncidentOpened,
    LedgerFact,
    MeshChanged,
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
    StateFolded,
    StepCommitted,
    StopAccepted,
    StrategyChosen,
    TermStarted,
    VersionCurrent,
)
from kintsugi.run_folder.incidents import IncidentIndex
from kintsugi.samples.ledger import Ledger
from kintsugi.types import Role

PAUSES_KEPT = 10_000
EVALUATIONS_KEPT = 1_000
"""Evaluations that are kept: the first, and the latest ones. `metrics.jsonl` has all of them."""
ANSWERS_KEPT = 1_000
"""Answers to requests of users that are kept, the latest: a user reads the answer within seconds."""
SAMPLES_KEPT = 100_000
"""Samples that are kept one by one, about 100 MB of them. A run that saves rarely, or whose saves fail, keeps a
`ReturnPoint` for each step that it can go back to, instead of all samples since."""


class Tally(msgspec.Struct):
    """Sums over the committed steps of a stage. Steps that a rollback can still reach are kept one by one."""

    reachable: dict[int, dict[str, float]] = {}
    first: dict[str, float] | None = None
    first_step: int = 0
    """Step that `first` belongs to."""
    settled: dict[str, float] | None = None
    """Metrics of the last step that no rollback reaches."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}

    def add(self, step: int, metrics: dict[str, float]) -> None:
        if self.first is None:
            self.first, self.first_step = metrics, step
        self.reachable[step] = metrics

    def roll_back(self, step: int) -> None:
        for other in [other for other in self.reachable if other > step]:
            del self.reachable[other]
            if other == self.first_step:
                self.first, self.first_step = None, 0

    def settle(self, step: int) -> None:
        """Add the steps up to `step` to the totals: no rollback reaches them any more."""
        for other in sorted(other for other in self.reachable if other <= step):
            self.settled = self.reachable.pop(other)
            _add_up(self.settled, self.sums, self.counts)

    @property
    def last(self) -> dict[str, float] | None:
        """Return the metrics of the latest step."""
        return self.reachable[max(self.reachable)] if self.reachable else self.settled

    def totals(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the sum of every metric over the steps, and in how many steps it occurred."""
        sums, counts = dict(self.sums), dict(self.counts)
        for metrics in self.reachable.values():
            _add_up(metrics, sums, counts)
        return sums, counts


class Meshes(msgspec.Struct):
    """Parts into which the ranks cut the state, where they are not those of the configuration."""

    current: MeshChanged | None = None
    of_steps: dict[int, MeshChanged] = {}
    """Step of which the digest is known → parts into which it was cut."""

    @property
    def seats(self) -> tuple[str, ...]:
        """Ranks of the current mesh, in the order of their seats; empty for the configured one."""
        return () if self.current is None else self.current.ranks

    def commit(self, step: int) -> None:
        self.of_steps.pop(step, None)
        if self.current is not None:
            self.of_steps[step] = self.current

    def keep(self, steps: Container[int]) -> None:
        """Forget all other steps."""
        self.of_steps = {step: mesh for step, mesh in self.of_steps.items() if step in steps}


def _add_up(metrics: dict[str, float], sums: dict[str, float], counts: dict[str, int]) -> None:
    for name, value in metrics.items():
        sums[name] = sums.get(name, 0.0) + value
        counts[name] = counts.get(name, 0) + 1


class ReturnPoint(msgspec.Struct, frozen=True):
    """State that a rollback to a step leads to, for a step whose later samples are not kept."""

    ledger: bytes
    tallies: dict[str, Tally]


class _FoldedRun(msgspec.Struct, omit_defaults=True):
    """The fields of `MasterState` that are no parts of their own."""

    job: str
    term: int
    outcome: str | None
    faults: tuple[Fault, ...]
    weights_sha256: str
    wall_s: float
    stage: str
    step: int
    version: int
    pace: PaceChanged | None
    pauses_ms: list[float]
    lineage: int
    num_incarnations: int
    num_servers: int | None
    answered: dict[str, str]
    tallies: dict[str, Tally]
    evaluations: list[EvaluationDone]
    saved_steps: list[int]
    checkpoint_paths: dict[int, str]
    failed_save_step: int
    digests: dict[int, str]
    stop_reason: str | None
    num_incidents: int
    open_incident: int
    return_points: dict[int, ReturnPoint] = {}
    session_began: float = 0.0
    homes: dict[str, str] = {}
    state_format: int = 1
    meshes: Meshes = msgspec.field(default_factory=Meshes)


class MasterState:
    """State of the run. `step` is the last one committed, `version` the one that all servers have."""

    def __init__(self, *, min_valid: int, keep_checkpoints: int) -> None:
        self._keep_checkpoints = keep_checkpoints
        self.job, self.term = "", 0
        self.outcome: str | None = None
        self.faults: tuple[Fault, ...] = ()
        """Faults that the run ended with."""
        self.weights_sha256 = ""
        self.wall_s = 0.0
        """Duration of all sessions that ended regularly."""
        self.session_began = 0.0
        """Wall-clock time at which the first master of this session began; 0 if unknown."""
        self.stage = ""
        self.step = 0
        self.version = -1
        """-1 while no version is known to be current: a master has just begun, or steps were undone."""
        self.pace: PaceChanged | None = None
        """Pace that the master set last."""
        self.pauses_ms: deque[float] = deque(maxlen=PAUSES_KEPT)
        """Pauses of servers at their last changes of weights."""
        self.lineage = 0
        """Number of rollbacks."""
        self.num_incarnations = 0
        self.members = WorkerRegistry()
        self.num_servers: int | None = None
        """Generation servers that were requested while the run continued; None: as configured."""
        self.answered: dict[str, str] = {}
        """Requests of users that were answered: reason of the refusal; empty for an accepted one."""
        self.ledger = Ledger(min_valid=min_valid)
        self.tallies: dict[str, Tally] = {}
        """Sums over committed steps, by stage."""
        self.evaluations: list[EvaluationDone] = []
        self.saved_steps: list[int] = []
        """Steps of durable checkpoints, oldest first."""
        self.checkpoint_paths: dict[int, str] = {}
        self.failed_save_step = -1
        self.digests: dict[int, str] = {}
        """Digest of the trainers' state, by step that a rollback can reach, in this term's `state_format`."""
        self.state_format = 1
        self.homes: dict[str, str] = {}
        """Rank → host on which it has committed a step last: there its snapshot is, whatever has become of it."""
        self.meshes = Meshes()
        self.return_points: dict[int, ReturnPoint] = {}
        """Steps that a rollback can reach, though the samples since are not kept."""
        self.stop_reason: str | None = None
        """Reason of a stop that was requested."""
        self.incidents = IncidentIndex()
        self.num_incidents = 0
        self.open_incident = 0
        """Number of the open incident; 0 for none."""

    def apply(self, fact: Fact) -> None:
        self.incidents.take(fact)
        if isinstance(fact, LedgerFact) and not isinstance(fact, RolledBack):
            self.ledger.apply(fact)
        match fact:
            case ProcessRequested() | ProcessJoined() | ProcessRetired() | ProcessLost():
                self.members.apply(fact)
                self.num_incarnations += isinstance(fact, ProcessRequested)
            case ServersScaled() | ScaleRefused():
                self._answer(fact)
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
                del self.evaluations[1 : -EVALUATIONS_KEPT + 1]
            case CheckpointSaved():
                self._save(fact)
            case CheckpointFailed():
                self.failed_save_step = fact.step
            case MeshChanged():
                self.meshes.current = fact if fact.ranks else None
            case IncidentOpened():
                self.num_incidents = self.open_incident = fact.incident
            case IncidentClosed():
                self.open_incident = 0
            case _ if not isinstance(fact, LedgerFact | FaultNoted | StrategyChosen | CauseDiagnosed):
                self._apply_to_run(fact)

    def _answer(self, fact: ServersScaled | ScaleRefused) -> None:
        self.answered[fact.request] = fact.reason if isinstance(fact, ScaleRefused) else ""
        if len(self.answered) > ANSWERS_KEPT:
            del self.answered[next(iter(self.answered))]
        if isinstance(fact, ServersScaled):
            self.num_servers = fact.servers

    def fold(self) -> StateFolded:
        """Return the whole state as one fact, which a new state can begin with instead of all facts so far."""
        names = _FoldedRun.__struct_fields__
        run = _FoldedRun(
            **{name: getattr(self, name) for name in names if name != "pauses_ms"},
            pauses_ms=list(self.pauses_ms),
        )
        return StateFolded(
            term=self.term,
            job=self.job,
            step=self.step,
            processes={
                member.process: member.pid
                for member in self.members.members.values()
                if member.status in (WorkerStatus.LIVE, WorkerStatus.LEAVING) and member.peer is not None
            },
            saved_steps=tuple(self.saved_steps),
            servers=self.num_servers,
            answers=self.answered,
            parts={
                "run": msgspec.msgpack.encode(run),
                "ledger": self.ledger.fold(),
                "members": self.members.fold(),
                "incidents": self.incidents.fold(),
            },
        )

    def _restore(self, folded: StateFolded) -> None:
        run = msgspec.msgpack.decode(folded.parts["run"], type=_FoldedRun)
        for name in _FoldedRun.__struct_fields__:
            setattr(self, name, getattr(run, name))
        self.pauses_ms = deque(run.pauses_ms, maxlen=PAUSES_KEPT)
        self.ledger.restore(folded.parts["ledger"])
        self.members.restore(folded.parts["members"])

    def _apply_to_run(
        self, fact: RunStarted | TermStarted | StageStarted | StopAccepted | RunEnded | StateFolded
    ) -> None:
        match fact:
            case StateFolded():
                self._restore(fact)
            case RunStarted():
                self.job = fact.job
            case TermStarted():
                self.term, self.outcome, self.version = fact.term, None, -1
                self.members.begin_term(fact.term)
                if fact.state_format != self.state_format:
                    self.state_format, self.digests = fact.state_format, {}
                if not fact.adopting:
                    self.stop_reason, self.open_incident = None, 0
                    self.meshes = Meshes()  # No process of the session before is left.
                    self.session_began = fact.time
            case StageStarted():
                self.stage = fact.stage
            case StopAccepted():
                self.stop_reason = fact.reason
            case RunEnded():
                self.outcome, self.weights_sha256 = fact.outcome, fact.weights_sha256
                self.faults = () if fact.fault is None else (fact.fault,)
                self.wall_s += fact.wall_s
                self.stop_reason = None

    def can_return_to(self, step: int) -> str | None:
        """Return why a rollback to this step is impossible, or None if it is possible."""
        if step in self.return_points:
            return None
        return self.ledger.accepts(RolledBack(step, ""))

    def _commit(self, fact: StepCommitted) -> None:
        self.step = fact.step
        self.digests[fact.step] = fact.state_digest
        self.meshes.commit(fact.step)
        for rank in self.meshes.seats or self.members.live(Role.MODEL):
            self.homes[rank] = self.members.members[rank].host
        self.tallies.setdefault(self.stage, Tally()).add(fact.step, fact.metrics)
        if self.ledger.num_kept > SAMPLES_KEPT:
            self._forget_unsaved()

    def _forget_unsaved(self) -> None:
        """Forget the older half of the samples, and keep a return point for each checkpoint, or for the beginning."""
        kept_from = self.ledger.step_of_newest(SAMPLES_KEPT // 2)
        oldest = [] if len(self.saved_steps) == self._keep_checkpoints else [0]
        steps = [step for step in (*oldest, *self.saved_steps) if step < kept_from]
        steps = [step for step in steps if self.can_return_to(step) is None]
        for step in steps:
            if step not in self.return_points:
                tallies = msgspec.msgpack.decode(msgspec.msgpack.encode(self.tallies), type=dict[str, Tally])
                for tally in tallies.values():
                    tally.roll_back(step)
                    tally.settle(step)
                self.return_points[step] = ReturnPoint(self.ledger.rolled_back(step), tallies)
        self.return_points = {step: self.return_points[step] for step in steps}
        self._forget_before(kept_from)

    def _forget_before(self, step: int) -> None:
        """Forget what only a rollback to an earlier step needs."""
        # The next master may still have to send the rollout workers the groups that the last step trained.
        self.ledger.forget_before(min(step + 1, self.step))
        self.digests = {
            s: digest for s, digest in self.digests.items() if s >= step or s in self.return_points
        }
        self.meshes.keep(self.digests)
        for tally in self.tallies.values():
            tally.settle(step)

    def _roll_back(self, fact: RolledBack) -> None:
        point = self.return_points.get(fact.step)
        if point is not None:
            self.ledger.restore(point.ledger)
            self.tallies = dict(point.tallies)
        else:
            self.ledger.apply(fact)
        self.return_points = {s: each for s, each in self.return_points.items() if s < fact.step}
        self.step, self.version = fact.step, -1
        self.lineage += 1
        self.digests = {step: digest for step, digest in self.digests.items() if step <= fact.step}
        self.meshes.keep(self.digests)
        for tally in self.tallies.values():
            tally.roll_back(fact.step)
        self.evaluations = [done for done in self.evaluations if done.step <= fact.step]
        self.saved_steps = [step for step in self.saved_steps if step <= fact.step]
        self.checkpoint_paths = {step: self.checkpoint_paths[step] for step in self.saved_steps}
        if self.failed_save_step > fact.step:
            self.failed_save_step = -1

    def _save(self, fact: CheckpointSaved) -> None:
        """Add a checkpoint. With more than are kept, nothing before the oldest kept one can return."""
        self.saved_steps = [*self.saved_steps, fact.step][-self._keep_checkpoints :]
        paths = {**self.checkpoint_paths, fact.step: fact.path}
        self.checkpoint_paths = {step: paths[step] for step in self.saved_steps}
        if len(self.saved_steps) == self._keep_checkpoints:
            oldest = self.saved_steps[0]
            self.return_points = {s: point for s, point in self.return_points.items() if s >= oldest}
            self._forget_before(oldest)
