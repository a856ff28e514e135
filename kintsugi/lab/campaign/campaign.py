"""Blind campaign: random faults on a run without end, each diagnosed by a process that knows nothing of the faults.

wait until healthy ─► inject (or not) ─► first verdict, or ten seconds ─► undo ─► measure the effect ─► next case

Times are longer where steps are (`CampaignPace`). Cases share a cluster. A cluster that does not become healthy again
is replaced, and the reason is recorded: a diagnosis that keeps naming a cause while nothing is wrong is a false alarm.
A fault without an effect on the run does not have to be found; naming something else is still wrong.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.cli.scale import scale_run
from kintsugi.config.schema import Config
from kintsugi.control.phases.table import Phase
from kintsugi.diagnosis.verdict import Cause
from kintsugi.errors import DeadlineExceeded, KintsugiError, ProcessDied, RunFailed
from kintsugi.lab.campaign import log_readers, scoring
from kintsugi.lab.campaign.blind import BlindDiagnosis, Look
from kintsugi.lab.campaign.cases import LEAST_FAULT_S, WINDOW_S, Benign, CampaignCase
from kintsugi.lab.campaign.fault_effect import effect_of
from kintsugi.lab.campaign.records import (
    OURS,
    CampaignFile,
    CaseRecord,
    ExclusionReason,
    MethodAnswer,
    UnhealthyCluster,
    counted_as,
    format_case,
    named,
    summarize,
)
from kintsugi.lab.faults.catalogue import shares_device, shares_memory
from kintsugi.lab.injector.injection import Injected
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.scenarios.experiments import Profile, TestbedSpec
from kintsugi.lab.scenarios.records import CAMPAIGN_FILE, write_json
from kintsugi.lab.scenarios.system import System, system_for
from kintsugi.lab.testbed.watch import RunWatch
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.types import Role, process_id

LOOK_S = 0.05
START_TIMEOUT_S = 420.0
WARM_STEPS, LEAST_WARM_STEPS, WARM_S = 12, 6, 30.0
"""Steps before the first case, or fewer that take at least this time."""
HEALTHY_TIMEOUT_S = 25.0
"""The cluster is replaced after this time."""
HEALTHY_LOOKS = 2
"""Consecutive diagnoses that must find nothing."""
PHASE_TIMEOUT_S = 30.0
"""Longest wait for the run's next evaluation or checkpoint."""

WINDOW_STEPS, MOST_WINDOW_S = 4.0, 60.0
"""Steps in which a verdict is expected, and the limit of that time."""
HEALTHY_TIMEOUT_STEPS = 15.0
LONG_STEP_S = 1.5
"""Duration above which one step is enough to see that a run goes on."""

Say = Callable[[str], None]


