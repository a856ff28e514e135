from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cli.export import export_checkpoint
from kintsugi.config.recipe import dump
from kintsugi.config.schema import AlgorithmSection, Config, WarmupSection
from kintsugi.control.records import Records
from kintsugi.errors import Fault, KintsugiError, StorageError, UserError
from kintsugi.journal.facts import CheckpointSaved, Fact, ProcessJoined, ProcessLost, RunEnded
from kintsugi.journal.journal import Journal
from kintsugi.run_folder import reader
from kintsugi.run_folder.creation import remove_unused
from kintsugi.run_folder.incidents import MOST_INCIDENTS, IncidentHistory, IncidentIndex, report_of
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import RunState
from kintsugi.run_folder.summary import FaultLine
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, EventLog, FaultSeen
from kintsugi.types import Peer, Role
from tests.unit.run_folder.test_incidents import OPENED, RECOVERED, folded, many_incidents

CONFIG = Config(name="mine", warmup=WarmupSection(steps=2), algorithm=AlgorithmSection(steps=3))

SUMMARY: dict[str, Any] = {
    "outcome": "finished",
    "name": "mine",
    "seed": 0,
    "run_dir": "runs/mine-1",
    "steps": 5,
    "wall_s": 61.0,
    "samples_trained": 100,
    "tokens_generated": 1000,
    "tokens_trained": 2000,
    "reward_first": 0.1,
    "reward_last": 0.9,
    "eval_accuracy_before": 0.2,
    "eval_accuracy_after": 0.9,
    "weights_sha256": "ab" * 32,
    "weight_version": 5,
    "processes": {"master": [1], "model": [2, 3]},
    "timing": {"generate": 30.0, "train": 20.0},
    "logprob_abs_diff_mean": 1e-7,
    "something_added_later": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine-1"
    folder.mkdir(parents=True)
    dump(CONFIG, folder / "config.yaml")
    return folder


def write_lines(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_a_run_is_found_by_path_or_by_name(folder: Path) -> None:
    assert reader.find_run(str(folder)) == folder
    assert reader.find_run("mine-1", folder=folder.parent) == folder
    with pytest.raises(UserError, match="other: expected a run folder"):
        reader.find_run("other", folder=folder.parent)
    with pytest.raises(UserError, match=r"without config\.yaml"):
        reader.find_run(str(folder.parent))


def test_only_the_folder_of_a_run_that_never_started_is_removed(folder: Path) -> None:
    (folder / "journal").touch()
    remove_unused(folder)
    assert folder.exists()
    (folder / "journal").unlink()
    remove_unused(folder)
    assert not folder.exists()


def test_status_says_how_far_and_how_well(folder: Path) -> None:
    write_lines(
        folder / "metrics.jsonl",
        {"step": 2, "eval/accuracy": 0.2, "eval/problems": 10},
        {"step": 3, "time": 1.0, "reward/mean": 0.5, "grad_norm": None},
        {"step": 4, "time": 2.0, "reward/mean": 0.7},
    )
    status = reader.read_status(folder)
    assert (status.step, status.total_steps, status.stage) == (4, 5, "grpo")
    assert status.metrics["reward/mean"] == 0.7
    assert [line["eval/accuracy"] for line in status.evaluations] == [0.2]


def test_a_new_run_stands_at_its_first_stage(folder: Path) -> None:
    status = reader.read_status(folder)
    assert (status.step, status.stage, status.state) == (0, "warmup", RunState.INTERRUPTED)


@pytest.mark.parametrize("outcome", ["finished", "stopped", "failed"])
def test_the_summary_says_how_a_run_ended(folder: Path, outcome: str) -> None:
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"outcome": outcome}))
    assert reader.read_status(folder).state == outcome


