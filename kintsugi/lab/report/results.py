"""All that a report is made of."""

from __future__ import annotations

import msgspec

from kintsugi.lab.campaign_records import CampaignFile
from kintsugi.lab.kit import Attempt
from kintsugi.lab.records import RunRecord, RunsFile
from kintsugi.lab.report import tables


class Results(msgspec.Struct, frozen=True):
    """Of one folder."""

    runs: RunsFile | None
    campaign: CampaignFile | None
    attempts: tuple[Attempt, ...] = ()
    """Of people who were timed on the kit."""

    @property
    def valid(self) -> list[RunRecord]:
        return tables.said_something(self.runs.runs) if self.runs else []

    @property
    def scale(self) -> float:
        return self.runs.scale if self.runs else 1.0

    def of(self, profile: str) -> list[RunRecord]:
        return [run for run in self.valid if run.profile == profile]
