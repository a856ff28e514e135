"""From findings to causes: what explains the others, how sure it is, and when to say nothing. Pure."""

from __future__ import annotations

import msgspec

from kintsugi.diagnosis.baseline import Baselines, usual
from kintsugi.diagnosis.evidence import MASTER, Bundle, known_role
from kintsugi.diagnosis.findings import Finding, merged
from kintsugi.diagnosis.happenings import happenings
from kintsugi.diagnosis.jointly import fallen_silent, unrecorded
from kintsugi.diagnosis.network import network_troubles
from kintsugi.diagnosis.rules import deviations
from kintsugi.diagnosis.symptoms import Symptom, symptom_of
from kintsugi.diagnosis.verdict import Cause, Diagnosis, FaultKind
from kintsugi.diagnosis.waiting import path_from, sinks, waits_in
from kintsugi.types import Role

SURE = 0.5
"""Below, nothing is said."""
MOST_CAUSES = 5
STALLED_S, STALLED_FACTOR = 20.0, 5.0
"""A run is said to stand still after so long, and so many times the usual step."""
FADING = 0.04
"""What is over counts so much less per second."""
AFTERMATH_S = 6.0
"""How long after something broke others may look bad only because it is being mended."""
BEFORE_S = 1.2
"""Clocks, and samples of a second, may put what follows a little before its cause."""
_K = FaultKind
_GONE = frozenset({_K.KILLED, _K.CRASHED, _K.STOPPED, _K.HUNG})
_ENDS = frozenset({_K.KILLED, _K.CRASHED, _K.HUNG, _K.HANDOVER})
_NETWORK = frozenset({_K.NETWORK_CUT, _K.NETWORK_DELAY, _K.NETWORK_LOSS})
_MOMENTARY = _NETWORK | {_K.CPU, _K.SLOW, _K.DEVICE, _K.DISK_SLOW}
"""What a neighbour may show for a moment while somebody is replaced."""
_SLOW = frozenset({_K.SLOW, _K.DEVICE})
PATIENCE_S = {_K.SLOW: 4.5, _K.DEVICE: 4.6, _K.NETWORK_LOSS: 2.8, _K.DNS: 4.8}
"""Not said before what would explain it, or tell which end it is, had time to show: figures come once a second, and it
takes three until nothing that was sent is surely acknowledged."""
_DISK = frozenset({_K.DISK_FULL, _K.DISK_SLOW, _K.DISK_ERROR})

EXPLAINS_AT_HOME: dict[FaultKind, frozenset[FaultKind]] = {
    _K.MEMORY: frozenset(
        {_K.KILLED, _K.CRASHED, _K.SLOW, _K.DEVICE, _K.DISK_SLOW, _K.CPU, _K.HUNG, _K.USER_CODE}
    ),
    _K.DESCRIPTORS: frozenset(
        {_K.CRASHED, _K.HUNG, _K.SLOW, _K.DISK_ERROR, _K.DNS, _K.NETWORK_CUT, _K.NETWORK_DELAY, _K.HANDOVER}
    ),
    _K.CPU: frozenset(
        {_K.SLOW, _K.DEVICE, _K.HUNG, _K.NETWORK_DELAY, _K.NETWORK_LOSS, _K.HANDOVER, _K.USER_CODE}
    ),
    _K.STOPPED: frozenset(
        {_K.SLOW, _K.DEVICE, _K.HUNG, _K.KILLED, _K.HANDOVER, _K.CPU, _K.DISK_SLOW, _K.USER_CODE}
    ),
    _K.KILLED: frozenset({_K.SLOW, _K.DEVICE, _K.CPU, _K.HANDOVER, _K.MEMORY}),
    _K.CRASHED: frozenset({_K.SLOW, _K.DEVICE, _K.CPU, _K.HANDOVER}),
    _K.HUNG: frozenset({_K.SLOW, _K.DEVICE, _K.KILLED, _K.HANDOVER}),
    _K.NETWORK_CUT: frozenset(
        {_K.NETWORK_DELAY, _K.NETWORK_LOSS, _K.HUNG, _K.SLOW, _K.DEVICE, _K.HANDOVER, _K.DNS}
    ),
    _K.NETWORK_DELAY: frozenset({_K.NETWORK_LOSS, _K.HUNG, _K.SLOW, _K.DEVICE, _K.HANDOVER, _K.DNS}),
    _K.NETWORK_LOSS: frozenset({_K.HUNG, _K.SLOW, _K.DEVICE, _K.HANDOVER, _K.DNS}),
    _K.DEVICE: frozenset({_K.CRASHED, _K.SLOW, _K.HUNG, _K.DEVICE_MEMORY}),
    _K.DEVICE_MEMORY: frozenset({_K.CRASHED, _K.SLOW, _K.HANDOVER}),
    _K.DISK_FULL: frozenset({_K.DISK_SLOW, _K.DISK_ERROR, _K.CRASHED, _K.HUNG}),
    _K.DISK_SLOW: frozenset({_K.SLOW, _K.DEVICE, _K.HUNG}),
    _K.DISK_ERROR: frozenset({_K.DISK_SLOW, _K.CRASHED, _K.CORRUPTION, _K.HUNG}),
    _K.NUMERIC: frozenset({_K.CRASHED, _K.CORRUPTION}),
    _K.CORRUPTION: frozenset({_K.CRASHED, _K.NUMERIC}),
    _K.USER_CODE: frozenset({_K.SLOW, _K.CRASHED}),
    _K.HANDOVER: frozenset({_K.SLOW, _K.DEVICE_MEMORY}),
    _K.DNS: frozenset({_K.SLOW, _K.NETWORK_CUT}),
    _K.SLOW: frozenset(),
}
"""What a fault brings about in the process that has it."""

