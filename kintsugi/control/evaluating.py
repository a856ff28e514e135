"""The phase in which the current version is judged: held-out problems are answered by the rollout workers, or held-out
pairs ranked by the ranks themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kintsugi.buffer.packing import shards_of_rank
from kintsugi.config import Config
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.episodes import Episodes
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.protocol import Raise, RecordEvaluation
from kintsugi.facts import EvaluationDone
from kintsugi.messages import EvaluatePairs, PairsEvaluated
from kintsugi.observe.evaluation import summarize
from kintsugi.stages import has_servers, next_stage


class Evaluating:
    """One evaluation at a time; one that a fault interrupted goes on with the answers it has."""

    def __init__(
        self,
        config: Config,
        num_problems: int,
        *,
        draft: Draft,
        talk: Conversation,
        episodes: Episodes,
        done: Callable[[float], None],
        wrong: Callable[[str, str, float], None],
    ) -> None:
        """`wrong`: a rank answered what can not be right."""
        self._config, self._num_problems = config, num_problems
        self._draft, self._talk, self._episodes = draft, talk, episodes
        self._done, self._wrong = done, wrong
        self._asked: dict[str, EvaluatePairs] = {}

    def begin(self, now: float, *, ranks: Sequence[str]) -> None:
        state, count = self._draft.state, self._num_problems
        if not has_servers(self._config):
            self._ask_ranks(ranks, now)
            return
        if self._episodes.evaluation is None:
            evaluation = Evaluation(self._config, step=state.step, version=state.version, num_problems=count)
            self._episodes.evaluate(evaluation, now)
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """Hand out what waits, or take the result when every answer is in."""
        evaluation = self._episodes.evaluation
        if evaluation is None or not evaluation.finished:
            self._episodes.hand_out(now)
            return
        self._episodes.evaluation = None
        if evaluation.unscored:
            name, reason = next(iter(evaluation.unscored.items()))
            count = len(evaluation.unscored)
            self._draft.do(
                Raise(f"{count} held-out answers could not be scored, and count as wrong; {name}: {reason}")
            )
        self._conclude(evaluation.metrics(), evaluation.verdicts(), now)

    def _ask_ranks(self, ranks: Sequence[str], now: float) -> None:
        """Each rank has its share of the pairs. A rank that is lost meanwhile is mended, and then all are asked again:
        ranking is quick, and who holds which share may have changed."""
        shares = [
            shards_of_rank(self._num_problems, rank=rank, world_size=len(ranks)) for rank in range(len(ranks))
        ]
        self._asked = {
            rank: EvaluatePairs(self._draft.state.step, share.start, len(share))
            for rank, share in zip(ranks, shares, strict=True)
            if share
        }
        self._talk.ask_all(self._asked, now, then=self._ranked)

    def _ranked(self, now: float) -> None:
        correct: list[bool] = []
        for rank, asked in self._asked.items():
            answer = self._talk.answers[rank]
            assert isinstance(answer, PairsEvaluated)
            expected = (asked.step, asked.first, asked.count)
            got = (answer.step, answer.first, len(answer.correct))
            if got != expected:
                self._wrong(rank, f"expected (step, first, count) {expected} of ranked pairs, got {got}", now)
                return
            correct += answer.correct
        self._conclude(summarize(correct), correct, now)

    def _conclude(self, metrics: dict[str, float], verdicts: Sequence[bool], now: float) -> None:
        state = self._draft.state
        stage = next_stage(self._config, step=state.step).name
        self._draft.fact(EvaluationDone(state.step, state.version, stage, metrics))
        self._draft.do(RecordEvaluation(state.step, metrics, tuple(verdicts)))
        self._done(now)
