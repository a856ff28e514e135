from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from kintsugi.config.schema import LoggingSection
from kintsugi.errors import StorageError
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.step_metrics import MetricsWriter, SamplesWriter, source_metrics, step_metrics
from kintsugi.types import FinishReason, SampleMeta, SampleText, sample_key

WITH_WANDB = LoggingSection(wandb=True)


def meta(
    ticket: str,
    index: int,
    *,
    reward: float = 0.0,
    length: int = 4,
    finish: FinishReason = FinishReason.EOS,
    components: dict[str, float] | None = None,
    repetition: float = 0.0,
) -> SampleMeta:
    return SampleMeta(
        key=sample_key(ticket, index),
        ticket=ticket,
        num_tokens=length + 3,
        num_loss_tokens=length,
        reward=reward,
        reward_components={"exact": reward} if components is None else components,
        finish=finish,
        version=7,
        holder="rollout-0",
        digest="",
        repetition=repetition,
    )


def figures(metas: list[SampleMeta]) -> dict[str, float]:
    advantages = {item.key: 0.5 for item in metas}
    return step_metrics(
        metas,
        advantages=advantages,
        call_metrics={"kl": 0.1},
        timing={"generate": 1.0, "train": 0.5, "step": 2.0},
    )


def test_rewards_are_summed_up_by_group() -> None:
    values = figures(
        [meta("a", 0, reward=1), meta("a", 1, reward=0), meta("b", 0, reward=1), meta("b", 1, reward=1)]
    )
    assert values["reward/mean"] == 0.75
    assert values["reward/exact"] == 0.75
    # Group a deviates by √½, group b by nothing.
    assert values["reward_std"] == pytest.approx(0.5**0.5 / 2)
    assert values["frac_reward_zero_std"] == 0.5


def test_what_shows_reward_hacking_is_there() -> None:
    values = figures(
        [
            meta("a", 0, reward=1, length=10, finish=FinishReason.LENGTH, repetition=0.5),
            meta("a", 1, reward=0, length=2, components={"exact": 0.0, "polite": 3.0}),
            meta("b", 0, reward=1, length=6),
            meta("b", 1, reward=0, length=2),
        ]
    )
    assert values["reward/polite"] == 3.0
    assert values["completions/clipped_ratio"] == 0.25
    assert values["truncated_share"] == 0.5
    assert values["repetition"] == 0.125
    # Rewards 1 0 1 0, lengths 10 2 6 2: covariance 2, deviations √⅓ and √(44/3).
    assert values["reward_length_correlation"] == pytest.approx(2 / (1 / 3 * 44 / 3) ** 0.5)


def test_a_mixture_has_the_mean_reward_of_each_source() -> None:
    metas = [meta("a", 0, reward=1), meta("a", 1, reward=0), meta("b", 0, reward=0)]
    sources = {"a/0": "sums", "a/1": "sums", "b/0": "riddles.jsonl"}
    texts = {key: SampleText("", "", "", source) for key, source in sources.items()}
    assert source_metrics(metas, texts=texts) == {
        "source/sums/reward": 0.5,
        "source/sums/samples": 2.0,
        "source/riddles.jsonl/reward": 0.0,
        "source/riddles.jsonl/samples": 1.0,
    }
    assert source_metrics(metas, texts={key: SampleText("", "") for key in sources}) == {}


def test_a_reward_that_never_varies_has_no_correlation() -> None:
    assert (
        figures([meta("a", 0, reward=0.1, length=1), meta("a", 1, reward=0.1)])["reward_length_correlation"]
        == 0
    )


def test_lengths_timing_and_rate_are_taken_over_the_step() -> None:
    values = figures([meta("a", 0, length=2), meta("a", 1, length=6)])
    assert values["completions/mean_length"] == 4
    assert values["tokens_per_s"] == 4
    assert (values["timing/generate"], values["timing/step"], values["kl"]) == (1.0, 2.0, 0.1)


def test_demonstrations_have_no_reward_figures() -> None:
    assert not [name for name in figures([meta("a", 0, components={})]) if "reward" in name]


