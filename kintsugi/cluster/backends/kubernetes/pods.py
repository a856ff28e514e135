"""Pure decisions about pods: from what the API shows of them to hosts that came, went, or are doubted.

A host has one *current* pod: the first one that appears after its order. Pods that were current and are lost count no
more, whatever the API still shows of them: a pod of a node without power is shown as running for minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kintsugi.cluster.backends.contract import HostCame, HostDoubted, HostEvent, HostLeaves, HostWent
from kintsugi.cluster.backends.kubernetes.manifests import COMPLETION_INDEX, CONTAINER, INDEX_LABEL

CANNOT_START = frozenset(
    {"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
    | {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
"""Reasons of a container that waits and will not start. The first failure of a pull, `ErrImagePull`, may pass."""
TERMINATED_BY_ENGINE = frozenset({"Evicted", "NodeLost", "Preempting", "Terminated", "Shutdown"})


AVOID_S = 60.0
"""Time for which no pod is put on a node whose host was lost before its engine knew: it calls the node ready for
another 40 s, by default, and prefers it, as it looks empty."""
UNPLACED_S = 10.0
"""Time for another node to take a pod, after which the avoided one may have it."""
UNTAKEN_S = 10.0
"""Time for the kubelet of a node to see the pod of a host that is replaced, from when it was placed there; one that
lives does within a second."""


class PodPhase(StrEnum):
    """A pod's life, as far as a host is concerned."""

    PENDING = "pending"
    RUNNING = "running"
    OVER = "over"


class PodView(msgspec.Struct, frozen=True):
    """State of one pod, as far as decisions depend on it."""

    name: str
    uid: str
    host: str
    phase: PodPhase
    created: str
    place: str = ""
    node: str = ""
    """Node that the scheduler has chosen; empty before it has."""
    is_taken: bool = True
    """The kubelet of that node has seen the pod."""
    why: str = ""
    """Why it is over, or why it does not start."""
    doubt: str = ""
    """Why it may be lost although it is shown as running."""
    is_going: bool = False
    """It is being deleted."""


def index_of(pod: Mapping[str, Any]) -> int | None:
    """Return the index of a pod in its run."""
    metadata = pod["metadata"]
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    for value in (labels.get(INDEX_LABEL), notes.get(COMPLETION_INDEX), labels.get(COMPLETION_INDEX)):
        if value is not None and str(value).isdecimal():
            return int(value)
    # Volcano names its pods JOB-TASK-INDEX.
    last = str(metadata["name"]).rpartition("-")[2]
    return int(last) if "volcano.sh/job-name" in labels and last.isdecimal() else None


def view(pod: Mapping[str, Any], *, hosts: Sequence[str]) -> PodView | None:
    """Return what counts of a pod; None if it is none of ours."""
    index = index_of(pod)
    if index is None or index >= len(hosts):
        return None
    metadata, status, spec = pod["metadata"], pod.get("status") or {}, pod.get("spec") or {}
    phase, why = _phase(status)
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    is_going = bool(metadata.get("deletionTimestamp"))
    doubt = ""
    if phase is PodPhase.RUNNING:
        if is_going:
            doubt = "its pod is being deleted"
        elif (conditions.get("Ready") or {}).get("status") in ("False", "Unknown"):
            doubt = f"its node {spec.get('nodeName', '')} is not ready"
    if phase is PodPhase.PENDING and (conditions.get("PodScheduled") or {}).get("status") == "False":
        why = f"no node takes its pod: {conditions['PodScheduled'].get('message', '')}{_requested(spec)}"
    node = str(spec.get("nodeName") or "")
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        host=hosts[index],
        phase=phase,
        created=str(metadata.get("creationTimestamp", "")),
        place=f"pod {metadata['name']} on {node}" if node else f"pod {metadata['name']}",
        node=node,
        is_taken=phase is not PodPhase.PENDING or bool(status.get("startTime")),
        why=why,
        doubt=doubt,
        is_going=is_going,
    )


def _requested(spec: Mapping[str, Any]) -> str:
    """Describe what a pod requests of its node, and what changes it."""
    containers = [each for each in spec.get("containers") or () if each.get("name") == CONTAINER]
    requests = [
        item for each in containers for item in (each.get("resources") or {}).get("requests", {}).items()
    ]
    listed = ", ".join(f"{name} {size}" for name, size in requests)
    return f" It requests {listed}: see cluster.kubernetes.cpus and .memory_gib." if listed else ""


