"""What people made of the master's log alone, where somebody was timed on the kit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kintsugi.lab.kit import Attempt
from kintsugi.lab.report.document import MISSING, Table
from kintsugi.lab.report.measures import seconds, share
from kintsugi.lab.report.plan import scenario_named


def people_table(attempts: Sequence[Attempt]) -> Table:
    """By run, and in all."""
    runs = sorted({(scenario_named(each.scenario), each.profile) for each in attempts})
    groups = [
        (
            f"{name} {profile}",
            [a for a in attempts if (scenario_named(a.scenario), a.profile) == (name, profile)],
        )
        for name, profile in runs
    ]
    rows = tuple((name, *_row(group)) for name, group in [*groups, ("all", list(attempts))])
    people = len({attempt.person for attempt in attempts})
    return Table(
        name="people",
        caption=f"{people} {'person' if people == 1 else 'people'} who had the controller's log and nothing else.",
        head=("run", "answers", "right", "misdiagnosed", "gave up", "time to answer, median"),
        rows=rows,
        note="Right: the process and the kind that were injected. In parentheses: how many of how many, and "
        "Wilson's 95 % interval.",
    )


def _row(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    times = [attempt.seconds for attempt in attempts if attempt.seconds is not None]
    return (
        str(len(attempts)),
        str(share(attempt.correct for attempt in attempts)),
        str(share(attempt.said and not attempt.correct for attempt in attempts)),
        str(sum(not attempt.said for attempt in attempts)),
        seconds(statistics.median(times)) if times else MISSING,
    )
