"""Sandbox for untrusted programs, such as those that a model writes.

`run_python("print(6 * 7)")` returns a `SandboxOutcome`: the output, the exit code, and in `reason` why the program
failed. Each program runs in a jail of its own (`jail.py`), which takes about 50 ms to set up.

Failures of the *program* (it raises, loops, uses too much memory, blocks) are outcomes, and are reproducible because
time limits are in CPU time. Failures to run the program (the jail was killed, the machine has no memory) are
`SandboxFailed` and can be retried. On a machine that cannot isolate programs, `ConfigError` is raised: nothing runs
unless `rollout.allow_unsandboxed` permits it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kintsugi.errors import ConfigError, DeadlineExceeded, WorldError
from kintsugi.runtime.processes import describe_status
from kintsugi.runtime.waits import wait

_JAIL = Path(__file__).with_name("jail.py")
_REMOTE_CALLS = Path(__file__).with_name("remote_calls.py")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_CHUNK = 65536
_END_S = 5.0
"""Time for a killed jail to exit."""
_IMPOSSIBLE = {
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.EINVAL,
    errno.ENOENT,
    errno.ENOSPC,
    errno.EUSERS,
    0,
}
"""Errors of a kernel that will never permit a jail; ENOSPC: the limit of namespaces, which may be 0, is reached."""


class SandboxFailed(WorldError):
    """A program could not be run, for a reason outside of the program."""


class SandboxLimits(msgspec.Struct, frozen=True):
    """Resource limits of one program, for all its processes together; file size is limited per file."""

    cpu_s: int = 2
    idle_s: float = 4.0
    """Time after which a program that used almost no CPU is killed as blocked."""
    slow_s: float = 12.0
    """Time after which a program is killed as too slow. Time that it waited for a busy CPU does not count."""
    memory_bytes: int = 512 * 2**20
    processes: int = 8
    """Limit of concurrent processes and threads, one of which is the jail's own."""
    file_bytes: int = 16 * 2**20
    """Largest file; all files together may have twice as much."""
    open_files: int = 48
    output_bytes: int = 2**20
    """Size limit of standard output, and of standard error."""
    deadline_s: float = 60.0
    """Wall-clock limit, for an overloaded machine; exceeding it is not a failure of the program."""


LIMITS = SandboxLimits()
_CPU_MARGIN_S = 0.1
"""Processor time beyond the limit that is within the clock ticks in which it is measured."""
_WHY_KILLED: dict[str, Callable[[SandboxLimits], str]] = {
    "cpu": lambda limits: f"used more than {limits.cpu_s} s of processor time",
    "memory": lambda limits: f"needed more than {limits.memory_bytes // 2**20} MiB of memory",
    "idle": lambda limits: f"stood still for {limits.idle_s:g} s",
    "slow": lambda limits: f"was not done after {limits.slow_s:g} s",
}


class SandboxOutcome(msgspec.Struct, frozen=True):
    """Result of a program: `SandboxOutcome("42\\n", "", 0, "", cpu_s=0.02, memory_bytes=9e6)`."""

    stdout: str
    stderr: str
    code: int | None
    """Exit code, or minus the signal; None if it was killed for writing too much."""
    reason: str
    """Why it failed; empty if it exited with 0."""
    cpu_s: float = 0.0
    memory_bytes: int = 0


class _Permission:
    """Whether programs may run unsandboxed if isolation is impossible; set per process by the user's recipe."""

    unsandboxed = False
    is_isolation_known = False
    """Whether a program was isolated in this process."""


def permit_unsandboxed(permitted: bool) -> None:
    """Apply `rollout.allow_unsandboxed`."""
    _Permission.unsandboxed = permitted


