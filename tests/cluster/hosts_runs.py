"""Whole runs on several machines, whatever engine they are hosts of: inputs, outcome, and waits for their steps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kintsugi.checkpoint.store import latest, verify
from kintsugi.journal.facts import ProcessJoined
from kintsugi.journal.journal import read_facts
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import read_summary
from tests.cluster.tiny_runs import until

LONGEST_S = 600.0
"""A run takes half a minute; this only bounds a broken one, also on a busy machine."""
SLOWLY = "algorithm.reward=[slow_rewards.py:odd_digits]"
"""The same rewards, so the same weights; something can happen to the run before it ends."""
_RECIPE = Path(__file__).with_name("recipe.yaml")
_REWARDS = """
import time

def odd_digits(completions, **columns):
    time.sleep(PAUSE_S)
    return [sum(character in "13579" for character in text) / (len(text) or 1) for text in completions]
"""


class Machines(Protocol):
    """The machines of an engine, and commands on the one that launches runs."""

    @property
    def runs(self) -> Path:
        """Folder of that machine in which its commands run."""
        ...

    def ask(self, *arguments: str, timeout_s: float) -> tuple[int, str]:
        """Run a `kintsugi` command to its end; return its exit code and what it wrote."""
        ...

    def pids(self) -> Mapping[int, str]:
        """Pid and command of every process of Kintsugi on these machines."""
        ...


def rewards(pause_s: float) -> str:
    """Return a module with a reward that takes this long."""
    return _REWARDS.replace("PAUSE_S", str(pause_s))


def write_inputs(runs: Path, *, pauses_s: Mapping[str, float]) -> Path:
    """Write modules of rewards, by their names, and the recipe; return the recipe. Its reward is that of `rewards`."""
    for name, pause_s in pauses_s.items():
        (runs / f"{name}.py").write_text(rewards(pause_s))
    recipe = runs / "recipe.yaml"
    recipe.write_text(_RECIPE.read_text().replace("gated_rewards.odd_digits", "rewards.py:odd_digits"))
    return recipe


def weights_of(run_dir: Path) -> str:
    summary = read_summary(run_dir)
    assert summary is not None
    assert summary.weights_sha256
    return summary.weights_sha256


def train_alone(machines: Machines, *overrides: str, name: str = "alone") -> str:
    """Run the recipe on the launcher's machine alone; return the digest of its weights."""
    run_dir = machines.runs / name
    code, output = machines.ask("train", "recipe.yaml", f"run_dir={run_dir}", *overrides, timeout_s=LONGEST_S)
    assert code == 0, output
    return weights_of(run_dir)


def saved_files(run_dir: Path, *, last_step: int) -> set[str]:
    """Files of the state in the last checkpoint, which is verified."""
    checkpoint = latest(RunFolder(run_dir).checkpoints_folder)
    assert checkpoint is not None and checkpoint.step == last_step
    verify(checkpoint.path)
    return {path.name for path in checkpoint.path.glob("trainer*.safetensors")}


def boxes(number: int) -> set[str]:
    """Files of a state that is cut into this many parts."""
    return {f"trainer-{box + 1:05d}-of-{number:05d}.safetensors" for box in range(number)}


def ranks_joined(run_dir: Path, number: int) -> list[int]:
    """Return how often each of so many ranks has joined the run."""
    facts = read_facts(RunFolder(run_dir).journal_file)
    joined = [fact.peer.process for fact in facts if isinstance(fact, ProcessJoined)]
    return [joined.count(f"model-{rank}") for rank in range(number)]


def finish(command: subprocess.Popen[str]) -> str:
    """Wait for the end of a command, which must succeed; return what it wrote."""
    output, errors = command.communicate(timeout=LONGEST_S)
    assert command.returncode == 0, output + errors
    return output + errors


def num_steps(run_dir: Path) -> int:
    """Lines of metrics that are committed."""
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_for_step(run_dir: Path, step: int, command: subprocess.Popen[str]) -> None:
    """Wait until so many lines of metrics are committed."""

    def is_there() -> bool:
        assert command.poll() is None, command.communicate()
        return num_steps(run_dir) >= step

    until(is_there, f"step {step}", timeout_s=LONGEST_S)


def faults_of_soak(report: Path, *, roles: set[str]) -> list[dict[str, Any]]:
    """Return the faults of a soak that have fired: losses of machines, and what else is of these roles. One in a
    recovery follows the kill of a rank.

    Its runs ended in equal bits, nothing was lost or done twice, and the processes that were not hit are the same.
    """
    found = json.loads(report.read_text())
    faults: list[dict[str, Any]] = found["faults"]
    assert {"node"} <= {fault["role"] for fault in faults} <= roles, faults
    for fault in faults:
        assert fault["processes"], fault
        assert fault["recovered_ms"] is not None and fault["healthy_pids_unchanged"], fault
    totals = found["totals"]
    assert totals["weights_sha256"] == totals["weights_sha256_undisturbed"] != ""
    assert totals["step_hashes_equal"]
    assert (totals["samples_lost"], totals["samples_duplicated"], totals["processes_left"]) == (0, 0, 0)
    return faults


def places_of_fault(soak: Path, fault: dict[str, Any]) -> set[str]:
    """Return the hosts that the markers of a fault of a soak name."""
    markers = [json.loads(path.read_text()) for path in soak.glob("faults-*/markers/*.json")]
    found = {each["host"] for each in markers if each["process"] in fault["processes"]}
    assert found, fault
    return found


def assert_lost_host_is_diagnosed(result: Path) -> None:
    """Check the result of `lab run node_loss`: the fault has fired, was named and was recovered from."""
    (run,) = json.loads(result.read_text())["runs"]
    assert (run["diagnosed"]["process"], run["diagnosed"]["kind"]) == ("agent-1", "host_lost"), run
    assert run["correct"] and run["recovered"] and run["steps_lost"] == 0, run


def pid_of(machines: Machines, text: str) -> int:
    """Pid of the only process whose command contains a text."""
    (pid,) = [pid for pid, command in machines.pids().items() if text in command]
    return pid
