"""Models that are cut over ranks on several machines, of which only the launcher's has the run folder.

Every rank brings its part of a checkpoint there and fetches it from there; the bits are those of one machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from kintsugi.checkpoint.store import latest
from kintsugi.journal.facts import (
    CheckpointSaved,
    Fact,
    ProcessJoined,
    ProcessLost,
    RolledBack,
    StepCommitted,
)
from kintsugi.journal.journal import read_facts
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import Launcher
from tests.cluster import ssh_hosts
from tests.cluster.hosts_runs import (
    LONGEST_S,
    boxes,
    finish,
    ranks_joined,
    saved_files,
    train_alone,
    wait_for_step,
    weights_of,
    write_inputs,
)
from tests.cluster.ssh_hosts import SshHosts
from tests.cluster.tiny_runs import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.skipif(
        ssh_hosts.missing() is not None, reason=f"hosts with an sshd can not be had: {ssh_hosts.missing()}"
    ),
]

SLICED = "actor.logical_slices=2"
"""Slices of the matrices, which the bits depend on."""
LAST_STEP = 7
FOUR_SHARDS = ("actor.workers=4", "actor.layout.shards=4")
REDUNDANT = ("actor.workers=4", "actor.layout.shards=2")
"""Two holders of each of two parts, on different hosts."""
CUT_MODEL = ("actor.workers=4", "actor.layout.stages=2", "actor.layout.tensors=2", SLICED)
EVERY_STEP = "checkpoint.every=1"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    made = SshHosts(tmp_path_factory.mktemp("ssh"), count=2)
    write_inputs(made.runs, pauses_s={"rewards": 0.1, "slow_rewards": 1.0})
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights_of_one_rank(machines: SshHosts) -> str:
    return train_alone(machines, "actor.workers=1")


def start(machines: SshHosts, name: str, *overrides: str) -> tuple[subprocess.Popen[str], Path]:
    run_dir = machines.runs / name
    command = machines.start(
        *("train", "recipe.yaml", f"run_dir={run_dir}", "--on", str(machines.hosts_file()), *overrides)
    )
    return command, run_dir


def play_losing_a_host(machines: SshHosts, name: str, *layout: str) -> Path:
    """Play a run whose second host loses its power in the middle."""
    command, run_dir = start(machines, name, *layout)
    wait_for_step(run_dir, 3, command)
    machines.power_off("host-2")
    try:
        finish(command)
    finally:
        machines.power_on("host-2")
    return run_dir


@pytest.mark.parametrize(("layout", "number"), [(FOUR_SHARDS, 4), (REDUNDANT, 2)])
def test_parts_on_two_hosts_end_in_the_bits_of_one_rank_and_make_one_checkpoint(
    machines: SshHosts, weights_of_one_rank: str, layout: tuple[str, ...], number: int
) -> None:
    command, run_dir = start(machines, f"cut-{number}", *layout)
    finish(command)
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(number)
    ours = load_file(RunFolder(run_dir).checkpoints_folder / f"step-{LAST_STEP:06d}" / "model.safetensors")
    alone = RunFolder(machines.runs / "alone").checkpoints_folder / f"step-{LAST_STEP:06d}"
    theirs = load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    machines.assert_nothing_left()


def test_stages_of_tensor_ranks_on_two_hosts_end_in_the_bits_of_one_rank(machines: SshHosts) -> None:
    alone = train_alone(machines, "actor.workers=1", SLICED, name="sliced")
    command, run_dir = start(machines, "cut-model", *CUT_MODEL)
    finish(command)
    assert weights_of(run_dir) == alone
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(4)
    machines.assert_nothing_left()


def test_a_rank_beside_the_run_folder_saves_the_parts_of_other_hosts(
    machines: SshHosts, weights_of_one_rank: str
) -> None:
    hosts_file = machines.hosts_file(name="mixed.txt")
    here = f"head {machines.head.address} slots=2 python={machines.python}\n"
    hosts_file.write_text(here + hosts_file.read_text())
    run_dir = machines.runs / "mixed"
    command = machines.start(
        *("train", "recipe.yaml", f"run_dir={run_dir}", "--on", str(hosts_file)),
        *FOUR_SHARDS,
    )
    finish(command)
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(4)
    machines.assert_nothing_left()


def test_a_killed_rank_on_another_host_changes_no_bit_and_no_other_rank(
    machines: SshHosts, weights_of_one_rank: str
) -> None:
    command, run_dir = start(machines, "killed", *FOUR_SHARDS)
    wait_for_step(run_dir, 3, command)
    kill_rank(machines, run_dir, "model-3")
    finish(command)
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(4)
    assert ranks_joined(run_dir, 4) == [1, 1, 1, 2]
    machines.assert_nothing_left()


def test_a_host_that_is_lost_takes_no_step_with_it_where_every_part_is_on_another_one(
    machines: SshHosts, weights_of_one_rank: str
) -> None:
    run_dir = play_losing_a_host(machines, "lost", *REDUNDANT)
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(2)
    assert_no_step_lost(run_dir)
    machines.assert_nothing_left()


def test_a_host_that_is_lost_with_the_only_parts_is_made_again_from_the_copies_of_another(
    machines: SshHosts, weights_of_one_rank: str
) -> None:
    run_dir = play_losing_a_host(machines, "lost-parts", *FOUR_SHARDS)
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(4)
    machines.assert_nothing_left()


def facts_of(run_dir: Path) -> list[Fact]:
    return list(read_facts(RunFolder(run_dir).journal_file))


def is_damaged(path: Path, reason: str) -> None:
    raise AssertionError(f"{path}: {reason}")


def assert_no_step_lost(run_dir: Path) -> None:
    assert committed(run_dir) == list(range(1, LAST_STEP + 1))
    assert not [fact for fact in facts_of(run_dir) if isinstance(fact, RolledBack)]


def committed(run_dir: Path) -> list[int]:
    return [fact.step for fact in facts_of(run_dir) if isinstance(fact, StepCommitted)]


def kill_rank(machines: SshHosts, run_dir: Path, rank: str) -> None:
    """Kill a process by the pid that it has on its host."""
    joined = [fact for fact in facts_of(run_dir) if isinstance(fact, ProcessJoined)]
    inner, host = next((fact.pid, fact.peer.host) for fact in reversed(joined) if fact.peer.process == rank)
    (supervisor,) = machines.supervisors_of(host)
    namespace = os.readlink(f"/proc/{supervisor}/ns/pid")
    for pid in machines.pids():
        status = Path(f"/proc/{pid}/status").read_text()
        own = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
        if int(own) == inner and os.readlink(f"/proc/{pid}/ns/pid") == namespace:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError(f"{rank} of {host} has no process")


def stop_both_launchers(machines: SshHosts, run_dir: Path, command: subprocess.Popen[str]) -> None:
    record = msgspec.json.decode((run_dir / "launcher.json").read_bytes(), type=Launcher)
    for pid in (record.pid, record.standby_pid):
        os.kill(pid, signal.SIGKILL)
    command.communicate(timeout=LONGEST_S)
    machines.assert_nothing_left(timeout_s=30.0)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("actor.layout.shards=1",),
        ("actor.layout.shards=2",),
        ("actor.layout.shards=1", "actor.layout.stages=2"),
    ],
    ids=lambda changes: ",".join(changes) or "same",
)
def test_a_run_goes_on_from_the_parts_of_its_hosts_with_any_layout(
    machines: SshHosts, weights_of_one_rank: str, changes: tuple[str, ...]
) -> None:
    command, run_dir = start(machines, f"resumed-{len(changes)}-{'2' in ''.join(changes)}", *FOUR_SHARDS)
    wait_for_step(run_dir, 5, command)
    stop_both_launchers(machines, run_dir, command)
    saved = latest(RunFolder(run_dir).checkpoints_folder)
    assert saved is not None and {path.name for path in saved.path.glob("trainer-*")} == boxes(4)
    code, output = machines.ask("resume", str(run_dir), *changes, timeout_s=LONGEST_S)
    assert code == 0, output
    assert weights_of(run_dir) == weights_of_one_rank
    assert any(isinstance(fact, RolledBack) for fact in facts_of(run_dir))
    machines.assert_nothing_left()


def test_one_rank_on_the_machine_of_the_launcher_goes_on_from_the_parts_of_hosts_that_are_gone(
    machines: SshHosts, weights_of_one_rank: str
) -> None:
    command, run_dir = start(machines, "goes-on-here", *FOUR_SHARDS)
    wait_for_step(run_dir, 5, command)
    stop_both_launchers(machines, run_dir, command)
    alone = ("cluster.on=''", "actor.workers=1", "actor.layout.shards=1")
    code, output = machines.ask("resume", str(run_dir), *alone, timeout_s=LONGEST_S)
    assert code == 0, output
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == {"trainer.safetensors"}
    assert not (run_dir / "joined_hosts.json").exists()
    machines.assert_nothing_left()


def test_ranks_of_two_hosts_that_are_lost_together_return_to_the_checkpoint_of_their_parts(
    machines: SshHosts, weights_of_one_rank: str
) -> None:
    command, run_dir = start(machines, "all-lost", *FOUR_SHARDS)
    wait_for_step(run_dir, 3, command)
    for host in ("host-1", "host-2"):
        machines.power_off(host)
    for host in ("host-1", "host-2"):
        machines.power_on(host)
    finish(command)
    assert weights_of(run_dir) == weights_of_one_rank
    assert any(isinstance(fact, RolledBack) for fact in facts_of(run_dir))
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(4)
    machines.assert_nothing_left()


def test_a_run_on_hosts_begins_with_the_parts_of_a_model_folder(
    machines: SshHosts, weights_of_one_rank: str
) -> None:
    folder = machines.runs / "model"
    shutil.copytree(RunFolder(machines.runs / "alone").checkpoints_folder / f"step-{LAST_STEP:06d}", folder)
    given = ("model.new=null", f"model.path={folder}")
    alone = train_alone(machines, "actor.workers=1", *given, name="alone-from-folder")
    assert alone != weights_of_one_rank
    command, run_dir = start(machines, "from-folder", *FOUR_SHARDS, *given)
    finish(command)
    assert weights_of(run_dir) == alone
    machines.assert_nothing_left()


DIES_AS_IT_BRINGS = """
import os, pathlib, signal
from kintsugi.training import checkpoint_delivery

