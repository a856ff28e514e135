"""Results of a blind campaign: all methods on the same faults, per case and in total."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from kintsugi.errors import StorageError
from kintsugi.lab.campaign.cases import LEAST_FAULT_S, WINDOW_S, CaseClass
from kintsugi.lab.campaign.records import METHODS, OURS, CampaignFile, CaseRecord, CountedAs
from kintsugi.lab.report.document import MISSING, ReportTable
from kintsugi.lab.report.measures import Share, quantile, seconds, share
from kintsugi.lab.scenarios.records import CAMPAIGN_FILE

MOST_MISTAKES = 25


def faulty(campaign: CampaignFile) -> list[CaseRecord]:
    """Return the cases with a fault that had an effect."""
    return _counted_as(campaign, CountedAs.FAULT)


def faint(campaign: CampaignFile) -> list[CaseRecord]:
    """Return the cases with a fault that had no effect."""
    return _counted_as(campaign, CountedAs.FAINT)


def quiet(campaign: CampaignFile) -> list[CaseRecord]:
    """Return the cases without a fault."""
    return _counted_as(campaign, CountedAs.QUIET)


def _counted_as(campaign: CampaignFile, what: CountedAs) -> list[CaseRecord]:
    return [case for case in campaign.cases if case.counted is what]


def methods_of(campaign: CampaignFile) -> list[str]:
    used = {method for case in campaign.cases for method in case.scores}
    return [method for method in METHODS if method in used]


class AccuracyCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Times at which a method had named the right causes, in order, out of `cases` cases."""

    method: str
    label: str
    seconds: tuple[float, ...]
    cases: int


def read_campaign(folder: Path) -> CampaignFile | None:
    """Read the campaign of a folder; None where there is none."""
    path = folder / CAMPAIGN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CampaignFile)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise StorageError(f"{path}: not what `kintsugi lab campaign` writes: {error}") from error


def top1(campaign: CampaignFile, method: str) -> Share:
    return share(case.scores[method].top1 for case in faulty(campaign))


def abstained(campaign: CampaignFile, method: str) -> Share:
    return share(not case.scores[method].said for case in quiet(campaign))


def misdiagnosed(campaign: CampaignFile, method: str) -> Share:
    """Return the share of all cases with a wrong answer: a cause other than the fault, or any cause where there was no
    fault."""
    cases = [*faulty(campaign), *faint(campaign), *quiet(campaign)]
    return share(case.scores[method].said and not case.scores[method].top1 for case in cases)


def curves(campaign: CampaignFile) -> list[AccuracyCurve]:
    cases = faulty(campaign)
    found = []
    for method in methods_of(campaign):
        named = [case.scores[method] for case in cases if case.scores[method].top1]
        times = tuple(sorted(max(0.0, each.verdict_s) for each in named if each.verdict_s is not None))
        found.append(AccuracyCurve(method=method, label=METHODS[method], seconds=times, cases=len(cases)))
    return found if cases else []


def methods_table(campaign: CampaignFile) -> ReportTable:
    cases, methods = faulty(campaign), methods_of(campaign)
    two = [case for case in cases if case.what is CaseClass.TWO]

    def for_each(value: Callable[[str], object]) -> list[str]:
        return [str(value(method)) for method in methods]

    def of_scores(name: str) -> list[str]:
        return for_each(lambda method: share(getattr(case.scores[method], name) for case in cases))

    def time(fraction: float) -> list[str]:
        return for_each(lambda method: _quantile((case.scores[method].verdict_s for case in cases), fraction))

    def onset(method: str) -> str:
        right = (case.scores[method] for case in cases if case.scores[method].top1)
        return _quantile((each.onset_error_s for each in right), 0.5)

    def to_read(values: Sequence[int]) -> list[str]:
        median = quantile([float(value) for value in values], 0.5)
        read = MISSING if median is None else f"{median:,.0f}"
        return for_each(lambda method: "–" if method == OURS else read)

    return ReportTable(
        name="campaign",
        caption=f"Blind campaign with seed {campaign.seed}: {len(campaign.cases)} cases on "
        f"{campaign.clusters} clusters in {seconds(campaign.seconds)}. {len(cases)} with a fault that had an "
        f"effect, {len(faint(campaign))} with one that had none, {len(quiet(campaign))} healthy or slow for a "
        f"benign reason; {len(_counted_as(campaign, CountedAs.NOT))} could not be carried out and did not count.",
        head=("", *for_each(lambda method: METHODS[method])),
        rows=(
            ("top-1 on (process, kind)", *of_scores("top1")),
            ("top-3 on (process, kind)", *of_scores("top3")),
            ("path right", *of_scores("path")),
            (
                "both named by the end of the case, of two concurrent faults",
                *for_each(lambda method: share(case.scores[method].every for case in two)),
            ),
            ("abstained where nothing was wrong", *for_each(lambda method: abstained(campaign, method))),
            ("misdiagnosis rate", *for_each(lambda method: misdiagnosed(campaign, method))),
            ("time to verdict, median", *time(0.5)),
            ("time to verdict, 95th percentile", *time(0.95)),
            ("onset error, median", *for_each(onset)),
            ("log files to read, median", *to_read([case.files for case in cases])),
            ("log lines to read, median", *to_read([case.lines for case in cases])),
        ),
        note="In parentheses: counts and Wilson's 95 % interval. Times are from the "
        "beginning of the fault, over the cases in which the method said anything; for logs it is when the "
        "line was written, not when it was read. With a diagnosis, no logs have to be read. A case "
        f"ends with the verdict of the diagnosis, but not before its fault has lasted {seconds(LEAST_FAULT_S)}, "
        f"or after {seconds(WINDOW_S)} without one; logs are read up to its end. Two concurrent faults: the first "
        "answer has to be one of them. Where a fault had no effect, naming something else is a misdiagnosis. "
        "A case begins when the diagnosis names no cause. " + _alarms(campaign),
    )


