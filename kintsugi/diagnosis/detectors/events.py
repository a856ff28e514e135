"""Events that need no comparison: processes that ended or do not run, errors that name what broke. Pure.

The first failure counts. Of a chain of faults only the root is considered. An end that the run itself ordered is a
response to something and no cause, and a process that noticed the loss of another one has not failed.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from itertools import pairwise

from kintsugi.diagnosis.detectors.cross_process import NO_EPISODES, across_processes, is_user_code
from kintsugi.diagnosis.detectors.damage import damaged_on_the_way
from kintsugi.diagnosis.detectors.fault_kinds import CONSEQUENCES, kind_of_fault
from kintsugi.diagnosis.detectors.foreign_errors import kind_of
from kintsugi.diagnosis.evidence import MASTER, OVER, EvidenceBundle, LoggedMessage, ProcessEnd, known_role
from kintsugi.diagnosis.findings import Finding, shortened
from kintsugi.diagnosis.process_activity import ProcessActivities
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.errors import Fault, StatesDiverged, chain, root_first
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.runtime.shortages import EXIT_FILE_LIMIT, EXIT_NO_DESCRIPTORS, EXIT_NO_MEMORY, SHORTAGES
from kintsugi.telemetry.events import (
    AcceleratorWarning,
    BytesDamaged,
    JournalPaused,
    LeaseUnanswered,
    OperationFailed,
    SlowLink,
    SlowProcess,
    UpdateSkipped,
    WeightsFromFallback,
)
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
"""Signals that a process causes itself."""
BEFORE_END_S = 5.0
"""Time before the end of a process in which its cause is looked for."""
FULL = 0.9
"""Share of a memory limit above which a SIGKILL counts as the kernel's."""
RESTART_S = 2.5
"""Longest time until a killed agent is back; an agent that was stopped is waited for before it is replaced."""
TOGETHER_S = 1.5
"""Longest time between the last heartbeats, or recorded ends, of processes that were killed in the same moment."""
REPORTED_S = 3.0
"""Longest time until an end is recorded by the parent of the process."""
NOTICED_AFTER_S = {FaultKind.HANDOVER: 1.0, FaultKind.NETWORK_DELAY: 1.0}
"""Time that a process waits for an answer or an upload before it raises the alert."""
HINTS = frozenset({FaultKind.SLOW, FaultKind.NETWORK_DELAY})
"""Alerts of these kinds compare measurements; the others report what happened."""
SHORTAGE_KINDS = {
    EXIT_NO_MEMORY: FaultKind.MEMORY,
    EXIT_NO_DESCRIPTORS: FaultKind.DESCRIPTORS,
    EXIT_FILE_LIMIT: FaultKind.DISK_FULL,
}
"""Exit codes with which a master says what the host did not give it."""
XID = "xid"
"""Health signal of an accelerator that means a hardware error even if the device still works."""


def discrete_events(
    bundle: EvidenceBundle, activities: ProcessActivities, *, since: float, at: float
) -> list[Finding]:
    """Return the findings of [since, at]. After the end of a run only errors count: all processes end then."""
    until = min(at, bundle.over_since())
    ends = [end for end in (*bundle.ends, *_unrecorded_ends(bundle, at=at)) if since <= end.time <= until]
    found = [*_ends(bundle, ends), *_not_running(bundle, activities, since=since, until=until)]
    dead = {finding.process for finding in found}
    found += _alerts(bundle, since=since, until=until)
    found += _damaged_bytes(bundle, since=since, until=until)
    found += damaged_on_the_way(bundle, since=since, until=until)
    found += across_processes(bundle, since=since, until=until)
    found = [finding for finding in found if finding.until >= until or not bundle.is_over(finding.until)]
    return [*found, *_errors(bundle, since=since, until=at, dead=dead)]


