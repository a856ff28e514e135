from __future__ import annotations

import json
from pathlib import Path

from kintsugi.control.protocol import RecordStep
from kintsugi.control.records import Records
from kintsugi.errors import Fault, StatesDiverged
from kintsugi.journal.facts import FaultNoted, StepCommitted
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import EventLog, OperationFailed, StateCommitted, read_events
from kintsugi.types import Ticket
from tests.unit.control.driven import CONFIG, scored


def test_the_advantage_of_a_sample_whose_tokens_have_their_own_is_their_mean(tmp_path: Path) -> None:
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0")
    records = Records(tmp_path, log, config=CONFIG, job="job")
    metas = scored(Ticket("ppo:0:0:0", "ppo", 0, 0, 0, 3), version=0).samples
    values = {metas[0].key: {"advantage": 0.5}, metas[1].key: {"mean_advantage": -1.5}, metas[2].key: {}}
    records.step(RecordStep(1, "ppo", metas, {}, values, {"loss": 0.25}, {}, ()), now=0.0)
    records.close()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["advantage"] for line in lines] == [0.5, -1.5, None]
    (figures,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (figures["loss"], figures["advantage/abs_mean"]) == (0.25, 2.0 / 3)


def test_lines_that_can_not_be_cut_off_are_an_alert_and_do_not_keep_a_master_from_taking_over(
    tmp_path: Path,
) -> None:
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0")
    records = Records(tmp_path, log, config=CONFIG, job="job")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    records.truncate_after(0)
    records.close()
    log.close()
    (alert,) = [record.event for record in read_events(tmp_path) if isinstance(record.event, OperationFailed)]
    assert alert.message == f"metrics can not be written, the run goes on without it: {alert.error}"
    assert alert.operation == "metrics" and alert.error.endswith("Is a directory")


def test_the_first_step_that_is_committed_after_a_divergence_is_recorded_with_its_state(
    tmp_path: Path,
) -> None:
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0")
    records = Records(tmp_path, log, config=CONFIG, job="job")

    def committed(step: int) -> StepCommitted:
        return StepCommitted(step=step, state_digest=f"digest {step}", metrics={})

    detail = StatesDiverged("actor_train", {"model-0": "digest 2", "model-1": "other"})
    records.fact(committed(1))
    records.fact(FaultNoted(1, Fault("f", "IntegrityError", "model-1", "differ", 0.0, detail=detail)))
    records.fact(committed(2))
    records.fact(committed(3))
    records.close()
    log.close()
    found = [record.event for record in read_events(tmp_path) if isinstance(record.event, StateCommitted)]
    assert [(event.step, event.state) for event in found] == [(2, "digest 2")]
