"""What happened and needs no comparison: processes that ended or stand still, errors that name what broke. Pure.

The first failure counts. Of an error that says what it follows from, only the beginning is looked at; an end that the
run itself ordered is the run's answer to something, and not the cause; and whoever noticed that somebody is gone has
not broken.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from itertools import pairwise

from kintsugi.diagnosis.baseline import WARM_S
from kintsugi.diagnosis.evidence import MASTER, OVER, Bundle, End, Said, known_role
from kintsugi.diagnosis.findings import Finding
from kintsugi.diagnosis.jointly import NO_EPISODES, jointly
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.diagnosis.words import (
    CONSEQUENCES,
    is_of_the_users_code,
    kind_of,
    kind_of_fault,
    origin_of,
    processes_in,
    shortened,
    states_in,
)
from kintsugi.errors import Fault, root_first
from kintsugi.types import Role

OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""What a process brings on itself."""
BEFORE_END_S = 5.0
"""How far before its end a process is looked at for what led to it."""
FULL = 0.9
"""Of a memory limit: one who is killed so close to it was killed for it."""
RESTART_S = 2.5
"""An agent that was killed is back within this; one that was stopped is first waited for."""
TOLD_S = 3.0
"""Whoever sees an end tells of it within this."""
REPEATED = 60
"""Characters by which a message is known again."""
LINK = "the link from "
"""How an alert begins that somebody raises about its own uploads."""
TOLD_LATE, TOLD_AFTER_S = frozenset({FaultKind.HANDOVER, FaultKind.NETWORK_DELAY}), 1.0
"""Somebody waits so long before it tells that an answer, or an upload, does not come."""
NAMED_BY_ALERTS = frozenset({FaultKind.HANDOVER, FaultKind.SLOW, FaultKind.NUMERIC, FaultKind.NETWORK_DELAY})
"""Of these, an alert tells who broke; of the others, who raises it."""


def happenings(bundle: Bundle, *, since: float, at: float) -> list[Finding]:
    """All of [since, at]; of a run that is over, or was until it was resumed, errors only: everybody ends then."""
    until = min(at, bundle.over_since())
    ends = [end for end in (*bundle.ends, *_unwitnessed(bundle, at=at)) if since <= end.time <= until]
    found = [*_ends(bundle, ends), *_standing_still(bundle, since=since, until=until)]
    dead = {finding.process for finding in found}
    found += _alerts(bundle, since=since, until=until)
    found += _damage(bundle, since=since, until=until)
    found += jointly(bundle, since=since, until=until)
    found = [finding for finding in found if finding.until >= until or not bundle.is_over(finding.until)]
    return [*found, *_errors(bundle, since=since, until=at, dead=dead)]


def _unwitnessed(bundle: Bundle, *, at: float) -> Iterator[End]:
    """Processes that began again though nobody told of their end, as somebody would have by now: a launcher or an agent
    may have died with it."""
    overs = [phase.time for phase in bundle.phases if phase.name in OVER]
    for process, births in bundle.births.items():
        for (began, pid), (born, _) in pairwise(births):
            said_goodbye = any(began < time <= born for time in bundle.goodbyes.get(process, ()))
            ended_with_the_run = any(began < time <= born for time in overs)
            told = any(end.pid == pid and end.process == process for end in bundle.ends)
            if at - born < TOLD_S or said_goodbye or ended_with_the_run or told:
                continue
            seen = bundle.beats_in(process, -math.inf, born)
            last = seen[-1] if seen else born
            how = "is gone without a word, and was started again"
            if born - last > RESTART_S:
                how = "did not run any more, and was started again"
            yield End(last, process, pid, None, how, False, False, f"events/{process}.jsonl")


def _ends(bundle: Bundle, ends: list[End]) -> Iterator[Finding]:
    for end in ends:
        if end.ordered or end.status == 0:
            continue
        yield _end(bundle, end)


