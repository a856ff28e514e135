"""The experiment itself: a few faults on a short run, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_a_soak_reports_every_fault_and_equal_runs(tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "kintsugi", "soak", str(ROOT / "kintsugi" / "recipes" / "soak.yaml")),
            *(f"run_dir={tmp_path / 'soak'}", "--faults", "4", "--seed", "3", "--json", str(report)),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert len(found["faults"]) >= 4
    for fault in found["faults"]:
        assert fault["detected_ms"] is not None and fault["recovered_ms"] is not None
        assert fault["healthy_pids_unchanged"] and fault["steps_lost"] == 0
    totals = found["totals"]
    assert totals["weights_sha256"] == totals["weights_sha256_undisturbed"] != ""
    assert totals["step_hashes_equal"] and totals["states_distinct"]
    assert (totals["samples_lost"], totals["samples_duplicated"], totals["processes_left"]) == (0, 0, 0)
    assert len(totals["full_restart"]["seconds"]) == 3
