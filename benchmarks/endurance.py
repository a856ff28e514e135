"""Losses of the launcher and mishaps of a host: does the run go on, in the same bits, and is the cause named?

    python benchmarks/endurance.py [--only TEXT ...] [--seed 0] [--json FILE]

Every case is a run of its own of the tiny recipe of the tests (`tests/cluster/recipe.yaml`), started by `kintsugi
train` as a user would start it, struck at a moment that the seed chooses, and compared with an undisturbed run:
weights, samples trained exactly once, processes and shared memory left behind, the causes that `kintsugi diagnose`
names. The cases with a read-only file system and a limit of processes need root, the latter cgroups of version 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.diagnosis import diagnose
from kintsugi.run_folder.reader import read_status, read_summary
from kintsugi.runtime.clock import SystemClock
from kintsugi.telemetry.events import ProcessBegan, read_events
from tests.cluster.ledger_of_a_run import assert_trained_exactly_once
from tests.cluster.real_runs import LAST_STEP, RECIPE, Run, until

END_S = 120.0
LEFT_S = 20.0
LONGEST_INTO_STEP_S = 0.4
"""Longest time between the step that was chosen and the kill; a step takes about a quarter of a second."""
PIDS = Path("/sys/fs/cgroup/pids")
"""Controller of the number of processes, as cgroups of version 1 have it."""
ATTEMPTS = 5
"""Runs of one case: a moment may be chosen that comes after the end of the run."""

Body = Callable[[Run, "Chance"], None]


class Chance(NamedTuple):
    """Random moments within the time that an undisturbed run takes."""

    rng: random.Random
    undisturbed_s: float

    def wait(self, *, part: float = 1.0) -> None:
        time.sleep(self.rng.uniform(0.0, self.undisturbed_s * part))


class Result(NamedTuple):
    """One case: `Result("launcher 3", "step 4, rollout", "finished", True, …)`."""

    case: str
    moment: str
    outcome: str
    is_equal: bool
    left: int
    seconds: float
    diagnosed: str


class Later(SystemClock):
    """A clock by which a run that has just ended is over."""

    def wall(self) -> float:
        return super().wall() + 10.0


class Missed(Exception):
    """The run had ended before it was struck."""


# Processes and moments.


def pid_of(run: Run, process: str) -> int:
    """Pid of the latest incarnation; 0 before the first."""
    records = read_events(run.run_dir, process=process)
    return ([record.event.pid for record in records if isinstance(record.event, ProcessBegan)] or [0])[-1]


def strike(run: Run, *pids: int) -> None:
    alive = run.pids()
    if not all(pid in alive for pid in pids):
        raise Missed
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def launcher_of(run: Run) -> int:
    """Pid of the launcher of a run that has not ended."""
    launcher, _ = run.launchers()
    if not launcher:
        raise Missed
    return launcher


def wait_in_steps(run: Run, chance: Chance) -> None:
    """Wait for a random moment after a random step: most of the time of such a short run is its start."""
    step = chance.rng.randrange(LAST_STEP)
    until(lambda: any(run.launchers()) and read_status(run.run_dir).step >= step, f"step {step}")
    time.sleep(chance.rng.uniform(0.0, LONGEST_INTO_STEP_S))


def kill_launcher(run: Run, chance: Chance) -> None:
    run.start()
    run.launcher_pair()
    chance.wait()
    strike(run, launcher_of(run))


def kill_launcher_in_steps(run: Run, chance: Chance) -> None:
    run.start()
    run.launcher_pair()
    wait_in_steps(run, chance)
    strike(run, launcher_of(run))


def kill_launcher_and(process: str) -> Body:
    def body(run: Run, chance: Chance) -> None:
        run.start()
        until(lambda: pid_of(run, process), f"the first {process}")
        wait_in_steps(run, chance)
        strike(run, launcher_of(run), pid_of(run, process))

    return body


def kill_everything_else(run: Run, chance: Chance) -> None:
    """All processes of the run at once, except the launcher and the command that shows it."""
    run.start()
    wait_in_steps(run, chance)
    assert run.launcher is not None
    kept = launcher_of(run), run.launcher.pid
    strike(run, *(pid for pid in run.pids() if pid not in kept))


def kill_everything_and_resume(run: Run, chance: Chance) -> None:
    run.start()
    wait_in_steps(run, chance)
    launcher_of(run)
    strike(run, *run.pids())
    run.assert_nothing_left(timeout_s=LEFT_S)
    run.launcher = run.command("resume", str(run.run_dir))


# The command and its output.


def through(line: str) -> Body:
    """`kintsugi train` as a shell starts it; `{command}` stands for it."""

    def body(run: Run, chance: Chance) -> None:
        command = f"{sys.executable} -m kintsugi train {RECIPE} run_dir={run.run_dir}"
        run.launcher = run.shell(line.format(command=command))

    return body


def kill_command(run: Run, chance: Chance) -> None:
    command = run.start()
    run.launcher_pair()
    chance.wait(part=0.8)
    launcher_of(run)
    command.kill()


def close_terminal(run: Run, chance: Chance) -> None:
    """Close the terminal: output fails, and the kernel sends SIGHUP to the command that leads the session."""
    terminal, run.output = pty.openpty()
    run.start()
    os.close(run.output)
    run.launcher_pair()
    chance.wait(part=0.8)
    os.close(terminal)


# Limits and files.


def limit_master(limit: int, value: int) -> Body:
    """Lower a limit of the running master: no descriptor, no memory, no byte of a file more."""

    def body(run: Run, chance: Chance) -> None:
        run.start(gates=(5,))
        run.wait_at(5)
        hard = resource.prlimit(pid_of(run, "master-0"), limit)[1]
        resource.prlimit(pid_of(run, "master-0"), limit, (value, hard))
        run.let_through(5)

    return body


def remount_read_only(run: Run, chance: Chance) -> None:
    """The file system of the run is read-only while the last checkpoint is saved."""
    folder = run.run_dir / "checkpoints"
    run.start(gates=(7,))
    run.wait_at(7)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        run.let_through(7)
        run.wait_for_line("checkpoint of step 7 waits", file="events/master-0.jsonl")
    finally:
        subprocess.run(["umount", folder], check=True)


def limit_processes(run: Run, chance: Chance) -> None:
    """The agent's control group may have no process more for 10 s, in which a rank is killed."""
    group = PIDS / f"kintsugi-{os.getpid()}"
    run.start(gates=(5,))
    run.wait_at(5)
    agent = pid_of(run, "agent-0")
    before = PIDS / Path(f"/proc/{agent}/cgroup").read_text().partition(":pids:/")[2].partition("\n")[0]
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(agent))
        (group / "pids.max").write_text((group / "pids.current").read_text())
        strike(run, pid_of(run, "model-1"))
        run.let_through(5)
        time.sleep(10.0)
        assert pid_of(run, "model-1") not in run.pids(), "the limit had no effect"
        (group / "pids.max").write_text("max")
        wait_for_end(run)
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (before / "cgroup.procs").write_text(pid)
        group.rmdir()