def _unrecorded_ends(bundle: EvidenceBundle, *, at: float) -> Iterator[ProcessEnd]:
    """Yield an end for each process that began again without one: the parent that records ends may have died too."""
    overs = [phase.time for phase in bundle.phases if phase.name in OVER]
    gone: list[tuple[float, float, str, int]] = []
    for process, births in bundle.births.items():
        for (began, pid), (born, _) in pairwise(births):
            has_exited = any(began < time <= born for time in bundle.goodbyes.get(process, ()))
            ended_with_the_run = any(began < time <= born for time in overs)
            is_recorded = any(end.pid == pid and end.process == process for end in bundle.ends)
            if at - born < REPORTED_S or has_exited or ended_with_the_run or is_recorded:
                continue
            beats = bundle.beats_in(process, -math.inf, born)
            gone.append((beats[-1] if beats else born, born, process, pid))
    for last, born, process, pid in gone:
        was_stalled = born - last > RESTART_S and not _died_with_others(bundle, process, last, gone)
        how = (
            "did not run any more, and was started again"
            if was_stalled
            else "is gone without a recorded end, and was started again"
        )
        source = str(RELATIVE.events_file(process))
        yield ProcessEnd(last, process, pid, None, how, False, False, source, was_stalled=was_stalled)


def _died_with_others(
    bundle: EvidenceBundle, process: str, last: float, gone: list[tuple[float, float, str, int]]
) -> bool:
    """Whether the agent of a process, or processes of an agent, were gone in the same moment: the time until
    it was there again is that of all of them, and no sign of a process that was stopped."""
    host = bundle.host_of.get(process, "")
    agent = bundle.observer_of.get(host, "")
    ends = [(end.time, end.process) for end in bundle.ends] + [(time, other) for time, _, other, _ in gone]
    same = {other for time, other in ends if other != process and abs(time - last) <= TOGETHER_S}
    if process == agent:
        return any(bundle.host_of.get(other) == host for other in same)
    return agent in same


def _ends(bundle: EvidenceBundle, ends: list[ProcessEnd]) -> Iterator[Finding]:
    for end in ends:
        if end.ordered or end.status == 0:
            continue
        yield _end(bundle, end)


def _end(bundle: EvidenceBundle, end: ProcessEnd) -> Finding:
    quote = f"{end.process} (pid {end.pid}) {end.how}"
    was_killed = end.status is not None and end.status < 0
    kind, what = FaultKind.KILLED, f"was {end.how}" if was_killed else end.how
    onset = _exit_onset(bundle, end) if was_killed else end.time
    evidence = [Evidence(end.source, end.time, quote)]
    stopped = _stopped_before(bundle, end)
    memory = bundle.processes[end.process]["memory_share"].between(end.time - BEFORE_END_S, end.time)
    rules_out: tuple[str, ...] = ("an error of its own: it recorded none",)
    if stopped is not None:
        kind, onset = FaultKind.STOPPED, stopped
        what = "was stopped, and ended by its agent when it did not continue"
        evidence.insert(0, Evidence(_readings_file(bundle, end.process), stopped, f"{end.process}: state T"))
        rules_out = ("a hang: a stopped process does not run at all",)
    elif end.oom or (end.status == -signal.SIGKILL and memory and max(memory) >= FULL):
        kind = FaultKind.MEMORY
        what = "was killed by the kernel because its memory was exhausted"
        if memory:
            share = f"{end.process}: {max(memory):.0%} of its memory limit"
            evidence.insert(0, Evidence(_readings_file(bundle, end.process), end.time, share))
        rules_out = (
            ("a kill by another process: the kernel counted an out-of-memory kill",) if end.oom else ()
        )
    elif end.was_stalled:
        kind, what = FaultKind.STOPPED, "did not run any more and was replaced"
    elif end.status is not None and (end.status > 0 or -end.status in OWN_SIGNALS):
        kind = SHORTAGE_KINDS.get(end.status, FaultKind.CRASHED)
        rules_out = ("a kill from outside: the process exited",)
        error = _last_error(bundle, end)
        if end.status in SHORTAGE_KINDS:
            what = f"ended because {SHORTAGES[end.status]}"
        elif error is not None and error.fault is not None:
            kind = kind_of_fault(error.fault) or kind
            onset = min(onset, error.time)
            what = f"ended with an error: {shortened(error.message)}"
            evidence.insert(0, Evidence(error.source, error.time, shortened(error.message)))
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


