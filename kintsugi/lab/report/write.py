"""`kintsugi lab report DIR`: write the results of a folder as HTML page, Markdown, figures and tables."""

from __future__ import annotations

from pathlib import Path

from kintsugi.errors import StorageError
from kintsugi.lab.report import plotting, raw
from kintsugi.lab.report.contents import document_of
from kintsugi.lab.report.document import to_html, to_markdown, write_tables
from kintsugi.lab.report.results import read_results

PAGE_FILE = "report.html"
MARKDOWN_FILE = "report.md"
FIGURES_FOLDER = "figures"
DATA_FOLDER = "data"


def write_report(folder: Path) -> Path:
    """Write the report next to the results and return the page; an earlier report is replaced."""
    plotting.require_matplotlib()
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
