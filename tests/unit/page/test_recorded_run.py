"""Answers about a recorded run with faults, and about ends of runs."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from kintsugi.learning_health import LearningEvidence, LearningFinding, LearningKind, LearningReport
from kintsugi.page.demo import FAULTS, SLOW
from kintsugi.page.feed import RunFeed
from kintsugi.page.logs import LogFilter
from kintsugi.page.run_reader import RunReader
from kintsugi.page.schema import LogLine
from tests.unit.page.made_runs import asked, make_run
from tests.unit.run_folder.test_reader import SUMMARY


@pytest.fixture(scope="module")
def faults(recorded: Path) -> RunReader:
    reader = RunReader(recorded / FAULTS)
    while reader.read_journal():
        pass
    return reader


def test_the_header_has_configuration_hosts_and_roles(faults: RunReader) -> None:
    header = faults.header()
    assert header.state == "finished"
    assert header.hosts == ("host-0", "host-1")
    assert header.roles["model"] >= 2
    settings = {setting.key: setting for setting in header.configuration}
    assert settings["eval.every"].origin == "command line"
    assert header.end is not None and header.end.resume == ""


def test_curves_are_thinned_and_marked(faults: RunReader) -> None:
    whole = faults.metrics(keys=["reward/mean"], points=2000)
    few = faults.metrics(keys=["reward/mean"], points=10)
    assert whole.thinned == 1 and len(whole.steps) == whole.steps[-1]
    assert len(few.steps) <= 10 and few.steps[-1] == whole.steps[-1]
    assert {mark.kind for mark in whole.marks} >= {"incident", "evaluation"}
    assert "loss" in whole.keys and "loss" not in whole.series


def test_every_incident_has_a_story_in_order_and_a_cause(faults: RunReader) -> None:
    rows = faults.incidents().incidents
    assert len(rows) >= 3
    for row in rows:
        detail = faults.incident(row.id)
        assert detail is not None and detail.state == "recovered"
        kinds = [line.kind for line in detail.story]
        assert {"noticed", "resumed"} <= set(kinds)
        times = [line.time for line in detail.story if line.time is not None]
        assert times == sorted(times)
        assert detail.diagnosis is not None
        assert detail.diagnosis.evidence and detail.diagnosis.path
    assert faults.incident(99) is None


def test_a_killed_process_is_named_as_killed(faults: RunReader) -> None:
    titles = [row.title for row in faults.incidents().incidents]
    assert any("model-1" in title and "SIGKILL" in title for title in titles)


def test_lanes_show_training_generation_and_load(faults: RunReader) -> None:
    last = faults.timeline(since=None, until=None, points=500)
    whole = faults.timeline(since=last.begin, until=last.end, points=500)
    lanes = {lane.process: lane for lane in whole.lanes}
    assert "train" in {span.kind for span in lanes["model-0"].spans}
    assert "generate" in {span.kind for span in lanes["server-0"].spans}
    assert {"train", "generate", "weights"} <= {span.kind for span in lanes["master-0"].spans}
    for lane in whole.lanes:
        assert all(whole.since <= span.since <= span.until <= whole.until for span in lane.spans)
    assert any(value is not None for value in whole.readings["host-0"].cpu)
    assert whole.steps and "train" in whole.steps[-1].stages
    assert whole.heat is None


def test_many_processes_are_a_heat_map_of_their_busy_share(recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "wide"
    shutil.copytree(recorded / SLOW, run)
    events = run / "events"
    for number in range(2, 40):
        shutil.copy(events / "model-0.jsonl", events / f"model-{number}.jsonl")
        shutil.copy(
            recorded / FAULTS / "events" / "model-0.spans.jsonl",
            events / f"model-{number}.spans.jsonl",
        )
    reader = RunReader(run)
    last = RunReader(recorded / FAULTS).timeline(since=None, until=None, points=500)
    heat = reader.timeline(since=last.since, until=last.until, points=500).heat
    assert heat is not None and {f"model-{number}" for number in range(2, 40)} <= set(heat.processes)
    busy = heat.busy[heat.processes.index("model-2")]
    trained = sum(
        span.until - span.since
        for lane in last.lanes
        if lane.process == "model-0"
        for span in lane.spans
        if span.kind != "wait"
    )
    assert sum(busy) / len(busy) == pytest.approx(trained / (last.until - last.since), abs=0.05)
    assert "train" in heat.kinds[heat.processes.index("model-2")]


def test_health_of_an_ended_run_says_that_its_processes_ended(faults: RunReader) -> None:
    health = faults.health()
    processes = {each.process: each for host in health.hosts for each in host.processes}
    assert not health.running and health.waits == ()
    assert processes["model-1"].restarts == 1
    assert {each.state for each in processes.values()} == {"ended"}


def test_service_levels_count_the_time_that_was_lost(faults: RunReader) -> None:
    levels = faults.service_levels()
    assert levels.lost_s is not None and levels.lost_s > 0
    assert levels.wall_s is not None and levels.wall_s > levels.lost_s
    assert levels.effective_ratio is not None and 0 < levels.effective_ratio < 1
    assert levels.incidents == levels.recovered
    assert {target.name for target in levels.targets} == {
        "effective_ratio",
        "success_rate",
        "mean_recovery_s",
    }


def test_logs_are_paged_backwards_without_gaps(faults: RunReader) -> None:
    whole = faults.logs(LogFilter(limit=2000))
    seen: list[LogLine] = []
    cursor = None
    while True:
        page = faults.logs(LogFilter(limit=97, cursor=cursor))
        seen = [*page.lines, *seen]
        cursor = page.next
        if cursor is None:
            break
    assert [line.line for line in seen[-len(whole.lines) :]] == [line.line for line in whole.lines]
    assert len({line.line for line in seen}) == len(seen)
    assert [line.time for line in seen] == sorted(line.time for line in seen)


def test_logs_are_found_by_words_process_and_time(faults: RunReader) -> None:
    found = faults.logs(LogFilter(text="sigkill", limit=500)).lines
    assert found and all("sigkill" in line.text.lower() for line in found)
    assert {line.process for line in faults.logs(LogFilter(process="model", limit=500)).lines} <= {
        "model-0",
        "model-1",
    }
    moment = found[0].time
    near = faults.logs(LogFilter(since=moment - 1, until=moment + 1, limit=500)).lines
    assert near and all(moment - 1 <= line.time <= moment + 1 for line in near)


def test_a_follower_gets_only_what_is_new(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    (run / "logs" / "model-0.log").write_text("first\n")
    reader = RunReader(run)
    before = reader.logs(LogFilter())
    assert [line.text for line in before.lines] == ["first"]
    with (run / "logs" / "model-0.log").open("a") as file:
        file.write("second\n")
    after = reader.logs(LogFilter(follow=before.last))
    assert [line.text for line in after.lines] == ["second"]
    assert reader.logs(LogFilter(follow=after.last)).lines == ()


def test_the_first_look_reports_incidents_that_may_have_begun_after_the_page_was_read(
    faults: RunReader,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        feed = RunFeed(faults, pool=pool, on_samples=lambda _: None)
        changed, fresh = feed._changes()
        assert "incidents" in changed and fresh == []
        assert "incidents" not in feed._changes()[0]


def test_a_log_that_was_put_aside_is_read_before_the_one_that_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    (run / "logs" / "model-0.1.log").write_text("2026-11-18 10:00:00 first\n")
    (run / "logs" / "model-0.log").write_text("2026-11-18 10:00:01 second\n")
    lines = RunReader(run).logs(LogFilter(process="model")).lines
    assert [line.text.rpartition(" ")[2] for line in lines] == ["first", "second"]


def test_an_empty_run_has_an_answer_to_everything(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "empty", steps=0)
    (run / "metrics.jsonl").unlink()
    (run / "samples.jsonl").unlink()
    paths = ("", "/metrics", "/samples", "/timeline", "/health", "/incidents", "/logs", "/service_levels")
    header, metrics, samples, timeline, *_ = asked(
        tmp_path / "runs", *(f"runs/empty{path}" for path in paths)
    )
    assert header["state"] == "interrupted" and header["step"] == 0
    assert metrics["steps"] == [] and metrics["keys"] == []
    assert samples["items"] == [] and samples["total"] == 0
    assert timeline["lanes"] == []


def test_a_dead_run_says_how_it_ended_and_how_to_resume(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "killed")
    failed = make_run(runs / "failed")
    fault = {"kind": "KeyError", "process": "model-0", "message": "exited with code 1"}
    (failed / "summary.json").write_text(json.dumps(SUMMARY | {"outcome": "failed", "faults": [fault]}))
    killed, failure = asked(runs, "runs/killed", "runs/failed")
    assert killed["end"]["outcome"] == "interrupted" and "killed" in killed["end"]["cause"]
    assert killed["end"]["resume"] == f"kintsugi resume {runs / 'killed'}"
    assert failure["end"]["cause"] == "model-0: exited with code 1 (KeyError)"


def test_findings_about_learning_are_those_that_the_watcher_recorded_last(runs: Path) -> None:
    reader = RunReader(runs / "mine-1")
    assert reader.learning().findings == () and reader.row().learning == ()
    found = LearningFinding(
        kind=LearningKind.REWARD_FORMAT,
        since_step=2,
        step=4,
        confidence=0.9,
        summary="12 of 64 completions contain the expected answer, and every one earns 0",
        evidence=(LearningEvidence("samples.jsonl", 4, "the answer is in 12 of 64 completions"),),
        advice="call the reward function by hand",
        leads_to=(LearningKind.EQUAL_REWARDS,),
    )
    report = LearningReport(run="mine-1", step=4, time=1004.0, findings=(found,))
    (reader.folder / "learning.jsonl").write_bytes(msgspec.json.encode(report) + b"\n")
    (shown,) = reader.learning().findings
    assert (shown.kind, shown.since_step, shown.leads_to) == ("reward_format", 2, ("equal_rewards",))
    assert shown.evidence[0].quote == "the answer is in 12 of 64 completions"
    assert reader.header().learning[0].startswith("reward_format since step 2: ")
    with (reader.folder / "learning.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(report, findings=())) + b"\n")
    assert reader.learning().findings == () and reader.row().learning == ()


def test_runs_are_compared_as_by_the_command(recorded: Path) -> None:
    (answer,) = asked(recorded, f"compare?runs={FAULTS},{SLOW}")
    assert [run["id"] for run in answer["runs"]] == [FAULTS, SLOW]
    assert "actor.learning_rate" in {each["key"] for each in answer["differences"]}
    assert answer["paired"][0]["paired"] is True


def test_records_of_a_step_and_the_trace_come_from_the_index(recorded: Path) -> None:
    lines, trace = asked(recorded, f"runs/{SLOW}/logs?request=step:60", f"runs/{SLOW}/trace")
    # A slow machine answers before the index is complete.
    assert lines["lines"] or not lines["indexed"]
    assert trace["traceEvents"]


def test_a_run_of_another_host_runs_as_long_as_its_master_writes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "launcher.json").write_text(
        '{"pid": 7, "start_time": 1, "host_name": "elsewhere", "boot_id": "1"}'
    )
    (run / "processes.json").write_text("{}")
    assert RunReader(run).row().state == "running"
    os.utime(run / "processes.json", (1.0, 1.0))
    assert RunReader(run).row().state == "interrupted"
