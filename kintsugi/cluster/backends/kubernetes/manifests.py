"""Every object that the back end creates in a cluster, as plain data, and the rights that this needs. Pure.

    Secret kintsugi-JOB     one ticket per host
    Indexed Job             where the cluster has them (1.24 and later): one pod per host
    or Volcano Job          where Volcano is installed: the pods start together or not at all
    or Pods                 where neither is there

A pod runs the supervisor of a host as its first process. It has no account for the API, no probe (a busy host is not a
dead one; heartbeats tell them apart), and is not restarted in place: a host that comes back is a new pod with a new
ticket.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kintsugi.cluster.backends.contract import HostOrder
from kintsugi.config.schema import KubernetesSection
from kintsugi.errors import ConfigError

Object = dict[str, Any]

RUN_LABEL, INDEX_LABEL = "kintsugi/run", "kintsugi/index"
TICKET_NOTE = "kintsugi/ticket"
"""Annotation that is changed with a ticket: the kubelet then brings the new Secret to the pod at once."""
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
CONTAINER = "agent"
TICKETS, SCRATCH = "/run/kintsugi/tickets", "/scratch"
GRACE_S = 30
"""Time for a pod to end in order: its processes end, and the last telemetry is sent."""
MOST_FAILURES = 1_000_000
"""A Job ends its run after so many failed pods; which failures a run survives is decided by its master."""
LEFT_S = 600
"""Time after which a Job that is over is removed, if it could not be deleted at the end of the run."""
FIRST_INDEXED = (1, 24)


class Workload(StrEnum):
    """Controller that keeps the pods."""

    JOB = "job"
    VOLCANO = "volcano"
    PODS = "pods"


class Deployment(msgspec.Struct, frozen=True):
    """Everything that the objects of one run are made from."""

    job: str
    """Identity of the session of the run."""
    hosts: tuple[str, ...]
    """Names of the hosts, `host-1` first."""
    settings: KubernetesSection
    namespace: str
    workload: Workload
    template: Object = {}
    """Pod template of the user, which is merged into ours."""
    requests: dict[str, str] = {}
    """Resources that each pod requests, as `{"cpu": "2200m", "memory": "1500Mi"}`."""

    @property
    def name(self) -> str:
        return f"kintsugi-{self.job}"

    @property
    def selector(self) -> str:
        return f"{RUN_LABEL}={self.job}"

    @property
    def labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "kintsugi", RUN_LABEL: self.job}


class Right(msgspec.Struct, frozen=True):
    """Verbs on a resource, as in a rule of a Role."""

    group: str
    resource: str
    verbs: tuple[str, ...]

    def rule(self) -> Object:
        return {"apiGroups": [self.group], "resources": [self.resource], "verbs": list(self.verbs)}


_SECRETS = Right("", "secrets", ("create", "patch", "delete"))
_EVENTS = Right("", "events", ("create", "list"))
_OWN_PODS = Right("", "pods", ("create", "list", "watch", "patch", "delete"))
_KEPT_PODS = Right("", "pods", ("list", "watch", "patch", "delete"))


def rights(workload: Workload) -> tuple[Right, ...]:
    """Return the rights that a run needs in its namespace."""
    match workload:
        case Workload.PODS:
            return _SECRETS, _OWN_PODS, _EVENTS
        case Workload.JOB:
            return _SECRETS, _KEPT_PODS, _EVENTS, Right("batch", "jobs", ("create", "delete"))
        case Workload.VOLCANO:
            return _SECRETS, _KEPT_PODS, _EVENTS, Right("batch.volcano.sh", "jobs", ("create", "delete"))


def choose_workload(wanted: str, *, version: tuple[int, int], has_volcano: bool) -> Workload:
    """Return what keeps the pods; ConfigError if the cluster does not have what is wanted."""
    if wanted == "auto":
        if has_volcano:
            return Workload.VOLCANO
        return Workload.JOB if version >= FIRST_INDEXED else Workload.PODS
    if wanted == "volcano" and not has_volcano:
        raise ConfigError(
            "cluster.kubernetes.workload: expected Volcano in the cluster, its Job is not installed"
        )
    if wanted == "job" and version < FIRST_INDEXED:
        raise ConfigError(
            "cluster.kubernetes.workload: expected Kubernetes 1.24 or later for an Indexed Job, found "
            f"{version[0]}.{version[1]}; use `pods`"
        )
    return Workload(wanted)


# Secret and tickets.


def ticket_data(orders: Sequence[HostOrder]) -> dict[str, str]:
    """Return the entries of the Secret for some hosts."""
    return {order.host: base64.b64encode(order.ticket).decode() for order in orders}


def secret(deployment: Deployment, orders: Sequence[HostOrder]) -> Object:
    """Return the Secret with the tickets of a run."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(deployment),
        "type": "Opaque",
        "data": ticket_data(orders),
    }