def run_python(source: str, *, stdin: str = "", limits: SandboxLimits = LIMITS) -> SandboxOutcome:
    """Run a Python program with this interpreter and its standard library, without installed packages.

    Hashes are not randomised, so that the order of sets, and with it the output, is reproducible.
    """
    flags = ["-s", "-P", "-B", "-X", "utf8", "program.py"]
    return run(
        [os.path.realpath(sys.executable), *flags],
        files={"program.py": source},
        environment={"PYTHONHASHSEED": "0"},
        stdin=stdin,
        limits=limits,
    )


def run(
    arguments: Sequence[str],
    *,
    files: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    limits: SandboxLimits = LIMITS,
) -> SandboxOutcome:
    """Run a command in a jail; it finds `files` in its working folder and nothing else in its environment."""
    order = {
        "parent": os.getpid(),
        "arguments": [os.path.realpath(arguments[0]), *arguments[1:]],
        "files": {name: _encodable(content) for name, content in (files or {}).items()},
        "environment": dict(environment or {}),
        "stdin": _encodable(stdin),
        "visible": _visible(arguments[0]),
        "hidden": _hidden(),
        "limits": msgspec.to_builtins(limits),
        "isolated": True,
        "channel": -1,
    }
    return _run_anywhere(order, limits=limits)


def run_tested(source: str, tests: str, *, limits: SandboxLimits = LIMITS) -> SandboxOutcome:
    """Run a program and its tests, each in a jail of its own; they are connected by pipes (`remote_calls.py`).

    The outcome is that of the tests, or of the program where that failed first.
    """
    to_program, to_tests = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    # The tests are idle while the program computes, as long as that may; the program while they do.
    patient = msgspec.structs.replace(limits, idle_s=limits.deadline_s, slow_s=limits.deadline_s)
    sides = (
        (
            "program",
            source,
            msgspec.structs.replace(limits, idle_s=2 * limits.idle_s),
            to_program[0],
            to_tests[1],
        ),
        ("tests", tests, patient, to_tests[0], to_program[1]),
    )
    with ThreadPoolExecutor(2, thread_name_prefix="sandbox") as pool:
        running = [pool.submit(_run_side, *side) for side in sides]

        def attempt(remaining_s: float) -> bool | None:
            return None if futures_wait(running, remaining_s).not_done else True

        limit_s = limits.deadline_s + 4 * _END_S
        wait(attempt, whom="sandbox", what="the end of a program and its tests", timeout_s=limit_s)
    program, verdict = (each.result() for each in running)
    return program if verdict.reason and program.reason else verdict


def _run_side(side: str, source: str, limits: SandboxLimits, reader: int, writer: int) -> SandboxOutcome:
    """Run the program's or the tests' side of two pipes; closes the descriptors."""
    command = os.path.realpath(sys.executable)
    order = {
        "parent": os.getpid(),
        "arguments": [command, "-s", "-P", "-B", "-X", "utf8", "remote_calls.py", side],
        "files": {
            "remote_calls.py": _REMOTE_CALLS.read_text(encoding="utf-8"),
            f"{side}.py": _encodable(source),
        },
        "environment": {"PYTHONHASHSEED": "0"},
        "stdin": "",
        "visible": _visible(command),
        "hidden": _hidden(),
        "limits": msgspec.to_builtins(limits),
        "isolated": True,
        "channel": reader,
    }
    with contextlib.ExitStack() as handed_over:
        handed_over.callback(os.close, reader)
        handed_over.callback(os.close, writer)
        # Closed as soon as the jail has its own copies: only then does the end of one side reach the other.
        pipes = _Pipes(reader, writer, close=handed_over.close)
        return _run_anywhere(order, limits=limits, pipes=pipes)


class _Pipes(NamedTuple):
    """Descriptors that take the place of standard input and output of a command."""

    reader: int
    writer: int
    close: Callable[[], None]


def _run_anywhere(
    order: dict[str, Any], *, limits: SandboxLimits, pipes: _Pipes | None = None
) -> SandboxOutcome:
    """Run an order in a jail, or without one where that is impossible and permitted."""
    if _Permission.unsandboxed and not is_available():
        with tempfile.TemporaryDirectory() as folder:
            return _run(order | {"isolated": False}, limits=limits, folder=folder, pipes=pipes)
    return _run(order, limits=limits, folder="/", pipes=pipes)


