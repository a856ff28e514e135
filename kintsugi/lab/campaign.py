"""A blind campaign: random faults on a run that goes on for ever, each diagnosed by who knows nothing of it.

until well ─► inject, or not ─► a verdict, or ten seconds ─► undo ─► how much it really did ─► the next

Cases share a cluster; one that does not become well again is replaced by a new one, and counted. A fault that changed
nothing in the run does not count: there was nothing to find.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config import Config
from kintsugi.diagnosis.verdict import Cause
from kintsugi.errors import DeadlineExceeded, KintsugiError, ProcessDied, RunFailed
from kintsugi.lab import baselines, scoring
from kintsugi.lab.blind import BlindDiagnosis, Look
from kintsugi.lab.cases import WINDOW_S, Benign, Case, CaseClass
from kintsugi.lab.experiments import Phase, Places, Profile
from kintsugi.lab.impacts import impact_of
from kintsugi.lab.injecting import Injector
from kintsugi.lab.injection import Injected
from kintsugi.lab.records import CAMPAIGN_FILE, host_facts, now_as_text, write_json
from kintsugi.lab.scoring import Scored
from kintsugi.lab.systems import System, system_for
from kintsugi.lab.watching import Watch
from kintsugi.runtime import SYSTEM_CLOCK, Child, SystemProcesses
from kintsugi.scaling import scale_run

LOOK_S = 0.05
START_TIMEOUT_S = 120.0
WARM_STEPS = 12
WELL_TIMEOUT_S = 25.0
"""Then the cluster is replaced."""
WELL_STEPS = 3
"""Committed since the last case."""
WELL_LOOKS = 2
"""In a row that found nothing."""
LEAST_FAULT_S = 3.0
"""A fault lasts at least so long, or its effect could not be told from none."""
METHODS = ("ours", baselines.LAST_ERROR, baselines.FIRST_ERROR)

Say = Callable[[str], None]


class Answer(msgspec.Struct, frozen=True):
    """What one method said, and when."""

    causes: tuple[Cause, ...]
    t: float | None


class CaseRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"what": "class"}):
    number: int
    faults: tuple[dict[str, Any], ...]
    what: CaseClass
    benign: str
    planned: tuple[str, ...]
    """`network_delay model-1`: what was to be done, also where it could not be."""
    impact: dict[str, Any]
    counted: bool
    why_not: str
    """Empty where it counted."""
    diagnoses: dict[str, Answer]
    scores: dict[str, Scored]
    top1: bool
    top3: bool
    path: bool
    onset_error_s: float | None
    verdict_s: float | None
    files: int
    lines: int
    seconds: float


class CampaignFile(msgspec.Struct, frozen=True, kw_only=True):
    host: dict[str, str]
    date: str
    seed: int
    cases: tuple[CaseRecord, ...]
    table: dict[str, scoring.Row]
    by_kind: dict[str, dict[str, float]]
    """Ability → cases and top-1 of ours."""
    not_counted: dict[str, int]
    """Reason → cases."""
    clusters: int
    seconds: float
    crashes: tuple[str, ...] = ()
    """Of the diagnosis itself."""


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

    def until_well(self) -> bool:
        """Steps go on and nobody finds anything; False if that does not come."""
        reached = self.watch.step
        quiet = 0

        def well() -> bool:
            nonlocal quiet
            for look in self.looks():
                quiet = 0 if _causes(look) else quiet + 1
            return quiet >= WELL_LOOKS and self.watch.step >= reached + WELL_STEPS

        return self.until(well, timeout_s=WELL_TIMEOUT_S) and self.system.run.running

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
        seconds = SYSTEM_CLOCK.monotonic() - self._began
        result = summed(records, seed=self._seed, clusters=self._clusters, seconds=seconds)
        lasting = self._cluster.crashes if self._cluster is not None else []
        return msgspec.structs.replace(result, crashes=(*self._crashes, *lasting))

    def _replace(self) -> None:
        if self._cluster is not None:
            self._crashes += self._cluster.crashes
            self._cluster.close()
            self._cluster = None

    def _well(self) -> Cluster:
        """The cluster, whole; another one where this one did not become so."""
        if self._cluster is not None and not self._cluster.until_well():
            self._say("  the cluster did not become well; a new one")
            self._replace()
        if self._cluster is None:
            self._clusters += 1
            folder = self._folder / f"cluster-{self._clusters}"
            self._cluster = Cluster(self._config, places=self._places, folder=folder)
            self._cluster.until_well()
        return self._cluster

    def _one(self, case: Case) -> CaseRecord:
        cluster = self._well()
        start = SYSTEM_CLOCK.wall()
        injected: list[Injected] = []
        answer, why_not = Answer((), None), ""
        try:
            with self._doing(case, cluster, injected):
                start = min((each.start for each in injected), default=SYSTEM_CLOCK.wall())
                answer = self._verdict(cluster, since=start)
                shown_s = SYSTEM_CLOCK.wall() - start
                if injected and shown_s < LEAST_FAULT_S:
                    cluster.until(lambda: False, timeout_s=LEAST_FAULT_S - shown_s)
        except KintsugiError as error:
            why_not = f"{type(error).__name__}: {error}"
        return self._record(case, cluster, injected, answer, start=start, why_not=why_not)

    @contextmanager
    def _doing(self, case: Case, cluster: Cluster, injected: list[Injected]) -> Iterator[None]:
        """What the case does to the run, until it is left."""
        try:
            for number, injection in enumerate(case.injections):
                injected.append(cluster.injector(number).begin(injection))
            with _benign(case.benign, cluster):
                yield
        finally:
            for number, each in enumerate(injected):
                cluster.injector(number).end(each)

    def _verdict(self, cluster: Cluster, *, since: float) -> Answer:
        """The first look that names a cause; looks that began before the fault know nothing of it."""
        found: list[Look] = []

        def said() -> bool:
            found.extend(each for each in cluster.looks() if each.t > since and _causes(each))
            return bool(found)

        if not cluster.until(said, timeout_s=WINDOW_S):
            return Answer((), None)
        return Answer(_causes(found[0]), found[0].t)

    def _record(
        self,
        case: Case,
        cluster: Cluster,
        injected: Sequence[Injected],
        answer: Answer,
        *,
        start: float,
        why_not: str,
    ) -> CaseRecord:
        end = SYSTEM_CLOCK.wall()
        errors = baselines.errors_in(cluster.run_dir, since=start, until=end)
        last, first = baselines.last_error(errors), baselines.first_error(errors)
        answers = {
            "ours": answer,
            baselines.LAST_ERROR: Answer((last,) if last else (), last.onset if last else None),
            baselines.FIRST_ERROR: Answer((first,) if first else (), first.onset if first else None),
        }
        host_of = cluster.system.host_of()
        culprits = [
            scoring.culprit(each.injection.ability, target=each.process, start=each.start, host_of=host_of)
            for each in injected
        ]
        scores = {
            method: scoring.score(said.causes, culprits, t=said.t, start=start)
            for method, said in answers.items()
        }
        impact = impact_of(cluster.run_dir, injected, start=start, end=end)
        if not why_not and injected and not impact["real"]:
            why_not = "the fault changed nothing"
        ours = scores["ours"]
        target = injected[0].process if injected else "model-0"
        read = baselines.to_read(cluster.run_dir, target=target, since=start, until=end)
        return CaseRecord(
            number=case.number,
            faults=tuple(_fault(each) for each in injected),
            what=case.what,
            benign=case.benign.value if case.benign else "",
            planned=tuple(f"{each.ability.value} {each.target}" for each in case.injections),
            impact=impact,
            counted=not why_not,
            why_not=why_not,
            diagnoses=answers,
            scores=scores,
            top1=ours.top1,
            top3=ours.top3,
            path=ours.path,
            onset_error_s=ours.onset_error_s,
            verdict_s=ours.verdict_s,
            files=read.files,
            lines=read.lines,
            seconds=end - start,
        )


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
            phase = Phase.EVALUATING if what is Benign.EVALUATION else Phase.SAVING
            cluster.until(lambda: cluster.watch.phase == phase.value, timeout_s=WINDOW_S)
            yield
        case None:
            yield


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


# The table.


def told(record: CaseRecord) -> str:
    done = ", ".join(record.planned) or record.benign or "nothing"
    said = (
        ", ".join(f"{cause.kind} {cause.process}" for cause in record.diagnoses["ours"].causes[:3])
        or "nothing"
    )
    if not record.counted:
        return f"{record.number}: {done}: does not count: {record.why_not}"
    right = record.top1 if record.faults else not record.scores["ours"].said
    after = f" after {record.verdict_s:.1f} s" if record.verdict_s is not None else ""
    return f"{record.number}: {done}: said {said}{after}: {'right' if right else 'WRONG'}"


def summed(records: Sequence[CaseRecord], *, seed: int, clusters: int, seconds: float) -> CampaignFile:
    counted = [record for record in records if record.counted]
    faulty = [record for record in counted if record.faults]
    quiet = [record for record in counted if record.what in (CaseClass.BENIGN, CaseClass.HEALTHY)]
    table = {
        method: scoring.row([each.scores[method] for each in faulty], [each.scores[method] for each in quiet])
        for method in METHODS
    }
    reasons: dict[str, int] = {}
    for record in records:
        if not record.counted:
            reasons[record.why_not] = reasons.get(record.why_not, 0) + 1
    return CampaignFile(
        host=host_facts(),
        date=now_as_text(),
        seed=seed,
        cases=tuple(records),
        table=table,
        by_kind=_by_kind(faulty),
        not_counted=reasons,
        clusters=clusters,
        seconds=seconds,
    )


def _by_kind(faulty: Sequence[CaseRecord]) -> dict[str, dict[str, float]]:
    found: dict[str, list[bool]] = {}
    for record in faulty:
        if record.what is CaseClass.FAULT:
            found.setdefault(record.faults[0]["kind"], []).append(record.top1)
    return {
        kind: {"cases": len(right), "top1": sum(right) / len(right)} for kind, right in sorted(found.items())
    }


def table_lines(table: Mapping[str, scoring.Row]) -> Iterator[str]:
    """For the terminal."""
    heads = {"cases": 6, "top-1": 7, "top-3": 7, "path": 7, "abstained": 11, "misdiagnosed": 14}
    yield " " * 14 + "".join(
        f"{head:>{width}}" for head, width in {**heads, "onset": 9, "verdict": 9}.items()
    )
    for method, row in table.items():
        onset = "–" if row.onset_error_s is None else f"{row.onset_error_s:.1f} s"
        verdict = "–" if row.verdict_s is None else f"{row.verdict_s:.1f} s"
        yield (
            f"{method:14}{row.cases:>6}{row.top1:>7.0%}{row.top3:>7.0%}{row.path:>7.0%}{row.abstained:>11.0%}"
            f"{row.misdiagnosed:>14.0%}{onset:>9}{verdict:>9}"
        )
