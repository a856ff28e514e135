"""Run that faults are injected into: started as a process of its own; all its processes carry a mark.

`python -m kintsugi.lab.testbed.run RUN_DIR start|resume warm|cold [HOSTS]` is the launcher that an experiment starts.
`cold` disables the fork server: every process imports its libraries itself. HOSTS is a file with the isolated hosts of
the agents (`testbed.py`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.cluster.handover import PROGRAMS, Programs
from kintsugi.cluster.launcher import launch
from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.config.recipe import dump, load_config
from kintsugi.config.schema import Config
from kintsugi.errors import KintsugiError, UserError
from kintsugi.lab.testbed.growth import with_growth
from kintsugi.lab.testbed.outputs import CommandOutput, Output
from kintsugi.lab.testbed.process_tags import carriers, carries
from kintsugi.lab.testbed.remote_hosts import RemoteHosts
from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.process.exit_codes import EXIT_ERROR, EXIT_USER_ERROR
from kintsugi.run_folder.creation import create_run_dir
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.proc import die_with_parent
from kintsugi.runtime.processes import Child, Processes, SystemProcesses
from kintsugi.runtime.waits import wait

MARK = "KINTSUGI_LAB_MARK"
LAUNCHER = (sys.executable, "-P", "-m", "kintsugi.lab.testbed.run")
SESSION = (sys.executable, "-P", "-m", "kintsugi.cli.session")
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Makes the C library return freed memory to the kernel immediately. Where there is no accelerator, tensors are in host
memory, and memory that the C library keeps could not be refused to the process."""
END_DEADLINE_S = 20.0


def cold(programs: Programs) -> Programs:
    """Return the same programs without a fork server."""
    return msgspec.structs.replace(programs, preload=(), forked=())


class MarkedRun:
    """One run folder and the launcher that runs it. Processes that carry the mark may be signalled and killed."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        cold: bool = False,
        command: Sequence[str] = LAUNCHER,
        testbed: RunTestbed | None = None,
        output: Output | None = None,
    ) -> None:
        """`command` is the launcher; its arguments are the folder, `start` or `resume`, `warm` or `cold`, and the hosts
        file if `testbed` has hosts. With `output` the run is started as `kintsugi train` starts it instead, with the
        live view on that output."""
        self.run_dir = run_dir
        self.testbed = testbed
        self._command = command
        self._output = output
        self._lifeline = -1
        """Write end of the pipe whose end stops a run that was started with an output."""
        self.config = msgspec.structs.replace(config, run_dir=str(run_dir))
        self.remote = RemoteHosts(self.config, run_dir=run_dir) if config.cluster.on else None
        """Hosts on other machines, with `cluster.on`."""
        self.launcher: Child | None = None
        self._cold = cold
        self._mark = uuid4().hex
        create_run_dir(run_dir)
        dump(self.config, RunFolder(run_dir).config_file)

    def start(self, *, resume: bool = False) -> None:
        if self.launcher is not None:
            self.launcher.close()
        if self._output is not None and not resume:
            self._start_session(self._output)
            return
        how = ["resume" if resume else "start", "cold" if self._cold else "warm"]
        if self.testbed is not None and self.testbed.hosts:
            how.append(str(self.testbed.hosts_file))
        with (self.run_dir / "launcher.log").open("ab") as log:
            self.launcher = SystemProcesses().spawn(
                [*self._command, str(self.run_dir), *how],
                environment=self._environment(),
                stdout=log,
                stderr=log,
                new_session=True,
            )

    def _start_session(self, output: Output) -> None:
        """Start the run with its live view; the run stops when this process ends."""
        opened = CommandOutput(output, log=self.run_dir / "launcher.log")
        read_end, self._lifeline = os.pipe()
        try:
            self.launcher = SystemProcesses().spawn(
                opened.command([*SESSION, str(self.run_dir), str(read_end)]),
                environment={**self._environment(), "TERM": "xterm-256color"},
                pass_fds=(read_end,),
                stdout=opened.descriptor,
                stderr=opened.descriptor,
                new_session=True,
            )
        finally:
            os.close(read_end)
            opened.started()

    def _environment(self) -> dict[str, str]:
        gives_back = GIVES_BACK if self.testbed is not None else {}
        return {**os.environ, **gives_back, MARK: self._mark}

    @property
    def running(self) -> bool:
        return self.launcher is not None and not self.launcher.ended()

    def exit_code(self) -> int | None:
        """Return the exit code of the launcher once it has ended."""
        return self.launcher.status() if self.launcher is not None else None

    def output(self) -> str:
        """Return the output of the launcher."""
        return (self.run_dir / "launcher.log").read_text(errors="replace").strip()

    def is_ours(self, pid: int) -> bool:
        """Whether a process carries the mark of this run."""
        return carries(pid, self._mark)

    def has(self, process: str, pid: int) -> bool:
        """Whether this is a process of the run. One on another machine is known by the master only."""
        return (self.remote is not None and self.remote.is_elsewhere(process)) or self.is_ours(pid)

    def pids(self) -> list[int]:
        """Return all running processes of the run, on this machine."""
        return carriers(self._mark)

    def kill_everything(self) -> None:
        """Kill all processes, as when the machine goes down: no process is left that could clean up."""

        def attempt(remaining_s: float) -> bool | None:
            pids = self.pids()
            for pid in pids:
                signal_ours(self, pid, signal.SIGKILL)
            return True if not pids else None

        wait(attempt, whom="all processes of the run", what="their end", timeout_s=END_DEADLINE_S)
        if self.launcher is not None:
            self.launcher.wait_ended(whom="launcher", timeout_s=END_DEADLINE_S)

    def close(self) -> None:
        """End the remaining processes of the run."""
        self.kill_everything()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self.launcher is not None:
            self.launcher.close()
            self.launcher = None
        if self.remote is not None:
            self.remote.close()


def signal_ours(run: MarkedRun, pid: int, number: signal.Signals) -> bool:
    """Signal a process of the run and no other, even when its pid has been reused meanwhile."""
    try:
        process = SystemProcesses().adopt(pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor is opened first, so the mark is checked on the process that gets the signal.
        if not run.is_ours(pid) or process.ended():
            return False
        process.send_signal(number)
        return True
    finally:
        process.close()


def main(arguments: list[str]) -> int:
    """Body of the launcher's process."""
    folder, how, temperature, *hosts = arguments
    programs = cold(PROGRAMS) if temperature == "cold" else PROGRAMS
    # The environment does not travel to other machines; the programs do.
    programs = with_growth(programs, gives_back=GIVES_BACK.items() <= os.environ.items())
    places = read_hosts(Path(hosts[0])) if hosts else ()
    return launch_for_a_lab(Path(folder), resume=how == "resume", programs=programs, hosts=places)


def read_hosts(path: Path) -> tuple[HostNamespaces, ...]:
    """Read the hosts file of a `RunTestbed`."""
    return msgspec.json.decode(path.read_bytes(), type=tuple[HostNamespaces, ...])


def launch_for_a_lab(
    run_dir: Path,
    *,
    resume: bool,
    programs: Programs,
    processes: Processes | None = None,
    hosts: Sequence[HostNamespaces] = (),
) -> int:
    """Launch the configuration of the folder; this process is killed when its parent ends."""
    die_with_parent()
    config = load_config(RunFolder(run_dir).config_file)
    if resume:
        RunFolder(run_dir).summary_file.unlink(missing_ok=True)
    try:
        return launch(
            config,
            run_dir=run_dir,
            on_tick=lambda: None,
            resume=resume,
            programs=programs,
            processes=processes,
            hosts=hosts,
        )
    except KintsugiError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
