"""The harness of `benchmarks/real_model_faults.py`: the order of the faults, the twin, and the table."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.real_model_faults import (
    Row,
    compared,
    digests,
    is_for_a_save,
    left_out,
    name_of,
    parsed,
    planned,
    possible,
    table,
)
from kintsugi.config.recipe import dump, load
from kintsugi.journal.facts import Fact, RolledBack, StepCommitted
from kintsugi.journal.journal import Journal
from kintsugi.lab.campaign.cases import EACH
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.scenarios.experiments import TestbedSpec
from kintsugi.run_folder.layout import RunFolder

CONFIG = load("recipes/grpo_arithmetic.yaml", ["warmup=null", "checkpoint.every=10"]).config


def folder_of(path: Path, states: Sequence[Fact], *changes: str) -> Path:
    path.mkdir()
    config = load("recipes/grpo_arithmetic.yaml", ["warmup=null", *changes]).config
    dump(config, RunFolder(path).config_file)
    with Journal.create(RunFolder(path).journal_file, owner="master-0") as journal:
        journal.append(states)
        journal.sync()
    return path


def test_signals_come_while_their_process_has_work_and_a_full_disk_during_a_save() -> None:
    faults = planned(CONFIG, able=set(Ability), names=[])
    assert len(faults) == len(EACH)
    phases = {name_of(fault): fault.trigger.phase for fault in faults}
    assert phases["kill-model-0"] == phases["stop-agent-0"] == "training"
    assert phases["kill-server-0"] == "collecting"
    assert [name_of(fault) for fault in faults if is_for_a_save(fault)] == ["disk_fill-model-0"]
    assert [name_of(each) for each in planned(CONFIG, able=set(Ability), names=["kill-master-0"])] == [
        "kill-master-0"
    ]


def test_a_fault_that_can_not_be_injected_is_listed_with_the_reason() -> None:
    able, why = possible(TestbedSpec())
    assert Ability.DISK_FILL not in able
    rows = left_out(CONFIG, why, names=["disk_fill-model-0", "no-such-fault"])
    assert [row.fault for row in rows] == ["disk_fill-model-0", "no-such-fault"]
    assert "--disk-mib" in rows[0].why_not
    assert not any(row.fired for row in rows)


def test_steps_that_were_rolled_back_count_with_the_state_that_replaced_them(tmp_path: Path) -> None:
    states: list[Fact] = [
        StepCommitted(1, "a"),
        StepCommitted(2, "b"),
        RolledBack(1, "lost"),
        StepCommitted(2, "c"),
    ]
    assert digests(folder_of(tmp_path / "run", states)) == {1: "a", 2: "c"}


def test_the_first_step_with_another_state_than_the_twin_is_found(tmp_path: Path) -> None:
    ours = folder_of(tmp_path / "ours", [StepCommitted(1, "a"), StepCommitted(2, "b"), StepCommitted(3, "c")])
    same = folder_of(tmp_path / "same", [StepCommitted(1, "a"), StepCommitted(2, "b")])
    other = folder_of(tmp_path / "other", [StepCommitted(1, "a"), StepCommitted(2, "x")], "seed=5")
    assert compared(ours, same) | {"twin": ""} == {
        "twin": "",
        "steps": 3,
        "steps_of_twin": 2,
        "compared": 2,
        "last_compared": 2,
        "different": [],
        "fields_that_differ": [],
    }
    assert compared(ours, other)["different"] == [2]
    assert compared(ours, other)["fields_that_differ"] == ["seed"]
    assert "compared" not in compared(ours, None)
    assert "compared" not in compared(ours, tmp_path / "absent")


def test_the_table_counts_only_faults_that_were_injected(tmp_path: Path) -> None:
    ours = folder_of(tmp_path / "ours", [StepCommitted(1, "a")])
    rows = [
        Row("kill-model-0", fired=True, kind="killed", process="model-0", confidence=0.97, right=True),
        Row("stop-model-0", fired=True, right=False),
        Row("disk_fill-model-0", why_not="no disk"),
    ]
    text = table(rows, {"equal": compared(ours, ours)})
    assert "1 of 2 right at the first answer; 1 not injected." in text
    assert "| killed model-0 97% |" in text
    assert "State digests of 1 steps (up to 1) against the undisturbed run: all equal" in text


def test_two_kinds_of_disk_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["--out", "x", "--disk-mib", "100", "--disk-folder", "y"])
    assert "got both" in capsys.readouterr().err
