"""Text of findings about learning, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from kintsugi.learning_health.finding import LearningFinding, LearningReport


def format_report(report: LearningReport) -> str:
    """Format the findings, causes first, each with its evidence, consequences and advice."""
    lines = [f"{report.run}: learning, as of step {report.step}"]
    if not report.findings:
        lines.append(f"nothing to report: {report.abstained}")
    for number, finding in enumerate(report.findings, start=1):
        lines += ["", *_finding_lines(number, finding)]
    return "\n".join(lines)


def finding_line(finding: LearningFinding) -> str:
    """`equal_rewards since step 3: no group has different rewards …`, for a live view and for alerts."""
    return f"{finding.kind.value} since step {finding.since_step}: {finding.summary}"


def _finding_lines(number: int, finding: LearningFinding) -> Iterator[str]:
    yield f"{number}. {finding.kind.value}, {finding.confidence:.0%} sure"
    yield f"   {finding.summary}"
    yield f"   since    step {finding.since_step}"
    for index, evidence in enumerate(finding.evidence):
        head = "evidence" if index == 0 else "        "
        yield f"   {head} step {evidence.step}  {evidence.source}: {evidence.quote}"
    if finding.leads_to:
        yield f"   leads to {', '.join(kind.value for kind in finding.leads_to)}"
    yield f"   do       {finding.advice}"
