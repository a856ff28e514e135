"""A process that has already imported torch and our programs, and forks them in milliseconds instead of seconds.

The agent sends a `Start` and its descriptors over a socket pair; the template forks twice, so that the child's parent
is the agent (a subreaper) exactly as if the agent had executed it: same pidfd, same exit status, same stop.

It outlives its agent, as everything does that the agent started, because importing again takes seconds. The agent's
successor finds it by an abstract socket; whatever it forks from then on is a child of the launcher.

Forking is only safe while the template has one thread and no device: it checks the first before every fork and imports
nothing that does the second. When it cannot be used it exits, and the agent executes interpreters instead.
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

from kintsugi.cluster.placement import MOST_BYTES, Start, await_readable, execute, run
from kintsugi.cluster.segments import user_of
from kintsugi.runtime import Child, Processes
from kintsugi.types import Placement


class Imported(msgspec.Struct, frozen=True, tag=True):
    """Said once: everything is imported, a child can be had in milliseconds."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The child's pid, or why there is none."""

    pid: int
    why: str = ""


class Template:
    """The agent's end. Requests are answered in order; it is readable, and ends, when the other side is gone."""

    def __init__(self, child: Child, connection: socket.socket, *, is_adopted: bool) -> None:
        self.child = child
        self.is_adopted = is_adopted
        """Started by an earlier agent: what it forks is not our child, and its status is not to be had."""
        self._socket = connection
        self._socket.setblocking(False)

    @classmethod
    def start(cls, processes: Processes, *, preload: tuple[str, ...], name: str, lifeline: int) -> Template:
        """Execute one; a successor of this agent will reach it under `name`, as long as the lifeline has a writer."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            child = execute(
                processes,
                ["kintsugi.cluster.template", str(theirs.fileno()), str(lifeline), name, *preload],
                placement=Placement(),
                pass_fds=(theirs.fileno(), lifeline),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(child, ours, is_adopted=False)

    @classmethod
    def adopt(cls, child: Child, *, name: str) -> Template:
        """Take over the template of an earlier agent; OSError when it does not listen."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            _attempt_connect(connection, name)
        except OSError:
            connection.close()
            raise
        return cls(child, connection, is_adopted=True)

    def fileno(self) -> int:
        return self._socket.fileno()

    def request(self, start: Start) -> bool:
        """Ask for a child; False when nobody takes the request."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(start)], start.descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Imported | Forked | None:
        """The next thing it says; None when the template is gone. Called when the descriptor is readable."""
        try:
            answer = self._socket.recv(MOST_BYTES)
        except ConnectionResetError:
            answer = b""
        return msgspec.msgpack.decode(answer, type=Imported | Forked) if answer else None

    def close(self) -> None:
        """The template sees the end of its socket and exits."""
        self._socket.close()


def _attempt_connect(connection: socket.socket, name: str) -> None:
    """At once or not at all: the template listens from its first moment."""
    connection.connect(f"\0{name}")
    if user_of(connection) != os.getuid():
        raise PermissionError(f"{name} belongs to user {user_of(connection)}")


def serve(connection: socket.socket) -> Start | None:
    """Fork a child per request. Returns twice, as fork does: a `Start` in every child, None when the agent is gone.

    Waits only for the agent, whose end (also by kill -9) closes the socket.
    """
    if not _say(connection, Imported()):
        return None
    while True:
        await_readable(connection, what="the next start")
        try:
            content, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 8)
        except ConnectionResetError:
            # An agent that was killed before it had read our last answer.
            return None
        if not content:
            return None
        start = msgspec.msgpack.decode(content, type=Start)
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
        if not _say(connection, Forked(pid=pid, why=why)):
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
            return None


def _say(connection: socket.socket, answer: Imported | Forked) -> bool:
    """False when the agent is gone."""
    try:
        connection.send(msgspec.msgpack.encode(answer))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _next_agent(listener: socket.socket, lifeline: int) -> socket.socket | None:
    """The connection of the agent's successor; None when the lifeline has ended, so that there will be none."""
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
    """Fork so that the child belongs to our parent before its pid is known to anyone: 0 in the child, else its pid."""
    assert num_threads() == 1, "a fork would copy locks whose holders do not exist in the child"
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
    """`python -m kintsugi.cluster.template CONNECTION LIFELINE NAME MODULE…`: import, then serve, agent after agent.

    Ends with the lifeline, that is, when launcher and agent are gone.
    """
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
    # Tearing down what the template imported would cost half a second, and nobody needs it any more.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
