"""A run of 1.8 billion parameters on one accelerator, as its recorders would have written it, half a second at a time.

The figures were measured on an H200 (issue 17); the files are written by the writers of the telemetry.

    start          34 s until the first prompt; the rank grows from 0.8 to 30 GB, the server to 19 GB of device memory
    step           6 or 18 s: collecting, training, committing, publishing
    save           10 s in which the rank writes 21 GB and can not be heard
    evaluation     12 s in which all servers and rollout workers are busy
    loss of a rank its end is reported after 1.5 s, its replacement starts for 13.7 s and grows by 29 GB meanwhile
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kintsugi.diagnosis.diagnose import Follower
from kintsugi.errors import Fault
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.events import (
    Event,
    EventLog,
    FaultSeen,
    ProcessBegan,
    ProcessGone,
    Span,
    Stamp,
    Transition,
    stamped,
)
from kintsugi.telemetry.jsonl_log import LineFile
from kintsugi.telemetry.readings import HeartbeatReading, HostReading, ProcessReading, Sample
from kintsugi.types import Wait, role_of

AGENT, MASTER, RANK, SERVER, MANAGER = "agent-0", "master-0", "model-0", "server-0", "manager-0"
WORKERS = ("rollout-0", "rollout-1")
PROCESSES = (AGENT, MASTER, RANK, SERVER, MANAGER, *WORKERS)
HOST = "host-0"
TICK_S = 0.5
GB = 1e9
CARD_BYTES, HOST_BYTES, DISK_BYTES = 143.7 * GB, 1000 * GB, 500 * GB
START_S, LOADED_S = 34.0, 20.0
REPLACED_S, REPAIRED_S = 13.7, 2.5
SAVE_S, EVALUATION_S, STATE_BYTES = 10.0, 12.0, 21 * GB
RSS = {RANK: 29.8 * GB, SERVER: 4 * GB, AGENT: 22 * GB}
EMPTY_RSS = {RANK: 0.768 * GB, SERVER: 0.7 * GB}
DEVICE = {RANK: 86 * GB, SERVER: 19 * GB}
SHARES = {"collecting": 0.1, "training": 0.86, "committing": 0.005, "publishing": 0.035}
"""Phases of a step with 18 s; faster ones have the shares of `FAST`."""
FAST = {"collecting": 0.28, "training": 0.6, "committing": 0.01, "publishing": 0.11}


@dataclass
class Part:
    """A process of the run: what it has and does now."""

    pid: int
    born: float = 0.0
    ready: float = START_S
    """When it has loaded and makes progress."""
    is_gone: bool = False
    is_stopped: bool = False
    is_mute: bool = False
    totals: dict[str, float] = field(
        default_factory=lambda: {"cpu_s": 0.0, "run_delay_s": 0.0, "write_bytes": 0.0}
    )
    counters: dict[str, int] = field(default_factory=dict)
    idle_s: float = 0.0
    alive_s: float = 0.0


class LargeRun:
    """`run = LargeRun(tmp_path, step_s=18.0); run.play(120); run.named()`."""

    def __init__(
        self, run_dir: Path, *, step_s: float = 18.0, save_every: int = 0, evaluate_every: int = 0
    ) -> None:
        self.run_dir, self.clock, self.step_s = run_dir, VirtualClock(), step_s
        self.shares = SHARES if step_s > 10 else FAST
        self.save_every, self.evaluate_every = save_every, evaluate_every
        self.parts = {process: Part(100 + number) for number, process in enumerate(PROCESSES)}
        self.leaks: dict[str, dict[str, float]] = {}
        """Process → reading → bytes that it does not give back."""
        self.changes: list[Callable[[str, dict[str, float]], None]] = []
        """Called with a process or the host, and its values."""
        self.slowness = 1.0
        self.user_code_since: dict[str, float] = {}
        self.step, self.stalled = 0, False
        self.phase, self.phase_since, self.phase_s = "starting", 0.0, START_S - 4.0
        self.step_since = START_S
        self._random = random.Random(5)
        self._host = {"cpu_busy_s": 0.0, "disk_busy_s": 0.0, "disk_write_bytes": 0.0, "cpu_iowait_s": 0.0}
        self._logs: dict[str, EventLog] = {}
        self._files: dict[str, LineFile] = {}
        RunFolder(run_dir).readings_folder.mkdir(parents=True)
        for process in PROCESSES:
            self.say(process, ProcessBegan(role_of(process).value, "1", self.parts[process].pid))
        self.follower = Follower(run_dir, clock=self.clock)
        self.verdicts: list[tuple[float, str, str]] = []
        """(Time, process, kind) of every first cause that was named, once a second."""

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def close(self) -> None:
        """Close all files of the run."""
        for log in self._logs.values():
            log.close()
        for file in self._files.values():
            file.close()
        self.follower.close()

    # Recording.

    def say(self, process: str, event: Event) -> None:
        if process not in self._logs:
            path = RunFolder(self.run_dir).events_file(process)
            self._logs[process] = EventLog(path, process=process, clock=self.clock)
        self._logs[process].emit(event)

    def _record(self, recorder: str, *samples: Sample) -> None:
        if recorder not in self._files:
            self._files[recorder] = LineFile(RunFolder(self.run_dir).readings_file(recorder))
        self._files[recorder].append(stamped(Stamp(self.clock.wall(), self.now, recorder), *samples))

    def fault(self, kind: str, process: str, message: str) -> None:
        identity = f"{kind}.{process}.{self.now}"
        self.say(MASTER, FaultSeen(Fault(identity, kind, process, message, self.clock.wall())))

    # Time.

    def play(self, seconds: float) -> LargeRun:
        """Let time pass, and diagnose once a second."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self._work()
            self._beats()
            if self.now % 1.0 == 0:
                self._samples()
                causes = self.follower.look().causes
                if causes:
                    self.verdicts.append((self.now, causes[0].process, causes[0].kind.value))
        return self

    def play_steps(self, steps: int) -> LargeRun:
        goal = self.step + steps
        while self.step < goal:
            self.play(1.0)
        return self

    def named(self, *, since: float = 0.0) -> list[tuple[str, str]]:
        """Return the different first causes since a time, in the order of their first naming."""
        return list(dict.fromkeys((process, kind) for time, process, kind in self.verdicts if time >= since))

    # Work of the master.

    def _enter(self, phase: str, seconds: float) -> None:
        self.say(MASTER, Transition("master", "run", self.phase, phase, ""))
        self.phase, self.phase_since, self.phase_s = phase, self.now, seconds

    def _work(self) -> None:
        for part in self.parts.values():
            part.alive_s += TICK_S
        is_blocked = self.stalled or self._blocks()
        if self.now < self.phase_since + self.phase_s or is_blocked:
            return
        slow = self.slowness
        match self.phase:
            case "starting":
                self._enter("preparing", 2.0)
            case "preparing":
                self._enter("publishing", 2.0)
            case "recovering":
                self._enter("publishing", self.step_s * self.shares["publishing"])
            case "collecting":
                self._enter("training", self.step_s * self.shares["training"] * slow)
            case "training":
                self._enter("committing", self.step_s * self.shares["committing"])
            case "committing":
                self.step += 1
                took_s = self.now - self.step_since
                self.say(MASTER, Span("step", self.step_since, took_s, {"step": str(self.step)}))
                self.step_since = self.now
                self._enter("publishing", self.step_s * self.shares["publishing"])
                for grown in self.leaks.values():
                    for reading in grown:
                        grown[reading] += grown[reading] and self._leak_bytes
            case "publishing" if self.evaluate_every and self.step and self.step % self.evaluate_every == 0:
                self._enter("evaluating", EVALUATION_S)
            case "publishing" | "evaluating" if (
                self.save_every and self.step and self.step % self.save_every == 0
            ):
                self._enter("saving", SAVE_S)
            case _:
                self._enter("collecting", self.step_s * self.shares["collecting"] * slow)

    def _blocks(self) -> bool:
        """Whether a process that the phase needs is not there."""
        needed = {"training": (RANK,), "collecting": (SERVER, MANAGER), "evaluating": (SERVER, MANAGER)}
        return any(
            (part := self.parts[process]).is_gone or part.is_stopped or self.now < part.ready
            for process in (MASTER, *needed.get(self.phase, ()))
        )

    # Processes.

    def _is_active(self, process: str) -> bool:
        match role_of(process).value:
            case "model":
                return self.phase in ("training", "saving", "publishing")
            case "server" | "manager" | "rollout":
                return self.phase in ("collecting", "evaluating")
            case _:
                return True

    def _is_silent(self, process: str) -> bool:
        part = self.parts[process]
        is_saving = process == RANK and self.phase == "saving"
        return part.is_gone or part.is_stopped or part.is_mute or is_saving or self.now < part.born + 2.0

    def _beats(self) -> None:
        for process, part in self.parts.items():
            active = self._is_active(process) and self.now >= part.ready
            if not active:
                part.idle_s += TICK_S
            elif not (part.is_stopped or part.is_gone):
                self._progress(process, part)
            if not self._is_silent(process):
                gauges = {"idle_s": part.idle_s, "alive_s": part.alive_s}
                beat = HeartbeatReading("1", dict(part.counters), 0.0, self._waits(process), gauges)
                self._record(process, beat)

    def _progress(self, process: str, part: Part) -> None:
        match role_of(process).value:
            case "model" if self.phase == "training":
                number = part.totals.get("work", 0.0) + TICK_S / (0.35 * self.slowness)
                part.totals["work"] = number
                part.counters["micro_batches"] = int(number)
            case "server":
                part.counters["steps"] = part.counters.get("steps", 0) + round(70 / self.slowness)
            case "rollout":
                part.counters["completions"] = part.counters.get("completions", 0) + 20
            case _:
                pass

    def _waits(self, process: str) -> tuple[Wait, ...]:
        def wait(whom: str, what: str, since: float) -> Wait:
            return Wait(whom, what, since, since + 600)

        since = self.phase_since
        match role_of(process).value:
            case "rollout" if process in self.user_code_since:
                return (wait("reward process", "scores", self.user_code_since[process]),)
            case "rollout" if self._is_active(process):
                return (wait(MANAGER, "completions", since),)
            case "manager" if self._is_active(process):
                return (wait(SERVER, "Generate", since),)
            case "master":
                kinds = {
                    "training": "RunCall",
                    "saving": "Save",
                    "publishing": "Publish",
                    "recovering": "Repair",
                }
                return (wait(RANK, kinds[self.phase], since),) if self.phase in kinds else ()
            case _:
                return (wait("anyone", "a request", since),)

    # Samples of the agent.

    def _samples(self) -> None:
        found: list[Sample] = []
        written = 0.0
        for process, part in self.parts.items():
            if part.is_gone and not part.totals.get("zombie_until", 0.0) > self.now:
                continue
            values = self._values(process, part)
            written += values.pop("write_rate", 0.0)
            state = "Z" if part.is_gone else "T" if part.is_stopped else "S"
            found.append(ProcessReading(process, part.pid, state, values))
        found.append(HostReading(HOST, self._host_values(written)))
        self._record(AGENT, *found)

    def _values(self, process: str, part: Part) -> dict[str, float]:
        is_still = part.is_gone or part.is_stopped
        active = self._is_active(process) or self.now < part.ready
        rates = {
            "cpu_s": 0.0 if is_still else 0.95 if active else 0.02,
            "run_delay_s": 0.0 if is_still else 0.01,
            "write_bytes": 0.0,
        }
        if process == RANK and self.phase == "saving" and not is_still:
            rates["write_bytes"] = STATE_BYTES / SAVE_S
        for name, value in rates.items():
            part.totals[name] += value
        size = self._size(process, part)
        values = {name: part.totals[name] for name in rates} | {"rss_bytes": size}
        if process in DEVICE:
            loaded = min(1.0, max(0.0, (self.now - part.born) / max(1.0, part.ready - part.born)))
            values["device_memory_bytes"] = 0.5 * GB + DEVICE[process] * loaded
        for reading, leaked in self.leaks.get(process, {}).items():
            values[reading] += leaked - 1.0
        for change in self.changes:
            change(process, values)
        return values | {"write_rate": rates["write_bytes"]}

    def _size(self, process: str, part: Part) -> float:
        full = RSS.get(process, 0.4 * GB)
        empty = EMPTY_RSS.get(process, 0.2 * GB)
        if part.is_gone:
            return 0.0
        loading = min(1.0, max(0.0, (self.now - part.born - 1.0) / max(1.0, part.ready - part.born - 1.0)))
        size = empty + (full - empty) * loading
        if process == RANK and self.phase == "saving":
            size += STATE_BYTES * min(1.0, (self.now - self.phase_since) / 5.0)
        return size * (1 + 0.002 * self._random.random())

    def _host_values(self, written: float) -> dict[str, float]:
        is_writing = written > GB
        for name, rate in {
            "cpu_busy_s": 3.0,
            "disk_busy_s": 0.9 if is_writing else 0.01,
            "disk_write_bytes": 1.2 * GB if is_writing else 2e5,
            "cpu_iowait_s": 0.1,
        }.items():
            self._host[name] += rate
        used = sum(self._size(process, part) for process, part in self.parts.items())
        card = sum(
            DEVICE[process] + self.leaks.get(process, {}).get("device_memory_bytes", 0.0)
            for process in DEVICE
            if not self.parts[process].is_gone
        )
        values = {
            **self._host,
            "cpu_count": 16.0,
            "fsync_s": 1.8 if is_writing else 0.004,
            "disk_total_bytes": DISK_BYTES,
            "disk_free_bytes": 0.5 * DISK_BYTES,
            "memory_total_bytes": HOST_BYTES,
            "memory_available_bytes": HOST_BYTES - used,
            "device_0_memory_total_bytes": CARD_BYTES,
            "device_0_memory_bytes": min(card, CARD_BYTES),
            "device_0_utilization": 0.9,
            "device_0_processes": 2.0,
        }
        for change in self.changes:
            change(HOST, values)
        return values

    # Faults.

    def kill(self, process: str, *, late_s: float = 0.0, missed: bool = False, oom: bool = False) -> None:
        """End a process by SIGKILL. Its end is reported after `late_s`; `missed`: the master found it silent before."""
        part = self.parts[process]
        part.is_gone = True
        part.totals["zombie_until"] = self.now + late_s
        if process == RANK:
            self._enter("recovering", 1e9)
        self.play(late_s)
        if missed:
            self.fault("Hung", process, f"{process} runs, but can not be heard")
        how = "killed by SIGKILL" + (" for want of memory" if oom else "")
        self.say(AGENT, ProcessGone(process, "1", part.pid, -9, how, oom=oom))
        self.replace(process)

    def stop(self, process: str) -> None:
        """Stop a process by SIGSTOP; its agent finds it after 1.2 s, ends and replaces it."""
        part = self.parts[process]
        part.is_stopped = True
        self.play(1.5)
        self.fault("Stopped", process, f"{process} is stopped (state T)")
        self.play(0.5)
        self.say(AGENT, ProcessGone(process, "1", part.pid, -9, "killed by SIGKILL", ordered=True))
        part.is_stopped, part.is_gone = False, True
        if process == RANK:
            self._enter("recovering", 1e9)
        self.replace(process)

    def replace(self, process: str) -> None:
        start_s = REPLACED_S if process in DEVICE else 0.5
        self.play(0.5)
        part = self.parts[process] = Part(self.parts[process].pid + 1000)
        part.born, part.ready = self.now, self.now + start_s
        self.say(process, ProcessBegan(role_of(process).value, "2", part.pid))
        if process == RANK:
            self.play(start_s)
            self.phase_since, self.phase_s = self.now, REPAIRED_S

    _leak_bytes = 0.0

    def leak(self, process: str, reading: str, *, per_step: float) -> None:
        """Grow by this much at every update from now on."""
        self._leak_bytes = per_step
        self.leaks[process] = {reading: 1.0}
