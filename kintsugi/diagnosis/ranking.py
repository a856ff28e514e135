"""From findings to ranked causes: explanations between findings, confidence, and when to abstain. Pure."""

from __future__ import annotations

import msgspec

from kintsugi.diagnosis.baseline import Baselines, usual
from kintsugi.diagnosis.detectors.cross_process import common_silence, nothing_recorded
from kintsugi.diagnosis.detectors.events import discrete_events
from kintsugi.diagnosis.detectors.memory import MemoryDetector
from kintsugi.diagnosis.detectors.network import (
    SAMPLE_S,
    has_unacknowledged,
    is_well_connected,
    network_troubles,
)
from kintsugi.diagnosis.detectors.thresholds import deviations
from kintsugi.diagnosis.evidence import MASTER, EvidenceBundle, known_role
from kintsugi.diagnosis.findings import Finding, merged
from kintsugi.diagnosis.process_activity import ProcessActivities
from kintsugi.diagnosis.symptoms import Symptom, symptom_of
from kintsugi.diagnosis.verdict import Cause, Diagnosis, FaultKind
from kintsugi.diagnosis.wait_graph import path_from, sinks, waits_in
from kintsugi.types import Role

SURE = 0.5
"""Least confidence of a cause that is named."""
MOST_CAUSES = 5
STALLED_S, STALLED_FACTOR = 20.0, 5.0
"""Time, and factor of the usual step, after which a run counts as stalled."""
FADING = 0.04
"""Loss of priority per second since a finding ended."""
AFTERMATH_S = 6.0
"""Time after a fault in which findings at other processes may be effects of the recovery."""
RECOVERY_STEPS = 8.0
"""Steps after which a loss is over although no step was committed: a large replacement loads its state, and the step is
computed again."""
MEASURED = 0.9
"""Strength from which on a reading is no effect of a fault elsewhere: the kernel itself counts the time for which a
quota held a process, or three connections of a process and hardly any other are bad."""
BEFORE_S = 1.2
"""Clock errors and sampling may place an effect this much before its cause."""
_K = FaultKind
_GONE = frozenset({_K.KILLED, _K.CRASHED, _K.STOPPED, _K.HUNG, _K.HOST_LOST})
_ENDS = frozenset({_K.KILLED, _K.CRASHED, _K.HUNG, _K.HANDOVER})
_ENDED_OR_MISSED = frozenset({_K.KILLED, _K.HUNG, _K.NETWORK_CUT})
"""A killed process, and what others take it for until its end is reported."""
_NETWORK = frozenset({_K.NETWORK_CUT, _K.NETWORK_DELAY, _K.NETWORK_LOSS})
_MOMENTARY = _NETWORK | {_K.CPU, _K.SLOW, _K.DEVICE, _K.DISK_SLOW}
"""Kinds that a neighbour may show for a moment while a process is replaced."""
_SLOW = frozenset({_K.SLOW, _K.DEVICE})
PATIENCE_S = {_K.SLOW: 4.5, _K.DEVICE: 4.6, _K.NETWORK_LOSS: 2.8, _K.DNS: 4.8}
"""Time before a finding of these kinds is named, in which an explanation or the faulty end may still show: readings
come once a second, and three are needed to know that nothing is acknowledged."""
CONNECTED_S = 3.0
"""The same for a name that is not resolved, where the connections of the host are well: neither a cut nor losses will
explain it."""
UNACKNOWLEDGED_S = 8.0
"""The same where a connection of the process has unacknowledged segments."""
_DISK = frozenset({_K.DISK_FULL, _K.DISK_SLOW, _K.DISK_ERROR})

EXPLAINS_LOCALLY: dict[FaultKind, frozenset[FaultKind]] = {
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
    _K.KILLED: frozenset(
        {_K.SLOW, _K.DEVICE, _K.CPU, _K.HANDOVER, _K.MEMORY, _K.DEVICE_MEMORY, _K.DISK_SLOW, _K.USER_CODE}
    ),
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
    _K.CORRUPTION: frozenset(
        {
            _K.CRASHED,
            _K.NUMERIC,
            _K.NETWORK_CUT,
            _K.NETWORK_DELAY,
            _K.NETWORK_LOSS,
            _K.SLOW,
            _K.DEVICE,
            _K.HUNG,
        }
    ),
    _K.HOST_LOST: frozenset(_K) - {_K.HOST_LOST, _K.NUMERIC, _K.CORRUPTION, _K.DISK_FULL},
    _K.USER_CODE: frozenset({_K.SLOW, _K.CRASHED}),
    _K.HANDOVER: frozenset({_K.SLOW, _K.DEVICE_MEMORY}),
    _K.DNS: frozenset({_K.SLOW, _K.NETWORK_CUT}),
    _K.SLOW: frozenset(),
}
"""Kind → kinds that it causes in the same process."""

