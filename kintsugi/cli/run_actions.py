"""Actions on runs that commands and the page share: stop, scale, resume."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kintsugi.cli.hosts import placed_again
from kintsugi.cli.output import counted
from kintsugi.config.recipe import fields_of, given, load_config, shown
from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.errors import ConfigError, DeadlineExceeded, UntrustedFile, UserError
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.owned_files import check_owner
from kintsugi.runtime.processes import Child, SystemProcesses, describe_status
from kintsugi.runtime.waits import wait_readable

SCALE_TIMEOUT_S = 60.0
LAUNCH_S = 60.0
"""Time from the creation of a run folder to its launcher, on a busy machine."""
LAUNCH_LOOK_S = 0.2
RESUME_CHECK_S = 3.0
"""Time in which a resume that can not work ends; after it, the run is taken to have started."""


def find_launcher(folder: Path) -> Child:
    """Return the launcher of a running run; UserError if it does not run, or belongs to another user."""
    check_owner(folder, action="stop it")
    record = reader.living_launcher(folder)
    if record is None:
        raise UserError(
            f"{folder} is not running (it is {reader.read_status(folder).state}); there is nothing to stop"
        )
    launcher = SystemProcesses().adopt(record.pid)
    owner = RunFolder(folder).launcher_file.stat().st_uid
    if Path(f"/proc/{record.pid}").stat().st_uid != owner:
        launcher.close()
        raise UntrustedFile(
            f"{RunFolder(folder).launcher_file}: expected the launcher of user {owner}, which wrote the file; process "
            f"{record.pid} belongs to another user"
        )
    return launcher


def _pause(seconds: float) -> None:
    wait_readable(whom="launcher-0", what="its record in the run folder", timeout_s=seconds)


def find_started(folder: Path, *, pause: Callable[[float], None] = _pause) -> bool:
    """Return whether a run is running. One that is being started is waited for: its launcher is recorded seconds after
    its folder was created."""
    run = RunFolder(folder)
    while reader.living_launcher(folder) is None:
        has_begun = run.launcher_file.exists() or run.journal_file.exists() or run.summary_file.exists()
        if has_begun or SYSTEM_CLOCK.wall() - run.config_file.stat().st_mtime > LAUNCH_S:
            return False
        pause(LAUNCH_LOOK_S)
    return True


def request_stop(folder: Path, launcher: Child) -> str:
    """Ask a run to stop after its current step, with a checkpoint."""
    launcher.send_signal(signal.SIGTERM)
    return f"{folder}: sent the stop request to process {launcher.pid}; it ends after its step"


class Finished(UserError):
    """A run that has nothing left to do."""


CHANGEABLE = (
    "algorithm.steps",
    "algorithm.entropy_weight",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "actor.workers",
    "actor.layout.gather",
    "actor.layout.replicas",
    "actor.layout.shards",
    "actor.layout.stages",
    "actor.layout.tensors",
    "actor.logical_slices",
    "actor.learning_rate",
    "actor.schedule",
    "actor.weight_decay",
    "actor.max_grad_norm",
    "critic.learning_rate",
    "sampling.temperature",
    "rollout.attempts",
    "rollout.reward_timeout_s",
    "rollout.turn_timeout_s",
    "eval",
    "checkpoint.every",
    "checkpoint.copy_to",
    "logging",
    "monitoring",
    "weights.deadline_s",
    "cluster.start_timeout_s",
    "cluster.on",
    "cluster.slurm.nodes",
    "cluster.slurm.spare_nodes",
    "cluster.slurm.partition",
    "cluster.slurm.time_limit_min",
    "cluster.slurm.stop_before_s",
    "cluster.slurm.options",
)
"""Fields, and sections, that a resume may change: a run with other values of the rest is another run."""


def change_config(folder: Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the configuration of a run with overrides, and a sentence for each change; ConfigError for a field that
    belongs to what the run has done already."""
    before = load_config(RunFolder(folder).config_file)
    if not overrides:
        return before, []
    asked = given(before, overrides).config
    _check_changeable(before, asked, folder=folder)
    after = placed_again(_with_parts_of_the_batch(asked, before), before)
    old, new = fields_of(before), fields_of(after)
    changed = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    done = reader.read_status(folder).step
    if (last := stages(after)[-1].last_step) < done:
        raise ConfigError(
            f"`algorithm.steps` (command line): expected at least {after.algorithm.steps + done - last}, as "
            f"{folder} has done {counted(done, 'step')} in all, got {after.algorithm.steps}"
        )
    return after, [
        f"{name}: {shown(old.get(name))} until step {done}, then {shown(new.get(name))}" for name in changed
    ]


