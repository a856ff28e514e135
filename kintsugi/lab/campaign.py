"""A blind campaign: random faults on a run that goes on for ever, each diagnosed by who knows nothing of it.

until well ─► inject, or not ─► a verdict, or ten seconds ─► undo ─► how much it really did ─► the next

Cases share a cluster; one that does not become well again is replaced by a new one, and why is written down: a
diagnosis that goes on naming something where nothing is wrong is a false alarm. A fault that changed nothing in the run
was not there to be found; naming something else is wrong all the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config import Config
from kintsugi.diagnosis.verdict import Cause
from kintsugi.errors import DeadlineExceeded, KintsugiError, ProcessDied, RunFailed
from kintsugi.lab import baselines, scoring
from kintsugi.lab.blind import BlindDiagnosis, Look
from kintsugi.lab.campaign_records import (
    OURS,
    Answer,
    CampaignFile,
    CaseRecord,
    Reason,
    Unwell,
    counted_as,
    named,
    summed,
    told,
)
from kintsugi.lab.cases import LEAST_FAULT_S, WINDOW_S, Benign, Case
from kintsugi.lab.experiments import Phase, Places, Profile
from kintsugi.lab.impacts import impact_of
from kintsugi.lab.injecting import Injector
from kintsugi.lab.injection import Injected
from kintsugi.lab.records import CAMPAIGN_FILE, write_json
from kintsugi.lab.systems import System, system_for
from kintsugi.lab.watching import Watch
from kintsugi.runtime import SYSTEM_CLOCK, Child, SystemProcesses
from kintsugi.scaling import scale_run
from kintsugi.types import Role, process_id

LOOK_S = 0.05
START_TIMEOUT_S = 120.0
WARM_STEPS = 12
WELL_TIMEOUT_S = 25.0
"""Then the cluster is replaced."""
WELL_STEPS = 3
"""Committed since the last case."""
WELL_LOOKS = 2
"""In a row that found nothing."""
PHASE_TIMEOUT_S = 30.0
"""Until the run evaluates or saves by itself."""

Say = Callable[[str], None]


class Cluster:
    """A run that is broken again and again, who watches it, and who diagnoses it."""

    def __init__(self, config: Config, *, places: Places, folder: Path) -> None:
        self._stack = ExitStack()
        try:
            self.system: System = self._stack.enter_context(
                system_for(config, Profile.OURS, places=places, folder=folder)
            )
            self.run_dir = self.system.run.run_dir
            self._injectors: list[Injector] = []
            self.watch = Watch(self.run_dir)
            self._stack.callback(self.watch.close)
            self.system.run.start()
            self._until_warm()
            self._folder = folder
            self._blind = BlindDiagnosis(self.run_dir, folder=folder)
            self.crashes: list[str] = []
            """Of the diagnosis itself: an answer that never came."""
        except BaseException:
            self.close()
            raise

    def _until_warm(self) -> None:
        run, watch = self.system.run, self.watch
        watch.until(
            lambda: watch.step >= WARM_STEPS or not run.running,
            what=f"{WARM_STEPS} steps",
            timeout_s=START_TIMEOUT_S,
            pause_s=LOOK_S,
        )
        if not run.running:
            raise RunFailed(f"the run to be broken ended by itself: {run.last_words()[-500:] or run.run_dir}")

    def injector(self, number: int) -> Injector:
        """Each of several faults at once has its own."""
        while len(self._injectors) <= number:
            self._injectors.append(self.system.new_injector())
        return self._injectors[number]

    def looks(self) -> list[Look]:
        """What the diagnosis said since; one that crashed has said nothing, and another takes its place."""
        try:
            return self._blind.looks()
        except ProcessDied as error:
            self.crashes.append(str(error))
            self._blind.close()
            self._blind = BlindDiagnosis(self.run_dir, folder=self._folder)
            return []

    def until_well(self) -> tuple[Reason, tuple[Cause, ...]] | None:
        """Until steps go on and nobody finds anything. Else: what is not so, and what was last named."""
        reached = self.watch.step
        quiet = 0
        last: tuple[Cause, ...] = ()

        def steps_go_on() -> bool:
            return self.watch.step >= reached + WELL_STEPS

        def well() -> bool:
            nonlocal quiet, last
            for look in self.looks():
                last = _causes(look) or last
                quiet = 0 if _causes(look) else quiet + 1
            return quiet >= WELL_LOOKS and steps_go_on()

        is_well = self.until(well, timeout_s=WELL_TIMEOUT_S)
        if not self.system.run.running:
            return Reason.ENDED, last
        if is_well:
            return None
        if not steps_go_on():
            return Reason.NO_STEPS, last
        return (Reason.ALARM if last else Reason.NO_LOOKS), last

    def until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Whether it came to hold in time."""
        try:
            self.watch.until(condition, what="the next case", timeout_s=timeout_s, pause_s=LOOK_S)
        except DeadlineExceeded:
            return False
        return True

    def close(self) -> None:
        if hasattr(self, "_blind"):
            self._blind.close()
        self._stack.close()


