"""Input of a report: the results of a `lab run`, a campaign and a human study in one folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.errors import UserError
from kintsugi.lab.campaign.records import CampaignFile
from kintsugi.lab.human_study import StudyAttempt, attempts_in
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report import tables
from kintsugi.lab.scenarios.records import CAMPAIGN_FILE, RUNS_FILE, RunRecord, RunsFile, read_runs


class Results(msgspec.Struct, frozen=True):
    """Results of one folder."""

    runs: RunsFile | None
    campaign: CampaignFile | None
    attempts: tuple[StudyAttempt, ...] = ()
    """Answers of the human study."""

    @property
    def valid(self) -> list[RunRecord]:
        return tables.valid_runs(self.runs.runs) if self.runs else []

    @property
    def scale(self) -> float:
        return self.runs.scale if self.runs else 1.0

    def of(self, profile: str) -> list[RunRecord]:
        return [run for run in self.valid if run.profile == profile]


def read_results(folder: Path) -> Results:
    """Read a folder; UserError when it contains neither runs nor a campaign."""
    if not folder.is_dir():
        raise UserError(f"{folder}: expected the folder of a `kintsugi lab run` or `kintsugi lab campaign`")
    campaign = campaigns.read_campaign(folder)
    runs = read_runs(folder) if (folder / RUNS_FILE).is_file() else None
    if runs is None and campaign is None:
        raise UserError(
            f"{folder}: expected {RUNS_FILE} of a `kintsugi lab run` or {CAMPAIGN_FILE} of a campaign in it"
        )
    return Results(runs, campaign, tuple(attempts_in(folder)))
