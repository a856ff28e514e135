from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kintsugi.errors import UserError
from kintsugi.lab import experiments, scenarios
from kintsugi.lab.experiments import Profile
from kintsugi.lab.records import RUNS_FILE


def no_place(*arguments: Any, **named: Any) -> None:
    raise UserError("hosts of their own can not be made here: expected root")


def test_a_system_that_can_not_be_set_up_is_a_problem_that_is_told_and_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "system_for", no_place)
    said: list[str] = []
    chosen = [(experiments.find("S1"), Profile.OURS), (experiments.find("S2"), Profile.OURS)]
    result = scenarios.run_all(chosen, folder=tmp_path, say=said.append)
    assert [record.correct or record.as_expected or record.recovered for record in result.runs] == [
        False,
        False,
    ]
    assert all("expected root" in record.problem for record in result.runs)
    assert any("says nothing" in line and "expected root" in line for line in said)
    assert len(json.loads((tmp_path / RUNS_FILE).read_text())["runs"]) == 2
