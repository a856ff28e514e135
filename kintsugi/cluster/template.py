"""A process that has already imported torch and our workers, and forks them in milliseconds instead of seconds.

The agent sends a `Start` and its descriptors over a socket pair; the template forks twice, so that the child's parent
is the agent (a subreaper) exactly as if the agent had executed it: same pidfd, same exit status, same stop.

Forking is only safe while the template has one thread and no device: it checks the first before every fork and imports
nothing that does the second. When it cannot be used it exits, and the agent executes interpreters instead.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import socket
import sys
from typing import NoReturn

import msgspec

from kintsugi.cluster.placement import Start, execute, run
from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime import Processes, wait
from kintsugi.types import Placement

_MOST_BYTES = 65536
"""Of one message; a `Start` has a few hundred."""


class Forked(msgspec.Struct, frozen=True):
    """The child's pid, or why there is none."""

    pid: int
    why: str = ""


class Template:
    """The agent's end. Requests are answered in order; `ended` once the process on the other side is gone."""

    def __init__(self, processes: Processes, *, preload: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self.child = execute(
                processes,
                ["kintsugi.cluster.template", str(theirs.fileno()), *preload],
                placement=Placement(),
                pass_fds=(theirs.fileno(),),
            )
        finally:
            theirs.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def request(self, start: Start) -> bool:
        """Ask for a child; False when nobody takes the request."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(start)], start.descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Forked | None:
        """The next answer; None when the template is gone. Called when the descriptor is readable."""
        try:
            answer = self._socket.recv(_MOST_BYTES)
        except ConnectionResetError:
            answer = b""
        return msgspec.msgpack.decode(answer, type=Forked) if answer else None

    def close(self) -> None:
        """The template sees the end of its socket and exits."""
        self._socket.close()


def serve(connection: socket.socket) -> Start | None:
    """Fork a child per request. Returns twice, as fork does: a `Start` in every child, None when the agent is gone.

    Waits only for the agent, whose end (also by kill -9) closes the socket.
    """
    while True:
        _await_request(connection)
        content, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 8)
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
            connection.close()
            return start.with_descriptors(tuple(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(msgspec.msgpack.encode(Forked(pid=pid, why=why)))


def _await_request(connection: socket.socket) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        try:
            wait(
                lambda remaining_s: poller.poll(remaining_s * 1000) or None,
                whom="agent",
                what="the next start",
                timeout_s=3600.0,
            )
        except DeadlineExceeded:
            continue
        return


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
    """`python -m kintsugi.cluster.template DESCRIPTOR MODULE…`: import, then serve until the agent is gone."""
    connection = socket.socket(fileno=int(arguments[0]))
    connection.set_inheritable(False)
    for module in arguments[1:]:
        importlib.import_module(module)
    if num_threads() != 1:
        sys.exit(f"cannot fork: importing {', '.join(arguments[1:])} started {num_threads() - 1} threads")
    gc.collect()
    gc.freeze()
    start = serve(connection)
    exit_code = 0 if start is None else run(start)
    # Tearing down what the template imported would cost half a second, and nobody needs it any more.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
