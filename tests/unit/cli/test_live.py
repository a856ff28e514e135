from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kintsugi.cli.closing import accuracy_text, print_closing
from kintsugi.cli.live import LiveView
from kintsugi.cli.output import console
from kintsugi.cli.progress import RunProgress, StepProgress, duration, seconds_text
from kintsugi.config.schema import AlgorithmSection, Config, WarmupSection
from kintsugi.learning_health import LearningFinding, LearningKind, LearningReport
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.summary import IncidentLine, Summary
from kintsugi.runtime.counters import SAVE_BYTES, SAVED_BYTES
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import Alert, EventLog, Note
from kintsugi.telemetry.process_reports import Activity, ProcessReport, ProcessReports, write_processes

CONFIG = Config(name="mine", warmup=WarmupSection(steps=2), algorithm=AlgorithmSection(steps=8))
STEP = {
    "timing/generate": 3.0,
    "timing/reward": 1.0,
    "timing/train": 3.0,
    "timing/commit": 1.0,
    "timing/weights": 1.0,
}

SUMMARY = Summary(
    outcome="finished",
    name="mine",
    seed=0,
    run_dir="runs/mine-1",
    steps=10,
    wall_s=61.0,
    samples_trained=1234,
    tokens_generated=1000,
    tokens_trained=2000,
    reward_first=0.1,
    reward_last=0.9,
    eval_accuracy_before=0.2,
    eval_accuracy_after=0.9,
    weights_sha256="ab" * 32,
    weight_version=5,
    processes={},
    timing={"generate": 30.0, "train": 20.0},
    logprob_abs_diff_mean=None,
)


def line(step: int, **values: float) -> dict[str, float | None]:
    return {"step": step, "time": 10.0 * step, "tokens_per_s": 100.0, "timing/step": 9.0, **STEP, **values}


def test_the_end_is_estimated_from_the_time_between_steps() -> None:
    progress = StepProgress(CONFIG)
    assert progress.eta_s() is None
    progress.take(line(1))
    assert progress.eta_s() == 9.0 * 9  # Its own account stands for the time before the first step.
    progress.take(line(2))
    progress.take(line(3))
    assert progress.eta_s() == pytest.approx((9.0 + 10.0 + 10.0) / 3 * 7)
    assert progress.stage == "grpo"


def test_a_pause_before_a_resume_is_not_part_of_the_estimate() -> None:
    progress = StepProgress(CONFIG)
    progress.take(line(1))
    progress.take({**line(2), "time": 20_000.0})
    progress.take({**line(3), "time": 20_010.0})
    assert progress.eta_s() == pytest.approx((9.0 + 9.0 + 10.0) / 3 * 7)


def test_a_stage_that_samples_nothing_shows_its_loss_instead_of_a_reward(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, warmup=None, algorithm=AlgorithmSection(name="sft", steps=8))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(3, loss=1.25)) + "\n")
    assert RunProgress(config, run_dir=tmp_path).results()["loss"] == "1.250"
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(3, loss=1.25, **{"reward/mean": 0.5})) + "\n")
    shown = RunProgress(CONFIG, run_dir=tmp_path).results()
    assert shown["reward"] == "0.500" and "loss" not in shown


def report(
    phase: str, *, wall: float, since: float, gauges: dict[str, float] | None = None, **counted: Any
) -> ProcessReports:
    rank = ProcessReport(
        process="model-0", role="model", host="host-0", pid=1, incarnation="1", status="live",
        gauges=gauges or {},
    )  # fmt: skip
    return ProcessReports(wall, (rank,), phase, "normal", Activity(since=since, **counted))


