"""What a diagnosis says of a fake run, in few words."""

from __future__ import annotations

from kintsugi.diagnosis.diagnose import look
from kintsugi.diagnosis.verdict import Diagnosis
from tests.unit.diagnosis.healthy import HealthyRun


def diagnosis_of(run: HealthyRun) -> Diagnosis:
    return look(run.bundle, at=run.time + 0.1)


def named(run: HealthyRun) -> list[tuple[str, str]]:
    return [(cause.process, cause.kind.value) for cause in diagnosis_of(run).causes]
