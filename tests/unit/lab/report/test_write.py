from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from kintsugi.errors import StorageError, UserError
from kintsugi.lab.campaign.records import CampaignFile
from kintsugi.lab.report.write import write_report
from kintsugi.lab.scenarios.records import CAMPAIGN_FILE, RUNS_FILE, RunRecord, RunsFile, write_json

VOID = {"meta", "br", "img", "link"}


class Tree(HTMLParser):
    """Every tag is closed, and the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, runs: RunsFile, campaign: CampaignFile) -> Path:
    """The report of one scenario and a campaign, written once: drawing takes time."""
    folder = tmp_path_factory.mktemp("results")
    kept = tuple(run for run in runs.runs if run.scenario.endswith("S1"))
    write_json(msgspec.structs.replace(runs, runs=kept), folder / RUNS_FILE)
    write_json(campaign, folder / CAMPAIGN_FILE)
    write_report(folder)
    return folder


def test_the_page_is_whole_and_needs_nothing_from_outside(written: Path) -> None:
    page = written / "report.html"

    text = page.read_text(encoding="utf-8")
    tree = Tree()
    tree.feed(text)
    assert (tree.wrong, tree.open) == ([], [])
    assert len(tree.ids) == len(set(tree.ids))
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|<script|<link', text)
    assert outside == []


def test_every_link_of_the_page_leads_somewhere(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")

    tree = Tree()
    tree.feed(text)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(tree.ids)


def test_the_figures_follow_light_and_dark(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")

    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawn) == 3
    assert all("var(--ink)" in svg and "#1a1a1a" not in svg and 'aria-label="' in svg for svg in drawn)


def test_figures_and_tables_lie_beside_the_page(written: Path) -> None:
    figures = {path.stem for path in (written / "figures").glob("*.svg")}
    assert figures == {"propagation_S1", "anomaly_S1", "diagnosis_times"}
    assert {path.stem for path in (written / "figures").glob("*.png")} == figures
    for path in (written / "figures").glob("*.svg"):
        ET.parse(path)
    tables = {path.stem for path in (written / "data").glob("*.csv")}
    assert {"coupling", "diagnosis", "contrast", "expectations", "campaign", "runs", "cases"} <= tables
    assert {"series_S1_ours", "series_S1_fragile", "series_sft_S1_sft", "moments_S1_ours"} <= tables


def test_the_markdown_says_the_same_as_the_page(written: Path) -> None:
    page = (written / "report.html").read_text(encoding="utf-8")
    markdown = (written / "report.md").read_text(encoding="utf-8")

    assert re.findall(r"<h[23][^>]*>([^<]+)<", page) == [
        title.replace("'", "&#39;") for title in re.findall(r"^#{2,3} (.+)$", markdown, re.MULTILINE)
    ]
    assert page.count("<table>") == len(re.findall(r"^\| ?-|^\| [^|]* ?\|?-{3}", markdown, re.MULTILINE))


def test_a_campaign_alone_makes_a_report_that_says_what_is_missing(results_folder: Path) -> None:
    (results_folder / RUNS_FILE).unlink()

    text = write_report(results_folder).read_text(encoding="utf-8")

    assert "S3: no result for fragile, ours and sft." in text
    assert "Blind campaign with seed 7" in text


def test_runs_alone_make_a_report_that_says_what_is_missing(results_folder: Path, runs: RunsFile) -> None:
    (results_folder / CAMPAIGN_FILE).unlink()
    write_json(msgspec.structs.replace(runs, runs=runs.runs[:1]), results_folder / RUNS_FILE)

    text = write_report(results_folder).read_text(encoding="utf-8")

    assert "No campaign" in text
    assert "No human study" in text


def test_an_experiment_that_could_not_be_done_is_listed_and_counts_nowhere(
    results_folder: Path, runs: RunsFile
) -> None:
    (results_folder / CAMPAIGN_FILE).unlink()
    broken = [_broken(run) for run in runs.runs]
    write_json(msgspec.structs.replace(runs, runs=tuple(broken)), results_folder / RUNS_FILE)

    text = write_report(results_folder).read_text(encoding="utf-8")

    assert "S1 ours is void: no root &lt;here&gt;" in text
    assert "No experiment came to a result." in text


def _broken(run: RunRecord) -> RunRecord:
    return msgspec.structs.replace(run, problem="no root <here>", correct=False, injected=(), diagnosed=None)


def test_a_folder_without_results_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected runs\.json"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="expected the folder"):
        write_report(tmp_path / "nowhere")


def test_damaged_results_are_named(results_folder: Path) -> None:
    (results_folder / CAMPAIGN_FILE).write_text('{"cases": 3}')

    with pytest.raises(StorageError, match=r"campaign\.json"):
        write_report(results_folder)
