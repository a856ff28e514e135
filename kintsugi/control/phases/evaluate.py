"""EVALUATING: held-out problems, answered by the rollout workers, or held-out pairs, ranked by the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from kintsugi.config.schema import Config
from kintsugi.config.stages import has_servers, next_stage
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.dispatch import EpisodeDispatch
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.mesh_choice import mesh_in_force
from kintsugi.control.pending import PendingRequests
from kintsugi.control.phases.table import DONE, RUNNING, PhaseReport, PhaseResult
from kintsugi.control.protocol import Raise, RecordEvaluation
from kintsugi.journal.facts import EvaluationDone
from kintsugi.protocol.training import EvaluatePairs, PairsEvaluated
from kintsugi.samples.sharding import shards_of_rank
from kintsugi.telemetry.eval_stats import summarize


class EvaluatePhase:
    """One evaluation at a time. After a fault it continues with the answers that it has."""

    def __init__(
        self,
        config: Config,
        num_problems: int,
        *,
        decision: DecisionBuilder,
        pending: PendingRequests,
        dispatch: EpisodeDispatch,
    ) -> None:
        self._config, self._num_problems = config, num_problems
        self._decision, self._pending, self._dispatch = decision, pending, dispatch
        self._asked: dict[str, EvaluatePairs] = {}
        self._answering: set[str] = set()
        """Ranks that know the scores: of a model that is cut over ranks the last stage."""

    def begin(self, now: float, *, ranks: Sequence[str]) -> PhaseReport:
        state, count = self._decision.state, self._num_problems
        if not has_servers(self._config):
            self._ask_ranks(ranks, now)
            return RUNNING
        if self._dispatch.evaluation is None:
            evaluation = Evaluation(self._config, step=state.step, version=state.version, num_problems=count)
            self._dispatch.evaluate(evaluation, now)
        return self.advance(now)

    def advance(self, now: float) -> PhaseReport:
        """Hand out problems that wait, or record the result when all are answered."""
        evaluation = self._dispatch.evaluation
        if evaluation is None or not evaluation.finished:
            self._dispatch.hand_out(now)
            return RUNNING
        self._dispatch.evaluation = None
        if evaluation.unscored:
            name, reason = next(iter(evaluation.unscored.items()))
            count = len(evaluation.unscored)
            self._decision.add_effect(
                Raise(f"{count} held-out answers could not be scored, and count as wrong; {name}: {reason}")
            )
        return self._conclude(evaluation.metrics(), evaluation.verdicts())

    def _ask_ranks(self, ranks: Sequence[str], now: float) -> None:
        """Request a share of the pairs from each rank. After the loss of a rank all pairs are requested again: ranking
        is quick, and the shares may have changed."""
        mesh = mesh_in_force(self._config, self._decision.state)
        parts = len(ranks) // mesh.model_ranks
        shares = [
            shards_of_rank(self._num_problems, rank=mesh.data_index(rank), world_size=parts)
            for rank in range(len(ranks))
        ]
        self._answering = {
            rank
            for number, rank in enumerate(ranks)
            if mesh.seat(number).is_last and not mesh.seat(number).tensor
        }
        self._asked = {
            rank: EvaluatePairs(self._decision.state.step, share.start, len(share))
            for rank, share in zip(ranks, shares, strict=True)
            if share or self._config.actor.layout.gathers_layers  # Then all ranks gather weights together.
        }
        self._pending.ask_all(self._asked, now)

    def ranked(self) -> PhaseReport:
        """Take the result of the held-out pairs once every rank has answered."""
        correct: list[bool] = []
        for rank, asked in self._asked.items():
            if rank not in self._answering:
                continue
            answer = self._pending.answers[rank]
            assert isinstance(answer, PairsEvaluated)
            expected = (asked.step, asked.first, asked.count)
            got = (answer.step, answer.first, len(answer.correct))
            if got != expected:
                problem = f"expected (step, first, count) {expected} of ranked pairs, got {got}"
                return PhaseReport(PhaseResult.DIVERGED, process=rank, problem=problem)
            correct += answer.correct
        return self._conclude(summarize(correct), correct)

    def _conclude(self, metrics: dict[str, float], verdicts: Sequence[bool]) -> PhaseReport:
        state = self._decision.state
        stage = next_stage(self._config, step=state.step).name
        self._decision.add_fact(EvaluationDone(state.step, state.version, stage, metrics))
        self._decision.add_effect(RecordEvaluation(state.step, metrics, tuple(verdicts)))
        return DONE