def _metadata(deployment: Deployment) -> Object:
    return {"name": deployment.name, "namespace": deployment.namespace, "labels": deployment.labels}


def owned_by(kind: str, api_version: str, *, name: str, uid: str) -> Object:
    """Return the part of the metadata that lets an object go with its owner."""
    return {"ownerReferences": [{"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}]}


# Pods and what keeps them.


def pod(
    deployment: Deployment, host: str, *, name: str, owner_uid: str, avoided: Sequence[str] = ()
) -> Object:
    """Return the pod of one host, which goes with the Secret of its run. It is put on none of the nodes `avoided`."""
    index = str(deployment.hosts.index(host))
    template = pod_template(deployment, ticket=host)
    metadata = template["metadata"] | {"name": name, "namespace": deployment.namespace}
    metadata["labels"] = metadata["labels"] | {INDEX_LABEL: index}
    metadata |= owned_by("Secret", "v1", name=deployment.name, uid=owner_uid)
    # Only its own ticket; the pods of a Job share one template, and so all tickets of their run.
    for volume in template["spec"]["volumes"]:
        if volume["name"] == "tickets":
            volume["secret"]["items"] = [{"key": host, "path": host}]
    spec = template["spec"]
    if avoided:
        spec = spec | {"affinity": _avoiding(spec.get("affinity") or {}, avoided)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _avoiding(affinity: Mapping[str, Any], nodes: Sequence[str]) -> Object:
    """Return an affinity that takes none of these nodes, whichever of the user's terms holds."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    of_nodes = affinity.get("nodeAffinity") or {}
    terms = (of_nodes.get(required) or {}).get("nodeSelectorTerms") or [{}]
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *others]} for term in terms]
    return {**affinity, "nodeAffinity": {**of_nodes, required: {"nodeSelectorTerms": terms}}}


def workload_object(deployment: Deployment) -> Object:
    """Return the Job that keeps the pods."""
    count = len(deployment.hosts)
    if deployment.workload is Workload.VOLCANO:
        template = pod_template(deployment, ticket="index-$(VC_TASK_INDEX)")
        return {
            "apiVersion": "batch.volcano.sh/v1alpha1",
            "kind": "Job",
            "metadata": _metadata(deployment),
            "spec": {
                "minAvailable": count,
                "maxRetry": MOST_FAILURES,
                "schedulerName": "volcano",
                "ttlSecondsAfterFinished": LEFT_S,
                "plugins": {"env": []},
                "tasks": [{"name": CONTAINER, "replicas": count, "template": template}],
            },
        }
    assert deployment.workload is Workload.JOB, deployment.workload
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(deployment),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": MOST_FAILURES,
            "ttlSecondsAfterFinished": LEFT_S,
            "template": pod_template(deployment, ticket="index-$(JOB_COMPLETION_INDEX)"),
        },
    }


def pod_template(deployment: Deployment, *, ticket: str) -> Object:
    """Return the template of a pod; `ticket` is the name of its file, in which environment variables are filled in."""
    container: Object = {
        "name": CONTAINER,
        "image": deployment.settings.image,
        "command": ["python", "-P", "-m", "kintsugi"],
        "args": ["agent", "--join", f"{TICKETS}/{ticket}", "--wait", "--scratch", SCRATCH],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tickets", "mountPath": TICKETS, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if resources := _resources(deployment):
        container["resources"] = resources
    # Keys of a Secret may not be named by number alone; the files of a Job are, by their index.
    items = [{"key": host, "path": f"index-{index}"} for index, host in enumerate(deployment.hosts)]
    apart = {
        "labelSelector": {"matchLabels": {RUN_LABEL: deployment.job}},
        "topologyKey": "kubernetes.io/hostname",
    }
    ours = {
        "metadata": {"labels": deployment.labels},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 100, "podAffinityTerm": apart}
                    ]
                }
            },
            "containers": [container],
            "volumes": [
                {
                    "name": "tickets",
                    "secret": {
                        "secretName": deployment.name,
                        "defaultMode": 0o444,
                        "items": items,
                        "optional": True,
                    },
                },
                {"name": "scratch", "emptyDir": {}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }
    merged: Object = merge(ours, deployment.template)
    return merged


def _resources(deployment: Deployment) -> Object:
    """Return what the container requests and what limits it. A limit of the user's template is its request too, as
    Kubernetes has it: one of ours might be above it."""
    containers = (deployment.template.get("spec") or {}).get("containers") or ()
    resources = [each.get("resources") or {} for each in containers if each.get("name") == CONTAINER]
    limits = {name for each in resources for name in each.get("limits") or ()}
    requests = {name: size for name, size in deployment.requests.items() if name not in limits}
    settings = deployment.settings
    found: Object = {"requests": requests} if requests else {}
    return found | ({"limits": {settings.gpu_resource: settings.gpus}} if settings.gpus else {})


def merge(ours: Any, theirs: Any) -> Any:
    """Return `ours` with the values of `theirs`; lists of objects are merged by their names, or mount paths.

    >>> merge({"a": [{"name": "x", "b": 1}]}, {"a": [{"name": "x", "c": 2}, {"name": "y"}]})
    {'a': [{'name': 'x', 'b': 1, 'c': 2}, {'name': 'y'}]}
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = {key: merge(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()}
        return {**ours, **theirs, **both}
    if (
        isinstance(ours, list)
        and isinstance(theirs, list)
        and all(isinstance(each, dict) for each in ours + theirs)
    ):
        key = "mountPath" if any("mountPath" in each for each in (*ours, *theirs)) else "name"
        named = {each.get(key, number): each for number, each in enumerate(ours)}
        for each in theirs:
            name = each.get(key, len(named))
            named[name] = merge(named[name], each) if name in named else each
        return list(named.values())
    return theirs


def check_template(template: Any, *, path: str) -> Object:
    """Return a pod template of the user; ConfigError names what can not be merged."""
    if not isinstance(template, dict) or not template.keys() <= {"metadata", "spec"}:
        raise ConfigError(
            f"{path}: expected a pod template with `metadata` and `spec`, got {str(template)[:80]!r}"
        )
    spec = template.get("spec") or {}
    refused = ["spec.restartPolicy"] if "restartPolicy" in spec else []
    for container in spec.get("containers") or []:
        if container.get("name") == CONTAINER:
            refused += [
                f"containers[{CONTAINER}].{key}" for key in ("args", "livenessProbe") if key in container
            ]
    if refused:
        raise ConfigError(
            f"{path}: expected no `{refused[0]}` in the pod template: Kintsugi sets it, or must not have it"
        )
    found: Object = msgspec.to_builtins(template)
    return found


def event(
    deployment: Deployment, about: Mapping[str, Any], *, reason: str, message: str, name: str, time: str
) -> Object:
    """Return an event about an object: `kubectl describe` shows it there."""
    metadata = about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": deployment.namespace},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": deployment.namespace,
            "uid": metadata.get("uid", ""),
        },
        "reason": reason,
        "message": message[:1000],
        "type": "Normal" if reason == "HostStarted" else "Warning",
        "source": {"component": "kintsugi"},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
