"""The contract of a back end (`cluster/backends/contract.py`), for every implementation that can run here."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from uuid import uuid4

import pytest

import kintsugi
from kintsugi.cluster.backends.contract import Backend, HostCame, HostEvent, HostLeaves, HostOrder, HostWent
from kintsugi.cluster.backends.kubernetes.backend import KubernetesBackend
from kintsugi.cluster.backends.local import LocalBackend
from kintsugi.cluster.backends.ray import RayBackend
from kintsugi.cluster.backends.ray_protocol import RayJob
from kintsugi.cluster.backends.slurm import SlurmBackend, read_allocation
from kintsugi.config.schema import KubernetesSection
from kintsugi.runtime.proc import process_start_time
from kintsugi.simulation.backend import SimulatedBackend
from kintsugi.simulation.world import World
from tests.cluster import slurm_cluster
from tests.cluster.kubernetes_server import KubernetesServer
from tests.cluster.slurm_cluster import SlurmCluster

LONGEST_S = 20.0
HOSTS = ("host-1", "host-2", "host-3")
SUPERVISOR = 'read ticket; echo "$ticket $$" >> "$0"; exec sleep 600'
"""Stands for a supervisor: writes its ticket and its pid to a file, then stays."""


class Engine(ABC):
    """One implementation with what the tests need around it."""

    backend: Backend
    longest_s = 20.0
    """Time for everything that a test waits for."""

    @abstractmethod
    def running(self) -> dict[str, object]:
        """Host → what identifies its supervisor, for those that run."""

    @abstractmethod
    def lose(self, host: str) -> None:
        """End the supervisor of a host as a power cut does."""

    @abstractmethod
    def advance(self) -> None:
        """Let some time pass."""

    def close(self) -> None:  # noqa: B027 - most have nothing.
        """Release what is around the back end."""

    def until(self, *wanted: tuple[type, str]) -> list[HostEvent]:
        """Poll until these events have been told; return all."""
        told: list[HostEvent] = []
        deadline = time.monotonic() + self.longest_s
        while not set(wanted) <= {(type(event), event.host) for event in told}:
            assert time.monotonic() < deadline, f"waited for {wanted}, told {told}"
            self.advance()
            told += self.backend.poll()
        return told


class LocalEngine(Engine):
    def __init__(self, folder: Path) -> None:
        self._tickets = folder / "tickets"
        self._tickets.touch()
        self.backend = LocalBackend(["sh", "-c", SUPERVISOR, str(self._tickets)])

    def running(self) -> dict[str, object]:
        lines = [line.split() for line in self._tickets.read_text().splitlines()]
        return {host: int(pid) for host, pid in lines if Path(f"/proc/{pid}").exists()}

    def lose(self, host: str) -> None:
        pid = self.running()[host]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)

    def advance(self) -> None:
        time.sleep(0.01)


class SimulatedEngine(Engine):
    def __init__(self) -> None:
        self._world = World(seed=3)
        self._simulated = SimulatedBackend(self._world, num_machines=4)
        self.backend = self._simulated

    def running(self) -> dict[str, object]:
        return dict(self._simulated.running)

    def lose(self, host: str) -> None:
        self._simulated.lose(host)

    def advance(self) -> None:
        self._world.turn()


class RayEngine(LocalEngine):
    """Nodes of a Ray cluster on this machine."""

    longest_s = 120.0

    def __init__(self, folder: Path, *, address: str) -> None:
        super().__init__(folder)
        self.backend = RayBackend(
            RayJob(
                address=address,
                job=f"kintsugi-{uuid4().hex[:12]}",
                num_hosts=len(HOSTS),
                cpus=1,
                command=("sh", "-c", SUPERVISOR, str(self._tickets)),
            )
        )

    def running(self) -> dict[str, object]:
        # One that was killed may stay a zombie: it is no child of ours.
        return {
            host: pid
            for host, pid in super().running().items()
            if isinstance(pid, int) and process_start_time(pid) is not None
        }


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000},
)
for _ in range(3):
    cluster.add_node(num_cpus=1, num_gpus=4, object_store_memory=80_000_000)
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a cluster of three nodes on this machine, and the environment that names its token."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(kintsugi.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        lines = (line for line in cluster.stdout if line.startswith("address "))
        yield next(lines).split()[1], environment


class KubernetesEngine(Engine):
    """Pods of the small server of the API, on their own or of an Indexed Job."""

    def __init__(self, *, minor: str) -> None:
        self.server = KubernetesServer(minor=minor)
        settings = KubernetesSection(image="kintsugi:1")
        self.backend = KubernetesBackend(
            settings, job="run1", hosts=HOSTS, patience_s=LONGEST_S, load=self.server.access
        )

    def running(self) -> dict[str, object]:
        return self.server.running()

    def lose(self, host: str) -> None:
        self.server.end_container(self.server.pod_of(host))

    def advance(self) -> None:
        time.sleep(0.01)

    def close(self) -> None:
        self.server.close()


class SlurmEngine(Engine):
    """An allocation of four nodes of a real cluster, with one free node."""

    def __init__(self, cluster: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = cluster
        self._tickets = folder / "tickets"
        self._tickets.touch()
        monkeypatch.setenv("PATH", f"{cluster.clients()}:{os.environ['PATH']}")
        job, nodes = cluster.allocate(4)
        allocation = read_allocation({"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes})
        self._job = job
        supervisor = SUPERVISOR.replace("$$", "$SLURMD_NODENAME $$")
        self.backend = SlurmBackend(allocation, command=["sh", "-c", supervisor, str(self._tickets)])

    def close(self) -> None:
        self.cluster.slurm("scancel", self._job)
        self.cluster.wait_for_nodes("IDLE", count=4)

    def _pids(self) -> dict[str, int]:
        """Host → pid on this machine of its supervisor."""
        here = {
            (node, line.split()[-1]): pid
            for node in self.cluster.nodes
            for pid in self.cluster.processes_of(node)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("NSpid:")
        }
        lines = [line.split() for line in self._tickets.read_text().splitlines()]
        return {host: here[node, pid] for host, node, pid in lines if (node, pid) in here}

    def running(self) -> dict[str, object]:
        return dict(self._pids())

    def lose(self, host: str) -> None:
        os.kill(self._pids()[host], signal.SIGKILL)

    def advance(self) -> None:
        time.sleep(0.05)


REAL_SLURM = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(
        slurm_cluster.missing() is not None,
        reason=f"a Slurm cluster can not be had: {slurm_cluster.missing()}",
    ),
]


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), count=4)
    yield cluster
    cluster.close()


MADE: dict[str, Callable[[Path], Engine]] = {
    "local": LocalEngine,
    "simulated": lambda folder: SimulatedEngine(),
    "kubernetes pods": lambda folder: KubernetesEngine(minor="20"),
    "kubernetes job": lambda folder: KubernetesEngine(minor="30+"),
}
ON_RAY = pytest.param(
    "ray",
    marks=[
        pytest.mark.slow,
        pytest.mark.ray,
        pytest.mark.skipif(util.find_spec("ray") is None, reason="Ray is not installed"),
    ],
)


@pytest.fixture(params=[*MADE, ON_RAY, pytest.param("slurm", marks=REAL_SLURM)])
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    made: Engine
    match request.param:
        case "slurm":
            made = SlurmEngine(request.getfixturevalue("four_nodes"), tmp_path, monkeypatch)
        case "ray":
            address, environment = request.getfixturevalue("ray_cluster")
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            made = RayEngine(tmp_path, address=address)
        case name:
            made = MADE[name](tmp_path)
    yield made
    made.backend.give_back(timeout_s=5.0)
    made.close()


def orders(*hosts: str) -> list[HostOrder]:
    """The ticket of each host is its name, so that a test can see which one arrived."""
    return [HostOrder(host, f"{host}\n".encode()) for host in hosts]


def started(engine: Engine) -> dict[str, object]:
    engine.backend.start(orders(*HOSTS))
    engine.until(*((HostCame, host) for host in HOSTS))
    deadline = time.monotonic() + engine.longest_s
    while len(engine.running()) < len(HOSTS):
        assert time.monotonic() < deadline
        engine.advance()
    return engine.running()


def test_each_ordered_host_comes_once_with_its_own_ticket(engine: Engine) -> None:
    assert started(engine).keys() == set(HOSTS)
    assert engine.backend.poll() == []


def test_a_lost_host_is_told_and_the_others_go_on(engine: Engine) -> None:
    before = started(engine)
    engine.lose("host-2")
    told = engine.until((HostWent, "host-2"))
    assert [event.host for event in told] == ["host-2"]
    assert all(event.why for event in told if isinstance(event, HostWent))
    assert engine.running() == {host: before[host] for host in ("host-1", "host-3")}


def test_one_host_is_replaced_and_the_others_keep_their_supervisors(engine: Engine) -> None:
    before = started(engine)
    engine.lose("host-2")
    engine.until((HostWent, "host-2"))
    engine.backend.replace(orders("host-2")[0])
    engine.until((HostCame, "host-2"))
    deadline = time.monotonic() + engine.longest_s
    while engine.running().keys() != set(HOSTS):
        assert time.monotonic() < deadline
        engine.advance()
    after = engine.running()
    assert {host: after[host] for host in ("host-1", "host-3")} == {
        host: before[host] for host in ("host-1", "host-3")
    }
    assert after["host-2"] != before["host-2"]


def test_a_host_can_be_replaced_before_its_engine_has_noticed_its_loss(engine: Engine) -> None:
    before = started(engine)
    engine.lose("host-1")
    engine.backend.replace(orders("host-1")[0])
    engine.until((HostCame, "host-1"))
    deadline = time.monotonic() + engine.longest_s
    while engine.running().keys() != set(HOSTS):
        assert time.monotonic() < deadline
        engine.advance()
    assert engine.running()["host-1"] != before["host-1"]


def test_a_host_whose_engine_asks_for_it_is_to_be_left_and_the_others_are_not(engine: Engine) -> None:
    before = started(engine)
    engine.backend.asked_to_end("host-2", "a signal")
    told = engine.until((HostLeaves, "host-2"))
    assert told == [HostLeaves("host-2", "a signal")]
    assert engine.running() == before


def test_nothing_is_left_after_all_was_given_back_and_it_may_be_given_back_twice(engine: Engine) -> None:
    started(engine)
    engine.backend.give_back(timeout_s=5.0)
    assert engine.running() == {}
    engine.backend.give_back(timeout_s=5.0)
    assert [event for event in engine.backend.poll() if isinstance(event, HostCame)] == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_supervisor_on_ray_sees_the_gpus_that_it_has_reserved_and_no_token(
    ray_cluster: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, environment = ray_cluster
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = tmp_path / "found"
    command = ("sh", "-c", 'env > "$0.part"; mv "$0.part" "$0"; exec sleep 600', str(found))
    job = RayJob(address, f"kintsugi-{uuid4().hex[:12]}", num_hosts=1, cpus=1, gpus=2, command=command)
    backend = RayBackend(job)
    backend.start(orders("host-1"))
    deadline = time.monotonic() + RayEngine.longest_s
    while not found.exists():
        assert time.monotonic() < deadline, backend.poll()
        assert not [event for event in backend.poll() if isinstance(event, HostWent)]
        time.sleep(0.05)
    there = dict(line.split("=", 1) for line in found.read_text().splitlines() if "=" in line)
    assert len(there["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    assert not [name for name in there if name.startswith("RAY_")]
    backend.give_back(timeout_s=5.0)


def test_a_supervisor_that_can_not_be_executed_is_told_by_name() -> None:
    backend = LocalBackend(["/nowhere/supervisor"])
    backend.start(orders("host-1"))
    (event,) = backend.poll()
    assert event == HostWent("host-1", "/nowhere/supervisor: No such file or directory")


def test_the_last_line_of_a_supervisor_that_refused_is_the_reason() -> None:
    backend = LocalBackend(["sh", "-c", "echo first; echo no torch here >&2; exit 2"])
    backend.start(orders("host-1"))
    deadline = time.monotonic() + LONGEST_S
    told: list[HostEvent] = []
    while not any(isinstance(event, HostWent) for event in told):
        assert time.monotonic() < deadline
        told += backend.poll()
    assert told[-1] == HostWent("host-1", "no torch here")


def test_a_simulated_engine_without_a_free_machine_says_so() -> None:
    backend = SimulatedBackend(World(seed=1), num_machines=1)
    backend.start(orders("host-1", "host-2"))
    assert backend.poll() == [HostWent("host-2", "no machine is free")]
