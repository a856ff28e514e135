from __future__ import annotations

from kintsugi.lab.campaign import CampaignFile
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report.document import Table
from kintsugi.lab.report.raw import cases_table


def cells(table: Table, name: str) -> tuple[str, ...]:
    return next(row[1:] for row in table.rows if row[0] == name)


def test_the_table_agrees_with_what_the_campaign_counted(campaign: CampaignFile) -> None:
    for method, row in campaign.table.items():
        assert campaigns.top1(campaign, method).value == row.top1
        assert campaigns.abstained(campaign, method).value == row.abstained
        assert campaigns.misdiagnosed(campaign, method).value == row.misdiagnosed


def test_a_case_whose_fault_did_nothing_counts_nowhere(campaign: CampaignFile) -> None:
    assert 5 not in {case.number for case in campaigns.faulty(campaign)}
    assert "1 did not count" in campaigns.methods_table(campaign).caption


def test_every_method_stands_in_the_same_table(campaign: CampaignFile) -> None:
    table = campaigns.methods_table(campaign)

    assert table.head[1:] == tuple(campaigns.METHODS.values())
    assert [cell.split(" ")[0] for cell in cells(table, "top-1 on (process, kind)")] == ["79%", "26%", "0%"]


def test_a_curve_ends_at_the_share_that_was_named_right(campaign: CampaignFile) -> None:
    for curve in campaigns.curves(campaign):
        assert len(curve.seconds) == campaigns.top1(campaign, curve.method).part
        assert list(curve.seconds) == sorted(curve.seconds)


def test_every_mistake_is_shown(campaign: CampaignFile) -> None:
    table = campaigns.mistakes_table(campaign)

    assert table is not None
    assert [row[0] for row in table.rows] == ["1", "10", "19", "28", "0"]


def test_every_case_is_in_the_data(campaign: CampaignFile) -> None:
    table = cases_table(campaign)

    assert len(table.rows) == len(campaign.cases)
    assert all(len(row) == len(table.head) for row in table.rows)