ADVICE: dict[FaultKind, str] = {
    _K.KILLED: "It was replaced; if it comes again, ask who or what kills processes on that host.",
    _K.CRASHED: "Read its log and the error quoted here; the same input may bring it about again.",
    _K.STOPPED: "Look for a debugger, job control or a freezer on that host; the process was replaced.",
    _K.HUNG: "Take a stack of it (py-spy) if it still lives; it makes no progress and waits for nobody.",
    _K.CPU: "Give it the processor back: lift its quota, move what competes with it, or start it elsewhere.",
    _K.MEMORY: "Find what grows; raise its limit or give it less to do.",
    _K.DESCRIPTORS: "Find what it opens and does not close (ls -l /proc/PID/fd), or raise its limit (ulimit -n).",
    _K.DEVICE_MEMORY: "Give the device less to hold (micro-batches, pages), or evict who else is on it.",
    _K.DEVICE: "Look at the accelerator (clocks, heat, memory errors); start the process on another one.",
    _K.DISK_FULL: "Free space on the disk of the run folder; what was refused is tried again by itself.",
    _K.DISK_SLOW: "Find who else writes to that disk, or move the run folder to another one.",
    _K.DISK_ERROR: "Look at the host's kernel log: the disk refuses writes for another reason than space.",
    _K.NETWORK_DELAY: "Look at that process's way to its peers: queues, shaping, a bad route.",
    _K.NETWORK_LOSS: "Look at that host's interface, cables and filters: packets do not arrive.",
    _K.NETWORK_CUT: "Nothing comes through: look at filters and routes between that process and its peers.",
    _K.DNS: "Look at the name service of that host; addresses instead of names do without it.",
    _K.CORRUPTION: "Check that host's memory and disk: bytes are not those that were sent or written.",
    _K.NUMERIC: "Take that process or its device out: it computes something else than its peers.",
    _K.HANDOVER: "Look at who did not answer: the device was given on without it when its lease ended.",
    _K.SLOW: "Nothing on its host explains it: compare its device and its input with its peers'.",
    _K.USER_CODE: "Read the reward, environment or agent program that is quoted here.",
}


class Candidate(msgspec.Struct, frozen=True):
    finding: Finding
    symptom: Symptom
    confidence: float


def judge(
    bundle: Bundle,
    baselines: Baselines,
    *,
    begin: float,
    since: float,
    at: float,
    is_over: bool = False,
    unrecorded_s: float = 0.0,
) -> Diagnosis:
    """What was wrong in [since, at], the most likely first; what began before, from `begin` on, explains some of it.
    `is_over`: nobody records anything any more; `unrecorded_s`: for so long nobody has, and somebody should."""
    findings = merged(
        [
            *happenings(bundle, since=begin, at=at),
            *(fallen_silent(bundle) if is_over else ()),
            *([unrecorded(bundle, seconds=unrecorded_s)] if unrecorded_s else ()),
            *deviations(bundle, baselines, since=begin, at=at),
            *network_troubles(bundle, baselines, since=begin, at=at),
        ]
    )
    roots = [each for each in findings if not any(_explains(bundle, other, each) for other in findings)]
    candidates = [
        _weighed(bundle, baselines, each, at=at)
        for each in roots
        if each.until >= since and not _is_early(each, at=at)
    ]
    named = sorted(
        (each for each in candidates if each.confidence >= SURE),
        key=lambda each: (-_urgency(each, at), each.finding.onset),
    )
    causes = tuple(_cause(bundle, each, at=at) for each in named[:MOST_CAUSES])
    abstained = "" if causes else _why_not(bundle, baselines, candidates, at=at)
    return Diagnosis(run=bundle.run, at=at, since=since, causes=causes, abstained=abstained)


def _is_early(finding: Finding, *, at: float) -> bool:
    return not finding.is_fact and at - finding.onset < PATIENCE_S.get(finding.kind, 0.0)


