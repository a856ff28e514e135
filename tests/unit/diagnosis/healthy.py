"""A run of two hosts as its recorders would have written it, in memory: healthy, until a test changes what it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle
from kintsugi.diagnosis.reader import take_event
from kintsugi.errors import Fault, FaultDetail
from kintsugi.telemetry.events import FaultSeen, ProcessBegan, ProcessGone, Span, Transition
from kintsugi.telemetry.readings import HeartbeatReading, HostReading, LinkReading, ProcessReading
from kintsugi.types import Wait

START = 1_700_000_000.0
HOSTS = {
    "host-0": ("agent-0", MASTER, "manager-0", "model-0", "rollout-0", "server-0"),
    "host-1": ("agent-1", "model-1", "rollout-1", "server-1"),
}
PROCESSES = tuple(process for processes in HOSTS.values() for process in processes)
LINKS = (
    ("model-0", MASTER), ("model-1", MASTER), ("rollout-0", MASTER), ("rollout-1", MASTER),
    ("server-0", "manager-0"), ("server-1", "manager-0"), ("rollout-0", "manager-0"), ("rollout-1", "manager-0"),
    ("model-1", "model-0"), ("model-0", "rollout-1"), ("model-1", "rollout-0"), ("model-1", "agent-0"),
    ("agent-0", MASTER), ("agent-1", MASTER), ("manager-0", MASTER),
)  # fmt: skip
HOST_TOTALS = ("cpu_busy_s", "cpu_iowait_s", "disk_busy_s", "disk_write_bytes")
PHASES = (("collecting", 0.3), ("training", 0.4), ("committing", 0.05), ("publishing", 0.25))

Change = Callable[[float, dict[str, float]], None]
"""Given seconds since the start and the rates of that second, makes them worse."""


@dataclass
class HealthyRun:
    """`run = HealthyRun(); run.play(40)`; `change` hooks are called for each second that is played."""

    bundle: EvidenceBundle = field(default_factory=lambda: EvidenceBundle(run="runs/fake"))
    changes: dict[object, Change] = field(default_factory=dict)
    waits: dict[str, tuple[str, str, float]] = field(default_factory=dict)
    """Process → whom it waits for, for what, since when (seconds since the start)."""
    silent: set[str] = field(default_factory=set)
    states: dict[str, str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    stalled: bool = False
    now: float = 0.0
    hosts: dict[str, tuple[str, ...]] = field(default_factory=lambda: HOSTS)
    links: tuple[tuple[str, str], ...] = LINKS

    def __post_init__(self) -> None:
        self._random = random.Random(7)
        self._totals: dict[object, dict[str, float]] = {}
        self._step = 0
        for number, process in enumerate(self._processes):
            self.pids[process] = 100 + number
            role = process.rsplit("-", 1)[0]
            self.say(process, ProcessBegan(role, "1", self.pids[process]))

    @property
    def _processes(self) -> list[str]:
        return [process for processes in self.hosts.values() for process in processes]

    @property
    def time(self) -> float:
        return START + self.now

    def say(self, process: str, event: object, *, ago_s: float = 0.0) -> None:
        take_event(self.bundle, self.time - ago_s, process, event)  # type: ignore[arg-type]

    def play(self, seconds: int) -> HealthyRun:
        for _ in range(seconds):
            self._one_second()
        self.bundle.sort()
        return self

    def _one_second(self) -> None:
        self.now += 1.0
        for host, processes in self.hosts.items():
            agent = processes[0]
            if agent not in self.silent:
                self._take(agent, HostReading(host, self._host(host)))
                for process in processes:
                    values = self._process(process)
                    state = self.states.get(process, "S")
                    self._take(agent, ProcessReading(process, self.pids[process], state, values))
                for of, peer in self.links:
                    if of in processes:
                        self._take(agent, LinkReading(of, peer, 4000, "ESTABLISHED", self._link(of, peer)))
        for process in self._processes:
            if process not in self.silent:
                self._beat(process)
        if not self.stalled:
            self._take_a_step()

    def _take(self, recorder: str, sample: object) -> None:
        self.bundle.take(self.time, self.time, recorder, sample)  # type: ignore[arg-type]

    def _beat(self, process: str) -> None:
        whom, what, since = self.waits.get(process, ("anyone", "a request", self.now))
        wait = Wait(whom, what, START + since, START + since + 60)
        counters = {"steps": self._step, "micro_batches": 2 * self._step, "completions": 8 * self._step}
        busy = {"idle_s": 0.5 * self.now, "alive_s": self.now}
        for ago_s in (0.5, 0.0):
            time = self.time - ago_s
            self.bundle.take(time, time, process, HeartbeatReading("1", counters, 0.0, (wait,), busy))

    def _take_a_step(self) -> None:
        at = 1.0
        for name, seconds in PHASES:
            self.say(MASTER, Transition("master", "run", "", name, ""), ago_s=at)
            at -= seconds
        self._step += 1
        span = Span("step", self.time, 1.0, {"step": str(self._step)})
        self.say(MASTER, span)

    def _noise(self, value: float, *, share: float = 0.2) -> float:
        return value * (1 + share * (self._random.random() - 0.5))

    def _changed(self, key: object, rates: dict[str, float]) -> dict[str, float]:
        if key in self.changes:
            self.changes[key](self.now, rates)
        return rates

    def _sum(self, key: object, rates: dict[str, float]) -> dict[str, float]:
        totals = self._totals.setdefault(key, {})
        for name, value in rates.items():
            totals[name] = totals.get(name, 0.0) + value
        return dict(totals)

    def _process(self, process: str) -> dict[str, float]:
        is_still = process in self.silent
        rates = {
            "cpu_s": 0.0 if is_still else self._noise(0.2),
            "run_delay_s": 0.0 if is_still else self._noise(0.2),
            "throttled_s": 0.0,
            "rss_bytes": 2e8,
        }
        self._changed(process, rates)
        is_level = ("descriptors", "descriptor_limit", *(name for name in rates if name.endswith("_bytes")))
        levels = {name: rates.pop(name) for name in tuple(rates) if name in is_level}
        rates["write_bytes"] = rates.pop("write_total", 0.0)
        return {**self._sum(process, rates), **levels}

    def _host(self, host: str) -> dict[str, float]:
        rates = {"cpu_busy_s": self._noise(1.0), "cpu_iowait_s": 0.0, "fsync_s": self._noise(0.004)}
        rates |= {"disk_busy_s": 0.01, "disk_write_bytes": 1e5}
        rates |= {"disk_total_bytes": 1e11, "disk_free_bytes": 5e10, "memory_total_bytes": 1e10}
        rates["memory_available_bytes"] = 6e9
        self._changed(host, rates)
        totals = {name: rates.pop(name) for name in HOST_TOTALS}
        return {"cpu_count": 2.0, **self._sum(host, totals), **rates}

    def _link(self, of: str, peer: str) -> dict[str, float]:
        rates = {
            "out_bytes": 1000.0,
            "in_bytes": 1000.0,
            "retransmits": 0.0,
            "needless": 0.0,
            "rtt_s": self._noise(0.002),
            "backoff": 0.0,
            "unacked": 0.0,
        }
        self._changed((of, peer), rates)
        levels = {name: rates.pop(name) for name in ("rtt_s", "backoff", "unacked")}
        return {**self._sum((of, peer), rates), **levels}

    # What breaks.

    def kill(
        self, process: str, *, status: int = -9, how: str = "killed by SIGKILL", oom: bool = False
    ) -> None:
        """It is gone and comes back at once, as it does."""
        agent = next(processes[0] for processes in self.hosts.values() if process in processes)
        self.say(agent, ProcessGone(process, "1", self.pids[process], status, how, oom=oom))
        self.pids[process] += 1000
        self.say(process, ProcessBegan(process.rsplit("-", 1)[0], "2", self.pids[process]), ago_s=-0.2)

    def fault(
        self,
        kind: str,
        process: str,
        message: str,
        *,
        by: str = MASTER,
        cause: Fault | None = None,
        detail: FaultDetail | None = None,
    ) -> Fault:
        fault = Fault(f"{kind}.{process}.{self.now}", kind, process, message, self.time, cause, detail)
        self.say(by, FaultSeen(fault))
        return fault
