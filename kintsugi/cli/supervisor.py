"""The launcher of `kintsugi train` in a session of its own, apart from the command that shows the run.

    kintsugi train ── stop requests, a byte each ──► launcher and standby ─► agents ─► (the run)
                   ◄── result, then end of file ──

The command may be killed, its terminal closed, its output full: the run goes on, and every other command finds it by
its folder. Ctrl-C and SIGTERM of the command are stop requests. The command learns of the end by the result on a pipe,
which reaches end of file when the last launcher process has ended.

    python -m kintsugi.cli.supervisor DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from subprocess import DEVNULL

import msgspec

from kintsugi.cluster.handover import PROGRAMS, Programs
from kintsugi.cluster.launcher import launch
from kintsugi.cluster.spawn import in_memory, own_session_and_log
from kintsugi.cluster.standby import Standby
from kintsugi.config.schema import Config
from kintsugi.data.streams import STANDARD_INPUT, STREAM, spools
from kintsugi.errors import USER_ERRORS, Fault, KintsugiError, ProcessDied, StartFailed, WorldError, fault_of
from kintsugi.process.exit_codes import EXIT_ERROR
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import RunState, read_summary
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import Child, Processes, SystemProcesses
from kintsugi.runtime.signals import Signals
from kintsugi.runtime.waits import wait_readable
from kintsugi.types import Role, process_id

TICK_S = 0.2
LAUNCHER = process_id(Role.LAUNCHER, 0)


class LaunchOrder(msgspec.Struct, frozen=True):
    """Everything that the launcher's process starts with; passed through anonymous memory."""

    config: Config
    run_dir: str
    resume: bool
    programs: Programs
    result: int
    """Write end of the pipe for the `LaunchResult`."""
    stop_requests: int
    standard_input: int = -1
    """Copy of the command's standard input, if the run reads its data from there."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the launcher's process inherits."""
        given = (self.result, self.stop_requests, self.standard_input)
        return tuple(descriptor for descriptor in given if descriptor >= 0)


class LaunchResult(msgspec.Struct, frozen=True):
    """Outcome of a launch: the exit code of the run, or the error that ended it."""

    exit_code: int = EXIT_ERROR
    error: Fault | None = None


def supervise(
    config: Config,
    *,
    run_dir: Path,
    on_tick: Callable[[], None],
    on_stop: Callable[[], None] = lambda: None,
    resume: bool = False,
    is_enough: Callable[[], bool] = lambda: False,
    stops_on_hangup: bool = False,
    programs: Programs = PROGRAMS,
    processes: Processes | None = None,
) -> int:
    """Run `config` to its end as `launch` does, in a launcher that outlives this process. Main thread only.

    `on_tick` is called about five times a second; it must not raise. SIGINT and SIGTERM are passed on as stop requests,
    with `stops_on_hangup` SIGHUP too; `on_stop` is called after each. Returns 0 before the end once `is_enough` holds:
    the run goes on by itself.
    Raises the launcher's error, and ProcessDied if all launcher processes were killed.
    """
    with ExitStack() as stack:
        hangup = (signal.SIGHUP,) if stops_on_hangup else ()
        signals = Signals(signal.SIGINT, signal.SIGTERM, *hangup)
        stack.callback(signals.close)
        result, result_write = os.pipe2(os.O_CLOEXEC)
        stack.callback(os.close, result)
        requests_read, requests = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, requests)
        standard_input = os.dup(0) if _reads_standard_input(config) else -1
        order = LaunchOrder(
            config=config,
            run_dir=str(run_dir),
            resume=resume,
            programs=programs,
            result=result_write,
            stop_requests=requests_read,
            standard_input=standard_input,
        )
        try:
            child = _start(order, processes or SystemProcesses())
        finally:
            for descriptor in order.descriptors:
                os.close(descriptor)
        stack.callback(child.close)
        content = b""
        while True:
            ready = wait_readable(
                result, signals.fileno(), whom=LAUNCHER, what="the end of the run", timeout_s=TICK_S
            )
            for _ in signals.received():
                with contextlib.suppress(BrokenPipeError, BlockingIOError):
                    os.write(requests, b".")
                on_stop()
            if result in ready:
                part = os.read(result, 65536)
                if not part:
                    break
                content += part
            child.status()  # Reaps the first launcher process, which may end before the run.
            on_tick()
            if is_enough():
                return 0
    return _outcome(content, run_dir=run_dir)


