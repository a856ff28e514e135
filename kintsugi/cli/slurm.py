"""`--on slurm`: the run inside of an allocation, or the job that makes one.

    kintsugi train RECIPE --on slurm ── sbatch ──► RUN/slurm_job.sh ─► kintsugi slurm-job RUN ─► launcher ─► srun …
             │                                        (on the first node)
             └── follows: state of the job, its output, at the end the results

The job's script is the command `kintsugi slurm-job RUN`, which starts the run, or resumes it when Slurm has started the
job again. A warning before the time limit or a preemption (SIGUSR2) stops the run after its step, with a checkpoint,
and queues the job again; SIGTERM only stops it. The run folder has to be on a file system that the nodes share.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec

from kintsugi.cli.output import say
from kintsugi.cluster.backends.slurm import (
    SlurmNode,
    ask_slurm,
    job_of,
    parse_nodes,
    read_allocation,
    step_command,
)
from kintsugi.cluster.joining import local_address
from kintsugi.config.schema import ClusterSection, Config, SlurmSection
from kintsugi.errors import ConfigError, KintsugiError, UserError, WorldError
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.waits import wait_readable

ENGINE = "slurm"
LOOK_S = 3.0
"""Interval at which the state of a job is read."""
AWAY_S = 600.0
"""Time for which a slurmctld that does not answer is waited for while a job is followed."""
NEVER = (
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PartitionConfig",
    "PartitionInactive",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "PerJob",
    "QOSTimeLimit",
    "AssociationTimeLimit",
    "DependencyNeverSatisfied",
    "JobHeldAdmin",
)
"""Parts of the reasons for which a job that waits will never start, however long it waits. A quota per user or group is
none of them: jobs of the same user may end."""
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
)


class SubmittedJob(msgspec.Struct, frozen=True):
    """`slurm_job.json` of a run folder: the job of the run."""

    job: str


class JobState(msgspec.Struct, frozen=True):
    """State of a job: `JobState("PENDING", "Resources", "")`."""

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        return not self.state or self.state in _ENDED

    @property
    def can_never_start(self) -> bool:
        return self.state == "PENDING" and any(part in self.reason for part in NEVER)


# Placement.


def placed_cluster(cluster: ClusterSection) -> ClusterSection:
    """Return the section with what follows from the allocation of this process."""
    allocation = read_allocation(os.environ)
    others = allocation.others
    if not others and not allocation.own:
        raise ConfigError(f"job {allocation.job}: expected at least one node, found none")
    is_inside = bool(allocation.own)
    num_placed = len(allocation.nodes) - cluster.slurm.spare_nodes
    if num_placed < 1:
        raise ConfigError(
            f"cluster.slurm.spare_nodes: expected fewer than the {len(allocation.nodes)} nodes of job "
            f"{allocation.job}, got {cluster.slurm.spare_nodes}"
        )
    return msgspec.structs.replace(
        cluster,
        hosts=1 + len(others),
        slots=(int(is_inside), *(1 for _ in others)),
        spare_hosts=cluster.slurm.spare_nodes,
        address=_own_address(others),
    )


def _own_address(others: Sequence[SlurmNode]) -> str:
    """Return the address of this machine on its route to the other nodes."""
    found: dict[str, str] = {}
    for node in others:
        try:
            found.setdefault(local_address(node.address), node.name)
        except OSError as error:
            raise ConfigError(
                f"{node.name}: no route to {node.address}: {error.strerror or error}"
            ) from error
    if len(found) > 1:
        named = " and ".join(f"{name} by {address}" for address, name in list(found.items())[:2])
        raise ConfigError(f"expected all nodes to be reached by one interface of this machine, found {named}")
    return next(iter(found), "127.0.0.1")


# Submission.


def job_script(config: Config, *, run_dir: Path) -> str:
    """Return the script of the job. It can be submitted again by hand."""
    slurm, run = config.cluster.slurm, RunFolder(run_dir.resolve())
    options = [
        f"--job-name=kintsugi-{config.name}",
        f"--nodes={slurm.nodes + slurm.spare_nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--no-kill",
        "--requeue",
        "--open-mode=append",
        f"--output={run.log_file(ENGINE)}",
        f"--signal=B:USR2@{slurm.stop_before_s}",
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--time={slurm.time_limit_min}"] if slurm.time_limit_min else []),
        *slurm.options,
    ]
    lines = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in options)
    command = shlex.join([sys.executable, "-P", "-m", "kintsugi", "slurm-job", str(run.path)])
    return f"#!/bin/sh\n{lines}exec {command}\n"


def check_section(slurm: SlurmSection) -> None:
    """Raise ConfigError for options that would change what the script relies on."""
    ours = (
        "--nodes",
        "-N",
        "--signal",
        "--requeue",
        "--no-requeue",
        "--no-kill",
        "-k",
        "--output",
        "-o",
        "--wrap",
    )
    for option in slurm.options:
        name = option.partition("=")[0]
        if not option.startswith("-") or "\n" in option:
            raise ConfigError(
                f"cluster.slurm.options: expected options of sbatch, as --account=lab, got {option!r}"
            )
        if name in ours or option.startswith("-N"):
            raise ConfigError(
                f"cluster.slurm.options: {name} is set by the run; expected one of nodes, spare_nodes, stop_before_s, "
                "or another option"
            )


def submit(config: Config, *, run_dir: Path) -> str:
    """Submit the job of a run; return its number. UserError with Slurm's words if it is refused."""
    check_section(config.cluster.slurm)
    run = RunFolder(run_dir)
    run.logs_folder.mkdir(exist_ok=True)
    script = run.slurm_script_file
    write_atomically(script, job_script(config, run_dir=run_dir).encode(), durable=False, mode=0o700)
    try:
        answer = ask_slurm("sbatch", "--parsable", str(script.resolve()))
    except KintsugiError:
        _remove(run)
        raise
    job = answer.splitlines()[-1].partition(";")[0].strip()
    write_atomically(run.slurm_job_file, msgspec.json.encode(SubmittedJob(job)), durable=False)
    return job


