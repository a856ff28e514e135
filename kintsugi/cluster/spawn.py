"""Start of a child: one entry point for every process, whether it is executed or forked.

    spawn ─► (interpreter starts) ─┐
                                   ├─► run: own session, log, placement, import of the program, report ─► its main
    fork server ─► fork ───────────┘

A spare runs the same way up to its program, which only prepares it; then it waits for the `StartOrder` of another
process and runs that.

`run` reports through a pipe: a process counts as started only when its placement holds and its program is imported, so
a failed start has a phase and a reason instead of a time-out. Children do not die with their parent (no parent-death
signal): a worker outlives its agent and ends when its lifeline pipe reaches end of file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from kintsugi.errors import DeadlineExceeded, EndedByError, StartFailed
from kintsugi.process.main import run_process
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.processes import Child, Processes
from kintsugi.runtime.shortages import start_shortage
from kintsugi.runtime.stacks import enable_stack_dumps
from kintsugi.runtime.waits import wait
from kintsugi.types import Placement

NETWORK_NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
MOST_BYTES = 65536
"""Maximum size of a message between agent and fork server or spare; a `StartOrder` has a few hundred bytes."""
PREPARED = b"prepared"
"""Message of a spare that is prepared."""

Program = Callable[[Bootstrap], int]
"""Program of a child; it returns the exit code."""


class StartOrder(msgspec.Struct, frozen=True):
    """Everything that a new process needs to run its program. Holds a secret key: passed only through descriptors."""

    program: str
    """`module:function` that takes the `Bootstrap` and returns the exit code."""
    placement: Placement
    bootstrap: Bootstrap
    report: int
    """Write end of the pipe on which the child reports the result of its start."""
    python: str = ""
    """Interpreter of the child; empty for that of this process."""
    orders: int = -1
    """For a spare: the socket on which it reports that it is prepared and receives its order."""

    @property
    def log(self) -> Path:
        return RunFolder(self.bootstrap.run_dir).log_file(self.bootstrap.process)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the child inherits, in the order of `with_descriptors`."""
        return tuple(descriptor for descriptor in self._descriptors if descriptor >= 0)

    @property
    def _descriptors(self) -> tuple[int, int, int, int]:
        return self.report, self.bootstrap.lifeline, self.bootstrap.listener, self.orders

    def with_descriptors(self, descriptors: tuple[int, ...]) -> StartOrder:
        """Return the same order with other descriptor numbers, as after a transfer through a socket."""
        assert len(descriptors) == len(self.descriptors), (descriptors, self.descriptors)
        numbers = iter(descriptors)
        report, lifeline, listener, orders = (
            next(numbers) if before >= 0 else -1 for before in self._descriptors
        )
        bootstrap = msgspec.structs.replace(self.bootstrap, lifeline=lifeline, listener=listener)
        return msgspec.structs.replace(self, bootstrap=bootstrap, report=report, orders=orders)


class StartReport(msgspec.Struct, frozen=True):
    """Result of a start: without a `phase` the program is imported and its main begins."""

    process: str
    phase: str = ""
    why: str = ""

    def error(self) -> StartFailed:
        return StartFailed(process=self.process, phase=self.phase, why=self.why)


def child_environment(inherited: Mapping[str, str], placement: Placement) -> dict[str, str]:
    """Environment of a child: one computing thread unless set otherwise; more compete for a busy host's CPUs."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **inherited, **placement.environment}


def execute(
    processes: Processes,
    arguments: list[str],
    *,
    placement: Placement,
    pass_fds: tuple[int, ...],
    before_exec: Callable[[], None] | None = None,
    python: str = "",
) -> Child:
    """Start `python -m …` in a session of its own, so that the terminal's Ctrl-C does not reach it."""
    return processes.spawn(
        [python or sys.executable, "-P", "-m", *arguments],
        pass_fds=pass_fds,
        environment=child_environment(os.environ, placement),
        before_exec=before_exec,
        new_session=True,
    )


def spawn(processes: Processes, start: StartOrder) -> Child:
    """Start a child by executing a new interpreter, which is slow and always possible."""
    process, handed_over = start.bootstrap.process, -1
    try:
        handed_over = in_memory(msgspec.msgpack.encode(start))
        return execute(
            processes,
            ["kintsugi.cluster.spawn", process, str(handed_over)],
            placement=start.placement,
            pass_fds=(handed_over, *start.descriptors),
            python=start.python,
        )
    except OSError as error:
        detail = EndedByError(type(error).__name__, start_shortage(error))
        phase = "executing the interpreter"
        raise StartFailed(process=process, phase=phase, why=str(error), detail=detail) from error
    finally:
        if handed_over >= 0:
            os.close(handed_over)