def _reads_standard_input(config: Config) -> bool:
    named = [config.data.source, *(each.source for each in config.data.sources)]
    return f"{STREAM}{STANDARD_INPUT}" in named


def _start(order: LaunchOrder, processes: Processes) -> Child:
    """Start the launcher's process. Until it has a log of its own, it can only report by its result."""
    handed_over = in_memory(msgspec.msgpack.encode(order))
    try:
        return processes.spawn(
            [sys.executable, "-P", "-m", "kintsugi.cli.supervisor", str(handed_over)],
            pass_fds=(handed_over, *order.descriptors),
            stdout=DEVNULL,
            stderr=DEVNULL,
            new_session=True,
        )
    except OSError as error:
        phase = "executing the interpreter"
        raise StartFailed(process=LAUNCHER, phase=phase, why=str(error)) from error
    finally:
        os.close(handed_over)


def _outcome(content: bytes, *, run_dir: Path) -> int:
    """Return the exit code of a run whose launchers have ended, or raise the error that ended it."""
    if content:
        result = msgspec.msgpack.decode(content, type=LaunchResult)
        if result.error is not None:
            kind = USER_ERRORS.get(result.error.kind, WorldError)
            raise kind(result.error.message, cause=result.error.cause)
        return result.exit_code
    summary = read_summary(run_dir)
    if summary is not None:
        return 0 if summary.outcome in (RunState.FINISHED, RunState.STOPPED) else EXIT_ERROR
    if not RunFolder(run_dir).journal_file.exists():
        raise ProcessDied(f"{LAUNCHER} was killed before the run had begun")
    raise ProcessDied(
        f"{LAUNCHER} and its standby were killed at the same time, and with them the run ended; "
        f"`kintsugi resume {run_dir}` continues it"
    )


def main(arguments: list[str]) -> int:
    """Body of the launcher's process, and after a fork of its standby and of its successors."""
    (descriptor,) = arguments
    with os.fdopen(int(descriptor), "rb") as handed_over:
        order = msgspec.msgpack.decode(handed_over.read(), type=LaunchOrder)
    for inherited in order.descriptors:
        os.set_inheritable(inherited, False)
    if order.standard_input >= 0:
        os.dup2(order.standard_input, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It has no terminal, and a run ends by a stop request only.
    result = _run(order)
    with contextlib.suppress(BrokenPipeError):  # The command was killed; the run folder says the same.
        os.write(order.result, msgspec.msgpack.encode(result))
    return result.exit_code


def _run(order: LaunchOrder) -> LaunchResult:
    run_dir = Path(order.run_dir)
    log = RunFolder(run_dir).log_file(LAUNCHER)
    try:
        own_session_and_log(LAUNCHER, log)
        with spools(order.config.data, run_dir) as pump:
            code = launch(
                order.config,
                run_dir=run_dir,
                on_tick=pump,
                resume=order.resume,
                programs=order.programs,
                standby=Standby(),
                stop_requests=order.stop_requests,
            )
    except (KintsugiError, OSError) as error:
        _remove_unused_log(log)
        return LaunchResult(error=fault_of(error, process=LAUNCHER, time=SYSTEM_CLOCK.wall()))
    return LaunchResult(exit_code=code)


def _remove_unused_log(log: Path) -> None:
    """Remove an empty log, and its folder if that is empty too: the folder of a run that never started is removed."""
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()
            log.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