def test_a_run_with_a_living_launcher_is_running(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    reader.write_launcher(folder, pid=os.getpid())
    status = reader.read_status(folder)
    assert (status.state, status.pid) == (RunState.RUNNING, os.getpid())


def test_a_dead_launcher_and_a_reused_number_are_not_the_launcher(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    reader.write_launcher(folder, pid=child.pid)
    assert reader.living_launcher(folder) is not None
    child.communicate(timeout=30)
    assert reader.living_launcher(folder) is None
    reader.write_launcher(folder, pid=os.getpid())
    record = msgspec.json.decode((folder / "launcher.json").read_bytes(), type=reader.Launcher)
    earlier = msgspec.structs.replace(record, start_time=record.start_time - 1)
    (folder / "launcher.json").write_bytes(msgspec.json.encode(earlier))
    assert reader.living_launcher(folder) is None


def test_a_launcher_of_another_host_is_not_judged_from_here(folder: Path) -> None:
    reader.write_launcher(folder, pid=os.getpid())
    record = msgspec.json.decode((folder / "launcher.json").read_bytes(), type=reader.Launcher)
    elsewhere = msgspec.structs.replace(record, host_name="elsewhere")
    (folder / "launcher.json").write_bytes(msgspec.json.encode(elsewhere))
    with pytest.raises(UserError, match="host elsewhere"):
        reader.living_launcher(folder)


def test_metrics_are_read_on_from_where_reading_stopped_and_a_torn_line_waits(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"lo')
    lines, offset = reader.read_metrics(folder)
    assert [line["step"] for line in lines] == [1]
    path.write_bytes(b'{"step":1}\n{"step":2,"loss":0.5}\n')
    lines, offset = reader.read_metrics(folder, offset=offset)
    assert lines == [{"step": 2, "loss": 0.5}]
    path.write_bytes(b'{"step":1}\n')
    assert reader.read_metrics(folder, offset=offset)[0] == [{"step": 1}]


def test_a_damaged_line_costs_that_line(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.0}\nnonsense\n{"step": 2, "loss": 1.0}\n\0\0\n'
    )
    assert [line["step"] for line in reader.read_metrics(folder)[0]] == [1, 2]
    status = reader.read_status(folder)
    assert (status.step, status.metrics["loss"]) == (2, 1.0)


def test_the_status_of_a_long_run_has_its_evaluations_and_the_latest_metrics(folder: Path) -> None:
    lines = [f'{{"step": {step}, "loss": {step}.5}}\n' for step in range(1, 1001)]
    lines[9:9] = ['{"step": 9, "eval/accuracy": 0.25}\n']
    lines += ['{"step": 1000, "eval/accuracy": 0.75}\n'] * 3
    (folder / "metrics.jsonl").write_text("".join(lines))
    status = reader.read_status(folder)
    assert (status.step, status.metrics["loss"], status.metrics["eval/accuracy"]) == (1000, 1000.5, 0.75)
    assert [line["step"] for line in status.evaluations] == [9, 1000, 1000, 1000]


class TestSamples:
    @pytest.fixture(autouse=True)
    def samples(self, folder: Path) -> None:
        common = {
            "ticket": "t",
            "version": 1,
            "reward_components": {"r": 0.0},
            "finish": "eos",
            "advantage": None,
        }
        write_lines(
            folder / "samples.jsonl",
            {"step": 1, "sample": 0, "prompt": "1+1=", "completion": "2", "reward": 1.0, **common},
            {"step": 1, "sample": 1, "prompt": "1+1=", "completion": "3", "reward": 0.0, **common},
            {"step": 2, "sample": 0, "prompt": "2+7=", "completion": "8", "reward": -1.0, **common},
        )

    def chosen(self, folder: Path, **choice: Any) -> list[str]:
        return [record.completion for record in reader.read_samples(folder, **choice)]

    def test_all_are_given_in_order(self, folder: Path) -> None:
        assert self.chosen(folder) == ["2", "3", "8"]

    def test_a_step_a_text_and_the_worst_can_be_asked_for(self, folder: Path) -> None:
        assert self.chosen(folder, step=1) == ["2", "3"]
        assert self.chosen(folder, grep="7=") == ["8"]
        assert self.chosen(folder, grep="3") == ["3"]
        assert self.chosen(folder, worst=2) == ["8", "3"]
        assert self.chosen(folder, worst=1, step=1) == ["3"]

    def test_a_demonstration_has_no_reward_and_is_never_among_the_worst(self, folder: Path) -> None:
        demonstration = {"step": 0, "sample": 0, "prompt": "3+3=", "completion": "6", "reward": 0.0}
        rest = {"ticket": "w", "version": -1, "reward_components": {}, "finish": "eos", "advantage": None}
        write_lines(folder / "samples.jsonl", {**demonstration, **rest})
        assert self.chosen(folder) == ["6"]
        assert self.chosen(folder, worst=1) == []

    def test_a_torn_last_line_is_passed_over(self, folder: Path) -> None:
        with (folder / "samples.jsonl").open("a") as file:
            file.write('{"step": 3')
        assert len(self.chosen(folder)) == 3


def test_a_summary_is_read_back_and_a_damaged_one_named(folder: Path) -> None:
    assert reader.read_summary(folder) is None
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    summary = reader.read_summary(folder)
    assert summary is not None and summary.timing == {"generate": 30.0, "train": 20.0}
    (folder / "summary.json").write_text("{}")
    with pytest.raises(StorageError, match=r"summary\.json"):
        reader.read_summary(folder)


def test_one_unreadable_run_hides_no_other(folder: Path) -> None:
    bad = folder.parent / "bad"
    bad.mkdir()
    (bad / "config.yaml").write_text("colour: red")
    found = dict(reader.list_runs(folder.parent))
    assert isinstance(found[bad], KintsugiError)
    assert isinstance(found[folder], reader.RunStatus)


def test_the_journal_lists_processes_and_checkpoints() -> None:
    def joined(process: str, pid: int) -> ProcessJoined:
        return ProcessJoined(Peer(process, "i", "host-0", "", b""), Role.MODEL, pid)

    fault = Fault("f1", "ProcessDied", "model-0", "killed", 0.0)
    status = reader.summarize_facts(
        [
            joined("model-0", 10),
            joined("model-1", 11),
            ProcessLost("model-0", "i", fault),
            CheckpointSaved(25, "checkpoints/step-000025", "9f"),
            RunEnded("failed", fault),
        ]
    )
    assert status.processes == {"model-1": 11}
    assert status.saved_steps == (25,)


def test_the_last_save_of_a_step_is_its_checkpoint(folder: Path) -> None:
    for name in ("step-000050", "step-000025", "step-000050.1", ".saving-step-000075"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    found = reader.checkpoint_folders(folder)
    assert list(found) == [25, 50]
    assert found[50].name == "step-000050.1"


def test_an_export_needs_a_checkpoint_and_a_free_place(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none yet"):
        export_checkpoint(folder, to=tmp_path / "out")
    (folder / "checkpoints" / "step-000025").mkdir(parents=True)
    with pytest.raises(UserError, match=r"\(25\), got 7"):
        export_checkpoint(folder, to=tmp_path / "out", step=7)
    with pytest.raises(UserError, match="does not exist yet"):
        export_checkpoint(folder, to=tmp_path)
    with pytest.raises(StorageError):
        export_checkpoint(folder, to=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_goes_beside_us_under_the_runs_name_if_no_place_is_given(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "checkpoints" / "step-000025").mkdir(parents=True)
    (tmp_path / "mine-1-step-25").mkdir()
    with pytest.raises(UserError, match="does not exist yet, found mine-1-step-25"):
        export_checkpoint(folder)


FAULT = Fault("f", "StorageError", "master-0", "disk full", 50.0)


def end_in_the_journal(folder: Path) -> None:
    with Journal.create(folder / "journal", owner="test") as journal:
        journal.append([RunEnded("failed", FAULT)])


def end_in_the_events(folder: Path) -> None:
    log = EventLog(
        RunFolder(folder).events_file("master-0"), process="master-0", clock=VirtualClock(wall=50.0)
    )
    log.emit(FaultSeen(FAULT))
    log.close()


@pytest.mark.parametrize("leave_word", [end_in_the_journal, end_in_the_events])
def test_a_session_without_a_summary_still_says_why_it_failed(
    folder: Path, leave_word: Callable[[Path], None]
) -> None:
    assert reader.read_faults(folder, since=49.0) == ()
    leave_word(folder)
    assert reader.read_faults(folder, since=49.0) == (FaultLine("StorageError", "master-0", "disk full"),)
    assert reader.read_faults(folder, since=51.0) == (), "that was an earlier session's"


def test_an_incident_that_is_not_over_is_part_of_the_status() -> None:
    assert reader.summarize_facts(OPENED).incident == report_of(OPENED).incidents[0]
    assert reader.summarize_facts(RECOVERED).incident is None


def test_a_run_without_a_journal_had_no_incident(folder: Path) -> None:
    assert reader.read_incidents(folder).incidents == ()


@pytest.mark.parametrize("last_written", [True, False])
def test_all_incidents_are_read_though_the_state_keeps_the_newest(folder: Path, last_written: bool) -> None:
    index = IncidentIndex()
    records = Records(
        folder, EventLog(folder / "events.jsonl", process="master-0"), config=Config(name="a"), job="a"
    )
    facts = many_incidents(2 * MOST_INCIDENTS)
    half = len(facts) // 4 * 3
    with Journal.create(RunFolder(folder).journal_file, owner="test") as journal:
        for fact in facts[:half]:
            index.take(fact)
            records.old_incidents(index.take_dropped())
        journal.append([folded(index)])
        for fact in facts[half:]:
            index.take(fact)
            journal.append([fact])
            if last_written:  # A killed master leaves this to its successor.
                records.old_incidents(index.take_dropped())
    records.close()
    incidents = reader.read_incidents(folder).incidents
    assert [each.incident for each in incidents] == list(range(1, 2 * MOST_INCIDENTS + 1))
    assert incidents == tuple(_histories(facts))


def _histories(facts: list[Fact]) -> list[IncidentHistory]:
    index, found = IncidentIndex(), []
    for fact in facts:
        index.take(fact)
        found += index.take_dropped()
    return [*found, *index.report().incidents]


def test_alerts_are_read_from_where_the_last_reading_ended(folder: Path) -> None:
    log = EventLog(RunFolder(folder).events_file("master-0"), process="master-0")
    log.emit(Alert("first"))
    first, offset = reader.read_new_alerts(folder, offset=0)
    log.emit(Alert("second"))
    log.close()
    second, _ = reader.read_new_alerts(folder, offset=offset)
    assert [record.event for record in first] == [Alert("first")]
    assert [record.event for record in second] == [Alert("second")]


def test_alerts_at_the_end_of_events_that_were_put_aside_are_read(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).events_file("master-0")

    def emit(*messages: str) -> None:
        log = EventLog(path, process="master-0")
        for message in messages:
            log.emit(Alert(message))
        log.close()

    emit("one", "one again")
    _, offset = reader.read_new_alerts(tmp_path, offset=0)
    emit("two")
    path.rename(path.with_suffix(".1.jsonl"))
    emit("three")
    alerts, offset = reader.read_new_alerts(tmp_path, offset=offset)
    assert [record.event for record in alerts] == [Alert("two"), Alert("three")]
    assert reader.read_new_alerts(tmp_path, offset=offset) == ([], offset)