def in_memory(content: bytes) -> int:
    """Return a descriptor of anonymous memory that holds `content`, to be inherited; it has no path."""
    descriptor = os.memfd_create("kintsugi")
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def run(start: StartOrder) -> int:
    """Run the program of `start` in this process, which was executed or forked for it."""
    process = start.bootstrap.process
    for inherited in start.descriptors:
        os.set_inheritable(inherited, False)
    own_session_and_log(process, start.log)
    try:
        apply(start.placement, process=process)
        program = load(start.program, process=process)
    except StartFailed as error:
        _report(start.report, StartReport(process=process, phase=error.phase, why=error.why[-2000:]))
        raise
    _report(start.report, StartReport(process=process))
    if start.orders < 0:
        return run_process(start.bootstrap, program)
    program(start.bootstrap)
    order = await_order(start.orders)
    return run(order) if order is not None else 0


def await_order(descriptor: int) -> StartOrder | None:
    """Report that this spare is prepared, and wait for its order; None when its agent has ended."""
    with socket.socket(fileno=descriptor) as orders:
        try:
            orders.send(PREPARED)
            await_readable(orders, what="its order")
            content, descriptors, _, _ = socket.recv_fds(orders, MOST_BYTES, 8)
        except (BrokenPipeError, ConnectionResetError):
            return None
    return (
        msgspec.msgpack.decode(content, type=StartOrder).with_descriptors(tuple(descriptors))
        if content
        else None
    )


def await_readable(*descriptors: socket.socket | int, what: str) -> set[int]:
    """Wait without a limit for the agent to write to or close one of these; return the readable ones."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    while True:
        try:
            ready = wait(
                lambda remaining_s: poller.poll(remaining_s * 1000) or None,
                whom="agent",
                what=what,
                timeout_s=3600.0,
            )
        except DeadlineExceeded:
            continue
        return {descriptor for descriptor, _ in ready}


def unprepared(bootstrap: Bootstrap) -> int:
    """Program of a spare that has nothing to prepare."""
    return 0


def load(program: str, *, process: str) -> Program:
    """Import a program: `load("kintsugi.training.worker:main", process="model-0")`. StartFailed if that fails."""
    module, _, function = program.partition(":")
    try:
        loaded: Program = getattr(importlib.import_module(module), function)
    except Exception as error:
        phase = f"importing {program}"
        raise StartFailed(process=process, phase=phase, why=f"{type(error).__name__}: {error}") from error
    return loaded


def apply(placement: Placement, *, process: str) -> None:
    """Apply a placement to this process. The cgroup comes first, so that everything later is charged to it."""
    if placement.cgroup is not None:
        with _placing(process, f"cgroup {placement.cgroup}"):
            _join_group(Path(placement.cgroup))
    if placement.network_namespace is not None:
        with _placing(process, f"network namespace {placement.network_namespace}"):
            _enter_network_namespace(placement.network_namespace)
    if placement.nice is not None:
        with _placing(process, f"nice {placement.nice}"):
            os.setpriority(os.PRIO_PROCESS, 0, placement.nice)
    for name, value in placement.limits.items():
        with _placing(process, f"limit {name}={value}"):
            resource.setrlimit(_limit(name), (value, value))


@contextlib.contextmanager
def _placing(process: str, what: str) -> Iterator[None]:
    """Convert an error into a `StartFailed` that names the part of the placement."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StartFailed(process=process, phase=f"placing: {what}", why=why) from error


def _join_group(folder: Path) -> None:
    """Move this process into a control group. The file is the same in both versions; 0 stands for the writer."""
    descriptor = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"0")
    finally:
        os.close(descriptor)


def _limit(name: str) -> int:
    limit = getattr(resource, f"RLIMIT_{name}", None)
    if not isinstance(limit, int):
        known = sorted(entry[7:] for entry in vars(resource) if entry.startswith("RLIMIT_"))
        raise ValueError(f"no such resource limit; expected one of {', '.join(known)}")
    return limit


def _enter_network_namespace(name: str) -> None:
    if "/" in name:
        raise ValueError("a namespace is given by its name, not by a path")
    descriptor = os.open(NETWORK_NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def own_session_and_log(process: str, log: Path) -> None:
    """Leave the terminal's session, take the name that `ps` and `top` show, write output and stack dumps to `log`."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    Path("/proc/self/comm").write_text(process)
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    enable_stack_dumps()


def _report(descriptor: int, report: StartReport) -> None:
    """Send the report to the agent, if it still runs."""
    try:
        os.write(descriptor, msgspec.msgpack.encode(report))
    except BrokenPipeError:
        pass
    os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Body of a child that was executed: `python -m kintsugi.cluster.spawn PROCESS DESCRIPTOR`."""
    _, descriptor = arguments
    with os.fdopen(int(descriptor), "rb") as handed_over:
        start = msgspec.msgpack.decode(handed_over.read(), type=StartOrder)
    return run(start)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # Without the exit handlers of libraries: that of a tracker may wait for a server that is gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
