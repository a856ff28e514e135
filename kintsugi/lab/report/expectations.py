"""Expectations about the five scenarios: the argument of each, and the values that are compared with measurements."""

from __future__ import annotations

import re

import msgspec

from kintsugi.lab.fragile.timeouts import NOTIFY_S, STOP_JOB_S, TRANSFER_S
from kintsugi.lab.scenarios.records import RunRecord

CHALLENGES = {
    "A": "Fault coupling: a fault in one stage shows as an error in another",
    "B": "Misleading diagnosis: the last error is not the cause",
    "C": "Patterns that exist in RL only",
}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario."""

    title: str
    proves: tuple[str, ...]
    """Challenges that it is evidence for."""
    path: str
    """Expected propagation of the fault."""
    coupling: str
    """Component of an RL system through which the fault propagates."""
    absent_in_sft: str
    """Reason why fine-tuning has no such component."""
    wait_s: float | None
    """Unscaled time-out that passes until the error shows; None where it shows without one."""


SCENARIOS: dict[str, Scenario] = {
    "S1": Scenario(
        title="A train worker's slow link during the weight update",
        proves=("A", "C"),
        path="train worker → weight meta-server → rollout workers",
        coupling="Weight synchronisation from train to rollout workers through a meta-server in the "
        "controller",
        absent_in_sft="weights never leave the train workers",
        wait_s=TRANSFER_S,
    ),
    "S2": Scenario(
        title="A rollout worker starved of CPU and memory",
        proves=("A", "C"),
        path="rollout worker → incomplete batch → split over train workers",
        coupling="Batches of generated samples, split over the train workers",
        absent_in_sft="batches come from a prepared data set and can be read again",
        wait_s=None,
    ),
    "S3": Scenario(
        title="A train worker out of memory, buried by clean-up",
        proves=("B",),
        path="train worker → HTTP 500 → clean-up → time-out of stopping the jobs",
        coupling="One controller that reaches every job by remote calls and cleans all of them up after any "
        "error",
        absent_in_sft="the process that ran out of memory logs it, and its launcher ends",
        wait_s=STOP_JOB_S,
    ),
    "S4": Scenario(
        title="A lost hand-over of a shared device",
        proves=("C",),
        path="controller → lost notification → both sides of the device wait",
        coupling="Train and rollout workers that share a device and hand it over by notification",
        absent_in_sft="a device has one owner",
        wait_s=NOTIFY_S,
    ),
    "S5": Scenario(
        title="A checkpoint corrupted in one step, detected in the next",
        proves=("A",),
        path="save of step N → half-written checkpoint → weight update of step N+1",
        coupling="Weights that reach the rollout workers through the checkpoint on disk",
        absent_in_sft="a checkpoint is read only by a restart",
        wait_s=TRANSFER_S,
    ),
}


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """One expected value, and the measurement that it is compared with."""

    challenge: str
    scenario: str
    metric: str
    expected: str
    measure: str
    """Name of a method of `MeasuredValue`."""


EXPECTATIONS: tuple[Expectation, ...] = (
    Expectation(
        challenge="A",
        scenario="S1",
        metric="Hops of propagation",
        expected="2 (train → meta-server → rollout)",
        measure="hops",
    ),
    Expectation(
        challenge="A",
        scenario="S2",
        metric="Stage of the fault → stage of the error",
        expected="rollout → train (1 stage away)",
        measure="stages",
    ),
    Expectation(
        challenge="A",
        scenario="S5",
        metric="Delay until the error shows",
        expected="1 step (perhaps hours)",
        measure="steps_late",
    ),
    Expectation(
        challenge="B",
        scenario="S3",
        metric="Masking: from the first effect to the last error",
        expected="30 s",
        measure="masking",
    ),
    Expectation(
        challenge="B",
        scenario="S3",
        metric="Log files to read",
        expected="33 (controller + 32 train workers)",
        measure="files",
    ),
    Expectation(
        challenge="B",
        scenario="S3",
        metric="Log lines to read",
        expected="about 1,000",
        measure="lines",
    ),
    Expectation(
        challenge="B",
        scenario="S3",
        metric="Time to diagnose",
        expected="> 10 min (by engineers)",
        measure="time_to_diagnose",
    ),
    Expectation(
        challenge="C",
        scenario="S4",
        metric="Same fault on SFT",
        expected="no such problem (no hand-over)",
        measure="contrast",
    ),
    Expectation(
        challenge="C",
        scenario="S1",
        metric="Same fault on SFT",
        expected="no such problem (no weights to synchronise)",
        measure="contrast",
    ),
)


def scenario_of(run: RunRecord) -> str:
    """Return the scenario of a run: its own, or that of which it is the fine-tuning counterpart."""
    return run.contrast_of or scenario_named(run.scenario)


def scenario_named(name: str) -> str:
    """
    >>> scenario_named("sft_S3"), scenario_named("loss1")
    ('S3', 'loss1')
    """
    match = re.fullmatch(r"sft_(S[1-9])", name)
    return match[1] if match else name


def title_of(name: str) -> str:
    scenario = SCENARIOS.get(name)
    return f"{name}: {scenario.title}" if scenario else name