real = checkpoint_delivery.CheckpointDelivery._send_files

def dying(self, paths, *, step, **more):
    died = pathlib.Path("DIED")
    if (step, self._process) == (STEP, "RANK") and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, paths, step=step, **more)

checkpoint_delivery.CheckpointDelivery._send_files = dying
"""


@pytest.mark.parametrize(("rank", "host"), [("model-0", "host-1"), ("model-3", "host-2")])
def test_a_rank_that_is_killed_while_it_brings_its_part_leaves_whole_checkpoints_only(
    machines: SshHosts, weights_of_one_rank: str, rank: str, host: str
) -> None:
    """The rank that saves, and one of those that it has asked."""
    died = machines.runs / "scratch" / f"died-{rank}"
    code = DIES_AS_IT_BRINGS.replace("DIED", str(died)).replace("STEP", "4").replace("RANK", rank)
    python = machines.interpreter_with(code, name=f"dies-{rank}")
    run_dir = machines.runs / f"killed-{rank}"
    hosts_file = machines.hosts_file(name=f"dies-{rank}.txt", python=python)
    slowly = "algorithm.reward=[slow_rewards.py:odd_digits]"
    command = machines.start(
        *("train", "recipe.yaml", f"run_dir={run_dir}", "--on", str(hosts_file), *FOUR_SHARDS, slowly)
    )
    wait_for_step(run_dir, 3, command)

    def is_past() -> bool:
        assert command.poll() is None, command.communicate()
        latest(RunFolder(run_dir).checkpoints_folder, report=is_damaged)
        return 5 in committed(run_dir)

    until(is_past, "the step after the fault", timeout_s=LONGEST_S)
    os.unlink(machines.scratch_folder(host) / died.name)  # Raises if the fault has not happened.
    finish(command)
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(4)
    facts = facts_of(run_dir)
    saved = [fact for fact in facts if isinstance(fact, CheckpointSaved)]
    assert [fact.step for fact in saved] == [2, 4, 6, 7]
    lost = [fact for fact in facts if isinstance(fact, ProcessLost)]
    assert [fact.process for fact in lost] == [rank]
    assert facts.index(lost[0]) < facts.index(saved[1]), "step 4 was saved by another attempt"
    machines.assert_nothing_left()