class Campaign:
    """All cases of a plan, one after the other."""

    def __init__(
        self, config: Config, *, places: Places, folder: Path, seed: int, say: Say = lambda line: None
    ) -> None:
        self._config = config
        self._places = places
        self._folder = folder
        self._seed = seed
        self._say = say
        self._cluster: Cluster | None = None
        self._clusters = 0
        self._unwell: list[Unwell] = []
        self._crashes: list[str] = []

    def run(self, cases: Sequence[Case]) -> CampaignFile:
        """What there is so far is in the folder after each case: whoever is interrupted has it."""
        self._began = SYSTEM_CLOCK.monotonic()
        records: list[CaseRecord] = []
        try:
            for case in cases:
                records.append(self._one(case))
                self._say(told(records[-1]))
                write_json(self._summed(records), self._folder / CAMPAIGN_FILE)
        finally:
            self._replace()
        return self._summed(records)

    def _summed(self, records: Sequence[CaseRecord]) -> CampaignFile:
        lasting = self._cluster.crashes if self._cluster is not None else []
        return summed(
            records,
            seed=self._seed,
            clusters=self._clusters,
            seconds=SYSTEM_CLOCK.monotonic() - self._began,
            unwell=self._unwell,
            crashes=[*self._crashes, *lasting],
        )

    def _replace(self) -> None:
        if self._cluster is not None:
            self._crashes += self._cluster.crashes
            self._cluster.close()
            self._cluster = None

    def _well(self, number: int) -> Cluster:
        """The cluster, whole, for this case; another one where this one did not become so."""
        if self._cluster is not None and not self._is_well(self._cluster, number):
            self._replace()
        if self._cluster is None:
            self._clusters += 1
            folder = self._folder / f"cluster-{self._clusters}"
            self._cluster = Cluster(self._config, places=self._places, folder=folder)
            self._is_well(self._cluster, number)
        return self._cluster

    def _is_well(self, cluster: Cluster, number: int) -> bool:
        found = cluster.until_well()
        if found is not None:
            reason, causes = found
            self._give_up(Unwell(before=number, reason=reason, said=tuple(map(named, causes))))
        return found is None

    def _give_up(self, unwell: Unwell) -> None:
        self._unwell.append(unwell)
        said = f" ({', '.join(unwell.said)})" if unwell.said else ""
        self._say(f"  the cluster is not well: {unwell.reason}{said}")

    def _one(self, case: Case) -> CaseRecord:
        cluster = self._well(case.number)
        start = SYSTEM_CLOCK.wall()
        logs = baselines.log_sizes(cluster.run_dir)
        injected: list[Injected] = []
        answer: Answer | None = None
        why_not = trouble = ""
        with ExitStack() as undoing:
            try:
                _begin(case, cluster, injected, undoing)
                start = min((each.start for each in injected), default=SYSTEM_CLOCK.wall())
                answer = self._verdict(cluster, since=start)
                shown_s = SYSTEM_CLOCK.wall() - start
                if injected and shown_s < LEAST_FAULT_S:
                    cluster.until(lambda: False, timeout_s=LEAST_FAULT_S - shown_s)
                answer = _followed(answer, cluster.looks())
            except KintsugiError as error:
                # Once there is an answer, nothing that goes wrong takes the case out of the count.
                message = f"{type(error).__name__}: {error}"
                why_not, trouble = (message, "") if answer is None else ("", message)
            try:
                undoing.close()
            except KintsugiError as error:
                trouble = f"{type(error).__name__}: {error}"
        record = _record(
            case,
            cluster,
            injected,
            answer or Answer((), None),
            start=start,
            logs=logs,
            why_not=why_not,
            trouble=trouble,
        )
        if trouble:
            self._give_up(Unwell(before=case.number + 1, reason=Reason.NOT_UNDONE))
            self._replace()
        return record

    def _verdict(self, cluster: Cluster, *, since: float) -> Answer:
        """The first look that names a cause; one that was over before the fault began is none of this case."""
        found: list[Look] = []

        def said() -> bool:
            found.extend(each for each in cluster.looks() if each.t > since and _causes(each))
            return bool(found)

        if not cluster.until(said, timeout_s=WINDOW_S):
            return Answer((), None)
        return Answer(_causes(found[0]), found[0].t)


def _followed(answer: Answer, later: Sequence[Look]) -> Answer:
    """With the last of what was named since."""
    named_later = [_causes(look) for look in later if _causes(look)]
    return msgspec.structs.replace(answer, at_the_end=[answer.causes, *named_later][-1])