class CampaignPace(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a campaign, by the usual duration of a step."""

    window_s: float
    """A case without a verdict ends after this time."""
    healthy_timeout_s: float
    """A cluster that is not healthy after this time is replaced."""
    healthy_steps: int
    """Steps that must be committed after the last case."""

    @classmethod
    def of(cls, step_s: float) -> CampaignPace:
        """Return the times for steps of this duration; those of a small model do not depend on it."""
        return cls(
            window_s=max(WINDOW_S, min(MOST_WINDOW_S, WINDOW_STEPS * step_s)),
            healthy_timeout_s=max(HEALTHY_TIMEOUT_S, HEALTHY_TIMEOUT_STEPS * step_s),
            healthy_steps=3 if step_s < LONG_STEP_S else 1,
        )


class CampaignCluster:
    """Run that faults are injected into repeatedly, with its observer and its blind diagnosis."""

    def __init__(self, config: Config, *, places: TestbedSpec, folder: Path) -> None:
        self._stack = ExitStack()
        try:
            self.system: System = self._stack.enter_context(
                system_for(config, Profile.OURS, places=places, folder=folder)
            )
            self.run_dir = self.system.run.run_dir
            self._injectors: list[Injector] = []
            self.watch = RunWatch(self.run_dir)
            self._stack.callback(self.watch.close)
            self.system.run.start()
            self._until_warm()
            self._folder = folder
            self._blind = BlindDiagnosis(self.run_dir, folder=folder)
            self.crashes: list[str] = []
            """Crashes of the diagnosis itself: answers that never came."""
        except BaseException:
            self.close()
            raise

    def _until_warm(self) -> None:
        run, watch = self.system.run, self.watch

        def is_warm() -> bool:
            if watch.step >= WARM_STEPS or not run.running:
                return True
            long_enough = watch.commits and watch.commits[-1].at - watch.commits[0].at >= WARM_S
            return watch.step >= LEAST_WARM_STEPS and bool(long_enough)

        watch.until(
            is_warm,
            what=f"{WARM_STEPS} steps",
            timeout_s=START_TIMEOUT_S,
            pause_s=LOOK_S,
        )
        if not run.running:
            raise RunFailed(
                f"the run ended before a fault was injected: {run.output()[-500:] or run.run_dir}"
            )

    @property
    def pace(self) -> CampaignPace:
        """Times by the median duration of the steps so far; the first ones are slower."""
        times = [commit.at for commit in self.watch.commits[2:]]
        return CampaignPace.of(
            statistics.median(after - before for before, after in pairwise(times)) if len(times) > 1 else 0.0
        )

    def injector(self, number: int) -> Injector:
        """Return the injector for the n-th concurrent fault of a case."""
        while len(self._injectors) <= number:
            self._injectors.append(self.system.new_injector())
        return self._injectors[number]

    def looks(self) -> list[Look]:
        """Return the diagnoses since the last call; a diagnosis process that crashed is replaced."""
        try:
            return self._blind.looks()
        except ProcessDied as error:
            self.crashes.append(str(error))
            self._blind.close()
            self._blind = BlindDiagnosis(self.run_dir, folder=self._folder)
            return []

    def until_healthy(self) -> tuple[ExclusionReason, tuple[Cause, ...]] | None:
        """Wait until steps are committed and the diagnosis finds nothing; otherwise return the reason and the last
        causes."""
        reached, pace = self.watch.step, self.pace
        quiet = 0
        last: tuple[Cause, ...] = ()

        def makes_steps() -> bool:
            return self.watch.step >= reached + pace.healthy_steps

        def healthy() -> bool:
            nonlocal quiet, last
            for look in self.looks():
                last = _causes(look) or last
                quiet = 0 if _causes(look) else quiet + 1
            return quiet >= HEALTHY_LOOKS and makes_steps()

        is_healthy = self.until(healthy, timeout_s=pace.healthy_timeout_s)
        if not self.system.run.running:
            return ExclusionReason.ENDED, last
        if is_healthy:
            return None
        if not makes_steps():
            return ExclusionReason.NO_STEPS, last
        return (ExclusionReason.ALARM if last else ExclusionReason.NO_LOOKS), last

    def until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Return whether the condition held in time."""
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
    """All cases of a plan, one after another."""

    def __init__(
        self, config: Config, *, places: TestbedSpec, folder: Path, seed: int, say: Say = lambda line: None
    ) -> None:
        self._config = config
        self._places = places
        self._folder = folder
        self._seed = seed
        self._say = say
        self._cluster: CampaignCluster | None = None
        self._clusters = 0
        self._unhealthy: list[UnhealthyCluster] = []
        self._crashes: list[str] = []

    def run(self, cases: Sequence[CampaignCase]) -> CampaignFile:
        """Run all cases; the result so far is written after each case, so that an interrupted campaign keeps it."""
        self._began = SYSTEM_CLOCK.monotonic()
        records: list[CaseRecord] = []
        try:
            for case in cases:
                records.append(self._one(case))
                self._say(format_case(records[-1]))
                write_json(self._summary(records), self._folder / CAMPAIGN_FILE)
        finally:
            self._replace()
        return self._summary(records)

    def _summary(self, records: Sequence[CaseRecord]) -> CampaignFile:
        lasting = self._cluster.crashes if self._cluster is not None else []
        return summarize(
            records,
            seed=self._seed,
            clusters=self._clusters,
            seconds=SYSTEM_CLOCK.monotonic() - self._began,
            unwell=self._unhealthy,
            crashes=[*self._crashes, *lasting],
        )

    def _replace(self) -> None:
        if self._cluster is not None:
            self._crashes += self._cluster.crashes
            self._cluster.close()
            self._cluster = None

    def _healthy_cluster(self, number: int) -> CampaignCluster:
        """Return a healthy cluster for this case; replace the current one if it did not recover."""
        if self._cluster is not None and not self._is_healthy(self._cluster, number):
            self._replace()
        if self._cluster is None:
            self._clusters += 1
            folder = self._folder / f"cluster-{self._clusters}"
            self._cluster = CampaignCluster(self._config, places=self._places, folder=folder)
            self._is_healthy(self._cluster, number)
        return self._cluster

    def _is_healthy(self, cluster: CampaignCluster, number: int) -> bool:
        found = cluster.until_healthy()
        if found is not None:
            reason, causes = found
            self._give_up(UnhealthyCluster(before=number, reason=reason, said=tuple(map(named, causes))))
        return found is None

    def _give_up(self, unhealthy: UnhealthyCluster) -> None:
        self._unhealthy.append(unhealthy)
        said = f" ({', '.join(unhealthy.said)})" if unhealthy.said else ""
        self._say(f"  the cluster is not healthy: {unhealthy.reason}{said}")

    def _one(self, case: CampaignCase) -> CaseRecord:
        cluster = self._healthy_cluster(case.number)
        start = SYSTEM_CLOCK.wall()
        logs = log_readers.log_sizes(cluster.run_dir)
        injected: list[Injected] = []
        answer: MethodAnswer | None = None
        why_not = trouble = ""
        with ExitStack() as undoing:
            try:
                _begin(case, cluster, injected, undoing)
                start = min((each.start for each in injected), default=SYSTEM_CLOCK.wall())
                answer = self._verdict(cluster, since=start)
                _until_shown(injected, cluster)
                answer = _with_last_causes(answer, cluster.looks())
            except KintsugiError as error:
                # Once there is an answer, a later error does not exclude the case.
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
            answer or MethodAnswer((), None),
            start=start,
            logs=logs,
            why_not=why_not,
            trouble=trouble,
        )
        if trouble:
            self._give_up(UnhealthyCluster(before=case.number + 1, reason=ExclusionReason.NOT_UNDONE))
            self._replace()
        return record

    def _verdict(self, cluster: CampaignCluster, *, since: float) -> MethodAnswer:
        """Return the first diagnosis that names a cause; one from before the fault does not belong to this case."""
        found: list[Look] = []

        def said() -> bool:
            found.extend(each for each in cluster.looks() if each.t > since and _causes(each))
            return bool(found)

        if not cluster.until(said, timeout_s=cluster.pace.window_s):
            return MethodAnswer((), None)
        return MethodAnswer(_causes(found[0]), found[0].t)


