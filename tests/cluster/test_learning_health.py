"""A learning fault in a real run: its watcher finds it while the run goes on, and every view says so; a healthy run
that differs in its reward only is silent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from kintsugi.cli.progress import RunProgress
from kintsugi.config.recipe import load_config
from kintsugi.learning_health import LearningKind, recorded_findings
from kintsugi.page.run_reader import RunReader
from kintsugi.telemetry.events import Alert, read_events
from tests.cluster.real_runs import RECIPE, Run, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FAULT = "gated_rewards.constant"
STEPS = ("warmup=null", "algorithm.steps=6", "eval.every=0", "checkpoint.every=0")
LOOKED_AT = 4
"""Step after which the run stands still; three steps show that rewards are equal."""


class Watched:
    """A run, and what was said about it while it stood still."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.live: dict[str, str] = {}
        self.output = ""


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    run = Run(tmp_path_factory.mktemp("constant") / "run")
    try:
        watched = Watched(run)
        run.start(f"algorithm.reward=[{FAULT}]", *STEPS, gates=(LOOKED_AT,))
        run.wait_at(LOOKED_AT)
        until(lambda: recorded_findings(run.run_dir) is not None, "a finding of the watcher")
        config = load_config(run.run_dir / "config.yaml")
        watched.live = dict(RunProgress(config, run_dir=run.run_dir).rows())
        run.let_through(LOOKED_AT)
        assert run.launcher is not None
        watched.output, errors = run.launcher.communicate(timeout=60)
        assert run.launcher.returncode == 0, errors
        yield watched
    finally:
        run.close()


def alerts(run: Run) -> list[str]:
    events = [record.event for record in read_events(run.run_dir, process="watcher-0")]
    return [
        each.message for each in events if isinstance(each, Alert) and each.message.startswith("learning")
    ]


def test_a_constant_reward_is_found_while_the_run_goes_on(constant: Watched) -> None:
    """The fault fired: every reward of every step is the same."""
    rewards = {line["reward"] for line in constant.run.lines("samples.jsonl")}
    assert rewards == {0.7}
    assert constant.live["learning"].startswith("equal_rewards since step 1: ")


def test_the_alert_is_raised_once(constant: Watched) -> None:
    (alert,) = alerts(constant.run)
    assert alert.startswith("learning: equal_rewards since step 1: ") and "every sample earns 0.7" in alert


def test_plain_output_and_the_closing_say_it(constant: Watched) -> None:
    said = [line for line in constant.output.splitlines() if "learning: equal_rewards" in line]
    assert said and "diagnose" in said[-1]


def test_commands_and_page_say_the_same(constant: Watched) -> None:
    folder = constant.run.run_dir
    code, said = constant.run.ask("diagnose", str(folder), "--learning", "--json")
    assert code == 0, said
    (finding,) = json.loads(said)["findings"]
    assert (finding["kind"], finding["since_step"]) == (LearningKind.EQUAL_REWARDS, 1)
    (shown,) = RunReader(folder).learning().findings
    assert (shown.kind, shown.since_step) == (finding["kind"], 1)
    code, status = constant.run.ask("status", str(folder))
    assert code == 0 and "learning: equal_rewards" in status


def test_a_healthy_twin_is_silent_everywhere(undisturbed: Run) -> None:
    """The undisturbed run of all cluster tests has the same model, data and batch, and a reward that varies."""
    folder = undisturbed.run_dir
    assert (
        len({line["reward"] for line in undisturbed.lines("samples.jsonl") if line["reward_components"]}) > 1
    )
    assert recorded_findings(folder) is None and alerts(undisturbed) == []
    code, said = undisturbed.ask("diagnose", str(folder), "--learning")
    assert code == 0 and "nothing to report: nothing unusual" in said
    code, status = undisturbed.ask("status", str(folder))
    assert code == 0 and "learning:" not in status
    assert RunReader(folder).learning().findings == ()


def test_samples_before_training_are_shown_with_what_they_earn(undisturbed: Run) -> None:
    code, said = undisturbed.ask("check", str(RECIPE), "--samples", "4", "warmup=null")
    assert code == 0, said
    assert "samples before training, 4 with the initial weights" in said
    assert len(re.findall(r"^  reward [0-9.]+: '[0-9+=]+' → ", said, re.MULTILINE)) == 4
    assert "the weights are random" in said
