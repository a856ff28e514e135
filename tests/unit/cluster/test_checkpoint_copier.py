"""Rounds of copying checkpoints: one when there is something new, failures told and repeated ever more seldom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from kintsugi.cluster.checkpoint_copier import FIRST_PAUSE_S, LONGEST_PAUSE_S, CheckpointCopier
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.processes import Child, SystemProcesses


class FakeProcesses(SystemProcesses):
    """Starts something else in place of a round of copying."""

    def __init__(self, *program: str) -> None:
        self.program = program
        self.children: list[Child] = []

    def spawn(
        self,
        argv: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        before_exec: Callable[[], None] | None = None,
        new_session: bool = False,
    ) -> Child:
        self.children.append(super().spawn(self.program, stdout=stdout, stderr=stderr))
        return self.children[-1]


def copier(run_dir: Path, *program: str) -> tuple[CheckpointCopier, FakeProcesses]:
    RunFolder(run_dir).logs_folder.mkdir()
    processes = FakeProcesses(*program)
    return CheckpointCopier(run_dir, target="/shared", processes=processes), processes


def save(run_dir: Path, step: int) -> None:
    (RunFolder(run_dir).checkpoints_folder / f"step-{step:06d}").mkdir(parents=True)


def play(
    handle: CheckpointCopier, processes: FakeProcesses, *, seconds: range
) -> tuple[list[int], list[str]]:
    """The seconds in which rounds began, each of which ends at once, and what was told."""
    began, told = [], []
    for second in seconds:
        before = len(processes.children)
        if why := handle.turn(float(second)):
            told.append(why)
        if len(processes.children) > before:
            began.append(second)
            processes.children[-1].wait_ended(whom="it", timeout_s=10.0)
    return began, told


def test_a_round_begins_for_a_new_checkpoint_and_not_again(tmp_path: Path) -> None:
    handle, processes = copier(tmp_path, "true")
    assert (*play(handle, processes, seconds=range(10)), handle.is_done) == ([], [], True)
    save(tmp_path, 5)
    assert (handle.is_done,) == (False,)
    began, told = play(handle, processes, seconds=range(10, 30))
    assert (len(began), told, handle.is_done) == (1, [], True)
    save(tmp_path, 10)
    assert len(play(handle, processes, seconds=range(30, 50))[0]) == 1
    handle.close()


def test_a_round_that_fails_is_told_and_repeated_ever_more_seldom(tmp_path: Path) -> None:
    handle, processes = copier(tmp_path, "sh", "-c", "echo trace; echo 'PermissionError: no bucket'; exit 1")
    save(tmp_path, 5)
    began, told = play(handle, processes, seconds=range(2000))
    assert set(told) == {"PermissionError: no bucket"}
    pauses = [after - before for before, after in itertools.pairwise(began)]
    assert pauses[0] <= FIRST_PAUSE_S + 2 and pauses == sorted(pauses) and pauses[-1] >= LONGEST_PAUSE_S
    assert handle.num_failures == len(told)
    handle.hurry()
    assert play(handle, processes, seconds=range(2000, 2001))[0] == [2000]
    handle.close()


def test_a_round_that_runs_is_ended_with_its_launcher(tmp_path: Path) -> None:
    handle, processes = copier(tmp_path, "sleep", "600")
    save(tmp_path, 5)
    handle.turn(0.0)
    assert handle.pids == {processes.children[0].pid} and not handle.is_done
    handle.close()
    assert not Path(f"/proc/{processes.children[0].pid}").exists() and handle.pids == frozenset()