def _exit_onset(bundle: EvidenceBundle, end: ProcessEnd) -> float:
    """Return when a process began to exit: one with much memory is a zombie for seconds before its end is reported."""
    seen = (
        time
        for time, state, pid in bundle.states_in(end.process, end.time - BEFORE_END_S, end.time)
        if pid == end.pid and state in "ZX"
    )
    return min(end.time, next(seen, end.time))


def _stopped_before(bundle: EvidenceBundle, end: ProcessEnd) -> float | None:
    """Return since when a process was stopped, if it was when it ended."""
    seen = [
        (time, state)
        for time, state, pid in bundle.states.get(end.process, ())
        if pid == end.pid and time <= end.time and time >= end.time - BEFORE_END_S
    ]
    if not seen or seen[-1][1] not in "Tt":
        return None
    return _stop_onset(bundle, end.process, next(time for time, state in seen if state in "Tt"))


def _stop_onset(bundle: EvidenceBundle, process: str, seen: float) -> float:
    """Return when a process stopped: after its last heartbeat."""
    beats = [beat.time for beat in bundle.beats.get(process, ()) if beat.time <= seen]
    return max(beats[-1], seen - 2.0) if beats else seen


def _last_error(bundle: EvidenceBundle, end: ProcessEnd) -> LoggedMessage | None:
    """Return the error that a process recorded at its end, if any."""
    errors = [
        each
        for each in bundle.faults
        if each.by == end.process and end.time - BEFORE_END_S <= each.time <= end.time + 1.0
    ]
    return errors[-1] if errors else None


def _not_running(
    bundle: EvidenceBundle, activities: ProcessActivities, *, since: float, until: float
) -> Iterator[Finding]:
    """Yield processes that are stopped (state T), frozen or mute.

    A frozen process exists, does not wait for a disk, and neither runs nor wants to run. A debugger or a shell may
    stop a process for a moment; only one that also misses its heartbeats is reported.
    """
    for process, states in bundle.states.items():
        for begin, end in _silences(bundle, process, since=since, until=until):
            seen = [(time, state) for time, state, _ in states if begin - 0.5 <= time <= end]
            stopped = [time for time, state in seen if state in "Tt"]
            if stopped:
                yield _still(bundle, process, begin, max(stopped[-1], begin), "is stopped (state T)", 0.9)
            elif end - begin >= FROZEN_S and len(seen) > 1 and _is_frozen(bundle, process, begin, end):
                what = "exists and does not run at all: no CPU time and no heartbeat"
                yield _still(bundle, process, begin, end, what, 0.75)
            elif end - begin >= _mute_s(bundle, activities, process, begin, end) and _is_mute(
                bundle, process, begin, end
            ):
                yield _mute(bundle, process, begin, end)


def _still(
    bundle: EvidenceBundle, process: str, begin: float, end: float, what: str, strength: float
) -> Finding:
    quote = f"{process}: {what} for {end - begin:.1f} s"
    return Finding(
        process=process,
        kind=FaultKind.STOPPED,
        onset=begin,
        until=end,
        strength=strength,
        what=what,
        evidence=(Evidence(_readings_file(bundle, process), end, quote),),
        is_fact=True,
        rules_out=("a hang: it does not run at all", "a lack of CPU: it does not wait for one"),
    )


def _is_mute(bundle: EvidenceBundle, process: str, begin: float, end: float) -> bool:
    """Return whether a process ran all the time while others of its host recorded heartbeats: the disk works."""
    seen = [time for time, state, _ in bundle.states[process] if begin < time <= end and state in "RS"]
    others = (
        beat.time
        for other, beats in bundle.beats.items()
        if other != process and bundle.host(other) == bundle.host(process)
        for beat in reversed(beats[-4:])
    )
    is_looked_at = len(seen) >= 3 and end - seen[-1] <= 1.6
    return is_looked_at and any(time > end - 1.2 for time in others)