def _until_shown(injected: Sequence[Injected], cluster: CampaignCluster) -> None:
    """Wait until the last fault of a case has had its time: one fault may be diagnosed before another has begun."""
    if not injected:
        return
    shown_s = SYSTEM_CLOCK.wall() - max(each.start for each in injected)
    if shown_s < LEAST_FAULT_S:
        cluster.until(lambda: False, timeout_s=LEAST_FAULT_S - shown_s)


def _with_last_causes(answer: MethodAnswer, later: Sequence[Look]) -> MethodAnswer:
    """Add the last causes that were named."""
    named_later = [_causes(look) for look in later if _causes(look)]
    return msgspec.structs.replace(answer, at_the_end=[answer.causes, *named_later][-1])


def _begin(
    case: CampaignCase, cluster: CampaignCluster, injected: list[Injected], undoing: ExitStack
) -> None:
    """Inject the faults of a case; an error in undoing one does not keep the others from being undone."""
    for number, injection in enumerate(case.injections):
        injector = cluster.injector(number)
        injected.append(injector.begin(injection))
        undoing.callback(injector.end, injected[-1])
    undoing.enter_context(_benign(case.benign, cluster))


def _record(
    case: CampaignCase,
    cluster: CampaignCluster,
    injected: Sequence[Injected],
    answer: MethodAnswer,
    *,
    start: float,
    logs: log_readers.LogSizes,
    why_not: str,
    trouble: str,
) -> CaseRecord:
    end = SYSTEM_CLOCK.wall()
    errors = log_readers.errors_in(cluster.run_dir, since=start, until=end, beyond=logs)
    answers = {
        OURS: answer,
        log_readers.LAST_ERROR: _answer_of(log_readers.last_error(errors)),
        log_readers.FIRST_ERROR: _answer_of(log_readers.first_error(errors)),
    }
    host_of = cluster.system.host_of()
    expected = [
        scoring.expected_cause(
            each.injection.ability,
            target=each.process,
            start=each.start,
            host_of=host_of,
            shares_device=shares_device(each.injection.ability, each.mechanism),
            shares_memory=shares_memory(each.injection.ability, each.mechanism),
        )
        for each in injected
    ]
    impact = effect_of(cluster.run_dir, injected, start=start, end=end, beyond=logs)
    target = injected[0].process if injected else process_id(Role.MODEL, 0)
    read = log_readers.to_read(cluster.run_dir, target=target, since=start, until=end, beyond=logs)
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
            method: scoring.score(said.causes, expected, t=said.t, start=start, at_the_end=said.at_the_end)
            for method, said in answers.items()
        },
        files=read.files,
        lines=read.lines,
        seconds=end - start,
    )