def _remove(run: RunFolder) -> None:
    """Remove what `submit` has written for a job that was refused."""
    run.slurm_script_file.unlink(missing_ok=True)
    run.slurm_job_file.unlink(missing_ok=True)
    run.log_file(ENGINE).unlink(missing_ok=True)
    with suppress(OSError):
        run.logs_folder.rmdir()


def read_job(job: str) -> JobState:
    """Ask for the state of a job; one that Slurm has forgotten has an empty state."""
    try:
        line = ask_slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r|%N")
    except UserError as error:
        if "Invalid job id" in str(error):
            return JobState("")
        raise WorldError(str(error)) from error
    words = (line.splitlines() or [""])[0].split("|")
    return JobState(*(word.strip() for word in words[:3]))


def follow(job: str, *, run_dir: Path) -> int:
    """Show the output of a job until it has ended; return the exit code of the run.

    SIGINT and SIGTERM stop the run after its step, with a checkpoint; the second one cancels the job. A job that can
    never start is cancelled, and UserError says why.
    """
    output = _Tail(RunFolder(run_dir).log_file(ENGINE))
    signals = Signals(signal.SIGINT, signal.SIGTERM)
    num_stops, told, heard_at = 0, JobState(""), SYSTEM_CLOCK.monotonic()
    try:
        while True:
            with suppress(TimeoutError):
                wait_readable(signals.fileno(), whom=f"job {job}", what="its end", timeout_s=LOOK_S)
            for _ in signals.received():
                num_stops += 1
                _stop_job(job, at_once=num_stops > 1)
            try:
                state, heard_at = read_job(job), SYSTEM_CLOCK.monotonic()
            except WorldError:
                if SYSTEM_CLOCK.monotonic() - heard_at > AWAY_S:
                    raise
                continue
            output.show()
            if state.can_never_start:
                ask_slurm("scancel", job)
                _remove(RunFolder(run_dir))
                raise UserError(f"job {job} can not start: {state.reason} (Slurm's reason); it was cancelled")
            if state != told and not state.has_ended:
                say(f"job {job}: {state.state.lower()}{_details(state)}", err=True)
                told = state
            if state.has_ended:
                break
    finally:
        signals.close()
    output.show()
    summary = reader.read_summary(run_dir)
    if summary is None:
        log = RunFolder(run_dir).log_file(ENGINE)
        raise WorldError(
            f"job {job} has ended ({state.state.lower() or 'unknown'}) without a result; see {log}"
        )
    return 0 if summary.outcome in (reader.RunState.FINISHED, reader.RunState.STOPPED) else 1


