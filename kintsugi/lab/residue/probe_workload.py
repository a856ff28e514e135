"""Probe processes that measure what happens to them: for testing fault mechanisms and their undo.

    python -m kintsugi.lab.residue.probe_workload FOLDER NOTES NAME ADDRESS PEER…

Each probe replies to its peers and repeats, in a thread each: a round trip to every peer, a computation, a small write
with fsync, an allocation, and a host name look-up. The durations are written to `NOTES/NAME.jsonl`, which is on another
disk than FOLDER where that disk is the target of a fault.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

from kintsugi.cluster.namespaces import HostNamespaces, enter
from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.faults.mechanism import end_with_parent
from kintsugi.lab.injector.undo_log import ProcessIdentity
from kintsugi.lab.testbed.process_tags import carries
from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import EventLog, ProcessBegan

MARK = "KINTSUGI_PROBE"
COMMAND = (sys.executable, "-P", "-m", "kintsugi.lab.residue.probe_workload")
START_TIMEOUT_S = 20.0
ROUND_TRIP_TIMEOUT_S = 5.0
PAUSE_S = 0.005
ALLOCATION_BYTES = 33 << 20
"""Larger than what the C library caches: each allocation is a request to the kernel."""
FILE_BYTES = 128 << 10
SHARED_BYTES = 1 << 16
WORK = 40_000
NAME = "host-0.lab"
"""Name that is looked up repeatedly where hosts have names."""


class ProbeRun:
    """Probes `probe-0` …, distributed over the hosts of a testbed; implements `InjectableRun`."""

    def __init__(self, run_dir: Path, *, testbed: RunTestbed | None = None, count: int = 2) -> None:
        self.run_dir = run_dir
        self.testbed = testbed
        self.remote = None
        self._mark = uuid4().hex
        self._children: dict[str, Child] = {}
        self._names = [f"probe-{index}" for index in range(count)]
        self._notes = (testbed.folder if testbed is not None else run_dir) / "probes"
        run_dir.mkdir(parents=True)
        self._notes.mkdir(parents=True)
        for name in self._names:
            self.start(name)
        for name in self._names:
            self.until(lambda name=name: bool(self.measured(name, "round_trip")), what=f"{name} to work")  # type: ignore[misc]

    def start(self, name: str) -> None:
        """Start a probe, or restart one that was killed."""
        if name in self._children:
            self._children[name].status()
            self._children[name].close()
        hosts = self.testbed.hosts if self.testbed is not None else ()
        host = hosts[self._names.index(name) % len(hosts)] if hosts else HostNamespaces("here")
        peers = [other for other in self._names if other != name]
        self._children[name] = SystemProcesses().spawn(
            [*COMMAND, str(self.run_dir), str(self._notes), name, host.address, *peers],
            environment={**os.environ, MARK: self._mark},
            before_exec=partial(_before_exec, os.getpid(), host.namespaces),
            new_session=True,
        )

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def alive(self, name: str) -> bool:
        return not self._children[name].ended()

    @property
    def running(self) -> bool:
        return any(not child.ended() for child in self._children.values())

    def is_ours(self, pid: int) -> bool:
        return carries(pid, self._mark)

    def measured(self, name: str, what: str, *, since: float = 0.0) -> list[float]:
        """Return the measurements of a probe after a monotonic time."""
        path = self._notes / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        records = (json.loads(line) for line in lines if line.endswith("\n"))
        return [record["value"] for record in records if record["what"] == what and record["t"] > since]

    def until(self, condition: Callable[[], bool], *, what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        def attempt(remaining_s: float) -> bool | None:
            if condition():
                return True
            time.sleep(min(remaining_s, PAUSE_S))
            return None

        wait(attempt, whom="probes", what=what, timeout_s=timeout_s)

    def close(self) -> None:
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)
            child.wait_ended(whom="probe", timeout_s=START_TIMEOUT_S)
            child.close()


def _before_exec(parent: int, namespaces: tuple[str, ...]) -> None:
    end_with_parent(parent)
    enter(namespaces)


class ProbeProcess:
    def __init__(self, folder: Path, name: str, *, notes: Path, address: str, peers: list[str]) -> None:
        self._data = folder / f"{name}.data"
        self._notes = notes
        self._peers = peers
        self._lines = (notes / f"{name}.jsonl").open("a", buffering=1)
        self._lock = threading.Lock()
        self._listener = socket.create_server((address, 0))
        self._shared = os.memfd_create("shared")
        os.truncate(self._shared, SHARED_BYTES)
        port = notes / f"{name}.port"
        write_atomically(port, f"{address} {self._listener.getsockname()[1]}".encode(), durable=False)

    def run(self) -> None:
        """Work until the process is killed."""
        work = [self._answer, self._compute, self._store, self._allocate, self._look_up]
        work += [partial(self._query, peer) for peer in self._peers]
        for index, function in enumerate(work):
            threading.Thread(target=function, name=f"work-{index}", daemon=True).start()
        while True:
            _pause(3600.0)

    def _note(self, what: str, value: float) -> None:
        line = json.dumps({"t": SYSTEM_CLOCK.monotonic(), "what": what, "value": value})
        with self._lock:
            self._lines.write(line + "\n")

    def _answer(self) -> None:
        """Send back every byte that arrives."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        connections: dict[int, socket.socket] = {}

        def attempt(remaining_s: float) -> list[tuple[int, int]] | None:
            return poller.poll(remaining_s * 1000) or None

        while True:
            for descriptor, _ in wait(attempt, whom="peers", what="a request", timeout_s=3600.0):
                if descriptor == self._listener.fileno():
                    connection, _ = self._listener.accept()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections[connection.fileno()] = connection
                    poller.register(connection, select.POLLIN)
                    continue
                try:
                    content = connections[descriptor].recv(64)
                    connections[descriptor].send(content)
                except OSError:
                    content = b""
                if not content:
                    poller.unregister(descriptor)
                    connections.pop(descriptor).close()

    def _query(self, peer: str) -> None:
        while True:
            try:
                address, port = (self._notes / f"{peer}.port").read_text().split()
                with _connected(address, int(port)) as connection:
                    while True:
                        self._round_trip(connection)
                        _pause(2 * PAUSE_S)
            except (OSError, DeadlineExceeded):
                self._note("round_trip_failed", 1.0)
                _pause(10 * PAUSE_S)

    def _round_trip(self, connection: socket.socket) -> None:
        began = SYSTEM_CLOCK.monotonic()
        connection.send(b"?")

        def attempt(remaining_s: float) -> bytes | None:
            connection.settimeout(max(0.001, remaining_s))
            try:
                return connection.recv(64)
            except TimeoutError:
                return None

        if not wait(attempt, whom="peer", what="its answer", timeout_s=ROUND_TRIP_TIMEOUT_S):
            raise ConnectionResetError
        self._note("round_trip", SYSTEM_CLOCK.monotonic() - began)

    def _compute(self) -> None:
        """Measure a fixed computation and record its result."""
        while True:
            began = SYSTEM_CLOCK.monotonic()
            total = 0.0
            for index in range(1, WORK):
                total += 1.0 / index
            self._note("work", SYSTEM_CLOCK.monotonic() - began)
            self._note("sum", total)
            _pause(PAUSE_S)

    def _store(self) -> None:
        """Replace a file by a new one, with fsync."""
        content = b"x" * FILE_BYTES
        while True:
            began = SYSTEM_CLOCK.monotonic()
            new = self._data.with_suffix(".new")
            try:
                with new.open("wb", buffering=0) as file:
                    file.write(content)
                    os.fsync(file.fileno())
                os.replace(new, self._data)
                self._note("fsync", SYSTEM_CLOCK.monotonic() - began)
            except OSError as error:
                self._note("write_failed", float(error.errno or 0))
            _pause(4 * PAUSE_S)

    def _allocate(self) -> None:
        while True:
            try:
                block = bytearray(ALLOCATION_BYTES)
                self._note("allocated", float(len(block)))
                del block
            except MemoryError:
                self._note("refused", 1.0)
            _pause(20 * PAUSE_S)

    def _look_up(self) -> None:
        while True:
            began = SYSTEM_CLOCK.monotonic()
            try:
                socket.getaddrinfo(NAME, 1)
                self._note("look_up", SYSTEM_CLOCK.monotonic() - began)
            except OSError:
                self._note("look_up_failed", SYSTEM_CLOCK.monotonic() - began)
            _pause(10 * PAUSE_S)


def _connected(address: str, port: int) -> socket.socket:
    def attempt(remaining_s: float) -> socket.socket | None:
        try:
            return socket.create_connection((address, port), timeout=remaining_s)
        except TimeoutError:
            return None

    connection = wait(attempt, whom=f"{address}:{port}", what="a connection", timeout_s=ROUND_TRIP_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _pause(seconds: float) -> None:
    def attempt(remaining_s: float) -> bool | None:
        time.sleep(min(remaining_s, seconds))
        return True

    wait(attempt, whom="timer", what="a moment", timeout_s=seconds + 1.0)


def main(arguments: list[str]) -> int:
    folder, notes, name, address, *peers = arguments
    log = EventLog(RunFolder(folder).events_file(name), process=name)
    probe = ProbeProcess(Path(folder), name, notes=Path(notes), address=address, peers=peers)
    log.emit(ProcessBegan("probe", str(ProcessIdentity.of(os.getpid()).born), os.getpid()))
    probe.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