@pytest.mark.parametrize(
    ("phase", "counted", "gauges", "text"),
    [
        ("starting", {"done": 7, "total": 9, "unit": "processes"}, {}, "starting 7/9 processes, 3.0 s"),
        ("collecting", {"done": 300, "total": 1000, "unit": "groups"}, {}, "collecting 300/1000 rows, 3.0 s"),
        ("evaluating", {"done": 1, "total": 20, "unit": "problems"}, {}, "evaluating 1/20 problems, 3.0 s"),
        ("training", {}, {}, "training, 3.0 s"),
        (
            "saving",
            {"saving_step": 25},
            {SAVED_BYTES: 4.1e9, SAVE_BYTES: 21e9},
            "saving step 25: 4.1 of 21.0 GB, 3.0 s",
        ),
        (
            "training",
            {"saving_step": 25},
            {SAVED_BYTES: 12e6, SAVE_BYTES: 480e6},
            "training, 3.0 s; saving step 25: 12 of 480 MB",
        ),
    ],
)
def test_the_view_says_what_is_done_now_and_since_when(
    tmp_path: Path, phase: str, counted: dict[str, Any], gauges: dict[str, float], text: str
) -> None:
    clock = VirtualClock()
    progress = RunProgress(CONFIG, run_dir=tmp_path, clock=clock)
    assert progress.activity() == "starting the master, 0 s"
    write_processes(
        tmp_path, report(phase, wall=clock.wall(), since=clock.wall() - 3.0, gauges=gauges, **counted)
    )
    progress.read()
    assert progress.activity() == text
    clock.advance(60.0)
    assert progress.activity() == f"{phase}; no report of the master for 60 s"


def test_the_report_of_an_earlier_session_is_not_shown(tmp_path: Path) -> None:
    clock = VirtualClock()
    write_processes(tmp_path, report("training", wall=clock.wall() - 100.0, since=0.0))
    progress = RunProgress(CONFIG, run_dir=tmp_path, clock=clock)
    progress.read()
    assert progress.activity().startswith("starting the master")


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_block_fits_the_terminal_and_breaks_no_word(tmp_path: Path, width: int) -> None:
    clock, output = VirtualClock(), io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, color_system=None)
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps(line(3, **{"reward/mean": 0.5, "timing/evaluate": 1.0, "timing/data": 2.0})) + "\n"
    )
    with LiveView(CONFIG, run_dir=tmp_path, console=console, clock=clock):
        pass
    shown = [each.rstrip() for each in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).splitlines()]
    assert max(map(len, shown[1:])) <= width
    assert any(each.startswith("step 3/10") for each in shown)
    for share in ("data 17%", "generate 25%", "train 33%", "other 8%"):
        assert any(share in each.replace("\u00a0", " ") for each in shown), (share, shown)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stop_request_is_acknowledged_at_once_with_what_a_second_one_does(
    tmp_path: Path, terminal: bool
) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    with LiveView(CONFIG, run_dir=tmp_path, console=console, clock=VirtualClock()) as display:
        display.acknowledge_stop()
        assert "stopping after this step, then saving a checkpoint; a second Ctrl-C ends it at once" in (
            output.getvalue()
        )
        display.acknowledge_stop()
    assert "ending at once, without a checkpoint" in output.getvalue()


def test_an_incident_is_one_short_line(tmp_path: Path) -> None:
    output = io.StringIO()
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0")
    console = Console(file=output, force_terminal=True, width=60)
    with LiveView(CONFIG, run_dir=tmp_path, console=console, clock=VirtualClock()):
        log.emit(
            Alert("model-1 (pid 7) was lost: killed by SIGKILL. model: training stops until it is replaced")
        )
    log.close()
    assert "model-1 (pid 7) was lost: killed by SIGKILL\n" in re.sub(
        r"\x1b\[[0-9;?]*m", "", output.getvalue()
    )
    assert "training stops" not in output.getvalue()