def test_each_step_is_a_line_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, clock=VirtualClock(wall=5.0)) as writer:
        writer.write(1, {"loss": 0.5, "kl": float("nan")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "time": 5.0,
        "loss": 0.5,
        "kl": None,
    }


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_forgets_what_came_after_its_step(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 1.0})
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_after(1)
        writer.write(2, {"loss": 2.0})
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]
    samples = SamplesWriter(tmp_path)
    for step in (1, 2, 3):
        samples.write(step, [meta("a", 0)], texts={}, advantages={})
    samples.truncate_after(2)
    samples.write(3, [meta("b", 0)], texts={}, advantages={})
    samples.close()
    assert steps_in(tmp_path / "samples.jsonl") == [1, 2, 3]


def test_a_torn_last_line_is_cut_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"lo')
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {})
    assert steps_in(path) == [1, 2]


def test_a_sample_is_written_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    writer = SamplesWriter(tmp_path)
    writer.write(
        4,
        [meta("grpo:0:1:0", 3, reward=1)],
        texts={"grpo:0:1:0/3": SampleText("1+1=", "2", "2", "sums")},
        advantages={"grpo:0:1:0/3": 0.7},
    )
    writer.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {
        "step": 4,
        "ticket": "grpo:0:1:0",
        "sample": 3,
        "version": 7,
        "prompt": "1+1=",
        "completion": "2",
        "reward": 1,
        "reward_components": {"exact": 1},
        "finish": "eos",
        "advantage": 0.7,
        "answer": "2",
        "source": "sums",
    }