def _alarms(campaign: CampaignFile) -> str:
    """Describe false alarms between cases, which are not part of any share."""
    alarms = campaign.false_alarms
    if not alarms:
        return "There were no false alarms between cases."
    named = "; ".join(f"{', '.join(each.said)} before case {each.before}" for each in alarms)
    return (
        f"False alarms between cases, while the run made steps without a fault, are in no share of this table: "
        f"**{len(alarms)}** ({named})."
    )


def kinds_table(campaign: CampaignFile) -> ReportTable:
    """Accuracy by fault type."""
    methods = methods_of(campaign)
    kinds = sorted({fault["kind"] for case in faulty(campaign) for fault in case.faults})
    rows = []
    for kind in kinds:
        cases = [case for case in faulty(campaign) if any(fault["kind"] == kind for fault in case.faults)]
        right = (_counted(share(case.scores[method].top1 for case in cases)) for method in methods)
        verdict = _quantile((case.ours.verdict_s for case in cases), 0.5)
        rows.append((kind, str(len(cases)), *right, verdict))
    return ReportTable(
        name="campaign_kinds",
        caption="First answers that were right, by what was injected; a case of two faults is in both of "
        "its rows.",
        head=("injected", "cases", *(METHODS[method] for method in methods), "time to our verdict, median"),
        rows=tuple(rows),
    )


def quiet_table(campaign: CampaignFile) -> ReportTable | None:
    """Cases that look like a fault but are none."""
    names = sorted({case.benign or case.what.value for case in quiet(campaign)})
    if not names:
        return None
    methods = methods_of(campaign)
    rows = []
    for name in names:
        cases = [case for case in quiet(campaign) if (case.benign or case.what.value) == name]
        silent = (_counted(share(not case.scores[method].said for case in cases)) for method in methods)
        rows.append((name.replace("_", " "), str(len(cases)), *silent))
    return ReportTable(
        name="campaign_quiet",
        caption="Cases in which nothing was wrong, and how often nothing was said.",
        head=("what happened", "cases", *(METHODS[method] for method in methods)),
        rows=tuple(rows),
    )


def mistakes_table(campaign: CampaignFile) -> ReportTable | None:
    """List every case that the diagnosis got wrong, so that the reader can check."""
    wrong = [case for case in faulty(campaign) if not case.ours.top1]
    wrong += [case for case in faint(campaign) if case.ours.said and not case.ours.top1]
    wrong += [case for case in quiet(campaign) if case.ours.said]
    if not wrong:
        return None
    rows = []
    for case in wrong[:MOST_MISTAKES]:
        done = ", ".join(f"`{fault['target']}` {fault['kind']}" for fault in case.faults)
        said = ", ".join(f"`{cause.process}` {cause.kind}" for cause in case.diagnoses[OURS].causes[:3])
        among = "yes" if case.ours.top3 else "no"
        rows.append(
            (str(case.number), case.what.value, done or case.benign or "nothing", said or "nothing", among)
        )
    rest = len(wrong) - len(rows)
    return ReportTable(
        name="campaign_mistakes",
        caption="Cases that the diagnosis got wrong: what was done, and what it said, the most likely first.",
        head=("case", "class", "done", "said", "among the first three"),
        rows=tuple(rows),
        note=f"{rest} more are in `data/cases.csv`." if rest else "",
    )


def _counted(counted: Share) -> str:
    return f"{counted.part} of {counted.whole}"


def _quantile(values: Iterable[float | None], fraction: float) -> str:
    known = [value for value in values if value is not None]
    return seconds(quantile(known, fraction)) if known else "–"
