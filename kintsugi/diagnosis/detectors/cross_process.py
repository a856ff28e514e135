"""Rules over several processes: diverging rank states, repeated group failures, failing user code, common silence.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from kintsugi.diagnosis.detectors.foreign_errors import is_closed_by_peer
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle, LoggedMessage
from kintsugi.diagnosis.findings import Finding, shortened
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.errors import GroupFailed, StatesDiverged
from kintsugi.run_folder.layout import RELATIVE
from kintsugi.telemetry.events import HostLost, QuarantineCause, SamplesQuarantined, StateCommitted

NO_EPISODES = "EpisodesFailed"
"""Kind of the fault with which the master ends a run in which nothing can be scored."""
HOST_FAULT = "HostLost"
"""Kind of the fault that the master records for each process of a lost machine."""
LAST_SIGN_S = 25.0
"""Longest time between the last sign of a machine and the news that it is lost, and between that and its faults."""
USER_GROUPS = 3
"""Groups that failing user code has spoiled before it is reported; fewer may be odd samples."""
TOGETHER_S = 2.5
"""Processes whose last heartbeats are this close ended together: heartbeats come twice a second, samples once."""
REPEATED_FAILURES = 2
"""Process groups in a row that fail although all of their ranks live."""
AROUND_S = 3.0
"""A rank that ends or begins this close to the failure of a group has caused it."""


def across_processes(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    """Yield all findings of [since, until]."""
    yield from _lost_hosts(bundle, since=since, until=until)
    yield from _diverging_states(bundle, since=since, until=until)
    yield from _user_code(bundle, since=since, until=until)
    yield from _repeated_group_failures(bundle, since=since, until=until)


def _lost_hosts(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    """Yield each machine that is gone, by its agent, with the processes that were on it: the master names them when it
    starts them elsewhere, and by then they have other hosts."""
    for alert in bundle.alerts:
        if not isinstance(alert.event, HostLost) or not since <= alert.time <= until:
            continue
        agent = alert.event.of
        begin = alert.time - LAST_SIGN_S
        faults = [
            each
            for each in bundle.faults
            if each.fault is not None
            and each.fault.kind == HOST_FAULT
            and begin <= each.time <= alert.time + LAST_SIGN_S
        ]
        others = tuple(sorted({each.about for each in faults} - {agent}))
        last = [bundle.beats_in(process, begin, alert.time)[-1:] for process in (agent, *others)]
        yield Finding(
            process=agent,
            kind=FaultKind.HOST_LOST,
            onset=max(chain.from_iterable(last), default=alert.time),
            until=alert.time,
            strength=0.95,
            what=f"and everything of the run on its machine is gone: {shortened(alert.message)}",
            evidence=(Evidence(alert.source, alert.time, shortened(alert.message)),),
            is_fact=True,
            rules_out=("a cut link: its connections were closed, or its engine says that it is gone",),
            others=others,
            of_host=True,
        )


def _repeated_group_failures(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    """Yield a rank whose connections break in one group after the other although no rank has ended.

    An error that names the peer as the closing end blames the peer, any other error the rank that recorded it. In a
    group of more than two ranks the failed connection is not known.
    """
    groups: dict[str, dict[int, LoggedMessage]] = {}
    for recorded in bundle.faults:
        detail = recorded.fault.detail if recorded.fault is not None else None
        if not isinstance(detail, GroupFailed) or len(detail.peers) != 1 or recorded.by == MASTER:
            continue
        (peer,) = detail.peers
        has_changed = any(_changed(bundle, process, recorded.time) for process in (recorded.by, peer))
        if has_changed or not since <= recorded.time <= until:
            continue
        blamed = peer if is_closed_by_peer(detail.reason) else recorded.by
        groups.setdefault(blamed, {}).setdefault(detail.group, recorded)
    worst = max(groups, key=lambda each: (len(groups[each]), each), default=None)
    if worst is None or len(groups[worst]) < REPEATED_FAILURES:
        return
    failures = list(groups[worst].values())
    yield Finding(
        process=worst,
        kind=FaultKind.NETWORK_CUT,
        onset=failures[0].time,
        until=failures[-1].time,
        strength=0.85,
        what=f"its connections broke in {len(failures)} groups one after the other, although no rank had ended",
        evidence=tuple(Evidence(each.source, each.time, shortened(each.message)) for each in failures[-3:]),
        is_fact=True,
        rules_out=("an end of a rank: none ended or began then",),
    )


def _changed(bundle: EvidenceBundle, process: str, time: float) -> bool:
    """Return whether a process ended or began at about this time."""
    moments = chain(
        (end.time for end in bundle.ends if end.process == process),
        (born for born, _ in bundle.births.get(process, ())),
    )
    return any(abs(moment - time) <= AROUND_S for moment in moments)


def _diverging_states(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    """Yield ranks whose state differs from the expected or committed one or, while that is not known, the majority's.

    Of two ranks either may be wrong until a step is committed.
    """
    for recorded in bundle.faults:
        detail = recorded.fault.detail if recorded.fault is not None else None
        if not isinstance(detail, StatesDiverged) or not since <= recorded.time <= until:
            continue
        later = (note.event for note in bundle.notes if note.time >= recorded.time)
        committed = next((event.state for event in later if isinstance(event, StateCommitted)), None)
        counts = Counter(detail.states.values())
        (most, number), (_, second), *_ = [*counts.most_common(2), ("", 0)]
        right = detail.expected or committed or (most if number > second else None)
        for process, state in detail.states.items():
            if state != right:
                yield Finding(
                    process=process,
                    kind=FaultKind.NUMERIC,
                    onset=recorded.time,
                    until=recorded.time,
                    strength=0.92 if right else 0.6,
                    what="computed another state than its peers from the same samples",
                    evidence=(Evidence(recorded.source, recorded.time, shortened(recorded.message)),),
                    is_fact=True,
                    others=tuple(other for other in detail.states if other != process),
                )


def is_user_code(note: LoggedMessage) -> bool:
    """Return whether a note reports a group that failing user code has spoiled."""
    return isinstance(note.event, SamplesQuarantined) and note.event.cause is QuarantineCause.USER_CODE


def _user_code(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    """Yield one finding for user code that failed at every attempt of several groups.

    The same code runs at every rollout worker, so the worker with most of these groups stands for all.
    """
    by_process: dict[str, list[LoggedMessage]] = {}
    for note in bundle.notes:
        if since <= note.time <= until and is_user_code(note):
            by_process.setdefault(note.by, []).append(note)
    count = sum(map(len, by_process.values()))
    if not count or (count < USER_GROUPS and not _no_episodes(bundle, since=since, until=until)):
        return
    process = max(by_process, key=lambda each: (len(by_process[each]), each))
    others = tuple(sorted(by_process.keys() - {process}))
    notes = sorted(chain.from_iterable(by_process.values()), key=lambda note: note.time)
    where = f" there and at {', '.join(others)}" if others else ""
    last = by_process[process][-1]
    yield Finding(
        process=process,
        kind=FaultKind.USER_CODE,
        onset=notes[0].time,
        until=notes[-1].time,
        strength=0.85,
        what=f"{count} groups gave no sample{where}; the last: {shortened(last.message)}",
        evidence=(Evidence(last.source, last.time, shortened(last.message)),),
        is_fact=True,
        others=others,
    )


def _no_episodes(bundle: EvidenceBundle, *, since: float, until: float) -> bool:
    """Return whether the run ended because nothing could be scored."""
    return any(
        recorded.fault is not None and recorded.fault.kind == NO_EPISODES and since <= recorded.time <= until
        for recorded in bundle.faults
    )


def common_silence(bundle: EvidenceBundle) -> Iterator[Finding]:
    """Yield one finding if the last heartbeats of all processes are of one moment and none recorded its end.

    The processes that would have recorded an end have ended too.
    """
    last = {process: beats[-1].time for process, beats in bundle.beats.items() if beats}
    if len(last) < 2 or bundle.is_over(bundle.at):
        return
    first, latest = min(last.values()), max(last.values())
    has_exited = any(time >= first for times in bundle.goodbyes.values() for time in times)
    if latest - first > TOGETHER_S or has_exited:
        return
    yield Finding(
        process=MASTER,
        kind=FaultKind.KILLED,
        onset=latest,
        until=bundle.at,
        strength=0.8,
        what=(
            f"and {len(last) - 1} others ended within {latest - first:.1f} s, and no process was left to record "
            "how: a user, a scheduler or a power failure ended all processes together"
        ),
        evidence=tuple(
            Evidence(str(RELATIVE.readings_file(process)), time, f"{process}: its last heartbeat")
            for process, time in sorted(last.items())
        ),
        is_fact=True,
        rules_out=("the end of the run: it had not finished, and no stop was requested",),
        advice="`kintsugi resume` continues the run from its last checkpoint; find what ended everything on that host.",
    )


def nothing_recorded(bundle: EvidenceBundle, *, seconds: float) -> Finding:
    """Return the finding that no process of a followed run has written anything for this long."""
    what = f"and all others have recorded nothing for {seconds:.0f} s: the disk of the run folder accepts no writes"
    return Finding(
        process=MASTER,
        kind=FaultKind.DISK_SLOW,
        onset=bundle.at,
        until=bundle.at + seconds,
        strength=0.7,
        what=what,
        evidence=(Evidence(f"{RELATIVE.events_folder}/", bundle.at, "the last line of any process"),),
        rules_out=("a single process: all of them are silent",),
    )
