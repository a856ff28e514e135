from __future__ import annotations

import msgspec

from kintsugi.lab.report import tables
from kintsugi.lab.report.document import MISSING, ReportTable
from kintsugi.lab.scenarios.records import RunsFile


def row(table: ReportTable, name: str) -> dict[str, str]:
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


def test_only_ours_has_a_diagnosis(runs: RunsFile) -> None:
    table = tables.diagnosis_table(runs.runs, scale=600.0)

    assert {row(table, name)["diagnosis says"] for name in ("S1 sft", "S1 fragile")} == {"–"}


def test_what_the_plan_expects_stands_beside_what_was_measured(runs: RunsFile) -> None:
    measured = {(each[0], each[1]): each[2:] for each in tables.expectations_table(runs).rows}

    assert measured["A, S1", "Hops of propagation"][::2] == (
        "2 (train → meta-server → rollout)",
        "3 (train → host → rollout → controller)",
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

    assert not [name for name, _ in measured if "S3" in name], "a scenario that was not tried has no rows"
    assert measured["A, S5", "Delay until the error shows"][1] == MISSING


def test_how_late_an_error_is_is_counted_in_steps_from_the_one_that_was_hit(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S5" and run.profile == "fragile")
    assert run.surfaced is not None
    late = msgspec.structs.replace(run, surfaced=msgspec.structs.replace(run.surfaced, step=14))

    assert row(tables.coupling_table([late]), "S5 fragile")["steps late"] == "1"
    assert row(tables.coupling_table([run]), "S5 fragile")["steps late"] == "–", "it was not recorded"


def test_a_strength_has_its_unit_and_a_port_is_named(runs: RunsFile) -> None:
    fault = msgspec.structs.replace(runs.runs[0].injected[0], port=8080, amount={"rate": 1e9})
    found = row(
        tables.injections_table([msgspec.structs.replace(runs.runs[0], injected=(fault,))]), "S1 ours"
    )

    assert (found["target"], found["strength"]) == ("`model-1` → port 8080", "rate 1 GB/s")


def test_where_no_error_was_seen_there_is_nothing_to_read(runs: RunsFile) -> None:
    silent = msgspec.structs.replace(runs.runs[0], surfaced=None, log_files=None, log_lines=None)
    found = row(tables.coupling_table([silent]), "S1 ours")

    assert (found["files"], found["lines"]) == ("–", "–")


def test_a_verdict_before_the_first_effect_is_told_as_such(runs: RunsFile) -> None:
    early = msgspec.structs.replace(runs.runs[0], diagnosed_after_s=-0.4)
    found = row(tables.diagnosis_table([early], scale=600.0), "S1 ours")

    assert found["after first effect"] == "0.4 s before"


def test_challenges_are_counted_over_the_scenarios_that_prove_them(runs: RunsFile) -> None:
    table = tables.challenges_table(runs.runs, scale=600.0)

    assert row(table, "A, fragile")["scenarios"] == "S1 · S2 · S5"
    assert row(table, "A, fragile")["misdiagnosed"] == "3 of 3"
    assert row(table, "B, ours")["misdiagnosed"] == "0 of 1"