def _end(bundle: Bundle, end: End) -> Finding:
    quote = f"{end.process} (pid {end.pid}) {end.how}"
    was_killed = end.status is not None and end.status < 0
    kind, onset, what = FaultKind.KILLED, end.time, f"was {end.how}" if was_killed else end.how
    evidence = [Evidence(end.source, end.time, quote)]
    stopped = _stopped_before(bundle, end)
    memory = bundle.processes[end.process]["memory_share"].between(end.time - BEFORE_END_S, end.time)
    rules_out: tuple[str, ...] = ("an error of its own: it left no word of one",)
    if stopped is not None:
        kind, onset = FaultKind.STOPPED, stopped
        what = "was stopped, and ended by its agent when it did not go on"
        evidence.insert(0, Evidence(_figures(bundle, end.process), stopped, f"{end.process}: state T"))
        rules_out = ("a hang: a stopped process is not run at all",)
    elif end.oom or (end.status == -signal.SIGKILL and memory and max(memory) >= FULL):
        kind = FaultKind.MEMORY
        what = "was killed by the kernel because its memory was used up"
        if memory:
            share = f"{end.process}: {max(memory):.0%} of its memory limit"
            evidence.insert(0, Evidence(_figures(bundle, end.process), end.time, share))
        rules_out = ("somebody else's kill: the kernel counted one for want of memory",) if end.oom else ()
    elif end.status is None and "did not run" in end.how:
        kind, what = FaultKind.STOPPED, "did not run any more and was replaced"
    elif end.status is not None and (end.status > 0 or -end.status in OWN_SIGNALS):
        kind = FaultKind.CRASHED
        rules_out = ("a kill from outside: it ended by itself",)
        said = _last_words(bundle, end)
        if said is not None:
            kind = (kind_of_fault(said.fault) if said.fault else kind_of(said.message)) or kind
            onset = min(onset, said.time)
            what = f"ended with an error: {shortened(said.message)}"
            evidence.insert(0, Evidence(said.source, said.time, shortened(said.message)))
    return Finding(
        process=end.process,
        kind=kind,
        onset=onset,
        until=end.time,
        strength=0.95 if end.status is not None else 0.8,
        what=what,
        evidence=tuple(evidence),
        is_fact=True,
        rules_out=rules_out,
    )


def _stopped_before(bundle: Bundle, end: End) -> float | None:
    """Since when it was seen stopped, if it was when it ended."""
    seen = [
        (time, state)
        for time, state, pid in bundle.states.get(end.process, ())
        if pid == end.pid and time <= end.time and time >= end.time - BEFORE_END_S
    ]
    if not seen or seen[-1][1] not in "Tt":
        return None
    return _stop_onset(bundle, end.process, next(time for time, state in seen if state in "Tt"))


def _stop_onset(bundle: Bundle, process: str, seen: float) -> float:
    """It stopped after it last spoke."""
    beats = [beat.time for beat in bundle.beats.get(process, ()) if beat.time <= seen]
    return max(beats[-1], seen - 2.0) if beats else seen


def _last_words(bundle: Bundle, end: End) -> Said | None:
    """The error with which it ended, if it said one."""
    said = [
        each
        for each in bundle.faults
        if each.by == end.process and end.time - BEFORE_END_S <= each.time <= end.time + 1.0
    ]
    return said[-1] if said else None


def _standing_still(bundle: Bundle, *, since: float, until: float) -> Iterator[Finding]:
    """Stopped (T), or frozen: it exists, is not waiting for a disk, and neither runs nor wants to.

    A debugger or a shell stops a process for a moment; only one that also misses its heartbeats is told of.
    """
    for process, states in bundle.states.items():
        for begin, end in _silences(bundle, process, since=since, until=until):
            seen = [(time, state) for time, state, _ in states if begin - 0.5 <= time <= end]
            stopped = [time for time, state in seen if state in "Tt"]
            if stopped:
                yield _still(bundle, process, begin, max(stopped[-1], begin), "is stopped (state T)", 0.9)
            elif end - begin >= FROZEN_S and len(seen) > 1 and _is_frozen(bundle, process, begin, end):
                what = "exists and is not run at all: no processor time, and no heartbeat"
                yield _still(bundle, process, begin, end, what, 0.75)
            elif end - begin >= MUTE_S and _is_mute(bundle, process, begin, end):
                yield _mute(bundle, process, begin, end)


