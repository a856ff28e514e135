from __future__ import annotations

from kintsugi.lab.campaign.records import METHODS, CampaignFile
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report.document import ReportTable
from kintsugi.lab.report.raw import cases_table


def cells(table: ReportTable, name: str) -> tuple[str, ...]:
    return next(row[1:] for row in table.rows if row[0] == name)


def test_the_table_agrees_with_what_the_campaign_counted(campaign: CampaignFile) -> None:
    for method, row in campaign.table.items():
        assert campaigns.top1(campaign, method).value == row.top1
        assert campaigns.abstained(campaign, method).value == row.abstained
        assert campaigns.misdiagnosed(campaign, method).value == row.misdiagnosed


def test_a_fault_that_did_nothing_need_not_be_found_and_can_be_misdiagnosed(campaign: CampaignFile) -> None:
    assert [case.number for case in campaigns.faint(campaign)] == [5, 10]
    assert not {5, 10} & {case.number for case in campaigns.faulty(campaign)}
    mistakes = campaigns.mistakes_table(campaign)
    assert mistakes is not None and "10" in {row[0] for row in mistakes.rows}


def test_a_case_that_could_not_be_done_counts_nowhere(campaign: CampaignFile) -> None:
    counted = [*campaigns.faulty(campaign), *campaigns.faint(campaign), *campaigns.quiet(campaign)]
    assert 7 not in {case.number for case in counted}
    assert "1 could not be carried out" in campaigns.methods_table(campaign).caption


def test_false_alarms_between_cases_stand_beside_the_table(campaign: CampaignFile) -> None:
    note = campaigns.methods_table(campaign).note
    assert "**1**" in note and "cpu model-0 before case 12" in note


def test_every_method_stands_in_the_same_table(campaign: CampaignFile) -> None:
    table = campaigns.methods_table(campaign)

    assert table.head[1:] == tuple(METHODS.values())
    assert [cell.split(" ")[0] for cell in cells(table, "top-1 on (process, kind)")] == ["82%", "24%", "0%"]


def test_a_curve_ends_at_the_share_that_was_named_right(campaign: CampaignFile) -> None:
    for curve in campaigns.curves(campaign):
        assert len(curve.seconds) == campaigns.top1(campaign, curve.method).part
        assert list(curve.seconds) == sorted(curve.seconds)


def test_every_mistake_is_shown(campaign: CampaignFile) -> None:
    table = campaigns.mistakes_table(campaign)

    assert table is not None
    assert [row[0] for row in table.rows] == ["1", "19", "28", "10", "0"]


def test_every_case_is_in_the_data(campaign: CampaignFile) -> None:
    table = cases_table(campaign)

    assert len(table.rows) == len(campaign.cases)
    assert all(len(row) == len(table.head) for row in table.rows)
