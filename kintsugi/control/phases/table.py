"""Phases of a run, the results that they report, and the transitions between them, as a table.

    python -m kintsugi.control.phases.table > docs/master.md

A phase never calls another phase. It reports a result, and the master looks up the next phase here. A pair of phase and
result that is not in `TRANSITIONS` is a programming error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum, StrEnum

import msgspec

from kintsugi.errors import Fault, StatesDiverged


class Phase(StrEnum):
    """Phase of a run, under the name that operators read."""

    STARTING = "starting"
    ADOPTING = "adopting"
    PREPARING = "preparing"
    COLLECTING = "collecting"
    TRAINING = "training"
    COMMITTING = "committing"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    RECOVERING = "recovering"
    ENDING = "ending"
    ENDED = "ended"


_P = Phase

WORK: Mapping[Phase, str] = {
    _P.STARTING: "The agents start the planned processes, which register.",
    _P.ADOPTING: "A new master asks the ranks where they stand, and takes their process group over.",
    _P.PREPARING: "The ranks form their first process group, or start the next stage of the recipe.",
    _P.COLLECTING: "Rollout workers generate and score groups until the oldest ones fill a batch.",
    _P.TRAINING: "Every rank computes the model calls of the step; their states are compared.",
    _P.COMMITTING: "The step is journaled, and every rank adopts it.",
    _P.PUBLISHING: "Ranks copy the new weights into publish buffers; servers load them.",
    _P.EVALUATING: "Held-out problems are answered at the current version.",
    _P.SAVING: "One rank is asked for a durable checkpoint. Only the last one of a run or session is waited for.",
    _P.RECOVERING: "The ranks return to the last committed step (`docs/recovery.md`).",
    _P.ENDING: "One rank hashes the final weights.",
    _P.ENDED: "The summary is written, and every process shuts down.",
}
"""Work of each phase, in one sentence."""

ROLLOUT_PHASES = frozenset(Phase) - {_P.STARTING, _P.PREPARING, _P.ENDING, _P.ENDED}
"""Phases in which groups are handed to rollout workers."""


class PhaseResult(StrEnum):
    """Reason to leave a phase, or to stay in it."""

    RUNNING = "the phase has not finished"
    UNRECOVERABLE = "a fault was found that the run cannot survive"
    DONE = "the phase has done its work"
    RECOVERED = "the ranks form one process group at the committed step"
    ADOPTED = "a new master has adopted the processes of its predecessor"
    CONTINUED = "the ranks are one process group and have begun the next step"
    BROKEN = "the ranks are not one process group at the committed step"
    RANK_LOST = "a rank was lost"
    RANK_FAILED = "a rank could not do what was requested"
    DIVERGED = "the state of a rank or of the servers differs from the committed one"
    FAILED = "the grace period after an unrecoverable fault is over"
    STOPPED = "a stop was requested before the servers had loaded any weights"


_R = PhaseResult


class PhaseReport(msgspec.Struct, frozen=True):
    """Result of a phase, with the data that the next one needs."""

    result: PhaseResult
    batch: tuple[str, ...] = ()
    """Tickets of the batch that was collected."""
    blocks: tuple[int, ...] | None = None
    """Block of shards of each rank, in a step that the ranks have begun under the last master."""
    process: str = ""
    """Rank that failed or diverged."""
    problem: str = ""
    """Difference between the states that should be equal, or why the ranks are no group."""
    divergence: StatesDiverged | None = None
    """States of the ranks, if they differ after a training call."""
    fault: Fault | None = None
    """Fault behind the result."""


RUNNING = PhaseReport(_R.RUNNING)
DONE = PhaseReport(_R.DONE)


class Due(StrEnum):
    """Reason for the next phase once the weights of a step are current. The first that holds decides."""

    EVALUATION = "an evaluation is due"
    SAVE = "a checkpoint is due"
    END = "the last step is done"
    STOP = "a stop was requested"
    GROWTH = "a replacement rank waits to join the process group"
    STAGE = "the next step belongs to another stage"
    STEP = "none of these"


class Next(Enum):
    """Next phase that depends on the state of the run."""

    DUE = "see below"


AFTER_STEP: Mapping[Due, Phase] = {
    Due.EVALUATION: _P.EVALUATING,
    Due.SAVE: _P.SAVING,
    Due.END: _P.ENDING,
    Due.STOP: _P.ENDING,
    Due.GROWTH: _P.RECOVERING,
    Due.STAGE: _P.PREPARING,
    Due.STEP: _P.COLLECTING,
}
"""Next phase after PUBLISHING, EVALUATING and SAVING; `due.next_due` decides which reason holds."""


RANK_FAULTS = (_R.RANK_LOST, _R.RANK_FAILED, _R.DIVERGED)
"""Results after which the ranks have to form a group again."""


def _table() -> dict[tuple[Phase, PhaseResult], Phase | Next]:
    table: dict[tuple[Phase, PhaseResult], Phase | Next] = {
        (_P.STARTING, _R.DONE): _P.PREPARING,
        (_P.STARTING, _R.ADOPTED): _P.ADOPTING,
        (_P.ADOPTING, _R.RECOVERED): _P.PUBLISHING,
        (_P.ADOPTING, _R.CONTINUED): _P.TRAINING,
        (_P.ADOPTING, _R.BROKEN): _P.RECOVERING,
        (_P.PREPARING, _R.RECOVERED): _P.PUBLISHING,
        (_P.PREPARING, _R.DONE): _P.COLLECTING,
        (_P.COLLECTING, _R.DONE): _P.TRAINING,
        (_P.TRAINING, _R.DONE): _P.COMMITTING,
        (_P.COMMITTING, _R.DONE): _P.PUBLISHING,
        (_P.PUBLISHING, _R.DONE): Next.DUE,
        (_P.EVALUATING, _R.DONE): Next.DUE,
        (_P.SAVING, _R.DONE): Next.DUE,
        (_P.RECOVERING, _R.RECOVERED): _P.PUBLISHING,
        (_P.ENDING, _R.DONE): _P.ENDED,
    }
    for phase in Phase:
        if phase is _P.ENDED:
            continue
        if phase is not _P.STARTING:
            # A group that is not formed yet has lost nothing: PREPARING begins again.
            again = phase if phase is _P.PREPARING else _P.RECOVERING
            table |= dict.fromkeys([(phase, result) for result in RANK_FAULTS], again)
        table[phase, _R.FAILED] = _P.ENDED
    for phase in (_P.STARTING, _P.ADOPTING, _P.PREPARING, _P.PUBLISHING, _P.RECOVERING):
        table[phase, _R.STOPPED] = _P.ENDED
    return table


TRANSITIONS: Mapping[tuple[Phase, PhaseResult], Phase | Next] = _table()


def markdown() -> str:
    """Return the tables and the diagram, as `docs/master.md` has them."""
    ordered = sorted(TRANSITIONS, key=lambda pair: list(Phase).index(pair[0]))
    grouped: dict[tuple[PhaseResult, Phase | Next], list[Phase]] = {}
    for phase, result in ordered:
        grouped.setdefault((result, TRANSITIONS[phase, result]), []).append(phase)
    rows = [
        f"| {', '.join(phases)} | {result} | {_target(after)} |"
        for (result, after), phases in sorted(
            grouped.items(), key=lambda item: list(PhaseResult).index(item[0][0])
        )
    ]
    arrows = [
        f"    {phase} --> {TRANSITIONS[phase, result]}"
        for phase, result in ordered
        if isinstance(TRANSITIONS[phase, result], Phase)
        and result not in (*RANK_FAULTS, _R.FAILED, _R.STOPPED)
    ]
    choices = [f"    {phase} --> due" for (phase, _), after in TRANSITIONS.items() if after is Next.DUE]
    choices += [f"    due --> {after}" for after in dict.fromkeys(AFTER_STEP.values())]
    return "\n".join(
        [
            "# The master: phases and transitions",
            "",
            "Generated from the code by `python -m kintsugi.control.phases.table`; a test keeps it in step.",
            "",
            "| phase | work |",
            "|---|---|",
            *(f"| {phase} | {work} |" for phase, work in WORK.items()),
            "",
            "Rollout continues during every phase from collecting to recovering, as far ahead of training as the",
            "staleness bound allows. Processes that are not ranks are replaced without a change of phase.",
            "",
            "| phase | result | next phase |",
            "|---|---|---|",
            *rows,
            "",
            f"'{_R.RUNNING}' and '{_R.UNRECOVERABLE}' leave the phase as it is.",
            "An unrecoverable fault starts a grace period in which its root cause may still be reported;",
            "then the run ends.",
            "",
            "Once the weights of a step are current, the first reason that holds selects the next phase:",
            "",
            "| reason | next phase |",
            "|---|---|",
            *(f"| {reason} | {after} |" for reason, after in AFTER_STEP.items()),
            "",
            "Without early stops; the ways into recovery are a takeover and the growth of a smaller group:",
            "",
            "```mermaid",
            "stateDiagram-v2",
            f"    [*] --> {_P.STARTING}",
            *arrows,
            "    state due <<choice>>",
            *choices,
            f"    {_P.ENDED} --> [*]",
            "```",
            "",
        ]
    )


def _target(after: Phase | Next) -> str:
    return after.value if isinstance(after, Phase) else "the phase that is due (next table)"


if __name__ == "__main__":
    sys.stdout.write(markdown())