ADVICE: dict[FaultKind, str] = {
    _K.KILLED: "It was replaced; if it happens again, find what kills processes on that host.",
    _K.CRASHED: "Read its log and the error quoted here; the same input may cause it again.",
    _K.STOPPED: "Look for a debugger, job control or a freezer on that host; the process was replaced.",
    _K.HUNG: "Read the stacks at the end of its log; while it runs, `kill -USR1 PID` writes them there.",
    _K.CPU: "Give it CPU time: raise its quota, move what competes with it, or start it elsewhere.",
    _K.MEMORY: "Find what grows; raise its limit or give it less to do.",
    _K.DESCRIPTORS: "Find what it opens and does not close (ls -l /proc/PID/fd), or raise its limit (ulimit -n).",
    _K.DEVICE_MEMORY: "Give the device less to hold (micro-batches, KV blocks), or move other processes off it.",
    _K.DEVICE: "Look at the accelerator (clocks, heat, memory errors), or without one at what else uses its "
    "CPUs; start it elsewhere.",
    _K.DISK_FULL: "Free space on the disk of the run folder; refused writes are repeated automatically.",
    _K.DISK_SLOW: "Find what else writes to that disk, or move the run folder to another one.",
    _K.DISK_ERROR: "Look at the host's kernel log: the disk refuses writes for another reason than space.",
    _K.NETWORK_DELAY: "Look at the network path of that process to its peers: queues, shaping, a bad route.",
    _K.NETWORK_LOSS: "Look at that host's interface, cables and filters: packets do not arrive.",
    _K.NETWORK_CUT: "No data arrives: look at filters and routes between that process and its peers.",
    _K.DNS: "Look at the name service of that host; addresses instead of names do without it.",
    _K.CORRUPTION: "Check that host's memory and disk: bytes are not those that were sent or written.",
    _K.NUMERIC: "Take that process or its device out: it computes something else than its peers.",
    _K.HANDOVER: "Look at the process that did not answer: the device was passed on when its lease ended.",
    _K.SLOW: "Nothing on its host explains it: compare its device and its input with its peers'.",
    _K.HOST_LOST: "Look at that machine and at its engine's log; the run goes on without it and starts it again.",
    _K.USER_CODE: "Read the reward, environment or agent program that is quoted here.",
}


class CandidateCause(msgspec.Struct, frozen=True):
    finding: Finding
    symptom: Symptom
    confidence: float


def judge(
    bundle: EvidenceBundle,
    baselines: Baselines,
    *,
    begin: float,
    since: float,
    at: float,
    is_over: bool = False,
    unrecorded_s: float = 0.0,
) -> Diagnosis:
    """Return the causes of [since, at], the most likely first; findings from `begin` on may explain some of them.

    `is_over`: the run records nothing any more. `unrecorded_s`: a running job has recorded nothing for this long.
    """
    activities = ProcessActivities(bundle, at=at)
    compared_from = max(begin, baselines.compared_from)
    findings = merged(
        [
            *discrete_events(bundle, activities, since=begin, at=at),
            *(common_silence(bundle) if is_over else ()),
            *([nothing_recorded(bundle, seconds=unrecorded_s)] if unrecorded_s else ()),
            *deviations(bundle, baselines, activities, since=begin, at=at),
            *MemoryDetector(bundle, baselines, activities, since=compared_from, at=at).findings(),
            *network_troubles(bundle, baselines, since=begin, at=at),
        ]
    )
    causal = _CausalOrder(bundle, baselines, at=at)
    roots = [each for each in findings if not any(causal.explains(other, each) for other in findings)]
    candidates = [
        _weighed(bundle, baselines, each, at=at)
        for each in roots
        if causal.lasts_until(each) >= since and not _is_early(bundle, each, at=at)
    ]
    named = sorted(
        (each for each in candidates if each.confidence >= SURE),
        key=lambda each: (-_urgency(each, at), each.finding.onset),
    )
    causes = tuple(_cause(bundle, each, at=at) for each in named[:MOST_CAUSES])
    abstained = "" if causes else _why_not(bundle, baselines, candidates, at=at)
    return Diagnosis(run=bundle.run, at=at, since=since, causes=causes, abstained=abstained)