def _details(state: JobState) -> str:
    if state.nodes:
        return f" on {state.nodes}"
    return f" ({state.reason})" if state.reason and state.reason != "None" else ""


class _Tail:
    """The output of a job as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            self._offset += len(text)
            if text:
                say(text.decode(errors="replace"), nl=False, wrap=False)


def job_elsewhere(run_dir: Path) -> str:
    """Return the job of a run if its launcher runs in it, on whatever node, and this process is not in it; else
    nothing."""
    try:
        record = msgspec.json.decode(RunFolder(run_dir).slurm_job_file.read_bytes(), type=SubmittedJob)
    except (OSError, msgspec.DecodeError):
        return ""
    return "" if record.job == job_of(os.environ) or read_job(record.job).has_ended else record.job


def stop_job(job: str) -> str:
    """Stop the run of a job after its step, with a checkpoint; return what was done."""
    _stop_job(job, at_once=False)
    return f"job {job}: asked to stop after its step, with a checkpoint"


def _stop_job(job: str, *, at_once: bool) -> None:
    """A job that waits is cancelled at once: nothing of it has begun."""
    if at_once or read_job(job).state in ("PENDING", "CONFIGURING"):
        ask_slurm("scancel", job)
    else:
        ask_slurm("scancel", "--batch", "--signal=TERM", job)


# Inside of the job.


class JobWarning:
    """SIGUSR2 in the job's script: a stop request, after which the job is queued again."""

    def __init__(self) -> None:
        self.came = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Slurm may send it, and the host manager too: a second request to stop would end the run without a
        checkpoint."""
        if not self.came:
            self.came = True
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def requeued_when_warned(run_dir: Path) -> Iterator[JobWarning]:
    """While this is entered, Slurm's warning stops the run; a run that was stopped by it is queued again at the end."""
    warning = JobWarning()
    previous = signal.signal(signal.SIGUSR2, warning.note)
    try:
        yield warning
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN if warning.came else previous)
        summary = reader.read_summary(run_dir) if warning.came else None
        if summary is not None and summary.outcome == reader.RunState.STOPPED:
            job = job_of(os.environ)
            say(
                f"job {job}: stopped before its end with a checkpoint; it is queued again and resumes by itself"
            )
            ask_slurm("scontrol", "requeue", job)


def take_over_from_killed_job(run_dir: Path) -> None:
    """After Slurm has started this job again, its earlier launcher is gone, on whatever node it was."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return
    with suppress(OSError, msgspec.DecodeError):
        record = msgspec.json.decode(RunFolder(run_dir).slurm_job_file.read_bytes(), type=SubmittedJob)
        if record.job == job_of(os.environ):
            RunFolder(run_dir).launcher_file.unlink(missing_ok=True)


# The table of `kintsugi hosts`.


def asking_command(node: str, program: Sequence[str]) -> list[str]:
    """Build the command that runs a program on a node of this process's allocation."""
    return step_command(job_of(os.environ), node, host="kintsugi-hosts", command=program)


def cluster_lines() -> tuple[list[str], bool]:
    """Return the nodes of the site as Slurm describes them, and whether there is one that could be used."""
    nodes = parse_nodes(ask_slurm("scontrol", "show", "nodes", "--oneliner"))
    lines = [f"{'node':12} {'address':16} {'cores':>5} {'memory':>9}  {'generic resources':20} state"]
    for node in nodes:
        states = "+".join(sorted(node.states)).lower()
        problem = "" if node.is_usable else "; no step can be started there"
        memory = f"{node.memory_mib / 1024:5.1f} GiB"
        lines.append(
            f"{node.name:12} {node.address:16} {node.cpus:5} {memory}  {node.gres or '-':20} {states}{problem}"
        )
    lines.append("in no allocation: `salloc -N 3 kintsugi hosts --on slurm` asks the nodes themselves")
    return lines, any(node.is_usable for node in nodes)