def _check_changeable(before: Config, asked: Config, *, folder: Path) -> None:
    old, new = fields_of(before), fields_of(asked)
    for name in dict.fromkeys((*old, *new)):
        may_change = name in CHANGEABLE or name.partition(".")[0] in CHANGEABLE
        if old.get(name) != new.get(name) and not may_change:
            raise ConfigError(
                f"`{name}`: expected a field that a resume may change ({', '.join(CHANGEABLE)}), got "
                f"{shown(new.get(name))}; with another value it is another run: "
                f"`kintsugi train {RunFolder(folder).config_file} {name}=… run_dir=null`"
            )


def _with_parts_of_the_batch(asked: Config, before: Config) -> Config:
    """Keep the parts of the batch, on which the result depends, where other workers, or workers that share each model
    otherwise, are to compute them."""
    if asked.actor.logical_shards is not None or asked.actor.num_shards == before.actor.num_shards:
        return asked
    actor = msgspec.structs.replace(asked.actor, logical_shards=before.actor.num_shards)
    return msgspec.structs.replace(asked, actor=actor)


def check_resumable(
    folder: Path,
    config: Config | None = None,
    *,
    take_over: bool = False,
    accept_changes: bool = False,
) -> reader.RunStatus:
    """Return the status of a run that can be resumed; UserError for one that runs, is finished, is invalid, belongs to
    another user or was changed since its start.

    `config`: the configuration with which it is to continue, if another one than that in its folder.
    `take_over`: also one whose launcher ran on another host, which gives no sign of life any more.
    """
    from kintsugi.config.validation import validate
    from kintsugi.run_folder.started import changes_since_start

    check_owner(folder, action="resume it")
    status = reader.read_status(folder)
    config = status.config if config is None else config
    if status.state is reader.RunState.RUNNING:
        where = f"on host {status.host}" if status.host else f"process {status.pid}"
        hint = ""
        if status.host:
            unseen_s = max(0.0, reader.unseen_s(folder))
            hint = (
                f"; it gave a sign of life {unseen_s:.0f} s ago. If that host is gone, "
                f"`kintsugi resume --take-over` works {reader.ELSEWHERE_S:.0f} s after the last one"
            )
        raise UserError(f"{folder} is running ({where}); there is nothing to resume{hint}")
    if not take_over:
        reader.living_launcher(folder)  # Refuses one of another host.
    if status.state is reader.RunState.FINISHED and stages(config)[-1].last_step <= status.total_steps:
        more = f"`kintsugi resume {folder} algorithm.steps={2 * config.algorithm.steps}` trains it longer"
        raise Finished(f"{folder} is finished ({status.step} of {status.total_steps} steps); {more}")
    validate(msgspec.structs.replace(config, run_dir=None), resumed=folder)
    changes = changes_since_start(folder, status.config)
    if changes and not accept_changes:
        listed = "\n".join(f"  {change}" for change in changes)
        raise UserError(
            f"{folder} is not what it was when it started:\n{listed}\nits result would not be that of an "
            "uninterrupted run; undo the change, or accept it with `kintsugi resume --accept`"
        )
    if take_over:
        RunFolder(folder).launcher_file.unlink(missing_ok=True)
    return status


class RunActions:
    """Actions of the page, by the code of the commands. A resumed run is a process of its own and outlives the page."""

    def __init__(self) -> None:
        self._resumed: list[Child] = []

    def stop(self, run_dir: Path) -> str:
        launcher = find_launcher(run_dir)
        try:
            return request_stop(run_dir, launcher)
        finally:
            launcher.close()

    def scale(self, run_dir: Path, *, servers: int) -> str:
        from kintsugi.cli.scale import scale_run

        scale_run(run_dir, servers=servers, timeout_s=SCALE_TIMEOUT_S)
        return f"{run_dir}: scaled to {counted(servers, 'generation server')}"

    def resume(self, run_dir: Path) -> str:
        check_resumable(run_dir)
        self._reap()
        with tempfile.TemporaryFile() as output:
            child = SystemProcesses().spawn(
                [sys.executable, "-P", "-m", "kintsugi", "resume", str(run_dir)],
                stdout=output,
                stderr=output,
                new_session=True,
            )
            try:
                status = child.wait_ended(whom="kintsugi resume", timeout_s=RESUME_CHECK_S)
            except DeadlineExceeded:
                self._resumed.append(child)
                return f"{run_dir}: resumed by process {child.pid}"
            child.close()
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
        if status != 0:
            raise UserError(f"{run_dir}: not resumed: {said[-1] if said else describe_status(status)}")
        return f"{run_dir}: resumed, and ended already"

    def _reap(self) -> None:
        """Take the remains of resumed runs that have ended."""
        for child in [each for each in self._resumed if each.ended()]:
            child.status()
            child.close()
            self._resumed.remove(child)