def _is_early(bundle: EvidenceBundle, finding: Finding, *, at: float) -> bool:
    """Return whether to wait before a finding is named; longer for slowness that unacknowledged segments may explain:
    others then wait for the network, and three samples are needed to know the end that is cut off."""
    if finding.is_fact:
        return False
    patience_s = PATIENCE_S.get(finding.kind, 0.0)
    if finding.kind is _K.DNS and is_well_connected(
        bundle, finding.process, since=finding.onset + SAMPLE_S, at=at
    ):
        patience_s = CONNECTED_S
    if finding.kind in _SLOW and has_unacknowledged(bundle, finding.process, at=at):
        patience_s = max(patience_s, UNACKNOWLEDGED_S)
    return at - finding.onset < patience_s


class _CausalOrder:
    """Explanations between findings: what is an effect of what, and for how long a loss has effects."""

    def __init__(self, bundle: EvidenceBundle, baselines: Baselines, *, at: float) -> None:
        self._bundle, self._baselines, self._at = bundle, baselines, at

    def lasts_until(self, finding: Finding) -> float:
        """Return until when a fault is current: a loss, until a step has been committed with the replacement."""
        if not (finding.is_fact and finding.kind in _GONE):
            return finding.until
        births = (born for born, _ in self._bundle.births.get(finding.process, ()) if born > finding.onset)
        replaced = next(births, finding.until)
        steps = (step.time for step in self._bundle.steps if step.time > max(replaced, finding.until))
        longest = finding.until + RECOVERY_STEPS * self._baselines.step_s
        return max(finding.until, min(next(steps, self._at), longest))

    def has_effects_until(self, finding: Finding) -> float:
        """Return until when effects of a finding may begin."""
        recovered = self.lasts_until(finding)
        after_s = min(AFTERMATH_S, self._baselines.step_s) if recovered > finding.until else 0.0
        return max(finding.until + AFTERMATH_S, recovered + after_s)

    def explains(self, cause: Finding, other: Finding) -> bool:
        """Return whether `other` is only an effect of `cause`."""
        if cause is other:
            return False
        of_its_host = cause.of_host and (
            self._bundle.host(cause.process) == self._bundle.host(other.process)
            # Processes of a machine that is lost are on another one by now.
            or (cause.kind is _K.HOST_LOST and other.process in cause.others)
        )
        if cause.process == other.process or of_its_host:
            return self._explains_locally(cause, other)
        starts_after = other.onset >= cause.onset - BEFORE_S
        return (
            starts_after
            and other.onset <= self.has_effects_until(cause)
            and _explains_elsewhere(cause, other)
        )

    def _explains_locally(self, cause: Finding, other: Finding) -> bool:
        """Return whether `other` is an effect of `cause` in the same process, or on the same host."""
        if {cause.kind, other.kind} <= _ENDED_OR_MISSED and _K.KILLED in (cause.kind, other.kind):
            return _is_earlier_loss(cause, other)
        starts_after = other.onset >= cause.onset - BEFORE_S
        closely = other.onset <= self.has_effects_until(cause) and cause.onset <= other.until + AFTERMATH_S
        # A comparison of readings explains an end, but no error that names what broke.
        is_clearer = other.is_fact and not cause.is_fact and other.kind not in _ENDS
        # A fault of one process does not cut off its whole host.
        is_wider = other.of_host and not cause.of_host
        explained = closely and other.kind in EXPLAINS_LOCALLY[cause.kind] and not (is_clearer or is_wider)
        # The onset of a hang is the last progress, which may be long before.
        return explained and (starts_after or cause.is_fact or other.kind is _K.HUNG)


def _is_earlier_loss(cause: Finding, other: Finding) -> bool:
    """Return whether a kill, a hang or a silence was recorded before the other: a process whose memory is being freed
    is missed before its end is reported, and one that hung may have been killed for it."""
    if cause.kind is _K.KILLED:
        is_then = cause.onset - BEFORE_S <= other.until and other.onset <= cause.until + AFTERMATH_S
        return other.kind is not _K.KILLED and not other.of_host and is_then
    return cause.kind is _K.HUNG and BEFORE_S < other.onset - cause.until <= AFTERMATH_S