CASES: dict[str, Body] = {
    **{f"launcher, moment {number}": kill_launcher for number in range(1, 11)},
    **{f"launcher in the steps, moment {number}": kill_launcher_in_steps for number in range(1, 11)},
    **{f"launcher and master, moment {number}": kill_launcher_and("master-0") for number in range(1, 4)},
    **{f"launcher and agent, moment {number}": kill_launcher_and("agent-0") for number in range(1, 4)},
    **{f"launcher and a rank, moment {number}": kill_launcher_and("model-1") for number in range(1, 4)},
    **{f"everything but the launcher, moment {number}": kill_everything_else for number in range(1, 4)},
    **{f"everything, then resume, moment {number}": kill_everything_and_resume for number in range(1, 4)},
    "command": kill_command,
    "closed terminal": close_terminal,
    "| head -3": through("{command} 2>&1 | head -3"),
    "> full disk": through("{command} > /dev/full 2>&1"),
    "closed output": through("{command} >&- 2>&-"),
    "nohup": through("nohup {command} < /dev/null"),
    "master without descriptors": limit_master(resource.RLIMIT_NOFILE, 0),
    "master without memory": limit_master(resource.RLIMIT_AS, 1 << 20),
    "master at a file-size limit of 0": limit_master(resource.RLIMIT_FSIZE, 0),
    "read-only at the last save": remount_read_only,
    "no process more for 10 s": limit_processes,
}


def wait_for_end(run: Run) -> None:
    """Wait until no process of the run is left, and for the command."""
    until(lambda: not run.pids(), "the end of all processes", timeout_s=END_S)
    assert run.launcher is not None
    run.launcher.wait(LEFT_S)
    run.assert_nothing_left(timeout_s=LEFT_S)


def play(case: str, folder: Path, *, chance: Chance, expected: str) -> Result:
    """Play one case; a moment that came too late is chosen again."""
    for attempt in range(ATTEMPTS):
        run = Run(
            folder
            / f"{case.replace(' ', '-').replace(',', '').replace('|', 'pipe').replace('>', 'to')}-{attempt}"
        )
        began = time.monotonic()
        try:
            CASES[case](run, chance)
            moment = f"step {read_status(run.run_dir).step} of 7" if run.run_dir.exists() else "start"
            wait_for_end(run)
            return result_of(case, run, moment=moment, expected=expected, seconds=time.monotonic() - began)
        except Missed:
            continue
        finally:
            run.close()
    raise Missed


def result_of(case: str, run: Run, *, moment: str, expected: str, seconds: float) -> Result:
    summary = read_summary(run.run_dir)
    causes = diagnose(run.run_dir, clock=Later()).causes
    named = ", ".join(f"{cause.process}: {cause.kind.value}" for cause in causes[:3]) or "none"
    if summary is None:
        return Result(case, moment, read_status(run.run_dir).state, False, 0, seconds, named)
    is_equal = summary.weights_sha256 == expected
    if is_equal:
        assert_trained_exactly_once(run)
    return Result(case, moment, summary.outcome, is_equal, 0, seconds, named)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    results = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        undisturbed = Run(folder / "undisturbed")
        began = time.monotonic()
        undisturbed.start()
        undisturbed.finish()
        undisturbed.close()
        undisturbed_s = time.monotonic() - began
        expected = undisturbed.summary.weights_sha256
        assert expected is not None, "a run that finishes has weights"
        print(f"undisturbed: {undisturbed_s:.1f} s, {expected}", flush=True)
        for case in [name for name in CASES if any(part in name for part in options.only)]:
            chance = Chance(random.Random(f"{options.seed} {case}"), undisturbed_s)
            try:
                result = play(case, folder, chance=chance, expected=expected)
            except (AssertionError, subprocess.TimeoutExpired, Missed) as error:
                result = Result(case, "", f"failed: {error!r}", False, 1, 0.0, "")
            results.append(result)
            print(json.dumps(result._asdict()), flush=True)
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in results], indent=2))
    return 0 if all(each.is_equal for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
