"""A process that has imported torch and all programs, and forks them in milliseconds instead of seconds.

The agent sends a `StartOrder` and its descriptors over a socket pair; the fork server forks twice, so that the agent (a
subreaper) becomes the child's parent, exactly as if the agent had executed it: same pidfd, same exit status, same stop.

It outlives its agent, as all children of an agent do, because importing again takes seconds. The agent's successor
finds it by an abstract socket; processes that it forks from then on are children of the launcher.

Forking is safe only while the fork server has one thread and no device: it checks the first before every fork and
imports nothing that initialises a device. When it can not be used it exits, and the agent executes interpreters.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from kintsugi.cluster.shared_memory import user_of
from kintsugi.cluster.spawn import MOST_BYTES, StartOrder, await_readable, execute, run
from kintsugi.runtime.processes import Child, Processes
from kintsugi.runtime.stacks import enable_stack_dumps
from kintsugi.types import Placement


class ImportsDone(msgspec.Struct, frozen=True, tag="Imported"):
    """Sent once: everything is imported, children can be forked."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Pid of the child, or why there is none."""

    pid: int
    why: str = ""


class ForkServer:
    """The agent's end of the connection. Requests are answered in order; the end of the file is the fork server's."""

    def __init__(self, handle: Child, connection: socket.socket, *, is_adopted: bool) -> None:
        self.handle = handle
        self.is_adopted = is_adopted
        """Whether an earlier agent started it: then its children are not ours, and their status is not available."""
        self._socket = connection
        self._socket.setblocking(False)

    @classmethod
    def start(cls, processes: Processes, *, preload: tuple[str, ...], name: str, lifeline: int) -> ForkServer:
        """Start a fork server. A successor of this agent reaches it under `name`; it ends with the lifeline."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            handle = execute(
                processes,
                ["kintsugi.cluster.fork_server", str(theirs.fileno()), str(lifeline), name, *preload],
                placement=Placement(),
                pass_fds=(theirs.fileno(), lifeline),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(handle, ours, is_adopted=False)

    @classmethod
    def adopt(cls, handle: Child, *, name: str) -> ForkServer:
        """Connect to the fork server of an earlier agent; OSError when it does not listen."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            _attempt_connect(connection, name)
        except OSError:
            connection.close()
            raise
        return cls(handle, connection, is_adopted=True)

    def fileno(self) -> int:
        return self._socket.fileno()

    def request(self, start: StartOrder) -> bool:
        """Request a child; False when the fork server does not accept the request."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(start)], start.descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> ImportsDone | Forked | None:
        """Read the next answer; None when the fork server has ended. Called when the descriptor is readable."""
        try:
            answer = self._socket.recv(MOST_BYTES)
        except ConnectionResetError:
            answer = b""
        return msgspec.msgpack.decode(answer, type=ImportsDone | Forked) if answer else None

    def close(self) -> None:
        """Close the connection, upon which the fork server exits or waits for the next agent."""
        self._socket.close()


def _attempt_connect(connection: socket.socket, name: str) -> None:
    """Connect without waiting: a fork server listens from its start."""
    connection.connect(f"\0{name}")
    if user_of(connection) != os.getuid():
        raise PermissionError(f"{name} belongs to user {user_of(connection)}")


def serve(connection: socket.socket) -> StartOrder | None:
    """Fork a child per request. Returns in several processes, as fork does: the order in every child, and None in the
    fork server when the agent has ended.

    Waits only for the agent: its end (also by SIGKILL) closes the socket.
    """
    if not _send(connection, ImportsDone()):
        return None
    while True:
        await_readable(connection, what="the next start")
        try:
            content, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 8)
        except ConnectionResetError:
            # The agent was killed before it had read the last answer.
            return None
        if not content:
            return None
        start = msgspec.msgpack.decode(content, type=StartOrder)
        try:
            pid = _fork_for_grandparent()
        except OSError as error:
            pid, why = -1, str(error)
        else:
            why = ""
        if pid == 0:
            return start.with_descriptors(tuple(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        if not _send(connection, Forked(pid=pid, why=why)):
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
            return None


def _send(connection: socket.socket, answer: ImportsDone | Forked) -> bool:
    """Send an answer; False when the agent has ended."""
    try:
        connection.send(msgspec.msgpack.encode(answer))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _next_agent(listener: socket.socket, lifeline: int) -> socket.socket | None:
    """Wait for the connection of the agent's successor; None when the lifeline has ended."""
    while True:
        ready = await_readable(listener, lifeline, what="its successor")
        if lifeline in ready:
            return None
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue
        if user_of(connection) == os.getuid():
            connection.setblocking(True)
            return connection
        connection.close()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork_for_grandparent() -> int:
    """Fork twice, so that the child's parent is the subreaper above: return 0 in the child, else its pid."""
    assert num_threads() == 1, "a fork would copy locks without the threads that hold them"
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.close(writer)
            return 0
        os.write(writer, child.to_bytes(4, sys.byteorder))
        os._exit(0)
    os.close(writer)
    answer = os.read(reader, 4)
    os.close(reader)
    os.waitpid(between, 0)
    if not answer:
        raise OSError("the intermediate process could not fork")
    return int.from_bytes(answer, sys.byteorder)


def main(arguments: list[str]) -> NoReturn:
    """`python -m kintsugi.cluster.fork_server CONNECTION LIFELINE NAME MODULE…`: import, then serve agents in turn.

    Ends with the lifeline, that is, when launcher and agent have ended.
    """
    enable_stack_dumps()
    own, lifeline, name, *modules = int(arguments[0]), int(arguments[1]), *arguments[2:]
    connection: socket.socket | None = socket.socket(fileno=own)
    for inherited in (own, lifeline):
        os.set_inheritable(inherited, False)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind(f"\0{name}")
    listener.listen(8)
    for module in modules:
        importlib.import_module(module)
    if num_threads() != 1:
        sys.exit(f"cannot fork: importing {', '.join(modules)} started {num_threads() - 1} threads")
    gc.collect()
    gc.freeze()
    exit_code = 0
    while connection is not None:
        start = serve(connection)
        connection.close()
        if start is not None:
            listener.close()
            os.close(lifeline)
            exit_code = run(start)
            break
        connection = _next_agent(listener, lifeline)
    # The interpreter's own shutdown would take half a second to free the imported modules.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