class Pipe(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_output_that_is_no_terminal_is_plain_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert not console(Pipe(is_terminal=False)).is_terminal
    assert console(Pipe(is_terminal=True)).is_terminal
    monkeypatch.setenv("TERM", "dumb")
    assert not console(Pipe(is_terminal=True)).is_terminal


def test_what_was_not_measured_has_no_number() -> None:
    first = {"step": 0.0, "eval/accuracy": 0.5, "eval/problems": 100.0}
    stopped = msgspec.structs.replace(
        SUMMARY, outcome="stopped", evaluations=(first,), eval_accuracy_after=0.5
    )
    assert "not measured since step 0" in printed(stopped)
    unscored = {**first, "eval/unscored": 100.0}
    failed = msgspec.structs.replace(SUMMARY, outcome="failed", evaluations=(unscored,))
    assert "not measured: no answer could be scored" in printed(failed) and "20.0%" not in printed(failed)


def test_the_closing_of_a_rollout_speaks_of_samples_that_were_scored() -> None:
    text = printed(msgspec.structs.replace(SUMMARY, algorithm="rollout"))
    assert "samples scored" in text and "trained" not in text and "weights" not in text
    assert "data.source=runs/mine-1/rollouts" in text


def test_time_is_shared_out_by_what_a_person_asks_about() -> None:
    progress = StepProgress(CONFIG)
    progress.take(line(1, **{"timing/evaluate": 1.0}))
    assert progress.shares() == {"generate": 0.3, "reward": 0.1, "train": 0.4, "weights": 0.1, "other": 0.1}


def test_an_evaluation_is_no_step() -> None:
    progress = StepProgress(CONFIG)
    progress.take(line(1, **{"reward/mean": 0.5}))
    progress.take({"step": 2, "time": 30.0, "eval/accuracy": 0.25})
    assert (progress.step, progress.accuracy, progress.reward) == (1, 0.25, 0.5)


def shown(display_width: int, *, terminal: bool, folder: Path) -> str:
    clock = VirtualClock()
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=display_width)
    with LiveView(CONFIG, run_dir=folder, console=console, clock=clock) as display:
        for step in range(1, 11):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line(step, **{"reward/mean": step / 10})) + "\n")
            for _ in range(10):
                clock.advance(0.3)
                display.tick()
    return output.getvalue()


def test_without_a_terminal_a_plain_line_comes_every_few_seconds(tmp_path: Path) -> None:
    lines = shown(80, terminal=False, folder=tmp_path).splitlines()
    assert "\x1b" not in "".join(lines)
    assert 4 <= len(lines) <= 8
    assert "step 10/10" in lines[-1] and "reward 1.000" in lines[-1] and "generate 33%" in lines[-1]


def test_on_a_terminal_progress_is_redrawn_in_place(tmp_path: Path) -> None:
    text = shown(80, terminal=True, folder=tmp_path)
    assert "\x1b[" in text and "10/10" in text and "tokens/s" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_loss_and_its_recovery_are_printed_immediately_and_old_ones_are_not(
    tmp_path: Path, terminal: bool
) -> None:
    clock, output = VirtualClock(), io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=80)
    log = EventLog(RunFolder(tmp_path).events_file("master-0"), process="master-0")
    log.emit(Alert("of an earlier session"))
    with LiveView(CONFIG, run_dir=tmp_path, console=console, clock=clock) as display:
        log.emit(Alert("model-1 was lost; its last words: Traceback:\n  f()\nKeyError: 'x'"))
        log.emit(Note("nothing to look at"))
        clock.advance(0.3)
        display.tick()
        plain = re.sub(r"\x1b\[[0-9;?]*m", "", output.getvalue())
        assert "model-1 was lost: KeyError: 'x'\n" in plain
        log.emit(Alert("recovered by recover: model-1 was lost", {"total": 0.25, "start": 0.1}))
        log.emit(Alert("recovered by continue: master-0 was lost", {"total": 0.0, "start": 0.0}))
    log.close()
    text = output.getvalue()
    assert text.count("recovered in 250 ms: model-1 was lost") == 1
    assert "recovered: master-0 was lost" in text
    assert "earlier session" not in text and "nothing to look at" not in text


def write_findings(folder: Path, *kinds: LearningKind) -> None:
    """Append a report with these findings, as the watcher does when they change."""
    found = tuple(
        LearningFinding(
            kind=kind,
            since_step=3,
            step=5,
            confidence=0.9,
            summary="no group has different rewards",
            evidence=(),
            advice="",
        )
        for kind in kinds
    )
    report = LearningReport(run=str(folder), step=5, time=0.0, findings=found)
    with RunFolder(folder).learning_file.open("ab") as file:
        file.write(msgspec.json.encode(report) + b"\n")


def test_a_finding_about_learning_is_printed_once_in_plain_output_and_its_end_too(tmp_path: Path) -> None:
    clock, output = VirtualClock(), io.StringIO()
    screen = Console(file=output, force_terminal=False, width=80)
    with LiveView(CONFIG, run_dir=tmp_path, console=screen, clock=clock) as display:
        write_findings(tmp_path, LearningKind.EQUAL_REWARDS)
        for _ in range(40):
            clock.advance(0.3)
            display.tick()
        write_findings(tmp_path)
        clock.advance(0.3)
        display.tick()
    text = output.getvalue()
    assert text.count("learning: equal_rewards since step 3: no group has different rewards") == 1
    assert text.count("learning:") == 2 and "learning: nothing unusual any more" in text


