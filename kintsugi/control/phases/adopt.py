"""ADOPTING: a new master asks the ranks where they stand, and goes on with the step that they are in.

A master is not needed while the ranks compute. If all of them are in one process group at the step of the journal, its
successor takes their group over: calls that are running end and count, and calls that have ended are answered again.
Otherwise the ranks have to recover.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kintsugi.config.schema import Config
from kintsugi.config.stages import next_stage
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.due import carried_stage
from kintsugi.control.mesh_choice import mesh_in_force
from kintsugi.control.pending import PendingRequests
from kintsugi.control.phases.table import RUNNING, PhaseReport, PhaseResult
from kintsugi.control.processes import ProcessManager
from kintsugi.model.seats import Mesh, digest_of_box, seat_of
from kintsugi.protocol.recovery import AskStanding, RankStanding
from kintsugi.protocol.training import CommitStep
from kintsugi.types import Role


class AdoptedGroup(msgspec.Struct, frozen=True):
    """Process group that a new master takes over."""

    ranks: tuple[str, ...]
    generation: int
    stage: str
    """Stage that every rank has started."""
    behind: tuple[str, ...]
    """Ranks that have not received the commit of the step in the journal."""
    blocks: tuple[int, ...] | None
    """Block of shards of each rank in the step under way; None if no rank has begun one."""


class JournaledStep(msgspec.Struct, frozen=True):
    """Step of the journal that the ranks have to be at."""

    step: int
    digest: str
    """Digest of its state; empty when not known."""
    stage: str
    """Stage that it was trained in."""
    next_stage: str
    """Stage that the next step belongs to."""
    has_batch: bool
    """Whether the batch of the next step is formed."""
    mesh: Mesh = Mesh()
    """Parts into which the ranks cut the state."""


class AdoptPhase:
    """Two rounds at most: the standing of every rank, then the commit for those that have missed it."""

    def __init__(
        self,
        config: Config,
        *,
        decision: DecisionBuilder,
        pending: PendingRequests,
        processes: ProcessManager,
    ) -> None:
        self._config, self._decision, self._pending, self._processes = config, decision, pending, processes
        self.group: AdoptedGroup | None = None
        """Group that was found; None until then."""

    def begin(self, now: float) -> PhaseReport:
        """Ask every rank that has a seat. Without all of them there is no group to take over."""
        state = self._decision.state
        seats = mesh_in_force(self._config, state).ranks
        missing = [name for name in self._processes.missing(Role.MODEL) if not seats or name in seats]
        living = [name for name in state.members.live(Role.MODEL) if not seats or name in seats]
        if missing or not living:
            return self._broken(f"{', '.join(missing) or 'every rank'} is missing")
        self._pending.ask_all(dict.fromkeys(living, AskStanding()), now)
        return RUNNING

    def answered(self, now: float) -> PhaseReport:
        """Decide, once all ranks have answered a round."""
        if self.group is not None:
            return self._continue()
        standings = {
            rank: body for rank, body in self._pending.answers.items() if isinstance(body, RankStanding)
        }
        found = find_group(standings, journal=self._journaled())
        if isinstance(found, str):
            return self._broken(found)
        self.group = found
        if not found.behind:
            return self._continue()
        self._pending.ask_all(dict.fromkeys(found.behind, CommitStep(self._decision.state.step)), now)
        return RUNNING

    def _journaled(self) -> JournaledStep:
        state = self._decision.state
        return JournaledStep(
            state.step,
            state.digests.get(state.step, ""),
            carried_stage(self._config, step=state.step).name,
            next_stage(self._config, step=state.step).name,
            has_batch=bool(state.ledger.in_batch(state.step + 1)),
            mesh=mesh_in_force(self._config, state),
        )

    def _continue(self) -> PhaseReport:
        group, state = self.group, self._decision.state
        assert group is not None
        if group.blocks is None:
            return PhaseReport(PhaseResult.RECOVERED)
        batch = state.ledger.in_batch(state.step + 1)
        return PhaseReport(PhaseResult.CONTINUED, batch=batch, blocks=group.blocks)

    def _broken(self, why: str) -> PhaseReport:
        return PhaseReport(PhaseResult.BROKEN, problem=f"the ranks have to recover: {why}")


def find_group(standings: Mapping[str, RankStanding], *, journal: JournaledStep) -> AdoptedGroup | str:
    """Return the process group that all ranks are in, at the step of the journal; or why there is none."""
    first = next(iter(standings.values()))
    ranks, ready = first.ranks, first.ready
    if set(ranks) != set(standings) or ranks != journal.mesh.seated(ranks):
        return f"{', '.join(standings)} live, the group is {', '.join(ranks) or 'not formed'}"
    for name, standing in standings.items():
        if (standing.ranks, standing.ready.generation) != (ranks, ready.generation):
            return f"{name} is in generation {standing.ready.generation}, not in {ready.generation}"
        why = _why_not(name, standing, journal=journal)
        if why:
            return f"{name} {why}"
    stages = {standing.ready.stage for standing in standings.values()}
    if len(stages) > 1:
        return f"the ranks carry the stages {', '.join(sorted(stages))}"
    behind = [name for name, standing in standings.items() if standing.ready.step < journal.step]
    begun = [standing.blocks for standing in standings.values() if standing.call_step > journal.step]
    if len(set(begun)) > 1:
        return "the ranks have begun the step with different shards"
    num_blocks = len(ranks) // journal.mesh.model_ranks
    blocks = (begun[0] or tuple(range(num_blocks))) if begun else None
    return AdoptedGroup(ranks, ready.generation, ready.stage, tuple(behind), blocks)


def _why_not(rank: str, standing: RankStanding, *, journal: JournaledStep) -> str:
    """Return why a rank cannot go on from the step of the journal; empty if it can."""
    ready = standing.ready
    if not standing.is_normal or ready.half_updated:
        return "is in a recovery, or was interrupted in its work"
    missed_commit = ready.step == journal.step - 1 and ready.prepared_step == journal.step
    if ready.step != journal.step and not missed_commit:
        return f"is at step {ready.step}, the journal at {journal.step}"
    if ready.stage not in (journal.stage, journal.next_stage):
        return f"carries stage {ready.stage!r}, the journal {journal.stage!r}"
    is_comparable = ready.step == journal.step and ready.stage == journal.stage
    committed = digest_of_box(journal.digest, seat_of(rank, journal.mesh))
    if is_comparable and committed not in ("", ready.state_digest):
        return f"has state {ready.state_digest} of step {ready.step}, committed was {committed}"
    is_ahead = max(standing.call_step, ready.prepared_step) > journal.step
    if is_ahead and not (journal.has_batch and ready.stage == journal.next_stage):
        return f"has begun step {journal.step + 1}, which the journal does not know"
    return ""
