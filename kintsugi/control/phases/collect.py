"""COLLECTING: groups for the next batch. Rollout continues during other phases too, as far as the staleness bound
allows."""

from __future__ import annotations

from collections.abc import Mapping

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.control.async_pacing import next_ahead, next_groups
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.control.due import steps_ahead
from kintsugi.control.phases.table import RUNNING, Phase, PhaseReport, PhaseResult
from kintsugi.journal.facts import PaceChanged


class CollectPhase:
    """`begin` and `advance` look for a batch; `roll` only issues and hands out groups."""

    def __init__(self, config: Config, *, decision: DecisionBuilder, dispatch: EpisodeDispatch) -> None:
        self._config, self._decision, self._dispatch = config, decision, dispatch
        self._failed_before = 0

    def begin(self, stage: Stage) -> None:
        """Count the groups that fail from now on, and return those of the batch to the queue that a lost worker
        held."""
        self._failed_before = self._decision.state.ledger.stage(stage.name).num_failed
        self._dispatch.reclaim()

    def advance(self, stage: Stage, now: float) -> PhaseReport:
        """Drop groups that cannot be trained, filter uninformative ones, issue replacements for both, and report the
        oldest groups once they are complete."""
        state, dispatch = self._decision.state, self._dispatch
        problem = dispatch.drop_unusable(stage, before=self._failed_before)
        if problem is not None:
            fault = self._decision.new_fault("EpisodesFailed", problem)
            return PhaseReport(PhaseResult.UNRECOVERABLE, fault=fault)
        dispatch.resample(stage)
        batch = state.ledger.in_batch(state.step + 1) or dispatch.next_batch(stage)
        dispatch.collect(stage, now)
        return PhaseReport(PhaseResult.DONE, batch=batch) if batch else RUNNING

    def committed(self, stage: Stage, timing: Mapping[str, float]) -> None:
        """Adapt how far rollout runs ahead to the seconds that a step spent in each phase."""
        state, section, step_s = self._decision.state, self._config.asynchrony, sum(timing.values())
        if not (section.adaptive and section.max_staleness and state.stage == stage.name and step_s > 0):
            return
        if not stage.samples_completions:
            return
        size = stage.algorithm.batch_size
        ready = len(state.ledger.oldest_ready(size * (section.max_staleness + 1)))
        ahead, reason = next_ahead(
            steps_ahead(self._config, state),
            max_staleness=section.max_staleness,
            waited_share=timing.get(Phase.COLLECTING, 0.0) / step_s,
            spare_batches=ready / size - 1.0,
        )
        groups = self._dispatch.most_groups if state.pace is None else state.pace.groups
        self._set_pace(ahead, groups, reason)

    def tick(self, stage: Stage, *, queue: float) -> None:
        """Adapt the number of groups that run at once to the queue of the servers. Once a step, so that a change takes
        effect before the next one."""
        state, section = self._decision.state, self._config.asynchrony
        is_new = state.pace is None or state.pace.step != state.step
        if not (section.adaptive and section.max_staleness and is_new and state.stage == stage.name):
            return
        most = self._dispatch.most_groups
        groups, reason = next_groups(
            min(most, most if state.pace is None else state.pace.groups),
            queue=queue,
            waiting=self._dispatch.num_waiting,
            least=stage.algorithm.batch_size,
            most=most,
        )
        self._set_pace(steps_ahead(self._config, state), groups, reason)

    def _set_pace(self, ahead: int, groups: int, reason: str) -> None:
        if reason:
            self._decision.add_fact(PaceChanged(self._decision.state.step, ahead, groups, reason))
            self._decision.explain(f"{ahead} steps ahead, {groups} groups at once: {reason}")

    def roll(self, stage: Stage, now: float) -> None:
        """Issue and hand out groups as far ahead as the staleness bound allows. With a bound of 0, only groups that are
        already issued run until the weights of the step are current."""
        if self._config.asynchrony.max_staleness > 0 and self._decision.state.stage == stage.name:
            self._dispatch.collect(stage, now)
        else:
            self._dispatch.hand_out(now)