def test_a_finding_about_learning_is_a_row_of_the_block(tmp_path: Path) -> None:
    assert "equal_rewards" not in shown(80, terminal=True, folder=tmp_path)
    write_findings(tmp_path, LearningKind.EQUAL_REWARDS)
    assert "equal_rewards since step 3" in shown(80, terminal=True, folder=tmp_path)


def printed(summary: Summary, *, config: Config = CONFIG) -> str:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        print_closing(console, summary, config=config, folder=Path("runs/mine-1"))
    return capture.get()


def test_the_closing_says_what_came_out_and_what_to_try_next() -> None:
    text = printed(SUMMARY)
    for part in (
        "20.0%",
        "90.0%",
        "500 problems",
        "1,234",
        "generate 30.0 s",
        "runs/mine-1",
        "kintsugi export",
    ):
        assert part in text


def test_the_closing_says_why_samples_were_not_trained() -> None:
    summary = msgspec.structs.replace(SUMMARY, samples_filtered={"all rewards are equal": 1200})
    text = printed(summary)
    assert "samples filtered" in text and "1,200: all rewards are equal" in text
    assert "quarantined" not in text


def test_a_reward_model_is_judged_by_the_pairs_it_ranks() -> None:
    config = msgspec.structs.replace(CONFIG, algorithm=AlgorithmSection(name="reward_model"))
    assert "held-out pairs ranked right after" in printed(SUMMARY, config=config)


def test_the_closing_says_how_many_incidents_were_resolved_and_how_to_see_them() -> None:
    mended = IncidentLine(1, "killed by SIGKILL", "model-1", "recover", 7, ("model-1",), 1.25)
    open_one = msgspec.structs.replace(mended, incident=2, seconds=None)
    assert "incidents" not in printed(SUMMARY)
    text = printed(msgspec.structs.replace(SUMMARY, incidents=(mended,)))
    assert "incidents: 1 recovered, 1.2 s lost; " in text and "kintsugi incidents runs/mine-1\n" in text
    text = printed(msgspec.structs.replace(SUMMARY, incidents=(mended, open_one), incidents_open=1))
    assert "1 recovered, 1 unresolved, 1.2 s lost" in text


@pytest.mark.parametrize("width", [60, 80])
def test_findings_of_the_closing_are_broken_between_words(tmp_path: Path, width: int) -> None:
    write_findings(tmp_path, LearningKind.EQUAL_REWARDS)
    output = io.StringIO()
    screen = Console(file=output, force_terminal=True, width=width)
    print_closing(screen, SUMMARY, config=CONFIG, folder=tmp_path)
    _, _, after = output.getvalue().partition("learning: ")
    finding, _, _ = after.partition("try next:")
    words = finding.split()
    assert all(word in words for word in ("rewards;", "details:", "diagnose", "--learning"))
    *lines, _ = finding.splitlines()
    assert all(len(line) <= width for line in lines if " " in line)


def test_a_run_that_did_not_finish_can_be_resumed() -> None:
    unfinished = msgspec.structs.replace(
        SUMMARY, outcome="stopped", eval_accuracy_after=None, reward_last=None
    )
    text = printed(unfinished)
    assert "kintsugi resume runs/mine-1" in text and "not measured" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3723, "1:02:03"), (59.7, "1:00")]
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_accuracy_comes_with_its_interval() -> None:
    assert accuracy_text(0.9, count=500) == "90.0% (87.1% – 92.3% at 95 %, 500 problems)"


@pytest.mark.parametrize(("seconds", "text"), [(0.24, "240 ms"), (1.26, "1.3 s"), (65.4, "1:05")])
def test_short_times_keep_their_precision(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_the_start_of_a_run_is_no_part_of_the_remaining_time() -> None:
    progress = StepProgress(CONFIG)
    progress.take(line(1, **{"timing/start": 100.0}))
    assert progress.eta_s() == 9.0 * 9 and "other" not in progress.shares()
