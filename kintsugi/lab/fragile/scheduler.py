"""Scheduler: an API that starts and stops jobs, each a set of processes of one role.

It knows how every process ended and writes that to its own log only. It also samples the shared devices periodically,
like the monitoring daemon of a node.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from uuid import uuid4

import msgspec

from kintsugi.cluster.fork_server import Forked, ForkServer
from kintsugi.cluster.orphans import subreaper
from kintsugi.cluster.spawn import StartOrder, await_readable
from kintsugi.errors import StartFailed, WorldError
from kintsugi.lab.fragile.device import SharedDevice, create_device, demand_of, device_path
from kintsugi.lab.fragile.directory import SCHEDULER_PORT, announce
from kintsugi.lab.fragile.messages import JobSpec, JobStatus, StartJob
from kintsugi.lab.fragile.process import FragileProcess, begin
from kintsugi.lab.fragile.rpc import RpcServer
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import Child, SystemProcesses, describe_status
from kintsugi.runtime.waits import wait
from kintsugi.types import Placement, Role, role_of

log = logging.getLogger("scheduler")

SCHEDULER = "scheduler-0"
DEVICE_FILE = "device.jsonl"
PRELOAD = (
    "torch",
    "kintsugi.lab.fragile.train_worker",
    "kintsugi.lab.fragile.rollout_worker",
    "kintsugi.lab.fragile.plain_sft",
)
_LOOK_S = 0.2
_STOP_S = 5.0


class DeviceSample(msgspec.Struct, frozen=True):
    """Line of `device.jsonl`."""

    time: float
    device: int
    utilization: float
    """Share of the time since the last sample in which an owner computed."""
    used_bytes: int
    capacity_bytes: int
    failed_allocations: int
    """Total since the start."""
    processes: int
    """Number of processes that hold memory of the device."""


class JobStarter:
    """Forks workers from a fork server that has imported their modules."""

    def __init__(self, bootstrap: Bootstrap, programs: dict[Role, str]) -> None:
        self._own, self._programs = bootstrap, programs
        self._processes = SystemProcesses()
        self._fork_server = ForkServer.start(
            self._processes, preload=PRELOAD, name=f"kintsugi-{uuid4().hex}", lifeline=bootstrap.lifeline
        )
        self._lock = threading.Lock()
        self._is_ready = False

    def start(self, process: str) -> Child:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        bootstrap = msgspec.structs.replace(
            self._own, process=process, role=role_of(process), incarnation=uuid4().hex[:8]
        )
        start = StartOrder(self._programs[role_of(process)], Placement(), bootstrap, report=writer)
        try:
            with self._lock:
                forked = self._fork(start)
        finally:
            os.close(writer)
            os.close(reader)
        if forked.pid < 0:
            raise StartFailed(process=process, phase="forking", why=forked.why)
        return self._processes.adopt(forked.pid)

    def _fork(self, start: StartOrder) -> Forked:
        if not self._is_ready:
            self._receive()
            self._is_ready = True
        if not self._fork_server.request(start):
            raise WorldError("the fork server has ended")
        answer = self._receive()
        assert isinstance(answer, Forked), "every request is answered by a pid"
        return answer

    def _receive(self) -> object:
        await_readable(self._fork_server.fileno(), what="the fork server")
        answer = self._fork_server.receive()
        if answer is None:
            raise WorldError("the fork server has ended")
        return answer


class FragileScheduler:
    """Serves requests in threads, and watches the processes in another thread."""

    def __init__(self, process: FragileProcess, starter: JobStarter) -> None:
        self._process, self._starter = process, starter
        self._jobs: dict[str, dict[str, Child]] = {}
        self._ends: dict[str, str] = {}
        self._lock = threading.Lock()
        self.server = RpcServer(
            {"/start": self._start, "/cancel": self._cancel, "/status": self._status},
            host=process.host,
            port=process.port(SCHEDULER_PORT),
            known_as=process.known_as,
            concurrent=True,
        )

    def _start(self, body: bytes) -> JobSpec:
        order = msgspec.msgpack.decode(body, type=StartJob)
        uid = f"{order.name}_job_{uuid4().hex[:6]}"
        children = {}
        for name in order.processes:
            children[name] = self._starter.start(name)
            log.info("Started %s of job %s, pid %d", name, uid, children[name].pid)
        with self._lock:
            self._jobs[uid] = children
        return JobSpec(uid)

    def _cancel(self, body: bytes) -> None:
        uid = msgspec.msgpack.decode(body, type=JobSpec).uid
        with self._lock:
            children = self._jobs.get(uid, {})
        log.info("Stopping job with UID: %s", uid)
        for child in children.values():
            child.send_signal(signal.SIGTERM)
        for name, child in children.items():
            child.wait_ended(whom=name, timeout_s=_STOP_S)

    def _status(self, body: bytes) -> JobStatus:
        uid = msgspec.msgpack.decode(body, type=JobSpec).uid
        with self._lock:
            children = self._jobs.get(uid, {})
            return JobStatus({name: self._ends.get(name, "") for name in children})

    def watch_processes(self) -> None:
        """Log the end of processes and sample the devices, in an endless loop."""
        devices = _Devices(self._process) if self._process.num_shared else None
        while True:
            _pause(_LOOK_S)
            with self._lock:
                children = {name: child for job in self._jobs.values() for name, child in job.items()}
                for name, child in children.items():
                    if name not in self._ends and child.ended():
                        self._ends[name] = describe_status(child.status())
                        log.warning("Process %s (pid %d) %s", name, child.pid, self._ends[name])
            if devices is not None:
                devices.sample()


class _Devices:
    """Devices of the run, and their usage since the last sample."""

    def __init__(self, process: FragileProcess) -> None:
        self._path = process.run_dir / DEVICE_FILE
        self._devices = [
            SharedDevice(device_path(process.run_dir, index)) for index in range(process.num_shared)
        ]
        self._before = [(SYSTEM_CLOCK.monotonic(), 0)] * len(self._devices)

    def sample(self) -> None:
        lines = b"".join(
            msgspec.json.encode(self._sample(index, device)) + b"\n"
            for index, device in enumerate(self._devices)
        )
        with self._path.open("ab") as file:
            file.write(lines)

    def _sample(self, index: int, device: SharedDevice) -> DeviceSample:
        now = SYSTEM_CLOCK.monotonic()
        bookings = device.bookings().values()
        busy_us = sum(booking.busy_us for booking in bookings)
        since, before_us = self._before[index]
        self._before[index] = now, busy_us
        return DeviceSample(
            SYSTEM_CLOCK.wall(),
            index,
            min(1.0, (busy_us - before_us) / 1e6 / max(now - since, 1e-6)),
            sum(booking.held_bytes for booking in bookings),
            device.capacity,
            sum(booking.failed_allocations for booking in bookings),
            sum(booking.held_bytes > 0 for booking in bookings),
        )


def _pause(seconds: float) -> None:
    def attempt(remaining_s: float) -> bool:
        time.sleep(remaining_s)
        return True

    wait(attempt, whom="timer", what="the next look", timeout_s=seconds)


def programs(*, plain: bool) -> dict[Role, str]:
    """Return the program of each role."""
    if plain:
        return {Role.MODEL: "kintsugi.lab.fragile.plain_sft:main"}
    return {
        Role.MODEL: "kintsugi.lab.fragile.train_worker:main",
        Role.ROLLOUT: "kintsugi.lab.fragile.rollout_worker:main",
    }


def main(bootstrap: Bootstrap) -> int:
    process = begin(bootstrap)
    for index in range(process.num_shared):
        create_device(device_path(process.run_dir, index), capacity=demand_of(process.config).capacity)
    with subreaper():
        starter = JobStarter(bootstrap, programs(plain=process.is_plain))
        scheduler = FragileScheduler(process, starter)
        threading.Thread(target=scheduler.watch_processes, name="watch processes", daemon=True).start()
        announce(process.run_dir, SCHEDULER, scheduler.server.address)
        log.info("Scheduler API at port %d", scheduler.server.address.port)
        scheduler.server.serve()
    return 0