def _mute_s(
    bundle: EvidenceBundle, activities: ProcessActivities, process: str, begin: float, end: float
) -> float:
    """Return how long a process may be silent: longer in a transient activity, and in a call that visibly computes,
    reads or writes, or would compute if it got a CPU: such a call may hold the interpreter all the time."""
    tracks = bundle.processes[process]
    busy = [
        max(
            cpu + (tracks["run_delay"].at(time) or 0.0),
            COMPUTES
            if (tracks["read"].at(time) or 0.0) + (tracks["written"].at(time) or 0.0) > MOVES
            else 0.0,
        )
        for time, cpu in tracks["cpu"].points(begin + 1.0, end)
    ]
    is_busy = bool(busy) and sum(each >= COMPUTES for each in busy) > len(busy) / 2
    return LONG_MUTE_S if is_busy or activities.has_transient(process, begin, end) else MUTE_S


def _mute(bundle: EvidenceBundle, process: str, begin: float, end: float) -> Finding:
    tracks = bundle.processes[process]
    used = tracks["cpu"].between(begin + 1.0, end)
    what = (
        f"has sent no heartbeat for {end - begin:.1f} s, although it exists and uses {max(used, default=0.0):.0%} of "
        "a CPU: it hangs, or can not write its records"
    )
    return Finding(
        process=process,
        kind=FaultKind.HUNG,
        onset=begin,
        until=end,
        strength=0.7,
        what=what,
        evidence=(Evidence(_readings_file(bundle, process), end, f"{process}: {what}"),),
        rules_out=("a stop: it runs", "the disk: other processes there record"),
    )


MUTE_S = 3.6
LONG_MUTE_S = 40.0
"""Longest call that holds the interpreter: a save, a tokenizer, a user's function."""
COMPUTES, MOVES = 0.5, 10e6
"""Share of a CPU, or bytes a second from and to a disk, by which a process is seen to work."""
MISSED_S = 0.9
"""Heartbeats are half a second apart."""
FROZEN_S = 2.4


def _silences(
    bundle: EvidenceBundle, process: str, *, since: float, until: float
) -> Iterator[tuple[float, float]]:
    """Yield (begin, end) of the times without a heartbeat, the last one up to `until`."""
    beats = bundle.beats_in(process, since - 10.0, until)
    if not beats:
        return
    births = [born for born, _ in bundle.births.get(process, ())]
    for before, after in zip(beats, [*beats[1:], until], strict=True):
        # The first heartbeat of a successor does not end its predecessor's silence.
        end = min((born for born in births if before < born < after), default=after)
        if end - before >= MISSED_S and end >= since:
            yield before, end


def _is_frozen(bundle: EvidenceBundle, process: str, begin: float, end: float) -> bool:
    """Return whether a process neither used nor wanted a CPU in a time in which it was sampled."""
    tracks = bundle.processes[process]
    wanted = [
        value
        for name in ("cpu", "run_delay", "io_delay", "read", "written")
        for value in tracks[name].between(begin + 1.1, end)
    ]
    states = {state for time, state, _ in bundle.states[process] if begin <= time <= end}
    # A process in state D waits for a disk or a driver; a frozen control group of version 1 looks the same.
    is_known = any(tracks["frozen"].between(begin, end)) or "D" not in states
    return bool(wanted) and max(wanted) < QUIET and "Z" not in states and is_known


QUIET = 1e-3


