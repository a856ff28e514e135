"""One command of an engine, as `ssh` or `srun`: it gets a ticket on its standard input and is watched until its end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryFile

from kintsugi.cluster.spawn import in_memory
from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import describe_status, hold_started
from kintsugi.runtime.waits import wait_readable

MOST_OUTPUT = 2000
"""Characters of a command's output that are told when it fails."""
KILLED_S = 1.0
"""Shortest time for a command that was killed to end, so that no zombie stays."""


class EngineCommand:
    """A command that runs in a session of its own. Its output is kept in a file without a name."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        secret: bytes = b"",
        environment: Mapping[str, str] | None = None,
        stdin: int = -1,
        stdout: int = -1,
    ) -> None:
        """Start `argv` with `secret` on its standard input. OSError if the program can not be executed.

        A command that is talked to has the descriptors `stdin` and `stdout` instead; its errors are kept.
        """
        self.program = argv[0]
        with ExitStack() as stack:
            self._output = stack.enter_context(TemporaryFile())
            given = in_memory(secret) if stdin < 0 else os.dup(stdin)
            try:
                popen = subprocess.Popen(
                    list(argv),
                    stdin=given,
                    stdout=self._output if stdout < 0 else stdout,
                    stderr=self._output,
                    env=None if environment is None else dict(environment),
                    start_new_session=True,
                )
            finally:
                os.close(given)
            self._child = hold_started(popen)
            stack.pop_all()  # The output is held until `close`.
        self.was_killed = False
        """It did not end in time and was killed by `close`."""

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ended(self) -> bool:
        return self._child.ended()

    @property
    def status(self) -> int | None:
        return self._child.status()

    def output(self, *, whole: bool = False) -> str:
        """Return the end of what it has written, or all of it."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(0 if whole else max(0, size - 4 * MOST_OUTPUT))
        text = self._output.read().decode(errors="replace")
        return (text if whole else text[-MOST_OUTPUT:]).strip()

    def explain(self) -> str:
        """Describe its end: the last line that it wrote, or its status."""
        lines = [line for line in self.output().splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"{self.program} {describe_status(self.status)}"

    def end(self, *, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the command and what it has started in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)
        self._child.send_signal(number)

    def close(self, *, timeout_s: float, keep_output: bool = False) -> None:
        """Wait for its end, kill it if it takes longer, and release it. With `keep_output` its output can still be
        read."""
        try:
            self._child.wait_ended(whom=self.program, timeout_s=timeout_s)
        except DeadlineExceeded:
            self.was_killed = True
            self.end(number=signal.SIGKILL)
            with suppress(DeadlineExceeded):
                self._child.wait_ended(whom=self.program, timeout_s=max(timeout_s, KILLED_S))
        self._child.status()
        self._child.close()
        if not keep_output:
            self.release()

    def release(self) -> None:
        """Release the output that `close` has kept."""
        self._output.close()


class LineBuffer:
    """Output of a command that arrives in pieces, as lines."""

    def __init__(self) -> None:
        self._unread = b""

    def add(self, content: bytes) -> None:
        self._unread += content

    def take(self, *, begin: bytes) -> bytes | None:
        """Take the next whole line that begins so; None if there is none yet. Lines before it are dropped: they are
        the engine's own."""
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            if line.startswith(begin):
                return line
        return None


class Conversation:
    """A command that answers lines with lines."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Start it. OSError if the program can not be executed."""
        given, self._orders = os.pipe2(os.O_CLOEXEC)
        self._answers, answers = os.pipe2(os.O_CLOEXEC)
        self._output = LineBuffer()
        try:
            self._command = EngineCommand(argv, stdin=given, stdout=answers)
        except OSError:
            os.close(self._orders)
            os.close(self._answers)
            raise
        finally:
            os.close(given)
            os.close(answers)

    @property
    def has_ended(self) -> bool:
        return self._command.ended

    def say(self, line: bytes) -> None:
        """Write a line. It is lost if the command has ended."""
        with suppress(BrokenPipeError):
            os.write(self._orders, line + b"\n")

    def hear(self, *, begin: bytes, timeout_s: float) -> bytes | None:
        """Return the next line that begins so; None if none comes in time."""
        until = SYSTEM_CLOCK.monotonic() + timeout_s
        while (line := self._output.take(begin=begin)) is None:
            remaining_s = max(0.0, until - SYSTEM_CLOCK.monotonic())
            with suppress(DeadlineExceeded):
                if wait_readable(self._answers, whom="a host", what="its answer", timeout_s=remaining_s):
                    content = os.read(self._answers, 65536)
                    if not content:
                        return None
                    self._output.add(content)
                    continue
            return None
        return line

    def explain(self) -> str:
        """Describe its end."""
        return self._command.explain()

    def end(self) -> None:
        """Signal it."""
        self._command.end()

    def close(self, *, timeout_s: float, keep_output: bool = False) -> None:
        """Close its input, and wait for its end as `EngineCommand.close` does."""
        os.close(self._orders)
        os.close(self._answers)
        self._command.close(timeout_s=timeout_s, keep_output=keep_output)

    def release(self) -> None:
        """Release the output that `close` has kept."""
        self._command.release()