def _explains_elsewhere(cause: Finding, other: Finding) -> bool:
    """Return whether `other` is an effect of `cause` in another process, at a time at which it may be."""
    if cause.kind in _DISK and other.kind in _DISK:
        # One disk, observed by several processes: the clearest evidence stands for all.
        return _order(cause) > _order(other)
    if cause.kind is other.kind is _K.DEVICE_MEMORY:
        # One accelerator: the process that grew leaves no memory to the others.
        return other.process in cause.others and cause.process not in other.others
    if other.kind in _NETWORK and cause.kind in _GONE | {_K.MEMORY} and cause.is_fact:
        # A lost process leaves its peers with dead connections, and its replacement delays others for a moment. It cuts
        # no connection between others: the kernel acknowledges for a process that gets no CPU.
        is_moment = not other.is_fact and other.kind is not _K.NETWORK_CUT and other.strength < MEASURED
        return cause.process in other.others or is_moment
    if cause.is_fact and cause.kind in _GONE | {_K.MEMORY, _K.DEVICE, _K.DEVICE_MEMORY}:
        # A replacement costs its neighbours CPU and disk for a moment, and others notice the absence.
        return not other.is_fact and other.strength < MEASURED and other.kind in _MOMENTARY
    if cause.kind in _NETWORK and other.kind in _NETWORK:
        return _order(cause) > _order(other) and cause.process in other.others
    if cause.kind in (_K.CPU, _K.MEMORY) and other.kind in _NETWORK | _SLOW:
        return cause.process in other.others or other.kind in _SLOW
    if cause.kind in _NETWORK and other.kind in _SLOW and not other.is_fact:
        return True
    if cause.kind is _K.CORRUPTION and cause.of_host:
        # A connection ends with its first damaged message: answers are late, and groups of ranks fail.
        return other.kind in _NETWORK | _SLOW | {_K.HUNG, _K.NUMERIC, _K.CRASHED}
    is_comparison = not other.is_fact and other.strength < MEASURED
    return cause.kind in _DISK and other.kind in _SLOW | {_K.HUNG, _K.CPU} and is_comparison


def _order(finding: Finding) -> tuple[bool, float, float, str]:
    return (finding.is_fact, round(finding.strength, 2), -finding.onset, finding.process)


def _weighed(bundle: EvidenceBundle, baselines: Baselines, finding: Finding, *, at: float) -> CandidateCause:
    """Weigh a finding: a comparison without a symptom counts less, a process that others wait for counts more."""
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
    return CandidateCause(finding, symptom, round(min(confidence, 0.99), 3))


def _urgency(candidate: CandidateCause, at: float) -> float:
    """Return the sort key of a candidate: current faults come before past ones."""
    return candidate.confidence - FADING * min(max(0.0, at - candidate.finding.until), 20.0)


def _cause(bundle: EvidenceBundle, candidate: CandidateCause, *, at: float) -> Cause:
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
        advice=finding.advice or ADVICE[finding.kind],
    )


def _why_not(
    bundle: EvidenceBundle, baselines: Baselines, candidates: list[CandidateCause], *, at: float
) -> str:
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
    return "no process failed, and no reading is far from its own past and from its peers"


def _stalled(bundle: EvidenceBundle, *, at: float) -> str | None:
    """Return a remark if no step is committed although no cause was found."""
    before = usual([step.duration_s for step in bundle.steps])
    waited_s = at - bundle.steps[-1].time if bundle.steps else 0.0
    if before is None or bundle.is_over(at) or waited_s < max(STALLED_S, STALLED_FACTOR * before.middle):
        return None
    return (
        f"no step was committed for {waited_s:.0f} s, usually one in {before.middle:.1f} s, and nothing that was "
        "recorded explains it: `kintsugi status` shows what each process waits for"
    )


def replaceable(cause: Cause) -> bool:
    """Return whether a replacement of the process may help: it is slow or starved itself."""
    if cause.process == MASTER or known_role(cause.process) is Role.AGENT:
        return False
    return cause.kind in (
        _K.CPU, _K.MEMORY, _K.DESCRIPTORS, _K.DEVICE, _K.SLOW, _K.NETWORK_DELAY, _K.NETWORK_LOSS
    )  # fmt: skip
