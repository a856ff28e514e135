"""History of one stage, as detectors read it: settings that matter, figures of its steps, evaluations. Bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import isfinite, nan

import msgspec

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.learning_health.sample_figures import SampleFigures

FIRST_KEPT, LAST_KEPT = 16, 240
"""Steps of a stage that are kept: its first ones, to compare with, and the latest."""
MOST_EVALUATIONS = 256


class StageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a stage on which the meaning of its figures depends."""

    name: str
    algorithm: str
    first_step: int
    critic_steps: int = 0
    """Steps at its start in which the actor is not updated."""
    samples_completions: bool = True
    group_size: int = 8
    has_reference: bool = False
    reference_given: bool = False
    """Whether the reference is a model of its own instead of the weights with which the stage begins."""
    max_grad_norm: float = 1.0
    learning_rate: float = 0.0
    max_new_tokens: int = 16
    is_on_policy: bool = True
    """Whether the weights that sample are those with which the step begins."""
    is_mixture: bool = False
    is_pretrained: bool = False
    """Whether the stage begins with weights of a folder."""
    vocabulary: int = 0
    """Tokens of the model; 0 if unknown."""


def facts_of(config: Config, stage: Stage, *, vocabulary: int, replays: bool = False) -> StageFacts:
    """Return the settings of a stage; `replays`: its samples are those of a finished `kintsugi rollout`."""
    return StageFacts(
        name=stage.name,
        algorithm=stage.algorithm.name,
        first_step=stage.first_step,
        critic_steps=stage.critic.warmup_steps if stage.has_critic else 0,
        samples_completions=stage.samples_completions,
        group_size=stage.algorithm.group_size,
        has_reference=stage.has_reference,
        reference_given=stage.reference.path is not None,
        max_grad_norm=stage.actor.max_grad_norm,
        learning_rate=stage.actor.learning_rate,
        max_new_tokens=config.sampling.max_new_tokens,
        is_on_policy=stage.asynchrony.max_staleness == 0 and not replays,
        is_mixture=len(config.data.sources) > 1,
        is_pretrained=config.model.path is not None and stage.first_step == 1,
        vocabulary=vocabulary,
    )


class StepFigures(msgspec.Struct, frozen=True):
    """Metrics of one step, and figures of its samples where it has any."""

    step: int
    values: dict[str, float]
    """Metrics by name; NaN where the recorded value was not finite."""
    samples: SampleFigures | None = None

    def get(self, name: str) -> float:
        """Return a metric; NaN if it was not recorded, so that no comparison with it holds."""
        return self.values.get(name, nan)


class StageHistory:
    """Steps and evaluations of one stage, in order."""

    def __init__(self, facts: StageFacts) -> None:
        self.facts = facts
        self.steps: list[StepFigures] = []
        self.evaluations: list[StepFigures] = []

    def add_step(self, figures: StepFigures) -> None:
        self.steps.append(figures)
        if len(self.steps) > FIRST_KEPT + LAST_KEPT:
            del self.steps[FIRST_KEPT]

    def add_evaluation(self, figures: StepFigures) -> None:
        self.evaluations.append(figures)
        if len(self.evaluations) > MOST_EVALUATIONS:
            del self.evaluations[1]

    def truncate_after(self, step: int) -> None:
        """Forget later steps: they were undone."""
        self.steps = [each for each in self.steps if each.step <= step]
        self.evaluations = [each for each in self.evaluations if each.step <= step]


def trailing(steps: Sequence[StepFigures], holds: Callable[[StepFigures], bool]) -> list[StepFigures]:
    """Return the latest steps for which a condition holds, back to the first for which it does not.

    >>> steps = [StepFigures(step, {"x": x}) for step, x in enumerate((2.0, 0.0, 3.0, 4.0), start=1)]
    >>> [each.step for each in trailing(steps, lambda each: each.get("x") > 1)]
    [3, 4]
    """
    return list(takewhile(holds, reversed(steps)))[::-1]


def mean_of(steps: Sequence[StepFigures], name: str) -> float:
    """Mean of the recorded values; NaN if there is none."""
    values = [value for each in steps if isfinite(value := each.get(name))]
    return sum(values) / len(values) if values else nan


def median_of(steps: Sequence[StepFigures], name: str) -> float:
    values = sorted(value for each in steps if isfinite(value := each.get(name)))
    return values[len(values) // 2] if values else nan


def standard_error(steps: Sequence[StepFigures], name: str) -> float:
    """Standard error of the mean over these steps, from the differences between them."""
    values = [value for each in steps if isfinite(value := each.get(name))]
    if len(values) < 2:
        return nan
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return float((variance / len(values)) ** 0.5)
