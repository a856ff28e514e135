"""A run that may be broken: started as a process of its own, every process of it recognised by a mark.

`python -m kintsugi.lab.running RUN_DIR start|resume warm|cold [HOSTS]` is the launcher that an experiment starts. Cold
is the same program without the template that workers are forked from: every process imports what it needs. HOSTS is a
file that says where the agents are, where they are on hosts of their own (`places.py`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from kintsugi.cluster.handover import PROGRAMS, Programs
from kintsugi.cluster.hosts import HostPlace
from kintsugi.cluster.launcher import launch
from kintsugi.config import Config
from kintsugi.errors import KintsugiError, UserError
from kintsugi.lab.marks import carriers, carries
from kintsugi.lab.places import Place
from kintsugi.recipe import dump, load_config
from kintsugi.runs import CONFIG_FILE, SUMMARY_FILE, create_run_dir
from kintsugi.runtime import Child, Processes, SystemProcesses, wait
from kintsugi.worker import EXIT_ERROR, EXIT_USER_ERROR

MARK = "KINTSUGI_LAB_MARK"
LAUNCHER = (sys.executable, "-m", "kintsugi.lab.running")
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Where there is no accelerator, tensors are in memory that the C library would keep for the next ones. Given back at
once, it can be refused to a process like an accelerator's."""
PR_SET_PDEATHSIG = 1
END_DEADLINE_S = 20.0


def cold(programs: Programs) -> Programs:
    """The same programs without a template to fork from."""
    return msgspec.structs.replace(programs, preload=(), forked=())


class MarkedRun:
    """One run folder and the launcher that runs it. Whatever carries the mark is ours to break and to end."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        cold: bool = False,
        command: Sequence[str] = LAUNCHER,
        place: Place | None = None,
    ) -> None:
        """`command` is the launcher; it is given the folder, `start` or `resume`, `warm` or `cold`, and where its hosts
        are if `place` has any."""
        self.run_dir = run_dir
        self.place = place
        self._command = command
        self.config = msgspec.structs.replace(config, run_dir=str(run_dir))
        self.launcher: Child | None = None
        self._cold = cold
        self._mark = uuid4().hex
        create_run_dir(run_dir)
        dump(self.config, run_dir / CONFIG_FILE)

    def start(self, *, resume: bool = False) -> None:
        if self.launcher is not None:
            self.launcher.close()
        how = ["resume" if resume else "start", "cold" if self._cold else "warm"]
        if self.place is not None and self.place.hosts:
            how.append(str(self.place.hosts_file))
        with (self.run_dir / "launcher.log").open("ab") as log:
            self.launcher = SystemProcesses().spawn(
                [*self._command, str(self.run_dir), *how],
                environment={
                    **os.environ,
                    **(GIVES_BACK if self.place is not None else {}),
                    MARK: self._mark,
                },
                stdout=log,
                stderr=log,
                new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.launcher is not None and not self.launcher.ended()

    def exit_code(self) -> int | None:
        """Of the launcher, once it has ended."""
        return self.launcher.status() if self.launcher is not None else None

    def last_words(self) -> str:
        """What the launcher wrote."""
        return (self.run_dir / "launcher.log").read_text(errors="replace").strip()

    def is_ours(self, pid: int) -> bool:
        """Whether a process carries the mark of this run."""
        return carries(pid, self._mark)

    def pids(self) -> list[int]:
        """Every living process of the run."""
        return carriers(self._mark)

    def kill_everything(self) -> None:
        """As when the machine goes down: nobody is left who could clean up."""

        def attempt(remaining_s: float) -> bool | None:
            pids = self.pids()
            for pid in pids:
                signal_ours(self, pid, signal.SIGKILL)
            return True if not pids else None

        wait(attempt, whom="all processes of the run", what="their end", timeout_s=END_DEADLINE_S)
        if self.launcher is not None:
            self.launcher.wait_ended(whom="launcher", timeout_s=END_DEADLINE_S)

    def close(self) -> None:
        """End what is left of the run."""
        self.kill_everything()
        if self.launcher is not None:
            self.launcher.close()
            self.launcher = None


def signal_ours(run: MarkedRun, pid: int, number: signal.Signals) -> bool:
    """Signal a process of the run and no other, even when the number has been given to somebody else meanwhile."""
    try:
        process = SystemProcesses().adopt(pid)
    except ProcessLookupError:
        return False
    try:
        # Held by descriptor first: what the mark says then is said of the process that gets the signal.
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
    places = read_hosts(Path(hosts[0])) if hosts else ()
    return launch_for_a_lab(Path(folder), resume=how == "resume", programs=programs, hosts=places)


def read_hosts(path: Path) -> tuple[HostPlace, ...]:
    """As a `Place` wrote them."""
    return msgspec.json.decode(path.read_bytes(), type=tuple[HostPlace, ...])


def launch_for_a_lab(
    run_dir: Path,
    *,
    resume: bool,
    programs: Programs,
    processes: Processes | None = None,
    hosts: Sequence[HostPlace] = (),
) -> int:
    """Launch what the folder's configuration says, and end with whoever started this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    config = load_config(run_dir / CONFIG_FILE)
    if resume:
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
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
