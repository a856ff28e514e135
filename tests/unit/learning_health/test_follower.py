"""Reading of a run folder, and what the watcher makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.config.recipe import dump
from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.diagnosis.learning_watch import LearningWatch
from kintsugi.errors import UserError
from kintsugi.learning_health import (
    LearningFollower,
    LearningKind,
    assess_learning,
    learning_lines,
    recorded_findings,
)
from kintsugi.learning_health.format import format_report
from kintsugi.learning_health.sample_figures import figures_of
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, EventLog, read_events
from kintsugi.telemetry.step_metrics import MetricsWriter, SampleRecord, SamplesWriter
from kintsugi.types import FinishReason, SampleMeta, SampleText


class RecordedRun:
    """A run folder with the files that a master writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = Config(name="test", algorithm=AlgorithmSection(name="grpo", steps=40))
        dump(config, RunFolder(folder).config_file)
        self._metrics, self._samples = MetricsWriter(folder), SamplesWriter(folder)

    def metrics(self, step: int, *, equal: bool) -> None:
        reward = 0.0 if equal else 0.2 + 0.01 * step
        values = {"reward/mean": reward, "frac_reward_zero_std": float(equal), "entropy": 1.0}
        self._metrics.write(step, {**values, "grad_norm": 0.5, "update_ratio": 1e-3, "skipped": 0.0})

    def samples(self, step: int, *, equal: bool) -> None:
        metas = [
            SampleMeta(
                f"t{step}.{group}/{each}",
                f"t{step}.{group}",
                9,
                3,
                0.0 if equal else float(each),
                {"exact": 0.0},
                FinishReason.EOS,
                step - 1,
                "rollout-0",
                "",
            )
            for group in range(4)
            for each in range(2)
        ]
        texts = {meta.key: SampleText(f"{meta.ticket}=", "x", "12") for meta in metas}
        self._samples.write(
            step, metas, texts=texts, advantages={meta.key: meta.reward - 0.5 for meta in metas}
        )

    def step(self, step: int, *, equal: bool = False) -> None:
        self.metrics(step, equal=equal)
        self.samples(step, equal=equal)

    def truncate_after(self, step: int) -> None:
        self._metrics.truncate_after(step)
        self._samples.truncate_after(step)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    recorded = RecordedRun(tmp_path)
    yield recorded
    recorded.close()


def test_a_healthy_run_has_no_finding_and_says_why(run: RecordedRun) -> None:
    for step in range(1, 13):
        run.step(step)
    report = assess_learning(run.folder)
    assert (report.step, report.findings) == (12, ())
    assert "nothing unusual in steps 1–12 of stage grpo" in format_report(report)


def test_a_finding_has_its_first_step_evidence_and_advice(run: RecordedRun) -> None:
    for step in range(1, 10):
        run.step(step, equal=step > 6)
    (found,) = assess_learning(run.folder).findings
    assert (found.kind, found.since_step) == (LearningKind.EQUAL_REWARDS, 7)
    text = format_report(assess_learning(run.folder))
    assert all(word in text for word in ("since    step 7", "evidence step 9", "do       "))


def test_a_step_is_judged_when_its_samples_are_written(run: RecordedRun) -> None:
    follower = LearningFollower(run.folder)
    run.metrics(1, equal=False)
    assert follower.look().step == 0
    run.samples(1, equal=False)
    assert follower.look().step == 1
    assert follower.histories[0].steps[0].samples is not None


def test_steps_that_were_rolled_back_are_forgotten(run: RecordedRun) -> None:
    follower = LearningFollower(run.folder)
    for step in range(1, 9):
        run.step(step, equal=step > 4)
    assert follower.look().findings
    run.truncate_after(4)
    run.step(5)
    report = follower.look()
    assert (report.step, report.findings) == (5, ())
    assert [each.step for each in follower.histories[0].steps] == [1, 2, 3, 4, 5]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a run folder"):
        assess_learning(tmp_path)


def test_the_watcher_records_and_reports_a_finding_once_and_its_end(run: RecordedRun) -> None:
    log = EventLog(RunFolder(run.folder).events_file("watcher-0"), process="watcher-0")
    watch = LearningWatch(run.folder, log=log)
    assert learning_lines(run.folder) == []
    for step in range(1, 8):
        run.step(step, equal=step > 1)
        watch.look()
    (line,) = learning_lines(run.folder)
    assert line.startswith("equal_rewards since step 2: ")
    again = LearningWatch(run.folder, log=log)
    again.look()
    run.step(8)
    again.look()
    assert learning_lines(run.folder) == []
    report = recorded_findings(run.folder)
    assert report is not None and report.step == 8
    watch.close()
    again.close()
    log.close()
    events = [record.event for record in read_events(run.folder, process="watcher-0")]
    alerts = [event for event in events if isinstance(event, Alert)]
    assert [alert.values["since_step"] for alert in alerts] == [2.0]


def record(ticket: str, reward: float, *, completion: str, advantage: float) -> SampleRecord:
    return SampleRecord(
        1,
        ticket,
        0,
        0,
        f"{ticket}:",
        completion,
        reward,
        {"r": reward},
        FinishReason.EOS,
        advantage,
        f"#### {ticket}",
    )


def test_figures_of_samples_tell_answers_from_chance_and_signs_of_advantages() -> None:
    found = figures_of(
        [
            record("17", 1.0, completion="it is 17", advantage=-1.0),
            record("17", 0.0, completion="23", advantage=1.0),
            record("23", 0.0, completion="\N{REPLACEMENT CHARACTER}", advantage=0.0),
        ]
    )
    assert found is not None
    assert (found.with_answer, found.answered, found.answered_by_chance) == (3, 1, 1)
    assert (found.leaked, found.leaked_by_chance, found.garbled) == (3, 0, 1)
    assert found.agreement == pytest.approx(-1.0)