def _phase(status: Mapping[str, Any]) -> tuple[PodPhase, str]:
    containers = status.get("containerStatuses") or ()
    for container in containers:
        state = container.get("state") or {}
        if (ended := state.get("terminated")) is not None:
            return PodPhase.OVER, _end(ended, status)
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in CANNOT_START:
            return PodPhase.OVER, f"{waiting['reason']}: {waiting.get('message', '')}"
    if status.get("phase") in ("Failed", "Succeeded"):
        said = " ".join(filter(None, (status.get("reason"), status.get("message"))))
        return PodPhase.OVER, f"its pod has {str(status['phase']).lower()}: {said or 'without a reason'}"
    if any("running" in (container.get("state") or {}) for container in containers):
        return PodPhase.RUNNING, ""
    return PodPhase.PENDING, "its pod has not started"


def _end(ended: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Describe the end of a container: its last words, or its status."""
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    if lines and ended.get("exitCode") != 0:
        return lines[-1]
    if status.get("reason") in TERMINATED_BY_ENGINE:
        return f"{status['reason']}: {status.get('message', '')}"
    reason = ended.get("reason") or "Completed"
    return f"its container ended with exit code {ended.get('exitCode')} ({reason})"


class _Tracked(msgspec.Struct):
    """One host."""

    is_ordered: bool = False
    current: str = ""
    """Uid of its pod; empty while none has appeared."""
    has_come: bool = False
    since: float = 0.0
    placed_at: float | None = None
    """When its pod was first seen with a node."""
    doubt: str = ""
    avoids: bool = False
    """Its pod may not be put on the nodes that are avoided."""


class PodTracker:
    """The pods of one run. Methods return what has happened; nothing is done."""

    def __init__(self, hosts: Sequence[str], *, patience_s: float) -> None:
        """`patience_s` is the time for a pod to start."""
        self._hosts, self._patience_s = tuple(hosts), patience_s
        self._tracked = {host: _Tracked() for host in hosts}
        self._pods: dict[str, PodView] = {}
        self._lost: set[str] = set()
        """Uids of pods that count no more."""
        self._avoided: dict[str, float] = {}
        """Node → when a host on it was lost before its engine knew."""
        self._came: set[str] = set()
        """Hosts that have come once."""

    def order(self, host: str, *, now: float) -> list[PodView]:
        """Note that a pod is wanted for a host; return the pods to be deleted first.

        A pod that was made by a controller after the last one was lost is kept: it waits for the ticket.
        """
        tracked = self._tracked[host]
        self._lost |= {tracked.current} - {""}
        self._note_node(self._pods.get(tracked.current), now)
        there = self._of(host)
        kept = [pod for pod in there if self._may_be_current(pod) and pod.phase is not PodPhase.OVER]
        current = kept[-1].uid if kept else ""
        self._tracked[host] = _Tracked(is_ordered=True, current=current, since=now)
        unwanted = [pod for pod in there if pod.uid != current]
        self._lost |= {pod.uid for pod in unwanted}
        return unwanted

    def _note_node(self, lost: PodView | None, now: float) -> None:
        self._avoided = {node: at for node, at in self._avoided.items() if now - at < AVOID_S}
        if lost is not None and lost.phase is PodPhase.RUNNING and not lost.is_going:
            self._avoided[lost.node] = now

    def avoided(self, host: str) -> tuple[str, ...]:
        """Return the nodes that the pod which is now made for a host may not be put on."""
        self._tracked[host].avoids = bool(self._avoided)
        return tuple(self._avoided)

    def refuse(self, host: str, why: str) -> list[HostEvent]:
        """Note that the order of a host could not be carried out."""
        return self._went(host, why) if self._tracked[host].is_ordered else []

    def adopt(self, pods: Iterable[Mapping[str, Any]]) -> None:
        """Begin with the pods of a predecessor, of hosts that were not ordered here."""
        for pod in pods:
            seen = view(pod, hosts=self._hosts)
            if seen is None:
                continue
            self._pods[seen.uid] = seen
            tracked = self._tracked[seen.host]
            if seen.phase is PodPhase.RUNNING:
                self._came.add(seen.host)
            if seen.phase is PodPhase.RUNNING and not tracked.is_ordered and not seen.is_going:
                self._tracked[seen.host] = _Tracked(is_ordered=True, current=seen.uid, has_come=True)

    def waiting(self, *, now: float, longer_than_s: float) -> list[str]:
        """Return ordered hosts for which no pod has appeared for a while."""
        return [
            host
            for host, tracked in self._tracked.items()
            if tracked.is_ordered and not tracked.current and now - tracked.since > longer_than_s
        ]

    def current(self, host: str) -> PodView | None:
        """Return the pod of a host."""
        return self._pods.get(self._tracked[host].current)

    @property
    def pods(self) -> tuple[PodView, ...]:
        return tuple(self._pods.values())

    def see(self, pod: Mapping[str, Any], *, deleted: bool, now: float) -> list[HostEvent]:
        """Take one change of a pod."""
        seen = view(pod, hosts=self._hosts)
        if seen is None:
            return []
        if deleted:
            self._pods.pop(seen.uid, None)
        else:
            self._pods[seen.uid] = seen
        return self._settle(seen.host, now)

    def see_all(self, pods: Iterable[Mapping[str, Any]], *, now: float) -> list[HostEvent]:
        """Take a list of all pods: what is not in it was deleted unseen."""
        views = [seen for pod in pods if (seen := view(pod, hosts=self._hosts)) is not None]
        self._pods = {seen.uid: seen for seen in views}
        return self.check(now=now)

    def check(self, *, now: float) -> list[HostEvent]:
        """Return what follows from time alone, and from orders."""
        return [event for host in self._hosts for event in self._settle(host, now)]

    def _of(self, host: str) -> list[PodView]:
        """Return the pods of a host, in order of creation."""
        return sorted((pod for pod in self._pods.values() if pod.host == host), key=lambda pod: pod.created)

    def _may_be_current(self, pod: PodView) -> bool:
        return pod.uid not in self._lost and not pod.is_going

    def _settle(self, host: str, now: float) -> list[HostEvent]:
        tracked = self._tracked[host]
        if not tracked.is_ordered:
            return []
        if not tracked.current:
            found = [pod for pod in self._of(host) if self._may_be_current(pod)]
            if not found:
                late = now - tracked.since > self._patience_s
                return self._went(host, f"no pod was made for {self._patience_s:g} s") if late else []
            tracked.current = found[-1].uid
        pod = self._pods.get(tracked.current)
        if pod is None:
            return self._went(host, "its pod was deleted")
        if pod.phase is PodPhase.OVER:
            return self._went(host, pod.why)
        if pod.node and tracked.placed_at is None:
            tracked.placed_at = now
        if pod.phase is PodPhase.PENDING and (why := self._give_up(tracked, pod, now)):
            return self._went(host, why)
        events: list[HostEvent] = []
        if pod.phase is PodPhase.RUNNING and not tracked.has_come:
            tracked.has_come = True
            self._came.add(host)
            events.append(HostCame(host, pod.place))
        if pod.doubt != tracked.doubt:
            tracked.doubt = pod.doubt
            events.append(HostDoubted(host, pod.doubt))
            if pod.is_going:
                events.append(HostLeaves(host, pod.doubt))
        return events

    def _give_up(self, tracked: _Tracked, pod: PodView, now: float) -> str:
        """Return why a pod that does not start is waited for no longer; empty while it is."""
        waited_s = now - tracked.since
        if waited_s > self._patience_s:
            return f"{pod.why} (for {self._patience_s:g} s)"
        if tracked.avoids and not pod.node and waited_s > UNPLACED_S:
            avoided, self._avoided = ", ".join(self._avoided), {}
            return f"no node takes its pod without {avoided} (for {UNPLACED_S:g} s)"
        # Without a host that never was there the run could not begin: its pod is waited for on a slow node too.
        placed_at = now if tracked.placed_at is None else tracked.placed_at
        if pod.host in self._came and not pod.is_taken and now - placed_at > UNTAKEN_S:
            self._avoided[pod.node] = now
            return f"node {pod.node} has not seen its pod (for {UNTAKEN_S:g} s)"
        return ""

    def _went(self, host: str, why: str) -> list[HostEvent]:
        tracked = self._tracked[host]
        self._lost |= {tracked.current} - {""}
        self._tracked[host] = _Tracked()
        return [HostWent(host, why)]
