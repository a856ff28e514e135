"""Results as the laboratory writes them. Made up for these tests: no number here was measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kintsugi.diagnosis.verdict import Cause, FaultKind, Hop
from kintsugi.lab.campaign import scoring
from kintsugi.lab.campaign.cases import CaseClass
from kintsugi.lab.campaign.log_readers import FIRST_ERROR, LAST_ERROR
from kintsugi.lab.campaign.records import (
    CampaignFile,
    CaseRecord,
    CountedAs,
    ExclusionReason,
    MethodAnswer,
    UnhealthyCluster,
    summarize,
)
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.scenarios.records import (
    CAMPAIGN_FILE,
    RUNS_FILE,
    DiagnosisRecord,
    InjectedRecord,
    RunRecord,
    RunsFile,
    Spread,
    SurfacedError,
    TimedEvent,
    write_json,
)

START = 1_800_000_000.0
SCALE = 600.0

FAULTS = {
    "S1": ("model-1", "network_delay", "publishing", 3),
    "S2": ("rollout-1", "cpu", "collecting", 1),
    "S3": ("model-1", "device_memory", "training", 2),
    "S4": ("server-0", "network_delay", "publishing", 2),
    "S5": ("model-0", "disk_fill", "saving", 1),
}
ERRORS = {
    "S1": ("rollout-0", "UpdateWeightError: failed to update weights: timed out after 6.0 s", 6.3),
    "S2": ("master-0", "DistributedBatchMemoryError: batch size mismatch: expected 32, got 24 <b>", 2.1),
    "S3": ("master-0", "Error stopping job rollout: HTTPConnectionPool: Read timed out.", 4.2),
    "S4": ("rollout-0", "RolloutError: out of memory, tried 143 times | the device is held by model-0", 9.0),
    "S5": ("model-0", "UploadWeightsError: invalid checkpoint format: EOFError at 2147483", 7.5),
}


def series(*, seed: int, strength: float) -> dict[str, list[tuple[float, float]]]:
    noise = random.Random(seed)
    steps = [(START + second * 0.8, 0.8 + noise.gauss(0, 0.02)) for second in range(-12, 14)]
    rtt = [
        (START + second * 0.5, abs(noise.gauss(0.002, 0.0003)) + (strength if 0 <= second * 0.5 < 8 else 0.0))
        for second in range(-20, 24)
    ]
    return {"timing/step": steps, "model-1>agent-0 rtt_s": rtt}


def run_of(scenario: str, profile: str) -> RunRecord:
    """A run as a fragile system, ours, or fine-tuning would leave it."""
    target, kind, phase, hops = FAULTS[scenario]
    process, message, delay_s = ERRORS[scenario]
    is_fragile = profile == "fragile"
    path = (
        TimedEvent(target, "its sends take 1.1 s instead of 2 ms", START + 0.4),
        TimedEvent("agent-0", "waits for the pieces of model-1", START + 0.9),
        TimedEvent("server-0", "waits for version 14", START + 1.3),
        TimedEvent("master-0", "step 14 is overdue", START + 2.0),
    )[: hops + 1]
    last = DiagnosisRecord(
        process=process,
        kind="network_delay" if scenario != "S4" else "memory",
        path=(),
        t=START + delay_s,
        confidence=1.0,
        onset=START + delay_s,
        by="last error in the controller's log",
    )
    verdict = DiagnosisRecord(
        process=target,
        kind={"disk_fill": "disk_full"}.get(kind, kind),
        path=path,
        t=START + 3.1,
        confidence=0.93,
        onset=START + 0.3,
        by="kintsugi diagnose",
        summary=f"{target} is slow",
    )
    values = series(seed=hops, strength=1.1)
    name = f"sft_{scenario}" if profile == "sft" else scenario
    surfaced = SurfacedError("publishing", process, message, START + delay_s)
    return RunRecord(
        scenario=name,
        profile=profile,
        workload="lab-grpo",
        challenges=("A",),
        injected=(
            InjectedRecord(
                target=target,
                kind=kind,
                mechanism="user-space relay with a queue",
                start=START,
                end=START + 8.0,
                amount={"delay_s": 1.0, "jitter_s": 0.5},
                phase=phase,
                step=13,
            ),
        ),
        surfaced=surfaced if is_fragile else None,
        hops=0 if profile == "sft" else hops,
        diagnosed=last if is_fragile else verdict,
        correct=not is_fragile,
        first_effect=START + 0.4,
        recovered=not is_fragile,
        steps_lost=3 if is_fragile else 0,
        log_files=3 if profile == "sft" else 5,
        log_lines=40 if profile == "sft" else 1430,
        seconds=31.0,
        expected_stage="publishing",
        as_expected=True,
        baseline={"timing/step": Spread(0.8, 0.02), "model-1>agent-0 rtt_s": Spread(0.002, 0.0003)},
        timeline=(
            TimedEvent(target, f"injected: {kind}", START),
            TimedEvent(target, "upload is retried", START + 2.0),
            TimedEvent("master-0", "HTTP 500 from the train worker", START + 3.0),
            TimedEvent(process, message, START + delay_s),
        ),
        series=values,
        folder="",
        diagnosed_after_s=delay_s - 0.4 if is_fragile else 2.7,
        readings={LAST_ERROR: last, FIRST_ERROR: None},
    )


def cause(process: str, kind: FaultKind, *, t: float) -> Cause:
    path = (Hop(process, "is slow", t), Hop("master-0", "waits for it", t + 1))
    return Cause(
        process=process, host="host-0", kind=kind, onset=t, confidence=0.9, summary="", path=path, evidence=()
    )


def case_of(number: int) -> CaseRecord:
    """Two in three are faults of two kinds; the diagnosis misses every ninth, logs find every sixth."""
    start = START + 15.0 * number
    ability = Ability.CPU if number % 2 else Ability.NETWORK_DELAY
    is_quiet = number % 3 == 0
    kind = FaultKind.CPU if number % 2 else FaultKind.NETWORK_DELAY
    expected = (
        [] if is_quiet else [scoring.expected_cause(ability, target="model-1", start=start, host_of={})]
    )
    said = (
        ()
        if is_quiet and number
        else (cause("model-0" if number % 9 == 1 else "model-1", kind, t=start + 0.5),)
    )
    read = (cause("model-1" if number % 6 == 1 else "master-0", kind, t=start + 4),)
    answers = {
        "ours": MethodAnswer(said, start + 2 + number % 5 if said else None),
        LAST_ERROR: MethodAnswer(read, start + 4.0),
        FIRST_ERROR: MethodAnswer((), None),
    }
    scores = {
        name: scoring.score(each.causes, expected, t=each.t, start=start) for name, each in answers.items()
    }
    fault: dict[str, Any] = {
        "target": "model-1",
        "kind": ability.value,
        "mechanism": "quota",
        "start": start,
        "intensity": {},
    }
    return CaseRecord(
        number=number,
        planned=() if is_quiet else (f"{ability.value} model-1",),
        faults=() if is_quiet else (fault,),
        what=CaseClass.HEALTHY if is_quiet else CaseClass.FAULT,
        benign="",
        impact={"real": True},
        counted=_counted(number, is_quiet=is_quiet),
        why_not="UserError: it has ended" if number == 7 else "",
        diagnoses=answers,
        scores=scores,
        files=4,
        lines=200 + number,
        seconds=9.0,
    )


def _counted(number: int, *, is_quiet: bool) -> CountedAs:
    """One case could not be done; one fault changed nothing and was named, another was not, and something else was."""
    if number == 7:
        return CountedAs.NOT
    if number in (5, 10):
        return CountedAs.FAINT
    return CountedAs.QUIET if is_quiet else CountedAs.FAULT


@pytest.fixture(scope="session")
def runs() -> RunsFile:
    chosen = [(name, profile) for name in FAULTS for profile in ("ours", "fragile")]
    records = [run_of(name, profile) for name, profile in [*chosen, ("S1", "sft"), ("S5", "sft")]]
    host = {"processors": "2", "memory_gib": "8", "kernel": "6.1", "python": "3.11.2"}
    return RunsFile(host=host, date="2027-01-15T08:00:00+00:00", scale=SCALE, runs=tuple(records))


@pytest.fixture(scope="session")
def campaign() -> CampaignFile:
    alarm = UnhealthyCluster(before=12, reason=ExclusionReason.ALARM, said=("cpu model-0",))
    cases = [case_of(number) for number in range(30)]
    return summarize(cases, seed=7, clusters=2, seconds=450.0, unwell=[alarm])


@pytest.fixture
def results_folder(tmp_path: Path, runs: RunsFile, campaign: CampaignFile) -> Path:
    write_json(runs, tmp_path / RUNS_FILE)
    write_json(campaign, tmp_path / CAMPAIGN_FILE)
    return tmp_path
