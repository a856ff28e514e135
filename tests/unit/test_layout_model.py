"""The estimates for models that are larger than a card."""

from __future__ import annotations

import pytest

from benchmarks.layout_model import (
    MODELS,
    PLANS,
    Hardware,
    Layout,
    Load,
    deviations,
    estimate,
    fit,
    memory_of,
    report,
)
from kintsugi.model.architecture import num_parameters


def test_points_that_were_not_fitted_deviate_by_at_most_fifteen_percent() -> None:
    found = deviations(fit())
    assert max(abs(row["deviation"]) for row in found if row["kind"] != "outside") <= 0.15
    assert sum(row["kind"] == "unseen" for row in found) >= 10


@pytest.mark.parametrize("name", list(PLANS))
def test_every_layout_uses_all_devices_and_divides_its_model(name: str) -> None:
    model, plan = MODELS[name], PLANS[name]
    for layout in plan.layouts:
        assert layout.num_ranks == plan.devices
        assert model.num_layers % layout.stages == 0
        assert model.num_kv_heads % layout.tensors == 0


def test_state_gradient_and_weights_of_a_rank_are_those_of_the_formula() -> None:
    model, load, hardware = MODELS["8b"], Load(), Hardware()
    whole, _ = memory_of(model, Layout(2, 1), load, hardware)
    cut, _ = memory_of(model, Layout(2, 8), load, hardware)
    saved = 12 * num_parameters(model) * (1 - 1 / 8)
    assert whole - cut == pytest.approx(1.05 * saved, rel=0.01)  # With the slack of the allocator.


def test_a_pipeline_has_the_bubble_of_its_stages_and_one_rank_does_not_communicate() -> None:
    rates, hardware, load = fit(), Hardware(), Load(num_samples=64)
    alone = estimate(MODELS["0.6b"], Layout(), rates=rates, load=load, hardware=hardware)
    assert alone.communication == alone.bubble == 0.0
    stages = estimate(MODELS["0.6b"], Layout(stages=4), rates=rates, load=load, hardware=hardware)
    assert stages.bubble == pytest.approx(3 / (16 + 3))


def test_the_report_names_every_assumption() -> None:
    found = report()
    assert found["hardware"].keys() >= {"inside_bytes_per_s", "outside_bytes_per_s", "fetch_bytes_per_s"}
    assert all(row["fits"] for rows in found["layouts"].values() for row in rows)