def _begin(case: Case, cluster: Cluster, injected: list[Injected], undoing: ExitStack) -> None:
    """What the case does to the run; of several faults, one that can not be undone keeps no other from it."""
    for number, injection in enumerate(case.injections):
        injector = cluster.injector(number)
        injected.append(injector.begin(injection))
        undoing.callback(injector.end, injected[-1])
    undoing.enter_context(_benign(case.benign, cluster))


def _record(
    case: Case,
    cluster: Cluster,
    injected: Sequence[Injected],
    answer: Answer,
    *,
    start: float,
    logs: baselines.LogSizes,
    why_not: str,
    trouble: str,
) -> CaseRecord:
    end = SYSTEM_CLOCK.wall()
    errors = baselines.errors_in(cluster.run_dir, since=start, until=end, beyond=logs)
    answers = {
        OURS: answer,
        baselines.LAST_ERROR: _read_as(baselines.last_error(errors)),
        baselines.FIRST_ERROR: _read_as(baselines.first_error(errors)),
    }
    host_of = cluster.system.host_of()
    culprits = [
        scoring.culprit(each.injection.ability, target=each.process, start=each.start, host_of=host_of)
        for each in injected
    ]
    impact = impact_of(cluster.run_dir, injected, start=start, end=end, beyond=logs)
    target = injected[0].process if injected else process_id(Role.MODEL, 0)
    read = baselines.to_read(cluster.run_dir, target=target, since=start, until=end, beyond=logs)
    return CaseRecord(
        number=case.number,
        faults=tuple(map(_fault, injected)),
        what=case.what,
        benign=case.benign.value if case.benign else "",
        planned=tuple(f"{each.ability.value} {each.target}" for each in case.injections),
        impact=impact,
        counted=counted_as(has_faults=bool(injected), was_felt=impact["real"], why_not=why_not),
        why_not=why_not,
        trouble=trouble,
        diagnoses=answers,
        scores={
            method: scoring.score(said.causes, culprits, t=said.t, start=start, at_the_end=said.at_the_end)
            for method, said in answers.items()
        },
        files=read.files,
        lines=read.lines,
        seconds=end - start,
    )


def _read_as(cause: Cause | None) -> Answer:
    return Answer((cause,), cause.onset) if cause is not None else Answer((), None)


def _causes(look: Look) -> tuple[Cause, ...]:
    return look.diagnosis.causes if look.diagnosis is not None else ()


def _fault(injected: Injected) -> dict[str, Any]:
    return {
        "target": injected.process,
        "kind": injected.injection.ability.value,
        "mechanism": injected.mechanism,
        "start": injected.start,
        "intensity": injected.injection.amount,
        "phase": injected.phase,
        "step": injected.step,
    }


# What is slow and not wrong.


@contextmanager
def _benign(what: Benign | None, cluster: Cluster) -> Iterator[None]:
    match what:
        case Benign.BUSY_HOST:
            with _busy_host():
                yield
        case Benign.SCALED:
            servers = cluster.system.run.config.generation.servers
            scale_run(cluster.run_dir, servers=max(1, servers - 1), timeout_s=WELL_TIMEOUT_S)
            try:
                yield
            finally:
                scale_run(cluster.run_dir, servers=servers, timeout_s=WELL_TIMEOUT_S)
        case Benign.EVALUATION | Benign.CHECKPOINT:
            _await_phase(Phase.EVALUATING if what is Benign.EVALUATION else Phase.SAVING, cluster)
            yield
        case None:
            yield


def _await_phase(phase: Phase, cluster: Cluster) -> None:
    """Until it has begun, and it may be over as soon; DeadlineExceeded if it does not: then nothing was slow."""
    before = len(cluster.watch.phases())

    def has_begun() -> bool:
        return any(name == phase.value for _, name in cluster.watch.phases()[before:])

    if not cluster.until(has_begun, timeout_s=PHASE_TIMEOUT_S):
        raise DeadlineExceeded(whom="the run", what=f"phase {phase.value}", waited_s=PHASE_TIMEOUT_S)


@contextmanager
def _busy_host() -> Iterator[None]:
    """As many programs as there are processors, which want them as much as the run does; they end by themselves."""
    program = f"import time; end = time.monotonic() + {WINDOW_S + 5}\nwhile time.monotonic() < end: pass"
    busy: list[Child] = []
    try:
        command = [sys.executable, "-c", program]
        busy.extend(SystemProcesses().spawn(command, new_session=True) for _ in range(os.cpu_count() or 1))
        yield
    finally:
        for each in busy:
            each.send_signal(9)
            each.wait_ended(whom="a busy program", timeout_s=5.0)
            each.close()
