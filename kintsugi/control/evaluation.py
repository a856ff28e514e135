"""One evaluation at a pinned version: its held-out problems and their results."""

from __future__ import annotations

from kintsugi.config.schema import Config
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.telemetry.eval_stats import summarize
from kintsugi.types import SamplingParams, Ticket, ticket_id


class Evaluation:
    """Problems of one evaluation: each is answered greedily (round 0) and, for mean@k and pass@k, sampled k times
    (round 1)."""

    def __init__(self, config: Config, *, step: int, version: int, num_problems: int) -> None:
        self._version = version
        limit, seed = config.sampling.max_new_tokens, config.seed
        rounds = [SamplingParams(temperature=0.0, max_new_tokens=limit, seed=seed)]
        if config.eval.num_samples:
            temperature, k = config.sampling.temperature, config.eval.num_samples
            rounds.append(
                SamplingParams(temperature=temperature, max_new_tokens=limit, num_samples=k, seed=seed)
            )
        self.tasks: dict[str, tuple[Ticket, SamplingParams]] = {}
        for round, sampling in enumerate(rounds):
            for position in range(num_problems):
                name = ticket_id("eval", epoch=step, position=position, round=round)
                self.tasks[name] = (
                    Ticket(name, "eval", step, position, round, sampling.num_samples),
                    sampling,
                )
        self._correct: dict[str, list[bool]] = {}
        self.unscored: dict[str, str] = {}
        """Sample → reason why it could not be scored; it counts as wrong."""

    def take(self, done: EpisodesDone) -> str | None:
        """Take an answer; return the problem if it ends the run. An answer is correct if the first reward function
        gives 1.

        An answer that could not be scored counts as wrong. The run ends only if no answer at all could be scored.
        """
        versions = {meta.version for meta in done.samples} - {self._version}
        if versions:
            return f"evaluation at version {self._version} was answered by version {sorted(versions)}"
        verdicts = [next(iter(meta.reward_components.values())) >= 1.0 for meta in done.samples]
        self._correct[done.ticket] = verdicts + [False] * len(done.quarantined)
        self.unscored |= done.quarantined
        if len(self.unscored) < sum(ticket.num_samples for ticket, _ in self.tasks.values()):
            return None
        return (
            f"no evaluation problem could be scored; {done.ticket}: {next(iter(done.quarantined.values()))}"
        )

    @property
    def num_answered(self) -> int:
        return len(self._correct)

    @property
    def finished(self) -> bool:
        return self.num_answered == len(self.tasks)

    def metrics(self) -> dict[str, float]:
        """Return greedy accuracy, mean@k and pass@k with their intervals, and the number of unscored answers if there
        are any."""
        sampled = [self._correct[name] for name, (ticket, _) in self.tasks.items() if ticket.round == 1]
        metrics = summarize(self.verdicts(), sampled)
        return metrics | ({"eval/unscored": float(len(self.unscored))} if self.unscored else {})

    def verdicts(self) -> tuple[bool, ...]:
        """Return whether each greedy answer is correct, in the order of the problems."""
        return tuple(self._correct[name][0] for name, (ticket, _) in self.tasks.items() if ticket.round == 0)
