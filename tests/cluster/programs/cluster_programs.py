"""Tiny programs for processes of a run: what cluster tests start instead of real masters and workers."""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from kintsugi.cluster.accelerators import AcceleratorReading
from kintsugi.cluster.shared_memory import SegmentClient
from kintsugi.errors import KintsugiError
from kintsugi.process.membership import open_endpoint
from kintsugi.protocol.agents import ProcessExited, ProcessStarted, StartProcess
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.membership import Register, Registered, Shutdown
from kintsugi.runtime.shortages import SHORTAGES
from kintsugi.transport import PendingReply


def idle(bootstrap: Bootstrap) -> int:
    """Until the lifeline ends."""
    os.read(bootstrap.lifeline, 1)
    return 0


def unprepared(bootstrap: Bootstrap) -> int:
    """What a spare does that needs nothing."""
    return 0


def prepare_in_vain(bootstrap: Bootstrap) -> int:
    """What a spare does whose device does not work."""
    raise RuntimeError(f"{bootstrap.process} can not be prepared")


class FileProbe:
    """Accelerators as `<folder>/<agent>.json` says; what an agent that has no such file sees is one that works."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{Path('/proc/self/comm').read_text().strip()}.json"

    def read(self) -> tuple[AcceleratorReading, ...]:
        if not self._path.exists():
            return (AcceleratorReading(uuid="cpu", name="the processor"),)
        return msgspec.json.decode(self._path.read_bytes(), type=tuple[AcceleratorReading, ...])


def file_probe() -> FileProbe:
    return FileProbe(Path(os.environ["KINTSUGI_TEST_CHIPS"]))


def stubborn(bootstrap: Bootstrap) -> int:
    """Notes that it was asked to end, and goes on. A process counts as started before its program runs, so it notes
    from when on it is stubborn."""
    signal.signal(signal.SIGTERM, lambda number, frame: _write(bootstrap, "asked_to_end", True))
    _write(bootstrap, "stubborn", True)
    return idle(bootstrap)


def ends_when_told(bootstrap: Bootstrap) -> int:
    """Records its end and returns once `<process>.told` is there, as a process does that has read `Shutdown`."""
    told = Path(bootstrap.run_dir) / f"{bootstrap.process}.told"
    while not told.exists():
        if select.select([bootstrap.lifeline], [], [], 0.005)[0]:
            return 1
    _write(bootstrap, "recorded", os.getpid())
    return 0


def last_words(bootstrap: Bootstrap) -> int:
    sys.stderr.write("these are my last words\n")
    return 3


def parent_of_sleepers(bootstrap: Bootstrap) -> int:
    """Leaves one child in its own group and one in a session apart."""
    sleepers = [subprocess.Popen(["sleep", "600"], start_new_session=apart) for apart in (False, True)]
    _write(bootstrap, "sleepers", [sleeper.pid for sleeper in sleepers])
    return idle(bootstrap)


def hungry(bootstrap: Bootstrap) -> int:
    """Takes all memory that it can get."""
    taken = []
    while True:
        taken.append(bytearray(os.urandom(1 << 20)))


def slow_to_end(bootstrap: Bootstrap) -> int:
    """Maps the same memory many times, which the kernel undoes at its end: it takes twice as long as an agent takes
    between two looks at its children, as with a large process."""
    descriptor, size = os.memfd_create("mapped"), 64 << 20
    os.ftruncate(descriptor, size)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    mapped = [mmap.mmap(descriptor, size, flags=flags) for _ in range(500)]
    _write(bootstrap, "mapped", len(mapped))
    return idle(bootstrap)


def segment_writer(bootstrap: Bootstrap) -> int:
    client = SegmentClient(bootstrap.segments)
    os.pwrite(client.create("snapshot", 4096), b"state of step 7", 0)
    _write(bootstrap, "written", True)
    return idle(bootstrap)


def segment_keeper(bootstrap: Bootstrap) -> int:
    """Writes a segment and offers it to whoever comes after the agent, until the lifeline ends."""
    client = SegmentClient(bootstrap.segments)
    os.pwrite(client.create("snapshot", 4096), b"state of step 7", 0)
    _write(bootstrap, "written", True)
    while not select.select([bootstrap.lifeline], [], [], 0.02)[0]:
        client.renew()
    return 0


def describe_itself(bootstrap: Bootstrap) -> int:
    """Writes down how it was placed."""
    targets = {
        name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _open(name)
    }
    _write(
        bootstrap,
        "placement",
        {
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "flavour": os.environ.get("FLAVOUR"),
            "session": os.getsid(0) == os.getpid(),
            "parent": os.getppid(),
            "name": Path("/proc/self/comm").read_text().strip(),
            "num_threads": threading.active_count(),
            "descriptors": targets,
            "groups": Path("/proc/self/cgroup").read_text(),
        },
    )
    return idle(bootstrap)


def _open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def _write(bootstrap: Bootstrap, what: str, value: object) -> None:
    path = Path(bootstrap.run_dir) / f"{bootstrap.process}.{what}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    new.replace(path)


class Orders(msgspec.Struct):
    """`<run_dir>/orders.json`: what the fake master starts, and how it ends (None: when it is told to; the code of a
    shortage: only the first one)."""

    starts: dict[str, list[StartProcess]]
    exit_code: int | None = None
    kill_itself: bool = False


def _next_term(bootstrap: Bootstrap) -> int:
    path = Path(bootstrap.run_dir) / "term"
    term = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(term))
    return term


def master(bootstrap: Bootstrap) -> int:
    """Starts what it was ordered to, writes down what happened, ends on SIGTERM or as ordered.

    One that takes over begins a new term and orders the same processes again; those that live are adopted.
    """
    bootstrap = msgspec.structs.replace(bootstrap, term=_next_term(bootstrap))
    told_to_stop = threading.Event()
    endpoint = open_endpoint(bootstrap)

    def stop(number: int, frame: object) -> None:
        told_to_stop.set()
        endpoint.wake()

    signal.signal(signal.SIGTERM, stop)
    endpoint.watch(bootstrap.lifeline, lambda: os._exit(70))
    orders = msgspec.json.decode((Path(bootstrap.run_dir) / "orders.json").read_bytes(), type=Orders)
    happened: list[object] = []
    pending: list[PendingReply] = []
    registered: set[str] = set()

    def note(event: object) -> None:
        happened.append(event)
        _write(bootstrap, "happened", happened)

    def answered(reply: PendingReply) -> None:
        try:
            body = reply.result().expect(ProcessStarted)
            note(["started", body.process, body.pid])
        except KintsugiError as error:
            note(["failed", str(error)])

    note(["master", os.getpid(), bootstrap.adopting, endpoint.address])
    while not told_to_stop.is_set():
        for delivery in endpoint.poll(1.0):
            match delivery.body:
                case Register(peer=peer, children=children):
                    endpoint.admit(peer)
                    endpoint.reply(delivery, Registered(bootstrap.term))
                    note(["registered", peer.process, peer.incarnation, sorted(one.pid for one in children)])
                    if peer.process not in registered:
                        registered.add(peer.process)
                        pending += [
                            endpoint.request(peer.process, start, deadline_s=60.0, on_done=answered)
                            for start in orders.starts.get(peer.process, [])
                        ]
                case ProcessExited(process=process, status=status):
                    note(["exited", process, status])
                case _:
                    pass
        everything = len(pending) == sum(map(len, orders.starts.values())) and all(
            one.done for one in pending
        )
        if everything and len(registered) == len(bootstrap.peers):
            if ["complete"] not in happened:
                note(["complete"])
            if orders.kill_itself:
                os.kill(os.getpid(), signal.SIGKILL)
            if orders.exit_code is not None and not (orders.exit_code in SHORTAGES and bootstrap.adopting):
                break
    for process in registered if len(registered) > 1 else ():
        endpoint.send(process, Shutdown("the fake master ends"))
    endpoint.close(flush_s=1.0)
    return 0 if bootstrap.adopting else orders.exit_code or 0
