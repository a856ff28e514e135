"""The phase in which held-out problems are answered at the current version, by the same rollout workers."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.config import Config, next_stage
from kintsugi.control.draft import Draft
from kintsugi.control.episodes import Episodes
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.protocol import RecordEvaluation
from kintsugi.facts import EvaluationDone


class Evaluating:
    """One evaluation at a time; one that a fault interrupted goes on with the answers it has."""

    def __init__(
        self,
        config: Config,
        num_problems: int,
        *,
        draft: Draft,
        episodes: Episodes,
        done: Callable[[float], None],
    ) -> None:
        self._config, self._num_problems = config, num_problems
        self._draft, self._episodes, self._done = draft, episodes, done

    def begin(self, now: float) -> None:
        state, count = self._draft.state, self._num_problems
        if self._episodes.evaluation is None:
            evaluation = Evaluation(self._config, step=state.step, version=state.version, num_problems=count)
            self._episodes.evaluate(evaluation, now)
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """Hand out what waits, or take the result when every answer is in."""
        evaluation, state = self._episodes.evaluation, self._draft.state
        if evaluation is None or not evaluation.finished:
            self._episodes.hand_out(now)
            return
        self._episodes.evaluation = None
        self._episodes.timing.clear()
        metrics, stage = evaluation.metrics(), next_stage(self._config, step=state.step).name
        self._draft.fact(EvaluationDone(state.step, state.version, stage, metrics))
        self._draft.do(RecordEvaluation(state.step, metrics))
        self._done(now)
