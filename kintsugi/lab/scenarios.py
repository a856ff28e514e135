"""One experiment on one system: undisturbed steps, the faults, and the run to its end.

start ─► steps of the baseline ─► faults, each at its trigger ─► undone ─► the run's end, or its deadline ─► record

A blind diagnosis looks at the run folder all the time, in a process that knows nothing of what is done. Whatever keeps
an experiment from saying something (a fault that can not be done here, a target that died by itself) is its `problem`,
and it counts as wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from kintsugi.errors import DeadlineExceeded, KintsugiError
from kintsugi.lab import baselines
from kintsugi.lab.blind import BlindDiagnosis
from kintsugi.lab.experiments import BASELINE_STEPS, FIRST_STEPS, Loaded, Profile
from kintsugi.lab.fragile.scale import Scale
from kintsugi.lab.injecting import Injector
from kintsugi.lab.injection import Injected, Injection
from kintsugi.lab.outcomes import Happened, record_of, told
from kintsugi.lab.records import RUNS_FILE, RunRecord, RunsFile, host_facts, now_as_text, write_json
from kintsugi.lab.systems import System, system_for
from kintsugi.lab.watching import Watch
from kintsugi.runtime import SYSTEM_CLOCK, wait

START_TIMEOUT_S = 90.0
"""Until the baseline is there."""
RUN_TIMEOUT_S = 75.0
"""For all that comes after it; the run is ended then."""
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
            try:
                follow(lambda: False, "the end of the run", RUN_TIMEOUT_S)
            except DeadlineExceeded:
                blind.looks()  # That it did not end is what is to be recorded.
        watch.look(at_once=True)

    @contextmanager
    def _faults(self, system: System) -> Iterator[None]:
        """Beside the one who watches, a thread for each fault begins it at its trigger; the run ends with this."""
        faults = self._loaded.experiment.faults_in(self._profile)
        doers = [
            threading.Thread(
                target=self._do,
                args=(system, system.new_injector(), fault),
                name=fault.ability.value,
                daemon=True,
            )
            for fault in faults
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
            return
        self._logs = self._logs or baselines.log_sizes(system.run.run_dir)
        patient = msgspec.structs.replace(trigger, timeout_s=trigger.timeout_s + RUN_TIMEOUT_S)
        try:
            injected = injector.begin(msgspec.structs.replace(fault, trigger=patient))
        except KintsugiError as error:
            # A fault that has no run to strike any more has not failed to strike.
            if not self._over.is_set() and system.run.running:
                self._problem = self._problem or f"{fault.ability} on {fault.target}: {error}"
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