def test_a_disk_that_takes_no_more_is_said_with_the_file(tmp_path: Path) -> None:
    writer = SamplesWriter(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(StorageError, match=r"samples\.jsonl: File too large"):
            writer.write(1, [meta("a", 0)], texts={}, advantages={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.close()


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    writer = SamplesWriter(tmp_path)
    writer.write(1, [meta("a", 0)], texts={}, advantages={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(StorageError):
            writer.write(2, [meta("a", 0)], texts={}, advantages={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.write(3, [meta("a", 0)], texts={}, advantages={})
    writer.close()
    assert steps_in(path) == [1, 3]


class FakeConfig(dict[str, Any]):
    def update(self, values: dict[str, Any], *, allow_val_change: bool) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(values)


class FakeRun:
    """A run of the fake `wandb`; takes two lines."""

    def __init__(self) -> None:
        self.config = FakeConfig()
        self.logged: list[int] = []
        self.values: dict[str, Any] = {}

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.values |= values
        if len(self.logged) == 2:
            raise FakeWandb.Error("no connection")
        self.logged.append(step)

    def finish(self) -> None:
        pass


class FakeWandb(ModuleType):
    """Keeps runs by their id, as W&B does with `resume="allow"`."""

    class Error(Exception):
        pass

    class Settings(NamedTuple):
        console: str
        silent: bool

    class Table(NamedTuple):
        columns: list[str]
        data: list[list[Any]]

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, FakeRun] = {}

    def init(self, *, id: str, resume: str, **options: object) -> FakeRun:
        assert resume == "allow"
        return self.runs.setdefault(id, FakeRun())


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_resumed_run_is_the_same_run_at_weights_and_biases(tmp_path: Path, wandb: FakeWandb) -> None:
    for step in (1, 2):
        with MetricsWriter(tmp_path, run_id="job1", also=WITH_WANDB) as writer:
            writer.write(step, {"loss": 1.0})
    assert {name: run.logged for name, run in wandb.runs.items()} == {"job1": [1, 2]}


def test_trackers_show_demonstrations_apart_and_group_what_has_no_group(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    with MetricsWriter(tmp_path, run_id="job1", also=WITH_WANDB) as writer:
        writer.write(1, {"loss": 1.0, "timing/step": 2.0}, stage="warmup")
        writer.write(2, {"loss": 0.5, "reward/mean": 0.1}, stage="grpo")
    assert wandb.runs["job1"].values == {
        "sft/loss": 1.0,
        "sft/timing/step": 2.0,
        "train/loss": 0.5,
        "reward/mean": 0.1,
    }
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1.0, 0.5]


def test_a_tracker_that_fails_keeps_nothing_from_the_file(tmp_path: Path, wandb: FakeWandb) -> None:
    writer = MetricsWriter(tmp_path, run_id="job1", also=WITH_WANDB)
    for step in (1, 2, 3):
        writer.write(step, {})
    with pytest.raises(StorageError, match="W&B: no connection"):
        writer.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_a_tracker_that_cannot_be_closed_is_reported(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: FakeRun) -> None:
        raise FakeWandb.Error("not finished")

    monkeypatch.setattr(FakeRun, "finish", broken)
    writer = MetricsWriter(tmp_path, run_id="job1", also=WITH_WANDB)
    writer.write(1, {})
    with pytest.raises(StorageError, match="W&B: not finished"):
        writer.close()


def test_a_wandb_that_cannot_be_reached_at_a_start_keeps_nothing_from_the_file(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(**options: object) -> FakeRun:
        raise FakeWandb.Error("no route to host")

    monkeypatch.setattr(wandb, "init", unreachable)
    writer = MetricsWriter(tmp_path, run_id="job1", also=WITH_WANDB)
    writer.write(1, {})
    with pytest.raises(StorageError, match="W&B: no route to host"):
        writer.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


def test_a_wandb_that_does_not_answer_delays_no_step(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def slow(**options: object) -> FakeRun:
        answers.wait()
        return wandb.runs.setdefault("job1", FakeRun())

    monkeypatch.setattr(wandb, "init", slow)
    with MetricsWriter(tmp_path, run_id="job1", also=WITH_WANDB) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 1.0})
        assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]
        answers.set()
    assert wandb.runs["job1"].logged == [1, 2]


def test_writers_are_opened_by_a_later_write_if_the_disk_refused_them_at_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer, samples = MetricsWriter(folder), SamplesWriter(folder)
    for write in (
        lambda: writer.write(1, {"loss": 1.0}),
        lambda: samples.write(1, [meta("a", 0)], texts={}, advantages={}),
    ):
        with pytest.raises(StorageError, match="No such file or directory"):
            write()
    folder.mkdir()
    writer.write(2, {"loss": 2.0})
    samples.write(2, [meta("a", 0)], texts={}, advantages={})
    writer.close()
    samples.close()
    assert steps_in(folder / "metrics.jsonl") == steps_in(folder / "samples.jsonl") == [2]
    assert any((folder / "tensorboard").iterdir())


@pytest.mark.parametrize("torn", [b'{"step":2,"lo', b"x" * 200_000])
def test_a_torn_last_line_of_any_length_is_cut(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step":1}\n' + torn)
    SamplesWriter(tmp_path).close()
    assert path.read_bytes() == b'{"step":1}\n'


def test_tensorboard_reads_what_was_written_and_drops_what_was_undone(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 2.0})
        writer.truncate_after(1)
        writer.write(2, {"loss": 3.0})
    program = (
        "import sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]).Reload().Scalars('train/loss')\n"
        "sys.stdout.write(str([(event.step, event.value) for event in events]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "tensorboard")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == "[(1, 1.0), (2, 3.0)]"


def test_trackers_get_a_bounded_table_of_completions_and_the_incidents(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    metas = [meta("a", number, reward=float(number)) for number in range(20)]
    texts = {each.key: SampleText("1|1=", "<b>2") for each in metas}
    with MetricsWriter(tmp_path, run_id="job1", also=WITH_WANDB) as writer:
        writer.write_completions(53, metas, texts=texts)
        writer.write_completions(54, metas, texts=texts)
        writer.write_incident(54, incident=1, text="model-0 was lost")
    assert wandb.runs["job1"].logged == [53, 54]
    completions = wandb.runs["job1"].values["completions"]
    assert [row[2] for row in completions.data] == [0.0, 1.0, 2.0, 3.0, 16.0, 17.0, 18.0, 19.0]
    assert wandb.runs["job1"].values["incidents"].data == [[1, 54, "model-0 was lost"]]
    program = (
        "import sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]).Reload()\n"
        "for tag in ('completions', 'incidents'):\n"
        "    for event in events.Tensors(tag):\n"
        "        sys.stdout.write(f'{tag} {event.step} {event.tensor_proto.string_val[0].decode()}\\n')\n"
        "sys.stdout.write(str(events.PluginTagToContent('text')))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "tensorboard")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "completions 53 | prompt | completion | reward |" in result.stdout
    assert "| 1&#124;1= | &#60;b&#62;2 | 19 |" in result.stdout
    assert "| 1 | 54 | model-0 was lost |" in result.stdout
    assert "'completions'" in result.stdout and "'incidents'" in result.stdout
