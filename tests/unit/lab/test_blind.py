from __future__ import annotations

import time
from pathlib import Path

import pytest

from kintsugi.errors import ProcessDied
from kintsugi.lab.campaign.blind import BlindDiagnosis, Look
from kintsugi.runtime.waits import wait


def until_said(blind: BlindDiagnosis, *, count: int) -> list[Look]:
    def attempt(remaining_s: float) -> list[Look] | None:
        blind.looks()
        time.sleep(min(remaining_s, 0.02))
        return blind.all if len(blind.all) >= count else None

    return wait(attempt, whom="the blind diagnosis", what="its word", timeout_s=30.0)


@pytest.mark.slow
def test_it_looks_again_and_again_at_a_folder_and_ends_when_it_is_let_go(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "events").mkdir(parents=True)
    blind = BlindDiagnosis(run_dir, folder=tmp_path)
    try:
        looks = until_said(blind, count=2)
    finally:
        blind.close()
    assert all(look.diagnosis is None or look.diagnosis.causes == () for look in looks)
    assert looks[0].t < looks[1].t


@pytest.mark.slow
def test_one_that_is_gone_is_noticed(tmp_path: Path) -> None:
    blind = BlindDiagnosis(tmp_path / "run", folder=tmp_path)
    try:
        until_said(blind, count=1)
        blind.kill()
        with pytest.raises(ProcessDied, match="the blind diagnosis ended"):
            until_said(blind, count=1000)
    finally:
        blind.close()