def _encodable(text: str) -> str:
    """Replace characters that cannot be encoded by question marks."""
    return text.encode(errors="replace").decode()


def is_available() -> bool:
    """Whether this machine can isolate programs. Once it could it is not asked again; until then each time, because
    the limit of namespaces may be reached for a moment only."""
    if not _Permission.is_isolation_known:
        try:
            require()
        except ConfigError:
            return False
        _Permission.is_isolation_known = True
    return True


def require() -> None:
    """Raise ConfigError, with reason and advice, if programs cannot be isolated on this machine."""
    order = {
        "parent": os.getpid(),
        "arguments": [os.path.realpath(sys.executable), "-I", "-S", "-c", ""],
        "files": {},
        "environment": {},
        "stdin": "",
        "visible": _visible(sys.executable),
        "hidden": _hidden(),
        "limits": msgspec.to_builtins(LIMITS),
        "isolated": True,
        "channel": -1,
    }
    outcome = _run(order, limits=LIMITS, folder="/")
    if outcome.reason:
        raise _unavailable(f"the interpreter does not run in it: {outcome.reason}; {outcome.stderr[-500:]}")


def _unavailable(why: str) -> ConfigError:
    return ConfigError(
        f"programs can not be isolated on this machine ({why}). It takes root or unprivileged user namespaces, and "
        "Linux 5.12. `rollout.allow_unsandboxed=true` runs them without isolation, with the rights of this user"
    )


def _visible(command: str) -> list[str]:
    """Paths of this machine that a program can see: the command, the interpreter's library, the system's libraries."""
    shared = {os.path.join(os.path.realpath(sys.base_prefix), name) for name in ("lib", "lib64")}
    wanted = {os.path.realpath(command), sysconfig.get_path("stdlib"), *shared, *_LIBRARIES}
    chosen: list[str] = []
    for path in sorted(path for path in wanted if os.path.lexists(path)):
        if not any(path.startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    return chosen


def _hidden() -> list[str]:
    """Folders of installed packages within the interpreter's library."""
    return [os.path.realpath(path) for path in site.getsitepackages([sys.base_prefix])]


def _times_out_of_memory() -> int:
    """Number of out-of-memory kills since the machine was started."""
    counters = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)


def _run(
    order: dict[str, Any], *, limits: SandboxLimits, folder: str, pipes: _Pipes | None = None
) -> SandboxOutcome:
    times_before = _times_out_of_memory()
    with contextlib.ExitStack() as stack:
        handed_over = os.memfd_create("order")
        stack.callback(os.close, handed_over)
        with os.fdopen(os.dup(handed_over), "wb") as file:
            file.write(msgspec.json.encode(order))
        os.lseek(handed_over, 0, os.SEEK_SET)
        report, told = os.pipe2(os.O_CLOEXEC)
        reading = stack.enter_context(os.fdopen(report, "rb", buffering=0))
        try:
            jail = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", str(_JAIL), str(told)],
                stdin=handed_over,
                stdout=subprocess.PIPE if pipes is None else pipes.writer,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=(told,) if pipes is None else (told, pipes.reader),
                cwd=folder,
                bufsize=0,
            )
        except OSError as error:
            raise SandboxFailed(f"could not start a sandbox: {error}") from error
        finally:
            os.close(told)
            if pipes is not None:
                pipes.close()
        read = {"report": reading.fileno()}
        for name, stream in (("out", jail.stdout), ("err", jail.stderr)):
            if stream is not None:
                read[name] = stack.enter_context(stream).fileno()
        try:
            written = _collect(read, limits=limits)
        finally:
            _end(jail)
        return _outcome(written, jail, limits=limits, times_before=times_before)


