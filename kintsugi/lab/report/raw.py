"""Results as plain tables for further processing: one row per run, case or point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kintsugi.lab.campaign.records import OURS, CampaignFile
from kintsugi.lab.report import measures
from kintsugi.lab.report.campaign import methods_of
from kintsugi.lab.report.document import ReportTable
from kintsugi.lab.scenarios.records import RunRecord

OF_A_RUN = (
    *("scenario", "profile", "workload", "target", "kind", "mechanism", "start", "end"),
    *("surfaced_stage", "surfaced_process", "surfaced_t", "surfaced_message", "hops"),
    *("diagnosed_process", "diagnosed_kind", "diagnosed_t", "confidence", "correct"),
    *("first_effect", "diagnosed_after_s", "recovered", "steps_lost", "log_files", "log_lines"),
    *("seconds", "as_expected", "problem", "folder"),
)
OF_A_CASE = (
    *("number", "class", "benign", "counted", "why_not", "trouble", "target", "kind", "mechanism", "start"),
    *("said_process", "said_kind", "top1", "top3", "every", "path", "onset_error_s", "verdict_s"),
    *("files", "lines"),
)


def runs_table(runs: Sequence[RunRecord]) -> ReportTable:
    rows = []
    for run in runs:
        first, seen, said = measures.target_fault_of(run), run.surfaced, run.diagnosed
        rows.append(
            (
                *(run.scenario, run.profile, run.workload),
                *(
                    (first.target, first.kind, first.mechanism, first.start, first.end)
                    if first
                    else [None] * 5
                ),
                *((seen.stage, seen.process, seen.t, seen.message) if seen else [None] * 4),
                run.hops,
                *((said.process, said.kind, said.t, said.confidence) if said else [None] * 4),
                *(run.correct, run.first_effect, run.diagnosed_after_s, run.recovered, run.steps_lost),
                *(run.log_files, run.log_lines, run.seconds, run.as_expected, run.problem, run.folder),
            )
        )
    return _table("runs", OF_A_RUN, rows)


def series_table(run: RunRecord) -> ReportTable:
    """All metrics of a run; the second figure shows a part of them."""
    start = measures.start_of(run) or 0.0
    rows = [(name, t, t - start, value) for name, values in run.series.items() for t, value in values]
    return _table(f"series_{run.scenario}_{run.profile}", ("name", "t", "since_injection_s", "value"), rows)


def moments_table(run: RunRecord) -> ReportTable:
    """Data of the first figure: the path of the verdict, and the timeline."""
    path = run.diagnosed.path if run.diagnosed is not None else ()
    events = [("path", moment) for moment in path] + [("timeline", moment) for moment in run.timeline]
    rows = [(source, moment.t, moment.process, moment.what) for source, moment in events]
    return _table(f"moments_{run.scenario}_{run.profile}", ("of", "t", "process", "what"), rows)


def cases_table(campaign: CampaignFile) -> ReportTable:
    others = [method for method in methods_of(campaign) if method != OURS]
    scores = [(method, what) for method in others for what in ("top1", "verdict_s")]
    rows = []
    for case in campaign.cases:
        first = next(iter(case.diagnoses[OURS].causes), None)
        rows.append(
            (
                *(case.number, case.what.value, case.benign, case.counted.value, case.why_not, case.trouble),
                " ".join(fault["target"] for fault in case.faults),
                " ".join(fault["kind"] for fault in case.faults),
                "; ".join(fault["mechanism"] for fault in case.faults),
                min((fault["start"] for fault in case.faults), default=None),
                *((first.process, first.kind.value) if first else (None, None)),
                *(case.ours.top1, case.ours.top3, case.ours.every, case.ours.path),
                *(case.ours.onset_error_s, case.ours.verdict_s, case.files, case.lines),
                *(getattr(case.scores[method], what) for method, what in scores),
            )
        )
    return _table("cases", (*OF_A_CASE, *(f"{method}_{what}" for method, what in scores)), rows)


def _table(name: str, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> ReportTable:
    cells = tuple(tuple("" if value is None else str(value) for value in row) for row in rows)
    return ReportTable(name=name, caption="", head=tuple(head), rows=cells)
