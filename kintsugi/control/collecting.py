"""Groups for the next batch: they are kept coming beside whatever the ranks do, and put together when it is time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kintsugi.config import Config
from kintsugi.control.agenda import steps_ahead
from kintsugi.control.draft import Draft
from kintsugi.control.episodes import Episodes
from kintsugi.control.failure import Failure
from kintsugi.control.pacing import next_ahead, next_groups
from kintsugi.control.phases import Phase
from kintsugi.facts import PaceChanged
from kintsugi.stages import Stage


class Collecting:
    """`begin` and `go_on` look for a batch; `roll` only keeps groups coming."""

    def __init__(
        self,
        config: Config,
        *,
        draft: Draft,
        episodes: Episodes,
        failure: Failure,
        complete: Callable[[tuple[str, ...], float], None],
    ) -> None:
        """`complete`: these groups are the next batch."""
        self._config, self._draft, self._episodes, self._failure = config, draft, episodes, failure
        self._complete = complete
        self._failed_before = 0

    def begin(self, stage: Stage, now: float) -> None:
        self._failed_before = self._draft.state.ledger.stage(stage.name).num_failed
        self._episodes.reclaim()
        self.go_on(stage, now)

    def go_on(self, stage: Stage, now: float) -> None:
        """Set aside what can not be trained, filter what says nothing, replace both, and train when the oldest groups
        are complete. A run that was called failed trains nothing any more, though it still listens for a moment."""
        if self._failure.begun:
            return
        state, episodes = self._draft.state, self._episodes
        problem = episodes.drop_unusable(stage, before=self._failed_before)
        if problem is not None:
            self._failure.begin(self._failure.new_fault("EpisodesFailed", problem), now)
            return
        episodes.resample(stage)
        batch = state.ledger.in_batch(state.step + 1) or episodes.next_batch(stage)
        episodes.collect(stage, now)
        if batch:
            self._complete(batch, now)

    def committed(self, stage: Stage, timing: Mapping[str, float]) -> None:
        """A step is done, with so many seconds in each phase: rollout may run further ahead, or less far."""
        state, section, step_s = self._draft.state, self._config.asynchrony, sum(timing.values())
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
        groups = self._episodes.most_groups if state.pace is None else state.pace.groups
        self._set_pace(ahead, groups, reason)

    def tick(self, stage: Stage, *, queue: float) -> None:
        """More or fewer groups at once, by how many samples wait at the servers; once a step, so that it shows what it
        did before it is done again."""
        state, section = self._draft.state, self._config.asynchrony
        is_new = state.pace is None or state.pace.step != state.step
        if not (section.adaptive and section.max_staleness and is_new and state.stage == stage.name):
            return
        most = self._episodes.most_groups
        groups, reason = next_groups(
            min(most, most if state.pace is None else state.pace.groups),
            queue=queue,
            waiting=self._episodes.num_waiting,
            least=stage.algorithm.batch_size,
            most=most,
        )
        self._set_pace(steps_ahead(self._config, state), groups, reason)

    def _set_pace(self, ahead: int, groups: int, reason: str) -> None:
        if reason:
            self._draft.fact(PaceChanged(self._draft.state.step, ahead, groups, reason))
            self._draft.because(f"{ahead} steps ahead, {groups} groups at once: {reason}")

    def roll(self, stage: Stage, now: float) -> None:
        """Keep groups coming, as far ahead as the staleness bound allows; with 0 none but those under way can come
        before the step is committed and its weights are current."""
        if self._failure.begun:
            return
        if self._config.asynchrony.max_staleness > 0 and self._draft.state.stage == stage.name:
            self._episodes.collect(stage, now)
        else:
            self._episodes.hand_out(now)