def _errors(bundle: EvidenceBundle, *, since: float, until: float, dead: set[str]) -> Iterator[Finding]:
    """Yield the root of each chain of recorded faults, if it names what broke."""
    recorded = [each for each in bundle.faults if since <= each.time <= until and each.fault is not None]
    by_id: dict[str, LoggedMessage] = {}
    for each in recorded:
        assert each.fault is not None
        by_id.setdefault(each.fault.id, each)
    for fault in root_first(each.fault for each in recorded if each.fault is not None):
        if fault.cause is not None or fault.kind in CONSEQUENCES:
            continue
        if fault.kind == NO_EPISODES and any(map(is_user_code, bundle.notes)):
            continue  # The rollout workers have recorded what code failed.
        where = by_id.get(fault.id) or next(each for each in recorded if _follows(each.fault, fault.id))
        kind = kind_of_fault(fault)
        time = bundle.moment_of(fault, by=where.by, recorded=where.time)
        if not since <= time <= until or isinstance(fault.detail, StatesDiverged):
            continue
        if kind is None:
            if fault.kind == "ProcessDied" or fault.process in dead:
                continue
            kind = FaultKind.CRASHED
        yield Finding(
            process=fault.process if known_role(fault.process) is not None else MASTER,
            kind=kind,
            onset=_began(bundle, fault, kind, time),
            until=max(time, where.time),
            strength=0.9 if fault.kind not in ("StartFailed", "StartKilled") else 0.6,
            what=shortened(fault.message.removeprefix(f"{fault.process}: ")),
            evidence=(Evidence(where.source, time, f"{fault.kind}: {shortened(fault.message)}"),),
            is_fact=True,
        )


def _follows(fault: Fault | None, cause: str) -> bool:
    return fault is not None and any(each.id == cause for each in chain(fault))


def _began(bundle: EvidenceBundle, fault: Fault, kind: FaultKind, time: float) -> float:
    """Return the onset of a fault. A standstill is detected after a while: it began with the last heartbeat or
    progress."""
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


def _alerts(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    for alert in bundle.alerts:
        named = _named_by(alert) if since <= alert.time <= until else None
        if named is None:
            continue
        process, kind = named
        is_hint = kind in HINTS
        yield Finding(
            process=process,
            kind=kind,
            onset=alert.time - NOTICED_AFTER_S.get(kind, 0.0),
            until=alert.time,
            strength=0.55 if is_hint else 0.8,
            what=shortened(alert.message.removeprefix(f"{process} ")),
            evidence=(Evidence(alert.source, alert.time, shortened(alert.message)),),
            is_fact=not is_hint,
        )


def _named_by(alert: LoggedMessage) -> tuple[str, FaultKind] | None:
    """Return the process and the kind of fault that an alert names; None where it names none.

    A plain `Alert` is for people. A `FaultHandled` is about a fault that has an event of its own.
    """
    match alert.event:
        case LeaseUnanswered(of=process):
            return process, FaultKind.HANDOVER
        case SlowLink(of=process):
            return process, FaultKind.NETWORK_DELAY
        case SlowProcess(of=process):
            return process, FaultKind.SLOW
        case AcceleratorWarning(of=process, signal=sign, is_broken=is_broken) if is_broken or sign == XID:
            return process, FaultKind.DEVICE
        case UpdateSkipped():
            return alert.by, FaultKind.NUMERIC
        case JournalPaused(error=error):
            return alert.by, kind_of(error) or FaultKind.DISK_ERROR
        case OperationFailed(error=error):
            kind = kind_of(error)
            return None if kind is None else (alert.by, kind)
        case _:
            return None


def _damaged_bytes(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    """Yield processes whose bytes were wrong on arrival and were obtained from elsewhere, so that the run continued."""
    for note in bundle.notes:
        match note.event:
            case BytesDamaged(origin=origin) | WeightsFromFallback(is_damaged=True, origin=origin):
                pass
            case _:
                continue
        if not since <= note.time <= until:
            continue
        yield Finding(
            process=origin or note.by,
            kind=FaultKind.CORRUPTION,
            onset=note.time,
            until=note.time,
            strength=0.85,
            what=f"gave bytes that are not those that it published, as {note.by} found out",
            evidence=(Evidence(note.source, note.time, shortened(note.message)),),
            is_fact=True,
            others=(note.by,),
        )


def _readings_file(bundle: EvidenceBundle, process: str) -> str:
    observer = bundle.observer_of.get(bundle.host(process), "")
    if not observer and known_role(process) is Role.AGENT:
        observer = process
    return str(RELATIVE.readings_file(observer or "agent-0"))