def _still(bundle: Bundle, process: str, begin: float, end: float, what: str, strength: float) -> Finding:
    quote = f"{process}: {what} for {end - begin:.1f} s"
    return Finding(
        process=process,
        kind=FaultKind.STOPPED,
        onset=begin,
        until=end,
        strength=strength,
        what=what,
        evidence=(Evidence(_figures(bundle, process), end, quote),),
        is_fact=True,
        rules_out=("a hang: it is not run at all", "a lack of processor: it does not wait for one"),
    )


def _is_mute(bundle: Bundle, process: str, begin: float, end: float) -> bool:
    """Whether it was seen alive all the time, and others of its host went on speaking: it is not the disk's silence."""
    seen = [time for time, state, _ in bundle.states[process] if begin < time <= end and state in "RS"]
    others = (
        beat.time
        for other, beats in bundle.beats.items()
        if other != process and bundle.host(other) == bundle.host(process)
        for beat in reversed(beats[-4:])
    )
    is_looked_at = len(seen) >= 3 and end - seen[-1] <= 1.6
    return is_looked_at and bundle.age_s(process, begin) > WARM_S and any(time > end - 1.2 for time in others)


def _mute(bundle: Bundle, process: str, begin: float, end: float) -> Finding:
    tracks = bundle.processes[process]
    used = tracks["cpu"].between(begin + 1.0, end)
    what = (
        f"has said nothing for {end - begin:.1f} s, though it is there and uses {max(used, default=0.0):.0%} of a "
        "processor: it hangs, or can not write down what it does"
    )
    return Finding(
        process=process,
        kind=FaultKind.HUNG,
        onset=begin,
        until=end,
        strength=0.7,
        what=what,
        evidence=(Evidence(_figures(bundle, process), end, f"{process}: {what}"),),
        rules_out=("a stop: it is run", "the disk: others there go on recording"),
    )


MUTE_S = 3.6
MISSED_S = 0.9
"""Heartbeats are half a second apart."""
FROZEN_S = 2.4


def _silences(bundle: Bundle, process: str, *, since: float, until: float) -> Iterator[tuple[float, float]]:
    """Times in which a process said nothing, the last one up to now."""
    beats = bundle.beats_in(process, since - 10.0, until)
    if not beats:
        return
    births = [born for born, _ in bundle.births.get(process, ())]
    for before, after in zip(beats, [*beats[1:], until], strict=True):
        # A successor's first word is not the end of its predecessor's silence.
        end = min((born for born in births if before < born < after), default=after)
        if end - before >= MISSED_S and end >= since:
            yield before, end


def _is_frozen(bundle: Bundle, process: str, begin: float, end: float) -> bool:
    """Whether it used and wanted no processor at all in a time that it was looked at."""
    tracks = bundle.processes[process]
    wanted = [
        value
        for name in ("cpu", "run_delay", "io_delay", "read", "written")
        for value in tracks[name].between(begin + 1.1, end)
    ]
    states = {state for time, state, _ in bundle.states[process] if begin <= time <= end}
    # Who waits for a disk or a driver (D) is not run either; a frozen control group of version 1 looks the same.
    is_known = any(tracks["frozen"].between(begin, end)) or "D" not in states
    return bool(wanted) and max(wanted) < QUIET and "Z" not in states and is_known


QUIET = 1e-3


def _errors(bundle: Bundle, *, since: float, until: float, dead: set[str]) -> Iterator[Finding]:
    """Faults that somebody noted: of each chain the beginning, if it says what broke."""
    said = [each for each in bundle.faults if since <= each.time <= until and each.fault is not None]
    by_id: dict[str, Said] = {}
    for each in said:
        assert each.fault is not None
        by_id.setdefault(each.fault.id, each)
    for fault in root_first(each.fault for each in said if each.fault is not None):
        if fault.cause is not None or fault.kind in CONSEQUENCES:
            continue
        if fault.kind == NO_EPISODES and any(is_of_the_users_code(note.message) for note in bundle.notes):
            continue  # The workers have told whose code it is.
        where = by_id.get(fault.id) or next(each for each in said if _follows(each.fault, fault.id))
        kind = kind_of_fault(fault)
        time = bundle.moment_of(fault, by=where.by, told=where.time)
        if not since <= time <= until or states_in(fault.message):
            continue
        if kind is None:
            if fault.kind == "ProcessDied" or fault.process in dead:
                continue
            kind = FaultKind.CRASHED
        yield Finding(
            process=_culprit(fault),
            kind=kind,
            onset=_began(bundle, fault, kind, time),
            until=max(time, where.time),
            strength=0.9 if fault.kind not in ("StartFailed", "StartKilled") else 0.6,
            what=shortened(fault.message.removeprefix(f"{fault.process}: ")),
            evidence=(Evidence(where.source, time, f"{fault.kind}: {shortened(fault.message)}"),),
            is_fact=True,
        )


