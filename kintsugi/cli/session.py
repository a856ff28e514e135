"""A session launches a run, shows its progress and reports its outcome.

`kintsugi train` and `kintsugi resume` run it in their own process. `kintsugi.train` starts it as a separate process
(`python -m kintsugi.cli.session RUN_DIR LIFELINE`): the launcher installs signal handlers, adopts orphans and needs the
main thread, which would interfere with a notebook or a calling program.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console

from kintsugi.cli.live import LiveView, print_closing
from kintsugi.cluster.child import tail
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.errors import Fault, KintsugiError, UserError
from kintsugi.process.exit_codes import EXIT_ERROR, EXIT_USER_ERROR
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.summary import FaultLine
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.printable import printable
from kintsugi.runtime.stacks import enable_stack_dumps
from kintsugi.types import Role, process_id

NOTE, WARNING = "note: ", "warning: "


def run_session(
    config: Config, *, run_dir: Path, resume: bool, on_tick: Callable[[], None] = lambda: None
) -> int:
    """Run to the end, print the outcome and return the exit code. The first cause of a failure is printed first."""
    from kintsugi.access.roles import Action
    from kintsugi.cli.access import record_locally
    from kintsugi.cli.capacity import check_start
    from kintsugi.cluster.launcher import launch
    from kintsugi.data.dataset import pin_data
    from kintsugi.data.streams import spools

    for sentence in pin_data(config, run_dir=run_dir).left_out:
        _print(f"{NOTE}{sentence}")
    for sentence in check_start(config, run_dir=run_dir, resume=resume):
        _print(f"{WARNING}{sentence}")
    record_locally(run_dir, Action.RESUME if resume else Action.START, begins=not resume)
    console, since = Console(), SYSTEM_CLOCK.wall()
    log = RunFolder(run_dir).log_file(process_id(Role.MASTER, 0))
    log_size = log.stat().st_size if log.exists() else 0
    with LiveView(config, run_dir=run_dir, console=console) as display, spools(config.data, run_dir) as pump:

        def tick() -> None:
            pump()
            display.tick()
            on_tick()

        code = launch(config, run_dir=run_dir, on_tick=tick, resume=resume)
    summary = reader.read_summary(run_dir)
    if summary is not None:
        print_closing(console, summary, config=config, folder=run_dir)
    if code != 0:
        faults = reader.read_faults(run_dir, since=since)
        _print_failure(code, faults, run_dir=run_dir, master_log=tail(log, offset=log_size).strip())
    return code


def print_error(error: KintsugiError) -> int:
    """Print an error as one message, with its cause before it, and return the exit code."""
    if error.cause is not None and not isinstance(error, UserError):
        print_faults([error.cause])
    _print(f"error: {error}")
    return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR


def print_faults(faults: Iterable[Fault | FaultLine]) -> None:
    """Print faults: the first one is the cause, the others are its consequences."""
    for number, fault in enumerate(faults):
        _print(f"{'cause' if number == 0 else 'then'}: {fault.process}: {fault.kind}: {fault.message}")


def _print(message: str) -> None:
    sys.stderr.write(f"{printable(message)}\n")


def _print_failure(code: int, faults: Sequence[FaultLine], *, run_dir: Path, master_log: str) -> None:
    """Print why a run failed: the recorded faults, else the end of the master's log."""
    if code == EXIT_USER_ERROR and faults:
        _print(f"error: {faults[-1].message}")
    elif faults:
        print_faults(faults)
        _print(f"error: the run failed; its folder is {run_dir}")
    elif code == EXIT_USER_ERROR and master_log:
        _print(f"error: {master_log.splitlines()[-1]}")
    elif master_log:
        _print(f"{master_log}\nerror: the master failed; the run folder is {run_dir}")
    else:
        _print(f"error: the run was interrupted; `kintsugi resume {run_dir}` continues it")


class Lifeline:
    """Read end of a pipe held open by the process that started the session; EOF means that this process has ended."""

    def __init__(self, descriptor: int) -> None:
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._ended = False

    def check(self) -> None:
        """At EOF, request a normal stop: after the current step, with a checkpoint."""
        if not self._ended and self._poller.poll(0):
            self._ended = True
            os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Run the session that `kintsugi.train` starts. The run folder exists and has its configuration."""
    folder, descriptor = arguments
    run_dir = Path(folder)
    enable_stack_dumps()
    lifeline = Lifeline(int(descriptor))
    try:
        config = load_config(RunFolder(run_dir).config_file)
        return run_session(config, run_dir=run_dir, resume=False, on_tick=lifeline.check)
    except KintsugiError as error:
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
