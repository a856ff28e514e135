from __future__ import annotations

import msgspec
import pytest

from kintsugi.lab.report import contrast, measures
from kintsugi.lab.report.abstract import abstract_of
from kintsugi.lab.report.document import Bullets
from kintsugi.lab.report.results import Results
from kintsugi.lab.scenarios.records import RunsFile
from tests.unit.lab.report.conftest import run_of
from tests.unit.lab.report.test_tables import row


def test_amplification_is_the_mean_factor_against_fine_tuning(runs: RunsFile) -> None:
    table = contrast.contrast_table(runs.runs, scale=600.0)

    assert table is not None
    found = row(table, "S1 fragile")
    assert (found["× processes"], found["× steps"]) == ("4.0×", "4.0×")
    run, other = run_of("S1", "fragile"), run_of("S1", "sft")
    factors = [factor for factor in contrast.factors(run, other) if factor is not None]
    assert contrast.amplification(run, other) == pytest.approx(measures.geometric_mean(factors))


def test_what_nobody_would_have_read_is_in_no_factor() -> None:
    run, other = run_of("S1", "fragile"), run_of("S1", "sft")
    unread = msgspec.structs.replace(other, log_files=None, log_lines=None)

    assert contrast.amplification(run, unread) == contrast.amplification(run, other)
    table = contrast.contrast_table([run, unread], scale=600.0)
    assert table is not None and row(table, "S1 fragile")["files"] == "5 / –"


def test_where_not_the_same_struck_there_is_no_amplification(runs: RunsFile) -> None:
    weaker = [
        msgspec.structs.replace(
            run,
            injected=tuple(msgspec.structs.replace(each, amount={"delay_s": 0.2}) for each in run.injected),
        )
        if run.profile == "sft"
        else run
        for run in runs.runs
    ]
    table = contrast.contrast_table(weaker, scale=600.0)

    assert table is not None
    assert row(table, "S1 ours")["amplification"] == contrast.OTHER_FAULT


def test_without_fine_tuning_there_is_no_contrast(runs: RunsFile) -> None:
    without = [run for run in runs.runs if run.profile != "sft"]
    assert contrast.contrast_table(without, scale=600.0) is None


def test_the_abstract_compares_the_fragile_system_with_its_fine_tuning_only(runs: RunsFile) -> None:
    (bullets,) = abstract_of(Results(runs, None))

    assert isinstance(bullets, Bullets)
    (said,) = [item for item in bullets.items if "Amplification" in item]
    assert "S1 fragile" in said and "S1 ours" not in said and "geometric mean" in said


def test_a_contrast_belongs_to_what_its_record_says() -> None:
    run = msgspec.structs.replace(run_of("S1", "fragile"), scenario="loss1")
    other = msgspec.structs.replace(run_of("S1", "sft"), scenario="loss1_sft", contrast_of="loss1")

    assert list(contrast.pairs([run, other])) == [(run, other)]
