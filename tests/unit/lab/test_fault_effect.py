from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kintsugi.lab.campaign.fault_effect import effect_of, symptoms_in
from kintsugi.lab.injector.injection import Ability
from tests.unit.lab.test_outcome import START, injected, tell


def write_steps(run_dir: Path, *durations: float) -> None:
    """One step a second until the fault, then on."""
    lines = [
        {"step": number, "time": START - 19.5 + number, "timing/step": took_s}
        for number, took_s in enumerate(durations)
    ]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@pytest.mark.parametrize(("during_s", "real"), [(0.5, False), (2.0, True)])
def test_a_fault_that_holds_no_step_up_and_raises_no_error_is_no_impact(
    tmp_path: Path, during_s: float, real: bool
) -> None:
    write_steps(tmp_path, *([0.5, 0.52] * 10), during_s)
    found = effect_of(tmp_path, [injected()], start=START, end=START + 1.0)
    assert found["real"] is real


def test_an_error_that_somebody_told_is_an_impact(tmp_path: Path) -> None:
    tell(tmp_path, "master-0", "model-1 was lost", after_s=0.5)
    assert effect_of(tmp_path, [injected()], start=START, end=START + 3.0)["real"]


def test_the_symptom_of_a_fault_is_an_impact_and_a_twitch_of_another_figure_is_none() -> None:
    link, host = "model-1>agent-0 rtt_s", "host-1 fsync_s"
    before = [(START - 10.0 + second, 0.0002) for second in range(10)]
    figures = {link: [*before, (START + 1.0, 0.4)], host: [*before, (START + 1.0, 0.4)]}
    assert symptoms_in(figures, Ability.NETWORK_DELAY, start=START) == {link: 0.4}
    assert symptoms_in({link: [*before, (START + 1.0, 0.005)]}, Ability.NETWORK_DELAY, start=START) == {}
    assert symptoms_in(figures, Ability.KILL, start=START) == {}


@pytest.mark.parametrize("figure", ["resolve_errors", "resolve_pending_s"])
def test_a_name_that_can_not_be_resolved_at_all_is_an_impact(figure: str) -> None:
    """The time of the last good try stays what it was."""
    took = [(START - 10.0 + second, 0.002) for second in range(13)]
    figures = {"host-1 resolve_s": took, f"host-1 {figure}": [(START + 2.0, 1.0), (START + 3.0, 1.0)]}
    assert symptoms_in(figures, Ability.DNS, start=START) == {f"host-1 {figure}": 1.0}
