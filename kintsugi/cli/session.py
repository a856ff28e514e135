"""A session starts the launcher of a run (`supervisor.py`), shows the run's progress and reports its outcome.

`kintsugi train` and `kintsugi resume` run it in their own process. `kintsugi.train` starts it as a separate process
(`python -m kintsugi.cli.session RUN_DIR LIFELINE`): a session installs signal handlers and needs the main thread, which
would interfere with a notebook or a calling program.

The run does not depend on its session: one that is killed leaves the run going, and one that cannot write its output
continues without it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from kintsugi.cli.closing import print_closing
from kintsugi.cli.live import LiveView, follow_until_end
from kintsugi.cli.output import SteadyOutput, console, print_message
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
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.stacks import enable_stack_dumps
from kintsugi.telemetry.process_reports import read_processes
from kintsugi.types import Role, process_id

NOTE, WARNING = "note: ", "warning: "
_GOOD_OUTCOMES = (reader.RunState.FINISHED, reader.RunState.STOPPED)


def run_session(
    config: Config,
    *,
    run_dir: Path,
    resume: bool,
    on_tick: Callable[[], None] = lambda: None,
    stops_on_hangup: bool = False,
) -> int:
    """Run to the end, print the outcome and return the exit code. The first cause of a failure is printed first."""
    from kintsugi.cli.supervisor import supervise

    _prepare(config, run_dir=run_dir, resume=resume)
    output, since = SteadyOutput(sys.stdout), SYSTEM_CLOCK.wall()
    screen = console(cast(TextIO, output))
    log = RunFolder(run_dir).log_file(process_id(Role.MASTER, 0))
    log_size = log.stat().st_size if log.exists() else 0
    with LiveView(config, run_dir=run_dir, console=screen) as display:

        def tick() -> None:
            # A file that cannot be read now may be readable the next time.
            with contextlib.suppress(OSError, KintsugiError):
                display.tick()
            on_tick()

        code = supervise(
            config,
            run_dir=run_dir,
            on_tick=tick,
            on_stop=display.acknowledge_stop,
            resume=resume,
            stops_on_hangup=stops_on_hangup,
        )
    _print_outcome(code, screen, config=config, run_dir=run_dir, since=since, log_size=log_size)
    output.settle()
    return code


def start_detached(config: Config, *, run_dir: Path, resume: bool) -> int:
    """Start a run and return as soon as its master reports; the run goes on without a terminal."""
    from kintsugi.cli.supervisor import supervise

    _prepare(config, run_dir=run_dir, resume=resume)
    since = SYSTEM_CLOCK.wall()
    log = RunFolder(run_dir).log_file(process_id(Role.MASTER, 0))
    log_size = log.stat().st_size if log.exists() else 0

    def has_begun() -> bool:
        reports = read_processes(run_dir)
        return reports is not None and reports.time >= since

    code = supervise(config, run_dir=run_dir, on_tick=lambda: None, resume=resume, is_enough=has_begun)
    if reader.living_launcher(run_dir) is None:  # It has ended already, which is a failure as a rule.
        screen = console()
        _print_outcome(code, screen, config=config, run_dir=run_dir, since=since, log_size=log_size)
    return code


def attach(run_dir: Path) -> int:
    """Show a running run as `kintsugi train` does, until it ends; Ctrl-C leaves the run going.

    Ctrl-C is read from a descriptor, as by `kintsugi train`: it also works where a shell has started the command with
    SIGINT ignored, as in the background, and where Python ignores exceptions, as in a callback of an import.
    """
    config, since = load_config(RunFolder(run_dir).config_file), SYSTEM_CLOCK.wall()
    output = SteadyOutput(sys.stdout)
    screen = console(cast(TextIO, output))
    log = RunFolder(run_dir).log_file(process_id(Role.MASTER, 0))
    log_size = log.stat().st_size if log.exists() else 0
    with (
        closing(Signals(signal.SIGINT)) as interrupts,
        LiveView(config, run_dir=run_dir, console=screen) as display,
    ):
        has_ended = follow_until_end(display, folder=run_dir, interrupts=interrupts)
    if not has_ended:
        see = f"`kintsugi attach {run_dir}` shows it again, `kintsugi stop {run_dir}` stops it"
        screen.print(printable(f"detached; the run goes on: {see}"), highlight=False, markup=False)
        output.settle()
        return 0
    summary = reader.read_summary(run_dir)
    code = 0 if summary is not None and summary.outcome in _GOOD_OUTCOMES else EXIT_ERROR
    _print_outcome(code, screen, config=config, run_dir=run_dir, since=since, log_size=log_size)
    output.settle()
    return code


def show_results(run_dir: Path) -> int:
    """Print the closing table of a run that has ended; returns the exit code that it had."""
    config = load_config(RunFolder(run_dir).config_file)
    summary = reader.read_summary(run_dir)
    code = 0 if summary is not None and summary.outcome in _GOOD_OUTCOMES else EXIT_ERROR
    _print_outcome(code, console(), config=config, run_dir=run_dir, since=0.0, log_size=0)
    return code


def _prepare(config: Config, *, run_dir: Path, resume: bool) -> None:
    """Pin the data, check what can be checked before any process starts, and record the start."""
    from kintsugi.access.roles import Action
    from kintsugi.cli.access import record_locally
    from kintsugi.cli.capacity import check_start
    from kintsugi.data.dataset import pin_data
    from kintsugi.run_folder.started import record_start

    warnings = check_start(config, run_dir=run_dir, resume=resume)  # First: reading the data may take long.
    data = pin_data(config, run_dir=run_dir)
    for sentence in data.left_out:
        print_message(f"{NOTE}{sentence}")
    if 0 < data.num_positions < data.num_held_out:
        print_message(
            f"{NOTE}{data.num_held_out:,} rows are held out (`data.num_eval`) and only {data.num_positions:,} are "
            "trained on"
        )
    for sentence in warnings:
        print_message(f"{WARNING}{sentence}")
    record_locally(run_dir, Action.RESUME if resume else Action.START, begins=not resume)
    if not resume:
        record_start(run_dir, load_config(RunFolder(run_dir).config_file))


def _print_outcome(
    code: int, screen: Console, *, config: Config, run_dir: Path, since: float, log_size: int
) -> None:
    """Print the closing table, and the causes of a failure."""
    summary = reader.read_summary(run_dir)
    if summary is not None:
        print_closing(screen, summary, config=config, folder=run_dir)
    if code != 0:
        log = RunFolder(run_dir).log_file(process_id(Role.MASTER, 0))
        faults = reader.read_faults(run_dir, since=since)
        _print_failure(code, faults, run_dir=run_dir, master_log=tail(log, offset=log_size).strip())


def print_error(error: KintsugiError) -> int:
    """Print an error as one message, with its cause before it, and return the exit code."""
    if error.cause is not None and not isinstance(error, UserError):
        print_faults([error.cause])
    print_message(f"error: {error}")
    return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR


def print_faults(faults: Iterable[Fault | FaultLine]) -> None:
    """Print faults: the first one is the cause, the others are its consequences."""
    for number, fault in enumerate(faults):
        print_message(f"{'cause' if number == 0 else 'then'}: {fault.process}: {fault.kind}: {fault.message}")


def _print_failure(code: int, faults: Sequence[FaultLine], *, run_dir: Path, master_log: str) -> None:
    """Print why a run failed: the recorded faults, else the end of the master's log."""
    if code == EXIT_USER_ERROR and faults:
        print_message(f"error: {faults[-1].message}")
    elif faults:
        print_faults(faults)
        if (trace := reader.last_user_traceback(run_dir)) is not None:
            print_message(f"the last traceback of user code, in {trace}")
        print_message(f"error: the run failed; its folder is {run_dir}")
    elif code == EXIT_USER_ERROR and master_log:
        print_message(f"error: {master_log.splitlines()[-1]}")
    elif master_log:
        print_message(f"{master_log}\nerror: the master failed; the run folder is {run_dir}")
    else:
        print_message(f"error: the run was interrupted; `kintsugi resume {run_dir}` continues it")


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
