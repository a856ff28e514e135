"""`kintsugi lab report DIR`: the results of a folder as a page, as Markdown, as figures and as tables."""

from __future__ import annotations

from pathlib import Path

from kintsugi.errors import StorageError, UserError
from kintsugi.lab.kit import attempts_in
from kintsugi.lab.records import CAMPAIGN_FILE, RUNS_FILE, read_runs
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report import drawing, raw
from kintsugi.lab.report.contents import document_of
from kintsugi.lab.report.document import to_html, to_markdown, write_tables
from kintsugi.lab.report.results import Results

PAGE_FILE = "report.html"
MARKDOWN_FILE = "report.md"
FIGURES_FOLDER = "figures"
DATA_FOLDER = "data"


def write_report(folder: Path) -> Path:
    """Writes beside the results and gives back the page; what an earlier report left there is replaced."""
    drawing.require_matplotlib()
    results = read_results(folder)
    document, drawn = document_of(results)
    every = [*document.tables]
    if results.runs is not None:
        every.append(raw.runs_table(results.runs.runs))
        every += [raw.series_table(run) for run in results.runs.runs if run.series]
        every += [raw.moments_table(run) for run in results.runs.runs if run.timeline]
    if results.campaign is not None:
        every.append(raw.cases_table(results.campaign))
    try:
        for name in (FIGURES_FOLDER, DATA_FOLDER):
            (folder / name).mkdir(exist_ok=True)
        for figure in drawn:
            figure.write(folder / FIGURES_FOLDER)
        write_tables(every, folder / DATA_FOLDER)
        (folder / MARKDOWN_FILE).write_text(to_markdown(document), encoding="utf-8")
        page = folder / PAGE_FILE
        page.write_text(to_html(document), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"could not write the report into {folder}: {error.strerror or error}") from error
    return page


def read_results(folder: Path) -> Results:
    if not folder.is_dir():
        raise UserError(f"{folder}: expected the folder of a `kintsugi lab run` or `kintsugi lab campaign`")
    campaign = campaigns.read_campaign(folder)
    runs = read_runs(folder) if (folder / RUNS_FILE).is_file() else None
    if runs is None and campaign is None:
        raise UserError(
            f"{folder}: expected {RUNS_FILE} of a `kintsugi lab run` or {CAMPAIGN_FILE} of a campaign in it"
        )
    return Results(runs, campaign, tuple(attempts_in(folder)))
