"""One experiment on one system: steps without a fault, the faults, and the run to its end.

start ─► baseline steps ─► faults, each at its trigger ─► undone ─► end of the run, or deadline ─► record

A blind diagnosis reads the run folder during the whole run, in a process that knows nothing of the faults. A reason
that makes an experiment void (a fault that can not be injected here, or was not injected although the run completed; a
target that died before; a run that made progress but did not end in time) is its `problem`, and it counts as wrong. A
system that the first of several faults ended is not there for the others: those are listed in `NOT_INJECTED_FILE`.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec

from kintsugi.config.stages import stages
from kintsugi.errors import DeadlineExceeded, KintsugiError
from kintsugi.lab.campaign import log_readers
from kintsugi.lab.campaign.blind import BlindDiagnosis
from kintsugi.lab.fragile.timeouts import Scale
from kintsugi.lab.injector.checks import LONGEST_FAULT_S
from kintsugi.lab.injector.injection import Injected, Injection
from kintsugi.lab.injector.injector import Injector, watch_of
from kintsugi.lab.scenarios.experiments import BASELINE_STEPS, FIRST_STEPS, LoadedExperiment, Profile
from kintsugi.lab.scenarios.outcome import ObservedOutcome, format_record, record_of
from kintsugi.lab.scenarios.records import RUNS_FILE, RunRecord, RunsFile, host_facts, now_as_text, write_json
from kintsugi.lab.scenarios.system import System, system_for
from kintsugi.lab.testbed.remote_hosts import HERE
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.lab.testbed.watch import RunWatch, StepCommit
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import join, wait

START_TIMEOUT_S = 90.0
"""Time until the baseline is complete."""
RUN_TIMEOUT_S = 75.0
"""Shortest time for everything after the baseline; the run is ended then."""
LONGEST_RUN_S = 240.0
"""Longest time for everything after the baseline."""
SLOWNESS = 3.0
"""A step with a fault may take this many times as long as one without."""
STILL_S = 10.0
"""A run that commits nothing for this time, and for `STILL_STEPS` usual steps, makes no progress."""
STILL_STEPS = 5
NOT_INJECTED_FILE = "not_struck.json"
"""File in the folder of an experiment: fault → reason why it never began."""
FAULTS_END_S = 20.0
LOOK_S = 0.1
PROGRESS_S = 5.0
PREPARED_STEPS = 5
"""A fault is prepared this many steps before its trigger."""

Say = Callable[[str], None]


def run_all(
    chosen: Sequence[tuple[LoadedExperiment, Profile]], *, folder: Path, say: Say = lambda line: None
) -> RunsFile:
    """Run experiments one after another, each in a folder of its own; one that fails does not keep the others from
    running.

    The result so far is written to `folder` after each experiment, so that an interrupted command keeps it.
    """
    result = RunsFile(host=host_facts(), date=now_as_text(), scale=Scale().factor, runs=())
    for loaded, profile in chosen:
        say(f"{loaded.experiment.name} ({profile}): {loaded.experiment.title}")
        scenario = ScenarioRun(
            loaded, profile, folder=folder / f"{loaded.experiment.name}-{profile}", say=say
        )
        record = scenario.run()
        say(format_record(record))
        for fault, why in scenario.not_injected.items():
            say(f"  not injected: {fault}: {why}")
        result = msgspec.structs.replace(result, runs=(*result.runs, record))
        write_json(result, folder / RUNS_FILE)
    return result


class ProgressLines:
    """Lines about an experiment that is under way: its start, its faults, and its step every `PROGRESS_S`."""

    def __init__(self, say: Say, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._say = say
        self._clock = clock
        self._began = self._said = clock.monotonic()

    def line(self, text: str) -> None:
        self._said = self._clock.monotonic()
        self._say(f"  {self._said - self._began:3.0f} s  {text}")

    def step(self, step: int, *, of: int) -> None:
        """Print the step if nothing was printed for a while. Called several times a second."""
        if self._clock.monotonic() - self._said >= PROGRESS_S:
            self.line(f"step {step} of {of}" if step else "starting the processes")


class ScenarioRun:
    """One experiment on one system. No process is left running and no change is left, even after an error."""

    def __init__(
        self, loaded: LoadedExperiment, profile: Profile, *, folder: Path, say: Say = lambda line: None
    ) -> None:
        self._progress = ProgressLines(say)
        self._loaded = loaded
        self._profile = profile
        self._folder = folder
        self._injected: dict[int, Injected] = {}
        """Fault → its marker."""
        self._problem = ""
        self.not_injected: dict[str, str] = {}
        """Formatted fault → reason why it never began."""
        self._logs: log_readers.LogSizes = {}
        """Log sizes before the first fault."""
        self._over = threading.Event()
        """Set when the run is over: faults that have not begun stay out."""
        self._step = 0
        """Last committed step."""

    def run(self) -> RunRecord:
        began = SYSTEM_CLOCK.monotonic()
        self._folder.mkdir(parents=True)
        observed = ObservedOutcome(loaded=self._loaded, profile=self._profile, folder=self._folder)
        with ExitStack() as stack:
            try:
                system = stack.enter_context(
                    system_for(
                        self._loaded.config_in(self._profile),
                        self._profile,
                        places=self._loaded.experiment.places,
                        folder=self._folder,
                    )
                )
                watch = watch_of(system.run)
                stack.callback(watch.close)
                blind = BlindDiagnosis(system.run.run_dir, folder=self._folder)
                stack.callback(blind.close)
                observed.looks = blind.all
                self._carry_out(system, watch, blind)
                observed.take(system, watch)
                self._judge_not_injected(completed=observed.completed)
            except KintsugiError as error:
                self._problem = self._problem or f"{type(error).__name__}: {error}"
            observed.injected = sorted(self._injected.values(), key=lambda each: each.start)
            observed.problem = self._problem
            observed.logs = self._logs
            observed.seconds = SYSTEM_CLOCK.monotonic() - began
            return record_of(observed)

    def _carry_out(self, system: System, watch: RunWatch, blind: BlindDiagnosis) -> None:
        run = system.run

        def follow(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
            def holds() -> bool:
                blind.looks()
                self._step = watch.step
                self._progress.step(watch.step, of=self._last_step)
                return condition() or not run.running

            watch.until(holds, what=what, timeout_s=timeout_s, pause_s=LOOK_S)

        run.start()
        faults = ", ".join(format_fault(fault) for fault in self._faults_planned)
        self._progress.line(f"started: {self._last_step} steps; to be injected: {faults}")
        start_s = START_TIMEOUT_S
        if run.remote is not None:
            start_s += run.config.cluster.start_timeout_s
        follow(lambda: self._reaches_hosts(run) and watch.step >= 1, "the first step", start_s)
        with self._faults(system):
            last = FIRST_STEPS + BASELINE_STEPS
            follow(lambda: watch.step >= last, f"{last} steps without a fault", START_TIMEOUT_S)
            if not run.running:
                self._problem = f"the run ended before the first fault: {run.output()[-300:]}"
                return
            step_s = usual_step_s(watch.commits)
            timeout_s = run_timeout_s(
                step_s, steps_left=self._last_step - watch.step, faults=self._faults_planned
            )
            try:
                follow(lambda: False, "the end of the run", timeout_s)
            except DeadlineExceeded:
                blind.looks()  # That it did not end is what is to be recorded.
                self._interrupt(system, watch, step_s=step_s, timeout_s=timeout_s)
        watch.look(force=True)
        self._progress.line(f"the run ended at step {watch.step} of {self._last_step}")

    def _reaches_hosts(self, run: MarkedRun) -> bool:
        """Connect to the other machines of all faults, while the run starts; later it could take longer than the steps
        before a fault."""
        if run.remote is None:
            return True
        ends = {fault.target for fault in self._faults_planned}
        ends |= {fault.peer for fault in self._faults_planned if fault.peer is not None}
        hosts = {run.remote.host_of(process) for process in ends} - {HERE}
        return all(run.remote.connect(host) for host in hosts)

    @property
    def _faults_planned(self) -> tuple[Injection, ...]:
        return self._loaded.experiment.faults_in(self._profile)

    @property
    def _last_step(self) -> int:
        return stages(self._loaded.config_in(self._profile))[-1].last_step

    def _interrupt(self, system: System, watch: RunWatch, *, step_s: float, timeout_s: float) -> None:
        """Note a problem unless the run made no progress: a run that still made progress was cut off by the time
        limit."""
        if is_still(watch.commits, step_s=step_s, now=SYSTEM_CLOCK.monotonic()):
            return
        system.interrupted = True
        self._problem = self._problem or (
            f"the laboratory ended the run at step {watch.step} of {self._last_step}: it still made progress, and had "
            f"{timeout_s:.0f} s after the baseline; is this machine busy with something else?"
        )

    def _judge_not_injected(self, *, completed: bool) -> None:
        """Record the faults that were not injected; a problem if the run completed, since it was there for all of
        them."""
        if not self.not_injected:
            return
        write_json(self.not_injected, self._folder / NOT_INJECTED_FILE)
        if completed:
            reasons = "; ".join(f"{fault}: {why}" for fault, why in self.not_injected.items())
            self._problem = self._problem or f"not injected: {reasons}"

    @contextmanager
    def _faults(self, system: System) -> Iterator[None]:
        """Start a thread per fault that injects it at its trigger; all processes are killed on exit."""
        threads = [
            threading.Thread(
                target=self._inject,
                args=(system, system.new_injector(), fault),
                name=fault.ability.value,
                daemon=True,
            )
            for fault in self._faults_planned
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            system.run.kill_everything()
            for thread in threads:
                _join(thread)

    def _inject(self, system: System, injector: Injector, fault: Injection) -> None:
        """Body of a fault thread: begins at the trigger, ends after the duration or with the run.

        The fault is prepared shortly before its step: preparing takes time, and a prepared change is undone when its
        lease ends, even if the fault has not begun.
        """
        trigger, warm = fault.trigger, FIRST_STEPS + BASELINE_STEPS
        if trigger.step is not None:
            self._until_step(trigger.step - PREPARED_STEPS)
        else:
            self._until_step(warm - PREPARED_STEPS if trigger.event is not None else warm)
        if self._over.is_set():
            self.not_injected[format_fault(fault)] = "the run was over before its trigger came"
            return
        self._logs = self._logs or log_readers.log_sizes(system.run.run_dir)
        extended = msgspec.structs.replace(
            trigger, timeout_s=min(LONGEST_FAULT_S, trigger.timeout_s + LONGEST_RUN_S)
        )
        try:
            injected = injector.begin(msgspec.structs.replace(fault, trigger=extended))
        except KintsugiError as error:
            self.not_injected[format_fault(fault)] = str(error).removeprefix(f"{format_fault(fault)}: ")
            # A fault that found no running run is judged when it is known how the run ended.
            if not self._over.is_set() and system.run.running:
                self._problem = (
                    self._problem or f"{format_fault(fault)}: {self.not_injected[format_fault(fault)]}"
                )
            return
        self._injected[id(fault)] = injected
        self._progress.line(f"{format_fault(fault)}: injected in step {self._step + 1}")
        _sleep(self._over, injected.start + injected.injection.duration_s - SYSTEM_CLOCK.wall())
        self._injected[id(fault)] = injector.end(injected)
        self._progress.line(f"{format_fault(fault)}: undone")

    def _until_step(self, step: int) -> None:
        """Wait for a step, or for the end of the run."""

        def attempt(remaining_s: float) -> bool | None:
            if self._step >= step:
                return True
            return self._over.wait(min(remaining_s, LOOK_S)) or None

        try:
            wait(attempt, whom="the run", what=f"step {step}", timeout_s=START_TIMEOUT_S)
        except DeadlineExceeded:
            self._over.set()


def format_fault(fault: Injection) -> str:
    return f"{fault.ability.value} on {fault.target}"


def usual_step_s(commits: Sequence[StepCommit]) -> float:
    """Return the median duration of the baseline steps; 0 when there are none."""
    lengths = [after.at - before.at for before, after in pairwise(commits[FIRST_STEPS:])]
    return statistics.median(lengths) if lengths else 0.0


def run_timeout_s(step_s: float, *, steps_left: int, faults: Sequence[Injection]) -> float:
    """Return the time that a run gets after its baseline; a slow or busy machine needs longer.

    >>> run_timeout_s(0.5, steps_left=20, faults=())
    75.0
    >>> run_timeout_s(1.0, steps_left=50, faults=())
    150.0
    """
    faults_s = max((fault.trigger.after_s + fault.duration_s for fault in faults), default=0.0)
    return min(LONGEST_RUN_S, max(RUN_TIMEOUT_S, SLOWNESS * steps_left * step_s + faults_s))


def is_still(commits: Sequence[StepCommit], *, step_s: float, now: float) -> bool:
    """Whether a run has committed nothing for longer than it usually needs."""
    return not commits or now - commits[-1].at > max(STILL_S, STILL_STEPS * step_s)


def _join(thread: threading.Thread) -> None:
    join(thread, whom=thread.name, what="its end", timeout_s=FAULTS_END_S)


def _sleep(over: threading.Event, seconds: float) -> None:
    """Wait for some seconds, or until the event is set."""
    try:
        wait(lambda s: over.wait(s) or None, whom="a fault", what="its end", timeout_s=max(0.0, seconds))
    except DeadlineExceeded:
        return
