"""One evaluation at a pinned version: which held-out problems are asked, and what came back."""

from __future__ import annotations

from kintsugi.config import Config
from kintsugi.messages import EpisodesDone
from kintsugi.observe.evaluation import summarize
from kintsugi.types import Sampling, Ticket, ticket_id


class Evaluation:
    """Every problem is answered once greedily (round 0) and, for mean@k and pass@k, k times sampled (round 1)."""

    def __init__(self, config: Config, *, step: int, version: int, num_problems: int) -> None:
        self._version = version
        limit, seed = config.sampling.max_new_tokens, config.seed
        rounds = [Sampling(temperature=0.0, max_new_tokens=limit, seed=seed)]
        if config.eval.num_samples:
            temperature, k = config.sampling.temperature, config.eval.num_samples
            rounds.append(Sampling(temperature=temperature, max_new_tokens=limit, num_samples=k, seed=seed))
        self.tasks: dict[str, tuple[Ticket, Sampling]] = {}
        for round, sampling in enumerate(rounds):
            for position in range(num_problems):
                name = ticket_id("eval", epoch=step, position=position, round=round)
                self.tasks[name] = (
                    Ticket(name, "eval", step, position, round, sampling.num_samples),
                    sampling,
                )
        self._correct: dict[str, list[bool]] = {}
        self.unscored: dict[str, str] = {}
        """Sample → why it could not be scored; it counts as wrong."""

    def take(self, done: EpisodesDone) -> str | None:
        """Note an answer; gives what is wrong with it. Right is what the first reward function gives full marks.

        One that could not be scored after all attempts is no reason to end a run; it would be if nothing can be.
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
    def finished(self) -> bool:
        return len(self._correct) == len(self.tasks)

    def metrics(self) -> dict[str, float]:
        """Greedy accuracy, mean@k, pass@k, with intervals; and how many answers could not be scored, if any."""
        sampled = [self._correct[name] for name, (ticket, _) in self.tasks.items() if ticket.round == 1]
        metrics = summarize(self.verdicts(), sampled)
        return metrics | ({"eval/unscored": float(len(self.unscored))} if self.unscored else {})

    def verdicts(self) -> tuple[bool, ...]:
        """Of the greedy answers, in the order of the problems."""
        return tuple(self._correct[name][0] for name, (ticket, _) in self.tasks.items() if ticket.round == 0)
