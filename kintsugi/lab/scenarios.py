"""One experiment on one system: undisturbed steps, the faults, and the run to its end.

start ─► steps of the baseline ─► faults, each at its trigger ─► undone ─► the run's end, or its deadline ─► record

A blind diagnosis looks at the run folder all the time, in a process that knows nothing of what is done. Whatever keeps
an experiment from saying something (a fault that can not be done here, or did not come to be done in a run that was
completed; a target that died by itself; a run that went on and did not come to its end in time) is its `problem`, and
it counts as wrong. A system that was broken by the first of several faults is not there for the others: those are told
as not struck, in `NOT_STRUCK_FILE`.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec

from kintsugi.errors import DeadlineExceeded, KintsugiError
from kintsugi.lab import baselines
from kintsugi.lab.blind import BlindDiagnosis
from kintsugi.lab.experiments import BASELINE_STEPS, FIRST_STEPS, Loaded, Profile
from kintsugi.lab.fault_checks import LONGEST_FAULT_S
from kintsugi.lab.fragile.scale import Scale
from kintsugi.lab.injecting import Injector
from kintsugi.lab.injection import Injected, Injection
from kintsugi.lab.outcomes import Happened, record_of, told
from kintsugi.lab.records import RUNS_FILE, RunRecord, RunsFile, host_facts, now_as_text, write_json
from kintsugi.lab.systems import System, system_for
from kintsugi.lab.watching import Commit, Watch
from kintsugi.runtime import SYSTEM_CLOCK, wait
from kintsugi.stages import stages

START_TIMEOUT_S = 90.0
"""Until the baseline is there."""
RUN_TIMEOUT_S = 75.0
"""For all that comes after it, at least; the run is ended then."""
LONGEST_RUN_S = 240.0
"""At most."""
SLOWNESS = 3.0
"""A step with a fault may take so many times as long as one without."""
STILL_S = 10.0
"""A run that committed nothing for so long, and for so many usual steps, stands still."""
STILL_STEPS = 5
NOT_STRUCK_FILE = "not_struck.json"
"""In the folder of an experiment: fault → why it never began."""
FAULTS_END_S = 20.0
LOOK_S = 0.1
PREPARED_STEPS = 5
"""Before its step, a fault is prepared."""

Say = Callable[[str], None]


def run_all(
    chosen: Sequence[tuple[Loaded, Profile]], *, folder: Path, say: Say = lambda line: None
) -> RunsFile:
    """One after the other, each in a folder of its own; what can not be done says so and hides no other.

    What there is so far is in `folder` after each: whoever is interrupted has it.
    """
    result = RunsFile(host=host_facts(), date=now_as_text(), scale=Scale().factor, runs=())
    for loaded, profile in chosen:
        say(f"{loaded.experiment.name} ({profile}): {loaded.experiment.title}")
        scene = Scene(loaded, profile, folder=folder / f"{loaded.experiment.name}-{profile}")
        record = scene.run()
        say(told(record))
        for fault, why in scene.not_struck.items():
            say(f"  not struck: {fault}: {why}")
        result = msgspec.structs.replace(result, runs=(*result.runs, record))
        write_json(result, folder / RUNS_FILE)
    return result


class Scene:
    """One experiment in one profile. Nothing is left running or changed whatever happens."""

    def __init__(self, loaded: Loaded, profile: Profile, *, folder: Path) -> None:
        self._loaded = loaded
        self._profile = profile
        self._folder = folder
        self._injected: dict[int, Injected] = {}
        """Fault → what was really done."""
        self._problem = ""
        self.not_struck: dict[str, str] = {}
        """Fault, in words → why it never began."""
        self._logs: baselines.LogSizes = {}
        """As they were before the first fault."""
        self._over = threading.Event()
        """The scene is: faults that have not begun do not."""
        self._step = 0
        """The last one committed."""

    def run(self) -> RunRecord:
        began = SYSTEM_CLOCK.monotonic()
        self._folder.mkdir(parents=True)
        happened = Happened(loaded=self._loaded, profile=self._profile, folder=self._folder)
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
                watch = Watch(system.run.run_dir)
                stack.callback(watch.close)
                blind = BlindDiagnosis(system.run.run_dir, folder=self._folder)
                stack.callback(blind.close)
                happened.looks = blind.all
                self._carry_out(system, watch, blind)
                happened.take(system, watch)
                self._judge_not_struck(completed=happened.completed)
            except KintsugiError as error:
                self._problem = self._problem or f"{type(error).__name__}: {error}"
            happened.injected = sorted(self._injected.values(), key=lambda each: each.start)
            happened.problem = self._problem
            happened.logs = self._logs
            happened.seconds = SYSTEM_CLOCK.monotonic() - began
            return record_of(happened)

    def _carry_out(self, system: System, watch: Watch, blind: BlindDiagnosis) -> None:
        run = system.run

        def follow(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
            def holds() -> bool:
                blind.looks()
                self._step = watch.step
                return condition() or not run.running

            watch.until(holds, what=what, timeout_s=timeout_s, pause_s=LOOK_S)

        run.start()
        follow(lambda: watch.step >= 1, "the first step", START_TIMEOUT_S)
        with self._faults(system):
            last = FIRST_STEPS + BASELINE_STEPS
            follow(lambda: watch.step >= last, f"{last} steps without a fault", START_TIMEOUT_S)
            if not run.running:
                self._problem = f"the run ended before the first fault: {run.last_words()[-300:]}"
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
        watch.look(at_once=True)

    @property
    def _faults_planned(self) -> tuple[Injection, ...]:
        return self._loaded.experiment.faults_in(self._profile)

    @property
    def _last_step(self) -> int:
        return stages(self._loaded.config_in(self._profile))[-1].last_step

    def _interrupt(self, system: System, watch: Watch, *, step_s: float, timeout_s: float) -> None:
        """A run that stands still has shown what it does; one that goes on was not given its time by us."""
        if is_still(watch.commits, step_s=step_s, now=SYSTEM_CLOCK.monotonic()):
            return
        system.interrupted = True
        self._problem = self._problem or (
            f"the laboratory ended the run at step {watch.step} of {self._last_step}: it went on, and had "
            f"{timeout_s:.0f} s after the baseline; is this machine busy with something else?"
        )

    def _judge_not_struck(self, *, completed: bool) -> None:
        """A run that was completed was there for every fault; one that was not may have ended before the next."""
        if not self.not_struck:
            return
        write_json(self.not_struck, self._folder / NOT_STRUCK_FILE)
        if completed:
            told_of = "; ".join(f"{fault}: {why}" for fault, why in self.not_struck.items())
            self._problem = self._problem or f"not struck: {told_of}"

    @contextmanager
    def _faults(self, system: System) -> Iterator[None]:
        """Beside the one who watches, a thread for each fault begins it at its trigger; the run ends with this."""
        doers = [
            threading.Thread(
                target=self._do,
                args=(system, system.new_injector(), fault),
                name=fault.ability.value,
                daemon=True,
            )
            for fault in self._faults_planned
        ]
        for doer in doers:
            doer.start()
        try:
            yield
        finally:
            self._over.set()
            system.run.kill_everything()
            for doer in doers:
                _join(doer)

    def _do(self, system: System, injector: Injector, fault: Injection) -> None:
        """Body of such a thread: begun at its trigger, ended when its time is over or the scene is.

        A fault is prepared shortly before its step: that takes a moment, and what is prepared is undone when its lease
        is over, whether it has begun or not.
        """
        trigger, warm = fault.trigger, FIRST_STEPS + BASELINE_STEPS
        if trigger.step is not None:
            self._until_step(trigger.step - PREPARED_STEPS)
        else:
            self._until_step(warm - PREPARED_STEPS if trigger.event is not None else warm)
        if self._over.is_set():
            self.not_struck[in_words(fault)] = "the run was over before its trigger came"
            return
        self._logs = self._logs or baselines.log_sizes(system.run.run_dir)
        patient = msgspec.structs.replace(
            trigger, timeout_s=min(LONGEST_FAULT_S, trigger.timeout_s + LONGEST_RUN_S)
        )
        try:
            injected = injector.begin(msgspec.structs.replace(fault, trigger=patient))
        except KintsugiError as error:
            self.not_struck[in_words(fault)] = str(error).removeprefix(f"{in_words(fault)}: ")
            # One that has no run to strike any more is judged when it is known how the run ended.
            if not self._over.is_set() and system.run.running:
                self._problem = self._problem or f"{in_words(fault)}: {self.not_struck[in_words(fault)]}"
            return
        self._injected[id(fault)] = injected
        _sleep(self._over, injected.start + injected.injection.duration_s - SYSTEM_CLOCK.wall())
        self._injected[id(fault)] = injector.end(injected)

    def _until_step(self, step: int) -> None:
        """Or until the scene is over."""

        def attempt(remaining_s: float) -> bool | None:
            if self._step >= step:
                return True
            return self._over.wait(min(remaining_s, LOOK_S)) or None

        try:
            wait(attempt, whom="the run", what=f"step {step}", timeout_s=START_TIMEOUT_S)
        except DeadlineExceeded:
            self._over.set()


def in_words(fault: Injection) -> str:
    return f"{fault.ability.value} on {fault.target}"


def usual_step_s(commits: Sequence[Commit]) -> float:
    """Of the steps of the baseline, the middle one; 0 while there are none."""
    lengths = [after.at - before.at for before, after in pairwise(commits[FIRST_STEPS:])]
    return statistics.median(lengths) if lengths else 0.0


def run_timeout_s(step_s: float, *, steps_left: int, faults: Sequence[Injection]) -> float:
    """How long a run has after its baseline: on a machine that is slow, or busy, everything takes longer.

    >>> run_timeout_s(0.5, steps_left=20, faults=())
    75.0
    >>> run_timeout_s(1.0, steps_left=50, faults=())
    150.0
    """
    faults_s = max((fault.trigger.after_s + fault.duration_s for fault in faults), default=0.0)
    return min(LONGEST_RUN_S, max(RUN_TIMEOUT_S, SLOWNESS * steps_left * step_s + faults_s))


def is_still(commits: Sequence[Commit], *, step_s: float, now: float) -> bool:
    """Whether a run has committed nothing for longer than it ever needs."""
    return not commits or now - commits[-1].at > max(STILL_S, STILL_STEPS * step_s)


def _join(thread: threading.Thread) -> None:
    def attempt(remaining_s: float) -> bool | None:
        thread.join(remaining_s)
        return None if thread.is_alive() else True

    wait(attempt, whom=thread.name, what="its end", timeout_s=FAULTS_END_S)


def _sleep(over: threading.Event, seconds: float) -> None:
    """So long, or until it is so far."""
    try:
        wait(lambda s: over.wait(s) or None, whom="a fault", what="its end", timeout_s=max(0.0, seconds))
    except DeadlineExceeded:
        return