def _end(jail: subprocess.Popen[bytes]) -> None:
    """End a jail by SIGTERM, then by SIGKILL; either way all processes inside die with it.

    After SIGTERM the jail reaps the processes inside; after SIGKILL they are left to the process that adopts orphans.
    """
    try:
        pidfd = os.pidfd_open(jail.pid)
    except ProcessLookupError:
        jail.poll()
        return
    with selectors.DefaultSelector() as selector, os.fdopen(pidfd):
        selector.register(pidfd, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGKILL):
            jail.send_signal(number)
            with contextlib.suppress(DeadlineExceeded):
                wait(lambda s: selector.select(s) or None, whom="sandbox", what="its end", timeout_s=_END_S)
                break
    jail.poll()


def _collect(pipes: dict[str, int], *, limits: SandboxLimits) -> dict[str, bytes]:
    """Read output until the jail has reported its end, then the rest; stop early if too much is written."""
    written = dict.fromkeys(("report", "out", "err"), b"")
    with selectors.DefaultSelector() as selector:
        for name, descriptor in pipes.items():
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ, name)

        def attempt(remaining_s: float) -> bool | None:
            is_told = False
            for key, _ in selector.select(remaining_s):
                chunk = os.read(key.fd, _CHUNK)
                written[key.data] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                    is_told = is_told or key.data == "report"
            return is_told or _is_too_much(written, limits) or None

        try:
            wait(attempt, whom="sandbox", what="the end of a program", timeout_s=limits.deadline_s)
        except DeadlineExceeded as error:
            raise SandboxFailed(f"a program was not done after {limits.deadline_s:g} s: {error}") from error
    for name in pipes.keys() - {"report"}:
        written[name] += _rest(pipes[name], most=limits.output_bytes + 1)
    return written


def _is_too_much(written: dict[str, bytes], limits: SandboxLimits) -> bool:
    return max(len(written["out"]), len(written["err"])) > limits.output_bytes


def _rest(descriptor: int, *, most: int) -> bytes:
    """What is in the pipe at this moment."""
    content = b""
    with contextlib.suppress(BlockingIOError):
        while len(content) < most and (chunk := os.read(descriptor, _CHUNK)):
            content += chunk
    return content


def _outcome(
    written: dict[str, bytes], jail: subprocess.Popen[bytes], *, limits: SandboxLimits, times_before: int
) -> SandboxOutcome:
    out, err = (written[name][: limits.output_bytes].decode(errors="replace") for name in ("out", "err"))
    if _is_too_much(written, limits):
        return SandboxOutcome(out, err, None, f"wrote more than {limits.output_bytes} bytes")
    if not written["report"]:
        raise SandboxFailed(f"the sandbox {describe_status(jail.returncode)} before the program was done")
    report = msgspec.json.decode(written["report"].partition(b"\n")[0])
    if "error" in report:
        if report["errno"] in _IMPOSSIBLE:
            raise _unavailable(report["error"])
        raise SandboxFailed(f"a sandbox could not be made: {report['error']}")
    cpu_s, memory_bytes = float(report["cpu_s"]), int(report["memory_bytes"])
    if "killed" in report:
        reason = _WHY_KILLED[report["killed"]](limits)
        return SandboxOutcome(out, err, -signal.SIGKILL, reason, cpu_s=cpu_s, memory_bytes=memory_bytes)
    code = int(report["code"])
    if cpu_s > limits.cpu_s + _CPU_MARGIN_S:
        reason = _WHY_KILLED["cpu"](limits)
    elif code == 0:
        reason = ""
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= limits.cpu_s):
        reason = _WHY_KILLED["cpu"](limits)
    elif code == -signal.SIGKILL and _times_out_of_memory() > times_before:
        raise SandboxFailed("the machine ran out of memory while a program ran")
    elif "MemoryError" in err[-200:]:
        reason = _WHY_KILLED["memory"](limits)
    else:
        reason = describe_status(code)
    return SandboxOutcome(out, err, code, reason, cpu_s=cpu_s, memory_bytes=memory_bytes)
