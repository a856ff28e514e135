"""What a fault must not change: which samples each step trained, the states it led to, and what was evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kintsugi.config.schema import Config, WarmupSection
from kintsugi.control.phases.table import Phase
from kintsugi.journal.facts import BatchFormed, EvaluationDone, Fact, RolledBack, RunEnded, StepCommitted
from kintsugi.recovery.rank import Flow
from tests.unit.control.driven import CONFIG, Driven

TWO_STAGES = msgspec.structs.replace(
    CONFIG,
    warmup=WarmupSection(steps=1, batch_size=2),
    algorithm=msgspec.structs.replace(CONFIG.algorithm, steps=1),
)
"""A warm-up step, then one of the main stage; each is evaluated and saved."""


class Outcome(NamedTuple):
    """What is left of a run when it is over; equal for runs that people can not tell apart."""

    steps: dict[int, tuple[str, tuple[str, ...], dict[str, float]]]
    """Step → state, tickets, metrics without times."""
    evaluations: dict[int, dict[str, float]]
    ended: tuple[str, str]
    """How, and with which weights."""


def outcome(facts: Sequence[Fact]) -> Outcome:
    """Undone steps do not count. A ticket that is trained twice fails here."""
    steps: dict[int, Any] = {}
    batches: dict[int, tuple[str, ...]] = {}
    evaluations: dict[int, dict[str, float]] = {}
    ended = ("", "")
    for fact in facts:
        match fact:
            case BatchFormed(step=step, tickets=tickets):
                batches[step] = tickets
            case StepCommitted(step=step, state_digest=digest, metrics=metrics):
                assert step not in steps, f"step {step} is committed twice"
                kept = {name: v for name, v in metrics.items() if not name.startswith("timing/")}
                steps[step] = (digest, batches[step], kept)
            case RolledBack(step=last):
                steps = {step: steps[step] for step in steps if step <= last}
                evaluations = {step: evaluations[step] for step in evaluations if step <= last}
            case EvaluationDone(step=step, metrics=metrics):
                assert step not in evaluations, f"step {step} is evaluated twice"
                evaluations[step] = metrics
            case RunEnded(outcome=how, weights_sha256=weights):
                ended = (how, weights)
            case _:
                pass
    trained = [ticket for _, tickets, _ in steps.values() for ticket in tickets]
    assert len(trained) == len(set(trained)), "a ticket is trained twice"
    return Outcome(steps, evaluations, ended)


def begun(config: Config = TWO_STAGES, *, flow: Flow = Flow.ROLLBACK, num_eval_rows: int = 2) -> Driven:
    driven = Driven(config, num_eval_rows=num_eval_rows, flow=flow)
    driven.begin()
    return driven


def undisturbed(config: Config = TWO_STAGES, *, num_eval_rows: int = 2) -> Outcome:
    driven = begun(config, num_eval_rows=num_eval_rows)
    driven.until(Phase.ENDED)
    return outcome(driven.facts)