def _answer_of(cause: Cause | None) -> MethodAnswer:
    return MethodAnswer((cause,), cause.onset) if cause is not None else MethodAnswer((), None)


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


# Slow but not faulty.


@contextmanager
def _benign(what: Benign | None, cluster: CampaignCluster) -> Iterator[None]:
    match what:
        case Benign.BUSY_HOST:
            with _busy_host():
                yield
        case Benign.SCALED:
            servers = cluster.system.run.config.generation.servers
            scale_run(cluster.run_dir, servers=max(1, servers - 1), timeout_s=HEALTHY_TIMEOUT_S)
            try:
                yield
            finally:
                scale_run(cluster.run_dir, servers=servers, timeout_s=HEALTHY_TIMEOUT_S)
        case Benign.EVALUATION | Benign.CHECKPOINT:
            _await_phase(Phase.EVALUATING if what is Benign.EVALUATION else Phase.SAVING, cluster)
            yield
        case None:
            yield


def _await_phase(phase: Phase, cluster: CampaignCluster) -> None:
    """Wait for the phase to begin; DeadlineExceeded if it does not, because then nothing was slow."""
    before = cluster.watch.num_times(phase.value)

    def has_begun() -> bool:
        return cluster.watch.num_times(phase.value) > before

    if not cluster.until(has_begun, timeout_s=PHASE_TIMEOUT_S):
        raise DeadlineExceeded(whom="the run", what=f"phase {phase.value}", waited_s=PHASE_TIMEOUT_S)


@contextmanager
def _busy_host() -> Iterator[None]:
    """Run as many busy programs as there are CPUs; they end without the laboratory too."""
    program = f"import time; end = time.monotonic() + {WINDOW_S + 5}\nwhile time.monotonic() < end: pass"
    busy: list[Child] = []
    try:
        command = [sys.executable, "-P", "-c", program]
        busy.extend(SystemProcesses().spawn(command, new_session=True) for _ in range(os.cpu_count() or 1))
        yield
    finally:
        for each in busy:
            each.send_signal(9)
            each.wait_ended(whom="a busy program", timeout_s=5.0)
            each.close()
