from __future__ import annotations

import msgspec

from kintsugi.lab.records import RunsFile
from kintsugi.lab.report import tables
from kintsugi.lab.report.document import MISSING, Table


def row(table: Table, name: str) -> dict[str, str]:
    found = next(row for row in table.rows if row[0] == name)
    return dict(zip(table.head, found, strict=True))


def test_where_the_fault_is_stands_beside_where_the_error_shows(runs: RunsFile) -> None:
    found = row(tables.coupling_table(runs.runs), "S1 fragile")

    assert found["fault in"] == "`model-1`, weight update"
    assert found["error shows in"] == "`rollout-0`, weight update"
    assert found["elsewhere?"] == "other part"
    assert (found["hops"], found["files"], found["lines"]) == ("3", "5", "1,430")


def test_who_believes_the_last_error_is_told_from_the_diagnosis(runs: RunsFile) -> None:
    table = tables.diagnosis_table(runs.runs, scale=600.0)

    assert row(table, "S1 fragile")["last error blames"] == "✗ `rollout-0` network delay"
    assert row(table, "S1 fragile")["error after"] == "6.3 s → 60 min"
    assert row(table, "S1 ours")["diagnosis says"] == "✓ `model-1` network delay"
    assert row(table, "S1 ours")["after"] == "3.1 s"
    assert row(table, "S1 ours")["after first effect"] == "2.7 s"


def test_amplification_is_the_mean_factor_against_fine_tuning(runs: RunsFile) -> None:
    table = tables.contrast_table(runs.runs)

    assert table is not None
    found = row(table, "S1 ours")
    assert (found["× processes reached"], found["× files"], found["× lines"]) == ("4.0×", "1.7×", "35.8×")
    assert found["amplification"] == "6.2×"


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
    table = tables.contrast_table(weaker)

    assert table is not None
    assert row(table, "S1 ours")["amplification"] == tables.OTHER_FAULT


def test_only_ours_has_a_diagnosis(runs: RunsFile) -> None:
    table = tables.diagnosis_table(runs.runs, scale=600.0)

    assert {row(table, name)["diagnosis says"] for name in ("S1 sft", "S1 fragile")} == {"–"}


def test_without_fine_tuning_there_is_no_contrast(runs: RunsFile) -> None:
    assert tables.contrast_table([run for run in runs.runs if run.profile != "sft"]) is None


def test_what_the_plan_expects_stands_beside_what_was_measured(runs: RunsFile) -> None:
    measured = {(each[0], each[1]): each[2:] for each in tables.expectations_table(runs).rows}

    assert measured["A, S1", "Hops of propagation"][:2] == (
        "2 (train → meta-server → rollout)",
        "3 (train → controller → rollout)",
    )
    assert measured["B, S3", "Masking: from the first effect to the last error"][:2] == (
        "30 s",
        "3.8 s → 31 s",
    )
    assert measured["B, S3", "Log files to read"][1] == "5"
    assert measured["C, S4", "Same fault on SFT"][1] == MISSING


def test_a_value_that_was_not_measured_is_never_made_up(runs: RunsFile) -> None:
    without = [msgspec.structs.replace(run, series={}) for run in runs.runs if run.scenario != "S3"]
    measured = {
        (each[0], each[1]): each[2:]
        for each in tables.expectations_table(msgspec.structs.replace(runs, runs=tuple(without))).rows
    }

    assert measured["B, S3", "Log files to read"][1:] == (MISSING, MISSING)
    assert measured["A, S5", "Delay until the error shows"][1] == MISSING


def test_steps_that_were_completed_before_the_error_are_how_late_it_is(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S5" and run.profile == "fragile")
    assert run.surfaced is not None
    start = run.injected[0].start
    steps = {"timing/step": [(start - 1.0, 1.0), (start + 2.0, 3.0), (run.surfaced.t + 1.0, 3.0)]}

    assert tables.steps_late(msgspec.structs.replace(run, series=steps)) == 1


def test_challenges_are_counted_over_the_scenarios_that_prove_them(runs: RunsFile) -> None:
    table = tables.challenges_table(runs.runs, scale=600.0)

    assert row(table, "A, fragile")["scenarios"] == "S1 · S2 · S5"
    assert row(table, "A, fragile")["misdiagnosed"] == "3 of 3"
    assert row(table, "B, ours")["misdiagnosed"] == "0 of 1"