def _follows(fault: Fault | None, cause: str) -> bool:
    while fault is not None:
        if fault.id == cause:
            return True
        fault = fault.cause
    return False


def _culprit(fault: Fault) -> str:
    """Who broke: whom the error names, where the one who noted it only looked."""
    if fault.process == MASTER and kind_of_fault(fault) in (FaultKind.NUMERIC, FaultKind.CORRUPTION):
        return next(iter(processes_in(fault.message)), fault.process)
    return fault.process if known_role(fault.process) is not None else MASTER


def _began(bundle: Bundle, fault: Fault, kind: FaultKind, time: float) -> float:
    """A standstill is noted after it was watched for a while: it began when the process last spoke or moved."""
    if kind not in (FaultKind.STOPPED, FaultKind.HUNG, FaultKind.NETWORK_CUT):
        return time
    if kind is FaultKind.STOPPED:
        return _stop_onset(bundle, fault.process, time)
    beats = [beat for beat in bundle.beats.get(fault.process, ()) if beat.time <= time]
    moved = time
    for before, after in zip(reversed(beats[:-1]), reversed(beats), strict=False):
        if before.counters != after.counters:
            break
        moved = before.time
    return max(moved, time - 20.0)


def _alerts(bundle: Bundle, *, since: float, until: float) -> Iterator[Finding]:
    told = {fault.message[:REPEATED] for fault in bundle.faults}
    for alert in bundle.alerts:
        if not since <= alert.time <= until or any(message in alert.message for message in told):
            continue  # A fault that is told again, with what was done about it.
        if is_of_the_users_code(alert.message):
            continue  # What their code says of its data names nothing of ours.
        kind = kind_of(alert.message)
        if kind is None and " is slow: " in alert.message:
            kind = FaultKind.NETWORK_DELAY if alert.message.startswith(LINK) else FaultKind.SLOW
        if kind is None:
            continue
        named = next(iter(processes_in(alert.message)), alert.by)
        process = named if kind in NAMED_BY_ALERTS else alert.by
        is_hint = kind in (FaultKind.SLOW, FaultKind.NETWORK_DELAY)
        yield Finding(
            process=process,
            kind=kind,
            onset=alert.time - (TOLD_AFTER_S if kind in TOLD_LATE else 0.0),
            until=alert.time,
            strength=0.55 if is_hint else 0.8,
            what=shortened(alert.message.removeprefix(f"{process} ")),
            evidence=(Evidence(alert.source, alert.time, shortened(alert.message)),),
            is_fact=not is_hint,
        )


def _damage(bundle: Bundle, *, since: float, until: float) -> Iterator[Finding]:
    """Bytes that somebody found to be wrong and took from elsewhere: the run went on, and only noted it."""
    for note in bundle.notes:
        if not since <= note.time <= until or kind_of(note.message) is not FaultKind.CORRUPTION:
            continue
        if is_of_the_users_code(note.message):
            continue
        yield Finding(
            process=origin_of(note.message) or note.by,
            kind=FaultKind.CORRUPTION,
            onset=note.time,
            until=note.time,
            strength=0.85,
            what=f"gave bytes that are not those that it published, as {note.by} found out",
            evidence=(Evidence(note.source, note.time, shortened(note.message)),),
            is_fact=True,
            others=(note.by,),
        )


def _figures(bundle: Bundle, process: str) -> str:
    observer = bundle.observer_of.get(bundle.host(process), "")
    if not observer and known_role(process) is Role.AGENT:
        observer = process
    return f"figures/{observer or 'agent-0'}.jsonl"