def _explains(bundle: Bundle, cause: Finding, other: Finding) -> bool:
    """Whether `other` is nothing but what follows from `cause`."""
    if cause is other:
        return False
    starts_after = other.onset >= cause.onset - BEFORE_S
    of_its_host = cause.of_host and bundle.host(cause.process) == bundle.host(other.process)
    if cause.process == other.process or of_its_host:
        closely = other.onset <= cause.until + AFTERMATH_S and cause.onset <= other.until + AFTERMATH_S
        # A comparison explains an end, but no error that names what broke.
        is_clearer = other.is_fact and not cause.is_fact and other.kind not in _ENDS
        # All of a host is not cut off by what is wrong with one name or one process there.
        is_wider = other.of_host and not cause.of_host
        explained = closely and other.kind in EXPLAINS_AT_HOME[cause.kind] and not (is_clearer or is_wider)
        # Since when somebody hangs is only known from when it last moved, which may be long before.
        return explained and (starts_after or cause.is_fact or other.kind is _K.HUNG)
    if not starts_after or other.onset > cause.until + AFTERMATH_S:
        return False
    if cause.kind in _DISK and other.kind in _DISK:
        # One disk, seen by several: who has the clearer evidence speaks for all.
        return _order(cause) > _order(other)
    if other.kind in _NETWORK and cause.kind in _GONE | {_K.MEMORY} and cause.is_fact:
        # Who is gone leaves its peers with connections that do not answer.
        return cause.process in other.others or not other.is_fact
    if cause.is_fact and cause.kind in _GONE | {_K.MEMORY, _K.DEVICE, _K.DEVICE_MEMORY}:
        # Replacing somebody costs its neighbours processor and disk for a moment, and others notice its absence.
        return not other.is_fact and other.strength < 0.9 and other.kind in _MOMENTARY
    if cause.kind in _NETWORK and other.kind in _NETWORK:
        return _order(cause) > _order(other) and cause.process in other.others
    if cause.kind in (_K.CPU, _K.MEMORY) and other.kind in _NETWORK | _SLOW:
        return cause.process in other.others or other.kind in _SLOW
    if cause.kind in _NETWORK and other.kind in _SLOW and not other.is_fact:
        return True
    return cause.kind in _DISK and other.kind in _SLOW | {_K.HUNG, _K.CPU} and not other.is_fact


def _order(finding: Finding) -> tuple[bool, float, float, str]:
    return (finding.is_fact, round(finding.strength, 2), -finding.onset, finding.process)


def _weighed(bundle: Bundle, baselines: Baselines, finding: Finding, *, at: float) -> Candidate:
    """A comparison alone is worth less than one that goes with harm; who is waited for and waits for nobody, more."""
    symptom = symptom_of(bundle, baselines, finding, at=at)
    confidence = finding.strength
    if not finding.is_fact:
        edges = waits_in(bundle, since=finding.onset, until=min(at, finding.until + 2.0))
        if finding.process in sinks(edges):
            confidence = 1 - (1 - confidence) * 0.7
        if symptom.seconds == 0.0 and not symptom.is_failure:
            confidence *= 0.8
        else:
            confidence = 1 - (1 - confidence) * 0.75
    return Candidate(finding, symptom, round(min(confidence, 0.99), 3))


def _urgency(candidate: Candidate, at: float) -> float:
    """What goes on comes before what is over."""
    return candidate.confidence - FADING * min(max(0.0, at - candidate.finding.until), 20.0)


def _cause(bundle: Bundle, candidate: Candidate, *, at: float) -> Cause:
    finding = candidate.finding
    return Cause(
        process=finding.process,
        host=bundle.host(finding.process),
        kind=finding.kind,
        onset=finding.onset,
        confidence=candidate.confidence,
        summary=f"{finding.process}: {finding.what}",
        path=path_from(bundle, finding, symptom=candidate.symptom.hop, at=at),
        evidence=finding.evidence,
        rules_out=finding.rules_out,
        advice=ADVICE[finding.kind],
    )


def _why_not(bundle: Bundle, baselines: Baselines, candidates: list[Candidate], *, at: float) -> str:
    if not bundle.processes:
        return "nothing was recorded of its processes"
    if at < baselines.settled:
        return "the run is warming up, and nothing has failed"
    if (stalled := _stalled(bundle, at=at)) is not None:
        return stalled
    if candidates:
        best = max(candidates, key=lambda each: each.confidence)
        return (
            f"nothing stands out: the most unusual is that {best.finding.process} {best.finding.what} "
            f"(confidence {best.confidence:.2f})"
        )
    return "no process failed, and no figure is far from its own past and from its peers"


def _stalled(bundle: Bundle, *, at: float) -> str | None:
    """That nothing was found does not mean that all is well."""
    before = usual([step.duration_s for step in bundle.steps])
    waited_s = at - bundle.steps[-1].time if bundle.steps else 0.0
    if before is None or bundle.is_over(at) or waited_s < max(STALLED_S, STALLED_FACTOR * before.middle):
        return None
    return (
        f"no step was committed for {waited_s:.0f} s, usually one in {before.middle:.1f} s, and nothing that was "
        "recorded explains it: `kintsugi status` tells what everybody waits for"
    )


def replaceable(cause: Cause) -> bool:
    """Whether the process itself is what is slow or starved, so that another in its place may do better."""
    if cause.process == MASTER or known_role(cause.process) is Role.AGENT:
        return False
    return cause.kind in (
        _K.CPU, _K.MEMORY, _K.DESCRIPTORS, _K.DEVICE, _K.SLOW, _K.NETWORK_DELAY, _K.NETWORK_LOSS
    )  # fmt: skip
