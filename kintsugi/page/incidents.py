"""Incidents of a run as stories: what broke, what was noticed, decided and replaced, what it cost, and the cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from kintsugi.diagnosis.format import earlier
from kintsugi.diagnosis.verdict import Cause, Diagnosis, Evidence
from kintsugi.journal.facts import (
    Fact,
    IncidentClosed,
    IncidentOpened,
    ProcessJoined,
    RolledBack,
    StrategyChosen,
    TermStarted,
)
from kintsugi.page.journal_tail import JournalTail, TimedFact
from kintsugi.page.line_files import window
from kintsugi.page.schema import (
    Alternative,
    CausePage,
    EvidenceQuote,
    IncidentDetail,
    IncidentList,
    IncidentRow,
    LogLink,
    OtherLoss,
    PathPoint,
    StoryLine,
)
from kintsugi.run_folder.incidents import (
    AFTER_S,
    BEFORE_S,
    INTERRUPTED,
    FaultRelation,
    IncidentHistory,
    ProcessLoss,
    ReportedFault,
    headline,
)
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.telemetry.events import FaultHandled, FaultSeen, ProcessBegan, ProcessGone, Record, records_in
from kintsugi.telemetry.format import format_event
from kintsugi.telemetry.jsonl_log import lines_in, paths_of
from kintsugi.types import Role, process_id

MOST_BYTES = 4 << 20
MOST_LINES = 60
"""Sentences of one story; an incident in which everything fails again and again is cut."""
MASTER = process_id(Role.MASTER, 0)
_VERBS = (
    "was",
    "is",
    "has",
    "had",
    "did",
    "does",
    "needs",
    "got",
    "gave",
    "computed",
    "waits",
    "takes",
    "ended",
)


def incident_row(incident: IncidentHistory, *, is_running: bool) -> IncidentRow:
    """Return an incident for a list."""
    since = incident.time or None
    until = None if since is None or incident.seconds is None else since + incident.seconds
    return IncidentRow(
        id=incident.incident,
        title=title(incident),
        since=since,
        until=until,
        cost_s=incident.seconds,
        state=state(incident, is_running=is_running),
        step=incident.step,
        strategy=incident.strategy,
        processes=tuple(dict.fromkeys(loss.process for loss in incident.losses)),
    )


def title(incident: IncidentHistory) -> str:
    """Return the cause in one sentence: that of the diagnosis where there is one."""
    if incident.diagnosed:
        # Of equally likely ones, the first that happened.
        found = max(incident.diagnosed, key=lambda found: (found.confidence, -found.onset))
        return spoken(found.summary, found.process)
    return about(headline(incident.cause.message), incident.cause.process)


def about(message: str, process: str) -> str:
    """Return a message with the process that it is about."""
    return spoken(message if message.startswith(process) else f"{process}: {message}", process)


def spoken(summary: str, process: str) -> str:
    """Return a summary as a sentence, without the colon between subject and verb.

    >>> spoken("model-1: was killed by SIGKILL", "model-1")
    'model-1 was killed by SIGKILL'
    >>> spoken("model-1: the disk of its host has 1.0 MB left", "model-1")
    'model-1: the disk of its host has 1.0 MB left'
    """
    rest = summary.removeprefix(f"{process}: ")
    return f"{process} {rest}" if rest != summary and rest.split(" ", 1)[0] in _VERBS else summary


def state(incident: IncidentHistory, *, is_running: bool) -> str:
    if incident.is_open:
        return "recovering" if is_running else "unresolved"
    return "recovered" if incident.mended_step is not None else "unresolved"


def incident_list(journal: JournalTail, *, is_running: bool) -> IncidentList:
    report = journal.report()
    others = [OtherLoss(process=loss.process, text=_replaced(loss)) for loss in report.other_losses]
    others += [
        OtherLoss(process=each.process, text=spoken(each.summary, each.process))
        for each in report.other_diagnoses
    ]
    return IncidentList(
        incidents=tuple(incident_row(each, is_running=is_running) for each in report.incidents),
        others=tuple(others),
        problems=journal.all_problems(),
    )


def incident_detail(
    run_dir: Path,
    journal: JournalTail,
    number: int,
    *,
    is_running: bool,
    computed: tuple[Cause, ...] | None,
) -> IncidentDetail | None:
    """Return the story and the diagnosis of an incident; None if there is no such incident.

    `computed`: causes of a diagnosis that was made for this page, where the watcher has recorded none.
    """
    incident = next((each for each in journal.report().incidents if each.incident == number), None)
    if incident is None:
        return None
    row = incident_row(incident, is_running=is_running)
    causes = recorded_causes(run_dir, incident) or list(computed or ())
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    return IncidentDetail(
        **fields,
        summary=_summary(incident, row),
        story=tuple(story(run_dir, journal, incident))[:MOST_LINES],
        diagnosis=cause_page(causes, broken=_broken_processes(incident)) if causes else None,
        no_diagnosis="" if causes else _no_diagnosis(computed),
        timing=incident.timing,
        steps_undone=incident.steps_undone,
        groups_again=incident.groups_again,
        problems=journal.all_problems(),
    )


def _no_diagnosis(computed: tuple[Cause, ...] | None) -> str:
    if computed is None:
        return "the diagnosis of this incident is being computed"
    return "the records of the run name no cause for this incident"


def recorded_causes(run_dir: Path, incident: IncidentHistory) -> list[Cause]:
    """Return the causes that the watcher recorded for an incident, the most likely first."""
    times = [fault.time for fault in incident.faults if fault.time]
    named = {(found.process, found.kind) for found in incident.diagnosed}
    if not times:
        return []
    try:
        known = earlier(run_dir, before=float("inf"))
    except OSError:
        return []
    near = [cause for _, cause in known if min(times) - BEFORE_S <= cause.onset <= max(times) + AFTER_S]
    first = [cause for cause in near if (cause.process, cause.kind.value) in named]
    rest = [cause for cause in near if cause not in first]
    return [
        *sorted(first, key=lambda cause: -cause.confidence),
        *sorted(rest, key=lambda cause: -cause.confidence),
    ]


def _broken_processes(incident: IncidentHistory) -> set[str]:
    return {loss.process for loss in incident.losses} | {fault.process for fault in incident.faults}


def cause_page(causes: list[Cause], *, broken: set[str]) -> CausePage:
    """Return the first cause with its path and evidence; the others are alternatives, or further faults of the same
    incident where their process broke, too."""
    cause = causes[0]
    return CausePage(
        cause=spoken(cause.summary, cause.process),
        process=cause.process,
        host=cause.host,
        kind=cause.kind.value,
        onset=cause.onset,
        certainty=cause.confidence,
        path=tuple(PathPoint(time=hop.time, component=hop.process, text=hop.what) for hop in cause.path),
        evidence=tuple(map(_quote, cause.evidence)),
        alternatives=tuple(
            Alternative(
                cause=spoken(other.summary, other.process),
                process=other.process,
                kind=other.kind.value,
                certainty=other.confidence,
                also=other.process in broken and other.process != cause.process,
            )
            for other in causes[1:]
        ),
        ruled_out=cause.rules_out,
        advice=cause.advice,
    )


def _quote(evidence: Evidence) -> EvidenceQuote:
    name = evidence.source.rpartition("/")[2].partition(".")[0]
    process = name if "/" in evidence.source else MASTER
    return EvidenceQuote(text=evidence.quote, process=process, line=evidence.source, time=evidence.time)


def _summary(incident: IncidentHistory, row: IncidentRow) -> str:
    """Return what followed from the incident in two sentences, for a reader that sees nothing else."""
    replaced = list(dict.fromkeys(loss.process for loss in incident.losses if loss.replacement))
    lost = list(dict.fromkeys(loss.process for loss in incident.losses if not loss.replacement))
    parts = [f"It happened after step {incident.step}."]
    if replaced:
        parts.append(f"{_listed(replaced)} {'was' if len(replaced) == 1 else 'were'} replaced.")
    if lost and row.state != "recovering":
        parts.append(f"{_listed(lost)} {'was' if len(lost) == 1 else 'were'} not replaced.")
    if row.state == "recovered":
        undone = incident.steps_undone
        steps = (
            f"{undone} step{'' if undone == 1 else 's'} had to be repeated" if undone else "no step was lost"
        )
        parts.append(f"The run went on as before after {incident.seconds or 0.0:.1f} s, and {steps}.")
    elif row.state == "recovering":
        parts.append("The run is recovering.")
    else:
        ended = "was interrupted" if incident.run_ended in ("", INTERRUPTED) else incident.run_ended
        parts.append(f"The run {ended} before it had recovered.")
    return " ".join(parts)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def story(run_dir: Path, journal: JournalTail, incident: IncidentHistory) -> list[StoryLine]:
    """Return the sentences of an incident in the order of time; those without a time of their own come last."""
    since = (incident.time or 0.0) - BEFORE_S
    until = (incident.time or 0.0) + (incident.seconds or 60.0) + AFTER_S
    facts = journal.facts_between(since, until)
    begin, end = _bounds(facts, incident)
    effects = list(_effects(run_dir, since=begin - 1.0, until=end + 1.0, incident=incident))
    broken = list(_broken(run_dir, incident, since=since, until=until))
    lines = [
        *broken,
        *_found(incident, but={line.process for line in broken}),
        *_noticed(incident, effects),
        *_decided(run_dir, incident, [each for each in facts if begin <= (each.time or 0.0) <= end], end=end),
        *_said(run_dir, since=begin - 6.0, until=end + 1.0, incident=incident),
        *_diagnosed(run_dir, incident),
        _cost(incident, end=end),
    ]
    ordered = sorted(lines, key=lambda line: (line.time is None, line.time or 0.0))
    return list(_once(ordered))


def _bounds(facts: list[TimedFact], incident: IncidentHistory) -> tuple[float, float]:
    """Return when the incident was opened and closed."""
    opened = closed = None
    for each in facts:
        match each.fact:
            case IncidentOpened(incident=number) if number == incident.incident:
                opened = each.time
            case IncidentClosed(incident=number) if number == incident.incident:
                closed = each.time
    begin = (
        min(time for time in (opened, incident.time or None) if time is not None)
        if opened or incident.time
        else 0.0
    )
    return begin, closed or begin + (incident.seconds or 60.0)


def _once(lines: Iterable[StoryLine]) -> Iterator[StoryLine]:
    seen: set[str] = set()
    for line in lines:
        if line.text not in seen:
            seen.add(line.text)
            yield line


def _broken(run_dir: Path, incident: IncidentHistory, *, since: float, until: float) -> Iterator[StoryLine]:
    """Yield the ends of processes as their agents saw them: a killed process records nothing itself. An agent may
    record an end after the master has noticed it; the end still came first."""
    names = _broken_processes(incident)
    for path in RunFolder(run_dir).events_folder.glob("*.jsonl"):
        if "." in path.stem or not path.stem.startswith((Role.AGENT.value, Role.LAUNCHER.value)):
            continue
        for record in _records(run_dir, path.stem, since=since, until=until):
            event = record.event
            if isinstance(event, ProcessGone) and event.of in names and not event.ordered:
                oom = ", because memory was exhausted" if event.oom else ""
                noticed = [
                    fault.time for fault in incident.faults if fault.process == event.of and fault.time
                ]
                yield StoryLine(
                    time=min([record.stamp.time, *(time - 1e-3 for time in noticed)]),
                    text=f"{event.of} (pid {event.pid}) {_was(event.how)}{oom}.",
                    process=event.of,
                    kind="broke",
                    link=LogLink(process=path.stem, line=str(RELATIVE.events_file(path.stem))),
                )


def _was(how: str) -> str:
    return f"was {how}" if how.startswith("killed") else how


def _noticed(incident: IncidentHistory, effects: list[tuple[str, str]]) -> Iterator[StoryLine]:
    """Yield what the master noticed, each with its effect on the run. A consequence without a time of its own, as of a
    process that was stopped in order to replace it, tells nothing new about a process that was noticed before."""
    timed = {fault.process for fault in incident.faults if fault.time}
    for fault in incident.faults:
        if not fault.time and fault.relation is not FaultRelation.CAUSE and fault.process in timed:
            continue
        also = "also " if fault.relation is FaultRelation.ALSO else ""
        text = _sentence(f"The master {also}noticed: {about(headline(fault.message), fault.process)}")
        effect = next((effect for process, effect in effects if process == fault.process), "")
        yield StoryLine(
            time=fault.time or None,
            text=f"{text} {effect}".strip(),
            process=fault.process,
            kind="noticed",
            link=LogLink(process=MASTER, line=str(RELATIVE.events_file(MASTER))),
        )


def _effects(
    run_dir: Path, *, since: float, until: float, incident: IncidentHistory
) -> Iterator[tuple[str, str]]:
    """Yield the processes of faults, each with the effect on the run that the master reported."""
    names = _broken_processes(incident)
    for record in _records(run_dir, MASTER, since=since, until=until):
        event = record.event
        if isinstance(event, FaultHandled) and event.of in names:
            effect = _effect(event.message, incident.faults)
            if effect:
                yield event.of, effect


def _effect(message: str, faults: tuple[ReportedFault, ...]) -> str:
    """Return the part of a message behind the fault itself, without the role: `Training stops until …`."""
    for fault in faults:
        rest = message.removeprefix(f"{fault.message}. ")
        if rest != message:
            role, _, effect = rest.partition(": ")
            text = effect if " " not in role else rest
            return _sentence(text[:1].upper() + text[1:])
    return ""


def _decided(
    run_dir: Path, incident: IncidentHistory, facts: list[TimedFact], *, end: float
) -> Iterator[StoryLine]:
    """Yield decisions and replacements, with the times of the facts where they were recorded.

    Otherwise a decision has the time of the first fault, and a replacement that of its first event.
    """
    fallback = min((fault.time for fault in incident.faults if fault.time), default=None)
    chosen: dict[str, float | None] = {}
    for each in facts:
        if isinstance(each.fact, StrategyChosen) and each.fact.incident == incident.incident:
            chosen.setdefault(each.fact.strategy, each.time)
    for choice in incident.choices:
        time = chosen.get(choice.strategy, fallback)
        times = f" ({choice.times} times)" if choice.times > 1 else ""
        text = f"The master decided to {choice.strategy}: {choice.reason}{times}."
        yield StoryLine(time=time, text=text, process=MASTER, kind="decided")
        if choice.alternatives:
            text = f"Not chosen: {'; '.join(choice.alternatives)}."
            yield StoryLine(time=time, text=text, process=MASTER, kind="rejected")
    lost = {loss.process: loss for loss in incident.losses}
    joined = {_joined(each.fact): each.time for each in facts if _joined(each.fact)}
    for process, loss in lost.items():
        time = joined.get(process) or _born(run_dir, loss, since=incident.time, until=end)
        yield StoryLine(
            time=time,
            text=f"{_replaced(loss)}.",
            process=process,
            kind="replaced",
            link=_log(process),
        )
    for each in facts:
        match each.fact:
            case RolledBack(step=step, reason=reason):
                yield StoryLine(
                    time=each.time,
                    text=f"The run went back to step {step}: {reason}.",
                    process=MASTER,
                    kind="decided",
                )
            case TermStarted(term=term, adopting=True):
                text = f"A new master took over (term {term}) and adopted the running processes."
                yield StoryLine(time=each.time, text=text, process=MASTER, kind="replaced")


def _born(run_dir: Path, loss: ProcessLoss, *, since: float, until: float) -> float | None:
    """Return the time of the first event of a replacement."""
    is_master = loss.process == MASTER
    # The end of a master is noticed by the next one, which has an incarnation of its own.
    begin = since - BEFORE_S if is_master else since
    for record in _records(run_dir, loss.process, since=begin, until=until + 1.0):
        event = record.event
        if isinstance(event, ProcessBegan) and (is_master or event.incarnation == loss.replacement):
            return record.stamp.time
    return None


def _joined(fact: Fact) -> str:
    return fact.peer.process if isinstance(fact, ProcessJoined) else ""


def _log(process: str) -> LogLink:
    return LogLink(process=process, line=str(RELATIVE.log_file(process)))


def _replaced(loss: ProcessLoss) -> str:
    was = f"{loss.process} (pid {loss.pid})" if loss.pid else loss.process
    if not loss.replacement:
        return f"{was} was lost and not replaced"
    now = f"pid {loss.replacement_pid}" if loss.replacement_pid else "a new process"
    return f"{was} was replaced by {now}"


def _said(run_dir: Path, *, since: float, until: float, incident: IncidentHistory) -> Iterator[StoryLine]:
    """Yield the faults that processes recorded themselves."""
    for process in sorted(_broken_processes(incident) - {MASTER}):
        for record in _records(run_dir, process, since=since, until=until):
            if isinstance(record.event, FaultSeen):
                yield StoryLine(
                    time=record.stamp.time,
                    text=_sentence(f"{process} said: {headline(format_event(record.event))}"),
                    process=process,
                    kind="broke",
                    link=LogLink(process=process, line=str(RELATIVE.events_file(process))),
                )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def _diagnosed(run_dir: Path, incident: IncidentHistory) -> Iterator[StoryLine]:
    """Yield the causes that the diagnosis named for processes that broke, at the time at which it named them; the
    others are among the alternatives."""
    named = _times_of_diagnoses(run_dir)
    broken = _broken_processes(incident)
    for found in incident.diagnosed:
        if found.process in broken:
            cause = spoken(found.summary, found.process)
            yield StoryLine(
                time=named.get((found.process, found.kind, round(found.onset / 10)), found.onset),
                text=f"The diagnosis named the cause: {cause} ({found.confidence:.0%} sure).",
                process=found.process,
                kind="diagnosed",
            )


def _found(incident: IncidentHistory, *, but: set[str]) -> Iterator[StoryLine]:
    """Yield the causes in processes that did not end, as of a stopped one, at their onset."""
    for found in incident.diagnosed:
        if found.process in _broken_processes(incident) - but:
            text = f"{spoken(found.summary, found.process)}, as the diagnosis found out later."
            yield StoryLine(time=found.onset, text=text, process=found.process, kind="broke")


def _times_of_diagnoses(run_dir: Path) -> dict[tuple[str, str, int], float]:
    """Return process, kind and onset of each cause → time of the first diagnosis that named it."""
    found: dict[tuple[str, str, int], float] = {}
    paths = (path for path in paths_of(RunFolder(run_dir).diagnoses_file) if path.is_file())
    for line in chain.from_iterable(lines_in(path.read_bytes()) for path in paths):
        try:
            diagnosis = msgspec.json.decode(line, type=Diagnosis)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # A killed watcher may leave part of a line.
            continue
        for cause in diagnosis.causes:
            found.setdefault((cause.process, cause.kind.value, round(cause.onset / 10)), diagnosis.at)
    return found


def _cost(incident: IncidentHistory, *, end: float) -> StoryLine:
    undone = f"{incident.steps_undone or 'no'} step{'' if incident.steps_undone == 1 else 's'} undone"
    again = f"{incident.groups_again or 'no'} group{'' if incident.groups_again == 1 else 's'} sampled again"
    if incident.mended_step is not None:
        took = f"the incident is over after {incident.seconds or 0.0:.1f} s"
        text = f"Step {incident.mended_step} was committed as fast as before: {took}, {undone}, {again}."
        return StoryLine(time=end, text=text, process=MASTER, kind="resumed")
    if incident.run_ended:
        ended = "was interrupted" if incident.run_ended == INTERRUPTED else incident.run_ended
        return StoryLine(time=None, text=f"The run {ended}: {undone}, {again}.", process=MASTER, kind="cost")
    return StoryLine(time=None, text=f"Not over yet: {undone}, {again} so far.", process=MASTER, kind="cost")


def _records(run_dir: Path, process: str, *, since: float, until: float) -> Iterator[Record]:
    lines, _ = window(
        RunFolder(run_dir).events_file(process), since=since, until=until, most_bytes=MOST_BYTES
    )
    yield from records_in(line for line in lines if b'"Span"' not in line)
