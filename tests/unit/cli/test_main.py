from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cli import main, supervisor
from kintsugi.cli.live import LiveView
from kintsugi.cluster import launcher
from kintsugi.config import recipe
from kintsugi.config.recipe import description, load, load_config, packaged_recipes
from kintsugi.config.schema import Config
from kintsugi.errors import Fault, ProcessDied, UserError
from kintsugi.journal.facts import ScaleRefused, ServersScaled
from kintsugi.journal.journal import Journal
from kintsugi.model.plan import plan_model
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, EventLog, FaultSeen
from kintsugi.telemetry.process_reports import write_processes
from kintsugi.telemetry.step_metrics import SampleRecord
from kintsugi.types import FinishReason
from tests.unit.run_folder.test_incidents import OPENED
from tests.unit.telemetry.test_process_reports import REPORTS

ROOT = Path(__file__).parents[3]
GRPO = str(ROOT / "kintsugi" / "recipes" / "grpo_arithmetic.yaml")


class Result(msgspec.Struct):
    code: int
    output: str
    errors: str


Kintsugi = Callable[..., Result]


@pytest.fixture
def kintsugi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kintsugi:
    """The command, run in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["kintsugi", *arguments])
        with pytest.raises(SystemExit) as exit:
            main.main()
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return run


class FakeCluster:
    """Stands in for the launcher: leaves behind what a run leaves behind."""

    def __init__(self) -> None:
        self.outcome = "finished"
        self.error: Exception | None = None
        self.launched: list[tuple[Config, Path, bool]] = []

    def launch(
        self,
        config: Config,
        *,
        run_dir: Path,
        on_tick: Callable[[], None],
        resume: bool = False,
        **options: object,
    ) -> int:
        self.launched.append((config, run_dir, resume))
        if self.error is not None:
            raise self.error
        line = {"step": 1, "time": 1.0, "reward/mean": 0.5, "tokens_per_s": 1.0, "timing/step": 1.0}
        (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        on_tick()
        summary: dict[str, Any] = {
            "outcome": self.outcome,
            "name": config.name,
            "seed": config.seed,
            "run_dir": str(run_dir),
            "steps": 1,
            "wall_s": 1.0,
            "samples_trained": 256,
            "tokens_generated": 1,
            "tokens_trained": 1,
            "reward_first": 0.1,
            "reward_last": 0.5,
            "eval_accuracy_before": 0.2,
            "eval_accuracy_after": 0.8,
            "weights_sha256": "ab" * 32,
            "weight_version": 1,
            "processes": {},
            "timing": {"train": 1.0},
            "logprob_abs_diff_mean": 0.0,
            "faults": [
                {"kind": "StorageError", "process": "model-0", "message": "disk full"},
                {"kind": "RemoteError", "process": "master-0", "message": "save failed"},
            ],
        }
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return 1 if self.outcome == "failed" else 0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()
    monkeypatch.setattr(supervisor, "supervise", cluster.launch)
    return cluster


def test_a_run_ends_with_its_table_and_leaves_its_configuration(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    result = kintsugi("train", GRPO, "seed=7")
    assert (result.code, result.errors) == (0, "")
    assert "80.0%" in result.output and "runs/grpo_arithmetic-1" in result.output
    written = load_config(Path("runs/grpo_arithmetic-1/config.yaml"))
    assert written.seed == 7
    assert written.run_dir == str(Path.cwd() / "runs/grpo_arithmetic-1")
    assert cluster.launched == [(written, Path("runs/grpo_arithmetic-1"), False)]


def test_runs_are_numbered(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    kintsugi("train", GRPO)
    kintsugi("train", GRPO)
    assert [path.name for _, path, _ in cluster.launched] == ["grpo_arithmetic-1", "grpo_arithmetic-2"]


def test_a_failed_run_exits_with_1_and_the_first_cause_first(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    cluster.outcome = "failed"
    result = kintsugi("train", GRPO)
    assert result.code == 1
    cause, then, last = result.errors.splitlines()
    assert cause == "cause: model-0: StorageError: disk full"
    assert then == "then: master-0: RemoteError: save failed"
    assert "runs/grpo_arithmetic-1" in last


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (
            2,
            "Traceback …\nrows.jsonl: expected rows, found none\n",
            "error: rows.jsonl: expected rows, found none",
        ),
        (
            1,
            "StorageError: journal is damaged\n",
            "StorageError: journal is damaged\nerror: the master failed",
        ),
        (1, "", "error: the run was interrupted; `kintsugi resume runs/grpo_arithmetic-1` continues it"),
    ],
)
def test_a_master_that_left_no_summary_is_quoted_from_its_log(
    kintsugi: Kintsugi, monkeypatch: pytest.MonkeyPatch, code: int, log: str, expected: str
) -> None:
    def launch(config: Config, *, run_dir: Path, **options: object) -> int:
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "master-0.log").write_text(log)
        return code

    monkeypatch.setattr(supervisor, "supervise", launch)
    result = kintsugi("train", GRPO)
    assert result.code == code
    assert result.errors.startswith(expected)


def test_a_mistake_that_the_master_found_is_one_sentence_and_exit_code_2(
    kintsugi: Kintsugi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(config: Config, *, run_dir: Path, **options: object) -> int:
        log = EventLog(RunFolder(run_dir).events_file("master-0"), process="master-0")
        log.emit(FaultSeen(Fault("f", "DataError", "master-0", "rows.jsonl: expected rows", time.time())))
        log.close()
        return 2

    monkeypatch.setattr(supervisor, "supervise", launch)
    result = kintsugi("train", GRPO)
    assert (result.code, result.errors) == (2, "error: rows.jsonl: expected rows\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 2),
    ],
)
def test_a_folder_that_can_not_be_made_is_one_message(
    kintsugi: Kintsugi, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int
) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = kintsugi("train", GRPO)
    assert result.code == code
    assert result.errors.startswith("error: ") and str(error.strerror) in result.errors
    assert len(result.errors.splitlines()) == 1
    assert cluster.launched == []


def test_a_disk_without_room_for_the_configuration_leaves_no_folder(
    kintsugi: Kintsugi, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recipe, "write_atomically", refuse)
    result = kintsugi("train", GRPO)
    assert result.code == 1
    assert "could not write" in result.errors and "config.yaml: No space left on device" in result.errors
    assert list(Path("runs").iterdir()) == []
    assert cluster.launched == []


def test_a_disk_without_room_for_the_launchers_name_leaves_no_folder(
    kintsugi: Kintsugi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes, *, durable: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(reader, "write_atomically", refuse)

    def launch(config: Config, *, run_dir: Path, on_tick: Callable[[], None], **options: object) -> int:
        return launcher.launch(config, run_dir=run_dir, on_tick=on_tick)

    monkeypatch.setattr(supervisor, "supervise", launch)  # In this process, where the disk is full.
    result = kintsugi("train", GRPO)
    assert result.code == 1
    assert "launcher.json: No space left on device" in result.errors
    assert list(Path("runs").iterdir()) == []


def test_status_of_a_living_run_shows_what_every_process_does_and_the_last_alerts(
    kintsugi: Kintsugi, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    kintsugi("train", GRPO)
    folder = Path("runs/grpo_arithmetic-1")
    reader.write_launcher(folder, pid=os.getpid())
    write_processes(folder, REPORTS)
    log = EventLog(RunFolder(folder).events_file("master-0"), process="master-0")
    for number in range(7):
        log.emit(Alert(f"alert number {number}", {"ratio": 1.5}))
    log.close()
    output = kintsugi("status", "grpo_arithmetic-1").output
    assert "model-0" in output and "steps 3" not in output
    assert "steps 3" in kintsugi("status", "grpo_arithmetic-1", "--all").output
    told = json.loads(kintsugi("status", "grpo_arithmetic-1", "--json").output)
    assert told["state"] == "running" and told["processes"]["processes"][0]["process"] == "model-0"
    assert "model-1: all_reduce (at most 30.0 s)" in output
    assert [number for number in range(7) if f"alert number {number} ratio=1.5" in output] == [2, 3, 4, 5, 6]


def test_a_broken_start_exits_with_1_and_its_cause(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    cluster.error = ProcessDied("master-0 died", cause=Fault("f", "OutOfMemory", "host-0", "killed", 0.0))
    result = kintsugi("train", GRPO)
    assert result.code == 1
    assert result.errors.splitlines() == ["cause: host-0: OutOfMemory: killed", "error: master-0 died"]


def test_a_mistake_seen_only_at_the_start_leaves_no_folder(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    cluster.error = UserError("port taken")
    assert kintsugi("train", GRPO).code == 2
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", GRPO, "actor.learning_rat=1"], "did you mean `actor.learning_rate`"),
        (["train", GRPO, "algorithm.group_size=1"], "at least 2"),
        (["train", GRPO, "run_dir=."], "`run_dir`"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train"], "RECIPE"),
        (["check", GRPO, "model.new=null", "model.path=gone"], "gone"),
        (["status", "nowhere"], "expected a run folder"),
        (["stop", "nowhere"], "expected a run folder"),
        (["resume", "nowhere"], "expected a run folder"),
        (["samples", "nowhere"], "expected a run folder"),
        (["eval", "nowhere"], "expected a run folder"),
        (["export", "nowhere", "--to", "x"], "expected a run folder"),
        (["import", "nowhere", "x"], "nowhere"),
        (["samples", ".", "--worst", "0"], "--worst"),
        (["dance"], "dance"),
    ],
)
def test_a_mistake_of_the_user_is_one_message_and_exit_code_2(
    kintsugi: Kintsugi, cluster: FakeCluster, arguments: list[str], part: str
) -> None:
    result = kintsugi(*arguments)
    assert result.code == 2
    assert part in result.errors
    assert "Traceback" not in result.errors
    assert cluster.launched == []
    assert not Path("runs").exists()


def test_check_shows_values_graph_processes_and_memory(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    result = kintsugi("check", GRPO, "actor.workers=1", "cluster.hosts=2")
    assert result.code == 0
    values = dict(
        line.split(maxsplit=1) for line in result.output.splitlines() if line.startswith("  actor.")
    )
    assert values["actor.workers"].split(maxsplit=1) == ["1", "command line"]
    for part in (
        "extends base_cpu.yaml",
        "actor_generate",
        "host-1: agent-1",
        "server      2 ×",
        "host     ",
    ):
        assert part in result.output
    assert not Path("runs").exists()


def test_values_of_a_recipe_and_their_origins_fit_80_columns(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    kintsugi("init", "sums.yaml")
    values, _, _ = kintsugi("check", "sums.yaml").output.partition("\n\n")
    too_long = [line for line in values.splitlines() if len(line) > 80]
    assert all("[" in line or "'" in line for line in too_long) and len(too_long) < 5, too_long


def test_a_finished_run_is_not_resumed(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    kintsugi("train", GRPO)
    result = kintsugi("resume", "grpo_arithmetic-1")
    assert result.code == 1
    assert "is finished" in result.errors
    assert len(cluster.launched) == 1


def test_a_stopped_run_is_resumed_with_its_own_configuration(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    cluster.outcome = "stopped"
    stopped = kintsugi("train", GRPO, "seed=3", "run_dir=mine")
    assert "kintsugi resume mine" in stopped.output
    cluster.outcome = "finished"
    assert kintsugi("resume", "mine").code == 0
    (first, _, _), (second, folder, resume) = cluster.launched
    assert (second, folder, resume) == (first, Path("mine"), True)


def test_stop_of_a_run_that_does_not_run_says_so(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    kintsugi("train", GRPO)
    result = kintsugi("stop", "grpo_arithmetic-1")
    assert result.code == 2
    assert "is not running (it is finished)" in result.errors


def test_a_run_that_does_not_run_is_not_scaled(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    kintsugi("train", GRPO)
    result = kintsugi("scale", "grpo_arithmetic-1", "--servers", "4")
    assert result.code == 2
    assert "is not running (it is finished); there is nothing to scale" in result.errors
    assert kintsugi("scale", "grpo_arithmetic-1", "--servers", "0").code == 2


def test_status_shows_that_a_run_was_scaled(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    kintsugi("train", GRPO, "run_dir=mine")
    journal = Journal.create(Path("mine/journal"), owner="test")
    journal.append([ServersScaled("a", 4), ScaleRefused("b", "too many")])
    journal.close()
    assert "4, scaled from 2" in kintsugi("status", "mine").output


def test_status_and_runs_and_samples_tell_of_a_run(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    assert "no runs" in kintsugi("runs").output
    kintsugi("train", GRPO, "warmup.steps=100", "algorithm.steps=150")
    assert "1 of 250" in kintsugi("status", "grpo_arithmetic-1").output
    assert "finished" in kintsugi("runs").output
    result = kintsugi("samples", "grpo_arithmetic-1")
    assert (result.code, result.output) == (1, "")
    assert "no samples yet; expected some after the first step" in result.errors


def test_incidents_of_a_running_run_are_printed_as_text_and_as_json(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    kintsugi("train", GRPO)
    folder = Path("runs/grpo_arithmetic-1")
    assert kintsugi("incidents", str(folder)).output == f"{folder}: no incidents\n"
    with Journal.create(folder / "journal", owner="test") as journal:
        journal.append(OPENED)
    reader.write_launcher(folder, pid=os.getpid())
    assert "incident 1: recovering\n  cause     model-1" in kintsugi("incidents", str(folder)).output
    assert "open incident 1" in kintsugi("status", str(folder)).output
    told = json.loads(kintsugi("incidents", str(folder), "--json").output)
    assert told["incidents"][0]["faults"][0]["process"] == "model-1"


def test_a_finished_run_is_extended_and_its_earlier_configuration_kept(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    kintsugi("train", GRPO, "warmup=null", "actor.warmup_steps=0", "algorithm.steps=1", "run_dir=mine")
    result = kintsugi("resume", "mine", "algorithm.steps=3", "actor.learning_rate=0.001")
    assert result.code == 0, result.errors
    assert "algorithm.steps: 1 until step 1, then 3" in result.output
    config, _, is_resumed = cluster.launched[-1]
    assert (config.algorithm.steps, config.actor.learning_rate, is_resumed) == (3, 0.001, True)
    assert load(Path("mine/config.yaml")).config == config
    assert load(Path("mine/config.until-step-1.yaml")).config.algorithm.steps == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=5", "`seed`: expected a field that a resume may change"),
        (
            "algorithm.steps=0",
            "`algorithm.steps` (command line): expected at least 1, as mine has done 1 step in all",
        ),
        ("actor.logical_shards=8", "`actor.logical_shards`: expected a field that a resume may change"),
        ("algorithm.stepz=5", "did you mean `algorithm.steps`?"),
    ],
)
def test_a_resume_changes_nothing_that_belongs_to_the_past(
    kintsugi: Kintsugi, cluster: FakeCluster, override: str, message: str
) -> None:
    kintsugi("train", GRPO, "warmup=null", "actor.warmup_steps=0", "algorithm.steps=1", "run_dir=mine")
    result = kintsugi("resume", "mine", override)
    assert (result.code, len(cluster.launched)) == (2, 1)
    assert message in result.errors


def test_a_run_goes_on_with_other_workers_on_the_same_parts_of_a_batch(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    cluster.outcome = "stopped"
    kintsugi("train", GRPO, "actor.workers=4", "actor.logical_shards=null", "run_dir=mine")
    result = kintsugi("resume", "mine", "actor.workers=2")
    assert result.code == 0, result.errors
    assert "actor.logical_shards: nothing until step 1, then 4" in result.output
    config, _, _ = cluster.launched[-1]
    assert (config.actor.workers, config.actor.num_shards) == (2, 4)
    result = kintsugi("resume", "mine", "actor.workers=3")
    assert result.code == 2 and "expected a multiple of `actor.workers`=3" in result.errors


def test_a_run_goes_on_in_another_layout_on_the_same_parts_of_a_batch(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    cluster.outcome = "stopped"
    kintsugi("train", GRPO, "actor.workers=4", "actor.logical_shards=null", "run_dir=mine")
    assert kintsugi("resume", "mine", "actor.layout.shards=2").code == 0
    assert cluster.launched[-1][0].actor.logical_shards is None, "as many parts as before"
    result = kintsugi("resume", "mine", "actor.layout.shards=1", "actor.layout.stages=2")
    assert result.code == 0, result.errors
    assert "actor.logical_shards: nothing until step 1, then 4" in result.output
    config, _, _ = cluster.launched[-1]
    assert (config.actor.data_parallel, config.actor.num_shards) == (2, 4)


def test_a_run_of_several_machines_goes_on_with_others_or_on_this_one_alone(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    cluster.outcome = "stopped"
    Path("two.txt").write_text("a 198.51.100.7\nb 198.51.100.8 slots=2\n")
    Path("one.txt").write_text("c 198.51.100.9\n")
    kintsugi("train", GRPO, "run_dir=mine", "--on", "two.txt")
    assert cluster.launched[-1][0].cluster.slots == (0, 1, 2)
    result = kintsugi("resume", "mine", "cluster.on=one.txt")
    assert result.code == 0, result.errors
    moved = cluster.launched[-1][0].cluster
    assert (Path(moved.on), moved.hosts, moved.slots) == (Path("one.txt").absolute(), 2, (0, 1))
    result = kintsugi("resume", "mine", "cluster.on=''")
    assert result.code == 0, result.errors
    alone = cluster.launched[-1][0].cluster
    assert (alone.on, alone.hosts, alone.slots, alone.address) == ("", 1, (), "")
    result = kintsugi("resume", "mine", "cluster.hosts=3")
    assert result.code == 2 and "`cluster.hosts`: expected a field that a resume may change" in result.errors


def test_runs_are_sorted_filtered_and_tagged(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    kintsugi("train", GRPO, "run_dir=runs/b")
    cluster.outcome = "stopped"
    kintsugi("train", GRPO, "run_dir=runs/a")
    assert kintsugi("tag", "b", "good", "paper").output == "runs/b: good, paper\n"
    assert kintsugi("tag", "b", "--remove", "paper").output == "runs/b: good\n"

    def names(*options: str) -> list[str]:
        return [line["folder"] for line in json.loads(kintsugi("runs", "--json", *options).output)]

    assert names("--sort", "name") == ["runs/a", "runs/b"]
    assert names("--state", "stopped") == ["runs/a"]
    assert names("--tag", "good") == names("--name", "b") == ["runs/b"]
    assert "good" in kintsugi("runs").output
    assert "expected one of started, name" in kintsugi("runs", "--sort", "size").errors
    assert "no matching runs" in kintsugi("runs", "--tag", "none").output


def test_samples_show_the_expected_answer_and_explain_the_reversed_digits(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    kintsugi("train", GRPO, "run_dir=mine")
    record = SampleRecord(
        3, "grpo:0:0:0", 1, 2, "12+39=", "15", 1.0, {"exact_answer": 1.0}, FinishReason.EOS, 0.35
    )
    Path("mine/samples.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")
    output = kintsugi("samples", "mine").output
    assert "digits reversed" in output and "answer: " in output
    assert "'12+39=' → '15'" in output and "reward 1 (exact_answer=1)" in output
    (told,) = json.loads(kintsugi("samples", "mine", "--json").output)
    assert "answer" in told["columns"]
    result = kintsugi("samples", "mine", "--step", "99")
    assert result.code == 1 and "expected a step with samples, from 1 to 3, got 99" in result.errors


def test_the_version_and_a_short_help_option(kintsugi: Kintsugi) -> None:
    assert kintsugi("--version").output.startswith("kintsugi ")
    assert "Usage" in kintsugi("train", "-h").output


def test_attach_to_an_ended_run_shows_its_results_and_of_an_interrupted_one_names_what_to_do(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    kintsugi("train", GRPO, "run_dir=mine")
    result = kintsugi("attach", "mine")
    assert result.code == 0 and "held-out accuracy after" in result.output
    Path("mine/summary.json").unlink()
    Path("mine/journal").touch()
    result = kintsugi("attach", "mine")
    assert result.code == 2
    assert "expected a run that is running, it was interrupted; try `kintsugi resume mine`" in result.errors


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["", "ignored"])
def test_ctrl_c_detaches_also_where_the_signal_or_exceptions_are_ignored(
    kintsugi: Kintsugi, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, inherited: Any
) -> None:
    kintsugi("train", GRPO, "run_dir=mine")

    class Collected:
        """Its end calls back; Python prints and ignores an exception that is raised there."""

    def interrupt_in_a_callback(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))  # The interpreter handles signals between two instructions.

    ticks: list[LiveView] = []

    def tick(view: LiveView) -> None:
        ticks.append(view)
        collected = Collected()
        reference = weakref.ref(collected, interrupt_in_a_callback)
        del collected
        assert reference() is None

    monkeypatch.setattr(LiveView, "tick", tick)
    monkeypatch.setattr("kintsugi.cli.run_actions.find_started", lambda folder: True)
    launcher = reader.Launcher(os.getpid(), 0, "here", "")
    monkeypatch.setattr(reader, "living_launcher", lambda folder: launcher if len(ticks) < 3 else None)
    before = signal.signal(signal.SIGINT, inherited)
    try:
        result = kintsugi("attach", "mine")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.code == 0 and "detached; the run goes on" in result.output
    assert len(ticks) == 1, "the first Ctrl-C is enough"


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_cut_weight_file_is_refused_in_one_sentence_before_anything_starts(
    command: str, kintsugi: Kintsugi, cluster: FakeCluster, tmp_path: Path
) -> None:
    model, tokenizer = plan_model(load(Path(GRPO)).config)
    tokenizer.save(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(model.to_huggingface()))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut")
    result = kintsugi(command, GRPO, "model.new=null", "model.path=model")
    assert (result.code, result.output, cluster.launched) == (2, "", [])
    assert "model.safetensors is not a safetensors file, or cut" in result.errors


def test_help_answers_without_loading_the_system() -> None:
    program = "import sys, kintsugi.cli.main; sys.stdout.write(str(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    loaded = [
        name for name in ("torch", "zmq", "yaml", "tokenizers", "numpy") if f"'{name}'" in result.stdout
    ]
    assert loaded == []


def test_a_first_recipe_is_written_and_can_be_checked_at_once(
    kintsugi: Kintsugi, cluster: FakeCluster
) -> None:
    assert "kintsugi check mine.yaml" in kintsugi("init", "mine.yaml").output
    assert kintsugi("check", "mine.yaml").code == 0
    refused = kintsugi("init", "mine.yaml")
    assert (refused.code, "nothing is overwritten" in refused.errors) == (2, True)


def test_rollouts_without_learning_are_a_run_of_their_own(kintsugi: Kintsugi, cluster: FakeCluster) -> None:
    result = kintsugi("rollout", GRPO, "--steps", "7", "algorithm.beta=0.1", "warmup=null")
    assert result.code == 0
    ((config, folder, _),) = cluster.launched
    assert (config.algorithm.name, config.algorithm.steps, config.algorithm.beta) == ("rollout", 7, 0.0)
    assert (config.algorithm.batch_size, config.algorithm.group_size) == (64, 8)
    assert "actor.warmup_steps" in json.loads((folder / "origins.json").read_text())


def test_recipes_are_listed_with_a_sentence_each(kintsugi: Kintsugi) -> None:
    listed = kintsugi("recipes")
    assert listed.code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == sorted(packaged_recipes())
    assert (
        f"sft_arithmetic               {description(packaged_recipes()['sft_arithmetic'])}\n" in listed.output
    )


def test_a_recipe_is_printed_as_it_is(kintsugi: Kintsugi) -> None:
    printed = kintsugi("recipes", "sft_arithmetic")
    assert printed.output == packaged_recipes()["sft_arithmetic"].read_text(encoding="utf-8")
    assert "closest packaged recipes: sft_arithmetic" in kintsugi("recipes", "sft_aritmetic").errors


def test_a_copied_recipe_can_be_used_where_it_lies_and_overwrites_nothing(
    kintsugi: Kintsugi, tmp_path: Path
) -> None:
    assert kintsugi("recipes", "ppo_arithmetic", "--copy", "mine/ppo.yaml").code == 0
    assert load(tmp_path / "mine" / "ppo.yaml").config == load("ppo_arithmetic").config
    assert "nothing is overwritten" in kintsugi("recipes", "ppo_arithmetic", "--copy", "mine/ppo.yaml").errors
    assert "--copy: expected the name of a recipe" in kintsugi("recipes", "--copy", "x.yaml").errors


def test_check_takes_the_name_of_a_packaged_recipe(kintsugi: Kintsugi) -> None:
    assert "graph of sft" in kintsugi("check", "sft_arithmetic").output


def test_a_soak_strikes_only_the_roles_that_were_asked_for(
    kintsugi: Kintsugi, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str] | None] = []

    def soak(*_: object, roles: tuple[str, ...] | None, **options: object) -> None:
        asked.append(None if roles is None else [*roles])
        raise UserError("no soak is made here")

    monkeypatch.setattr("kintsugi.lab.soak.soak.Soak", soak)
    for number, roles in enumerate((["--role", "model", "--role", "agent"], [])):
        kintsugi("soak", GRPO, *roles, f"run_dir=soak-{number}")
    assert asked == [["model", "agent"], None]
    refused = kintsugi("soak", GRPO, "--role", "trainer")
    assert refused.code == 2
    assert "'trainer' is not one of" in " ".join(refused.errors.replace("│", " ").split())
