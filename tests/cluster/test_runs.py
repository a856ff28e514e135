"""Whole runs that nothing happens to: what they leave, what their bits depend on, what the commands say of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kintsugi.config.recipe import anchored, load, load_config
from kintsugi.config.schema import ClusterSection, resolved
from kintsugi.data.dataset import open_data
from kintsugi.journal.facts import ProcessJoined, VersionCurrent
from kintsugi.run_folder.reader import read_samples, read_verdicts
from kintsugi.simulation.replay import replay
from kintsugi.telemetry.events import ProcessBegan, ProcessEnded, read_events
from kintsugi.types import SegmentSource, StreamSource
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, RECIPE, Run, finished, play

pytestmark = pytest.mark.cluster

SUMMARY = {
    "steps", "wall_s", "samples_trained", "tokens_generated", "tokens_trained", "reward_first", "reward_last",
    "eval_accuracy_before", "eval_accuracy_after", "weights_sha256", "weight_version", "processes", "timing",
    "logprob_abs_diff_mean",
}  # fmt: skip
METRICS = {
    "reward/mean", "reward/odd_digits", "reward_std", "frac_reward_zero_std", "kl", "entropy", "clip_ratio",
    "completions/mean_length", "completions/clipped_ratio", "grad_norm", "timing/generate", "timing/reward",
    "timing/train", "timing/weights", "timing/step", "tokens_per_s", "logprob_abs_diff_mean",
    "reward_length_correlation", "truncated_share", "repetition",
}  # fmt: skip
VARIANTS = {
    "another-seed": ("seed=1",),
    "one-of-each": ("actor.workers=1", "generation.servers=1", "rollout.workers=1"),
    "two-hosts": ("cluster.hosts=2",),
    "two-hosts-one-rank": ("cluster.hosts=2", "actor.workers=1"),
}
QUICK = "two-hosts"
"""The variant of the fast suite; the others are played only when one of them is looked at."""
QUICK_OR_SLOW = [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    def to_its_end(run: Run, *, overrides: tuple[str, ...]) -> None:
        run.start(*overrides)
        run.finish()

    scenarios = {name: partial(to_its_end, overrides=overrides) for name, overrides in VARIANTS.items()}
    played: dict[str, Run | BaseException] = {}

    def of(name: str) -> Run:
        if name not in played:
            alike = {each: scenarios[each] for each in scenarios if (each == QUICK) == (name == QUICK)}
            played.update(play(alike, tmp_path_factory.mktemp("variants")))
        return finished(played[name])

    return of


# What a run leaves.


def test_a_run_ends_with_a_summary_of_all_that_was_asked_for(undisturbed: Run) -> None:
    (text,) = [(undisturbed.run_dir / "summary.json").read_text()]
    assert all(f'"{name}"' in text for name in SUMMARY)
    summary = undisturbed.summary
    assert (summary.outcome, summary.steps, summary.weight_version) == ("finished", LAST_STEP, LAST_STEP)
    assert summary.samples_trained == 3 * 8 + 4 * 8 * 4
    assert summary.reward_first is not None and 0.0 < summary.reward_first < 1.0
    assert summary.logprob_abs_diff_mean is not None and summary.logprob_abs_diff_mean < 1e-4
    assert sum(summary.timing.values()) <= summary.wall_s
    assert summary.weights_sha256 is not None and len(summary.weights_sha256) == 64


def test_the_default_layout_is_at_least_one_launcher_agent_master_manager_and_two_of_each_worker(
    undisturbed: Run,
) -> None:
    processes = undisturbed.summary.processes
    assert {role: len(pids) for role, pids in processes.items()} == {
        "launcher": 1, "agent": 1, "master": 1, "manager": 1, "model": 2, "rollout": 2, "server": 2,
    }  # fmt: skip
    assert len({pid for pids in processes.values() for pid in pids}) == 10
    assert undisturbed.launcher is not None and undisturbed.launcher.pid not in processes["launcher"]


def test_metrics_have_the_names_that_the_field_knows_once_per_step(undisturbed: Run) -> None:
    steps = [line for line in undisturbed.lines("metrics.jsonl") if "eval/accuracy" not in line]
    assert [line["step"] for line in steps] == list(range(1, LAST_STEP + 1))
    for line in steps[3:]:
        assert set(line) >= METRICS, METRICS - set(line)


def test_evaluations_come_before_and_after_the_main_stage_with_wilson_intervals(undisturbed: Run) -> None:
    evaluations = [line for line in undisturbed.lines("metrics.jsonl") if "eval/accuracy" in line]
    assert [line["step"] for line in evaluations] == [3, LAST_STEP]
    for line in evaluations:
        assert line["eval/accuracy_low"] <= line["eval/accuracy"] <= line["eval/accuracy_high"]
        assert {"eval/mean@2", "eval/pass@2"} <= set(line)


def test_samples_say_what_was_trained_on_and_at_which_version(undisturbed: Run) -> None:
    samples = read_samples(undisturbed.run_dir)
    assert Counter(sample.step for sample in samples) == {1: 8, 2: 8, 3: 8, 4: 32, 5: 32, 6: 32, 7: 32}
    for sample in samples:
        if sample.step > 3:
            assert sample.version == sample.step - 1
            assert sample.reward_components == {"odd_digits": sample.reward}
            assert "+" in sample.prompt


def test_every_process_told_its_beginning_and_its_end(undisturbed: Run) -> None:
    records = read_events(undisturbed.run_dir)
    began = {record.stamp.process for record in records if isinstance(record.event, ProcessBegan)}
    ended = {
        record.stamp.process: record.event for record in records if isinstance(record.event, ProcessEnded)
    }
    expected = {"agent": 1, "master": 1, "manager": 1, "model": 2, "rollout": 2, "server": 2, "watcher": 1}
    assert Counter(process.rpartition("-")[0] for process in began) == expected
    assert {process: end.code for process, end in ended.items()} == dict.fromkeys(began, 0)


def test_tensorboard_and_logs_are_there(undisturbed: Run) -> None:
    (events,) = (undisturbed.run_dir / "tensorboard").glob("events.out.tfevents.*")
    assert events.stat().st_size > 1000
    assert not [log for log in (undisturbed.run_dir / "logs").iterdir() if log.stat().st_size], "no warnings"


def test_the_configuration_as_run_loads_back_to_the_same(undisturbed: Run) -> None:
    overrides = [f"run_dir={undisturbed.run_dir}"]
    as_run = load_config(undisturbed.run_dir / "config.yaml")
    config = anchored(load(RECIPE, overrides).config)
    assert msgspec.structs.replace(as_run, algorithm=config.algorithm) == config
    assert resolved(as_run.algorithm) == resolved(config.algorithm)


# Equal bits.


@pytest.mark.slow
def test_another_seed_gives_other_weights(undisturbed: Run, variant: Callable[[str], Run]) -> None:
    assert variant("another-seed").summary.weights_sha256 != undisturbed.summary.weights_sha256


@pytest.mark.parametrize(
    "name",
    [
        "two-hosts",
        pytest.param("one-of-each", marks=pytest.mark.slow),
        pytest.param("two-hosts-one-rank", marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_gives_the_same_weights_wherever_they_are_made(
    undisturbed: Run, variant: Callable[[str], Run], name: str
) -> None:
    assert variant(name).summary.weights_sha256 == undisturbed.summary.weights_sha256


def test_each_host_has_shared_memory_of_its_own(variant: Callable[[str], Run]) -> None:
    for fact in (fact for fact in variant("two-hosts").facts if isinstance(fact, VersionCurrent)):
        segments = {source.host: source.name for source in fact.sources if isinstance(source, SegmentSource)}
        assert segments == {
            "host-0": f"weights/model-0/{fact.version % 2}", "host-1": f"weights/model-1/{fact.version % 2}"
        }  # fmt: skip


@pytest.mark.slow
def test_a_host_without_a_rank_gets_the_weights_by_stream(variant: Callable[[str], Run]) -> None:
    run = variant("two-hosts-one-rank")
    hosts = {fact.peer.process: fact.peer.host for fact in run.facts if isinstance(fact, ProcessJoined)}
    assert (hosts["model-0"], hosts["server-0"], hosts["server-1"]) == ("host-0", "host-1", "host-0")
    current = [fact for fact in run.facts if isinstance(fact, VersionCurrent)]
    assert [fact.version for fact in current] == list(range(LAST_STEP + 1))
    for fact in current:
        assert fact.sources == (
            StreamSource("agent-0", owners=("model-0",), chain=("agent-1",)),
            SegmentSource("host-0", f"weights/model-0/{fact.version % 2}"),
            StreamSource("model-0"),
        )
        assert fact.servers == ("server-0", "server-1")


def test_two_hosts_run_two_agents(variant: Callable[[str], Run]) -> None:
    run = variant("two-hosts")
    assert len(run.summary.processes["agent"]) == 2
    assert load_config(run.run_dir / "config.yaml").cluster == ClusterSection(hosts=2)


# The journal.


@pytest.mark.parametrize("name", QUICK_OR_SLOW)
def test_a_recorded_run_gives_the_same_facts_again(variant: Callable[[str], Run], name: str) -> None:
    again, journaled = replay(variant(name).run_dir)
    assert again == journaled


@pytest.mark.parametrize("name", QUICK_OR_SLOW)
def test_every_sample_is_trained_exactly_once(variant: Callable[[str], Run], name: str) -> None:
    assert_trained_exactly_once(variant(name))


# The commands on a finished run.


def test_resume_of_a_finished_run_says_so(undisturbed: Run) -> None:
    code, output = undisturbed.ask("resume", str(undisturbed.run_dir))
    assert code == 1
    assert "is finished (7 of 7 steps); `kintsugi resume " in output


def test_stop_of_a_finished_run_says_so(undisturbed: Run) -> None:
    code, output = undisturbed.ask("stop", str(undisturbed.run_dir))
    assert code == 2
    assert "is not running (it is finished)" in output


def test_status_and_runs_tell_where_a_run_stands(undisturbed: Run) -> None:
    code, output = undisturbed.ask("status", str(undisturbed.run_dir))
    assert code == 0
    assert "finished" in output and "7" in output
    code, output = undisturbed.ask("runs", str(undisturbed.run_dir.parent))
    assert code == 0
    assert "run" in output and "finished" in output


def test_samples_are_found_by_step_text_and_lowest_reward(undisturbed: Run) -> None:
    samples = read_samples(undisturbed.run_dir)
    code, output = undisturbed.ask("samples", str(undisturbed.run_dir), "--step", "5", "--worst", "3")
    assert code == 0
    assert output.count("step 5  ") == 3
    text = samples[-1].prompt
    code, output = undisturbed.ask("samples", str(undisturbed.run_dir), "--grep", text)
    assert code == 0
    assert output.count(text) >= output.count("reward ") > 0
    code, output = undisturbed.ask("samples", str(undisturbed.run_dir), "--grep", "no such text")
    assert code == 1 and "no such text" in output


@pytest.mark.slow
def test_eval_gives_what_the_run_measured_and_leaves_the_run_as_it_was(undisturbed: Run) -> None:
    before = (undisturbed.run_dir / "summary.json").read_bytes()
    code, output = undisturbed.ask("eval", str(undisturbed.run_dir))
    assert code == 0, output
    measured = undisturbed.summary.eval_accuracy_after
    assert f"{measured:.1%}" in output
    assert (undisturbed.run_dir / "summary.json").read_bytes() == before
    undisturbed.assert_nothing_left()


@pytest.mark.slow
def test_eval_on_other_data_measures_all_of_its_rows_and_only_those(undisturbed: Run, tmp_path: Path) -> None:
    run_dir = undisturbed.run_dir
    before = (run_dir / "summary.json").read_bytes()
    held_out = open_data(load_config(run_dir / "config.yaml"), run_dir=run_dir)
    chosen = [5, 4, 3, 2, 1, 0]
    rows = [held_out.held_out_row(number) for number in chosen]
    lines = [json.dumps({"prompt": row.prompt, "answer": row.columns["answer"]}) for row in rows]
    (data := tmp_path / "other.jsonl").write_text("\n".join(lines))
    code, output = undisturbed.ask("eval", str(run_dir), "--data", str(data))
    assert code == 0, output
    in_the_run = read_verdicts(run_dir)[-1].right
    expected = tuple(in_the_run[number] for number in chosen)
    newest = max((run_dir / "evaluations").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert read_verdicts(newest)[-1].right == expected
    assert f"{sum(expected) / len(expected):.1%}" in output
    assert (run_dir / "summary.json").read_bytes() == before
    undisturbed.assert_nothing_left()


@pytest.mark.slow
def test_an_exported_checkpoint_loads_elsewhere(undisturbed: Run, tmp_path: Path) -> None:
    code, output = undisturbed.ask("export", str(undisturbed.run_dir), "--to", str(tmp_path / "model"))
    assert code == 0, output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = model(**tokenizer("12+34=", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()
    code, output = undisturbed.ask("export", str(undisturbed.run_dir), "--to", str(tmp_path / "model"))
    assert code == 2
    assert "expected a folder that does not exist yet" in output
