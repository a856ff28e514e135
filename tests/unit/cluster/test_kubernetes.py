"""Kubernetes: decisions about pods, requests and watches that survive, refusals by name, tickets in files."""

from __future__ import annotations

import asyncio
import base64
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kintsugi.cli.capacity import run_memory
from kintsugi.cli.hosts import moved, placed_cluster
from kintsugi.cluster.backends.contract import (
    HostCame,
    HostDoubted,
    HostEvent,
    HostLeaves,
    HostOrder,
    HostWent,
)
from kintsugi.cluster.backends.kubernetes import manifests
from kintsugi.cluster.backends.kubernetes.access import Access, load_access, read_kubeconfig
from kintsugi.cluster.backends.kubernetes.backend import KubernetesBackend
from kintsugi.cluster.backends.kubernetes.client import ApiError, Changed, Client, Expired
from kintsugi.cluster.backends.kubernetes.manifests import (
    Deployment,
    Right,
    Workload,
    choose_workload,
    rights,
)
from kintsugi.cluster.backends.kubernetes.opening import planned_objects
from kintsugi.cluster.backends.kubernetes.pods import AVOID_S, UNPLACED_S, UNTAKEN_S, PodTracker, view
from kintsugi.cluster.host_manager import DOUBTED_SILENT_S, HostDecision, HostPhase, HostRecord, decide
from kintsugi.cluster.joining import Ticket
from kintsugi.cluster.ticket_file import STALE_S, supervise_with_file
from kintsugi.config.recipe import load
from kintsugi.config.schema import ClusterSection, Config, KubernetesSection
from kintsugi.errors import ConfigError, UserError, WorldError
from kintsugi.lab.testbed.pod_signals import RIGHTS
from kintsugi.types import Peer, Role
from tests.cluster import kubernetes_server
from tests.cluster.kubernetes_server import KubernetesServer
from tests.cluster.programs.kubernetes_script import answers

HOSTS = ("host-1", "host-2")
ROOT = Path(__file__).parents[3]
SELECTOR = "kintsugi/run=run1"
PODS = "/api/v1/namespaces/runs/pods"


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    made = KubernetesServer(minor="20")
    yield made
    made.close()


# Decisions about pods. The objects are those of a real cluster (1.20.2), shortened.


def pod(
    index: int = 0, *, uid: str = "u1", created: str = "2026-11-18T10:00:00Z", **status: Any
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"kintsugi-run1-{index}-{uid}",
            "uid": uid,
            "labels": {"kintsugi/run": "run1", "kintsugi/index": str(index)},
            "creationTimestamp": created,
        },
        "spec": {"nodeName": "h1"},
        "status": {"phase": "Pending", **status},
    }


def running(index: int = 0, *, uid: str = "u1", ready: str = "True") -> dict[str, Any]:
    return pod(
        index,
        uid=uid,
        phase="Running",
        conditions=[{"type": "Ready", "status": ready}],
        containerStatuses=[{"name": "agent", "ready": True, "state": {"running": {"startedAt": "…"}}}],
    )


def ended(code: int, message: str = "", *, uid: str = "u1") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": message}}
    return pod(uid=uid, phase="Failed", containerStatuses=[{"name": "agent", "state": state}])


def tracker(*, patience_s: float = 60.0) -> PodTracker:
    made = PodTracker(HOSTS, patience_s=patience_s)
    made.order("host-1", now=0.0)
    return made


def test_a_pod_that_runs_is_a_host_that_came_and_is_told_once() -> None:
    pods = tracker()
    assert pods.see(pod(), deleted=False, now=1.0) == []
    assert pods.see(running(), deleted=False, now=2.0) == [HostCame("host-1", "pod kintsugi-run1-0-u1 on h1")]
    assert pods.see(running(), deleted=False, now=3.0) == []


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (ended(137), "its container ended with exit code 137 (Error)"),
        (ended(1, "Traceback …\nModuleNotFoundError: No module named 'torch'\n"), "No module named 'torch'"),
        (
            pod(
                containerStatuses=[
                    {
                        "state": {
                            "waiting": {
                                "reason": "ImagePullBackOff",
                                "message": 'Back-off pulling image "x:1"',
                            }
                        }
                    }
                ]
            ),
            'ImagePullBackOff: Back-off pulling image "x:1"',
        ),
        (
            pod(
                containerStatuses=[
                    {
                        "state": {
                            "waiting": {
                                "reason": "ErrImageNeverPull",
                                "message": 'image "x:1" is not present',
                            }
                        }
                    }
                ]
            ),
            'ErrImageNeverPull: image "x:1" is not present',
        ),
        (
            pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
            "its pod has failed: Evicted The node was low on resource: memory.",
        ),
    ],
)
def test_a_pod_that_is_over_is_a_host_that_went_with_the_reason(seen: dict[str, Any], why: str) -> None:
    pods = tracker()
    (event,) = pods.see(seen, deleted=False, now=1.0)
    assert isinstance(event, HostWent) and why in event.why
    assert pods.see(seen, deleted=False, now=2.0) == []


def test_the_first_failure_of_a_pull_may_pass() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "timeout"}}
    assert tracker().see(pod(containerStatuses=[{"state": waiting}]), deleted=False, now=1.0) == []


def test_a_pod_without_a_node_is_given_up_with_the_words_of_the_scheduler() -> None:
    pods = tracker(patience_s=30.0)
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/3 nodes are available: 3 Insufficient gpu.",
    }
    assert pods.see(pod(conditions=[scheduled]), deleted=False, now=1.0) == []
    assert pods.check(now=29.0) == []
    (event,) = pods.check(now=31.0)
    assert event == HostWent(
        "host-1", "no node takes its pod: 0/3 nodes are available: 3 Insufficient gpu. (for 30 s)"
    )


def test_a_node_whose_host_was_lost_before_its_engine_knew_takes_no_pod_for_a_while() -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    assert [each.uid for each in pods.order("host-1", now=10.0)] == ["u1"], (
        "the API still shows it as running"
    )
    assert pods.avoided("host-1") == ("h1",)
    pods.order("host-2", now=20.0)
    assert pods.avoided("host-2") == ("h1",), "the pods of other hosts are not put there either"
    pods.order("host-2", now=11.0 + AVOID_S)
    assert pods.avoided("host-2") == ()


def test_a_node_whose_pod_has_ended_may_take_the_next_one() -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    assert len(pods.see(ended(137), deleted=False, now=2.0)) == 1
    pods.order("host-1", now=3.0)
    assert pods.avoided("host-1") == ()


def test_a_node_that_is_avoided_takes_the_pod_when_no_other_does() -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    pods.order("host-1", now=10.0)
    assert pods.avoided("host-1") == ("h1",)
    unplaced = pod(uid="u2", created="2026-11-18T10:00:10Z")
    unplaced["spec"] = {}
    assert pods.see(unplaced, deleted=False, now=11.0) == []
    (event,) = pods.check(now=10.5 + UNPLACED_S)
    assert event == HostWent("host-1", f"no node takes its pod without h1 (for {UNPLACED_S:g} s)")
    pods.order("host-1", now=22.0)
    assert pods.avoided("host-1") == ()


@pytest.mark.parametrize("started", [False, True])
def test_a_replaced_pod_that_its_node_does_not_see_is_given_up(started: bool) -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    pods.see(ended(137), deleted=False, now=2.0)
    pods.order("host-1", now=10.0)
    seen: dict[str, Any] = {"startTime": "2026-11-18T10:00:11Z"} if started else {}
    pods.see(pod(uid="u2", created="2026-11-18T10:00:10Z", **seen), deleted=False, now=11.0)
    assert pods.check(now=10.5 + UNTAKEN_S) == []
    told = pods.check(now=11.5 + UNTAKEN_S)
    why = f"node h1 has not seen its pod (for {UNTAKEN_S:g} s)"
    assert told == ([] if started else [HostWent("host-1", why)])
    if not started:
        pods.order("host-1", now=23.0)
        assert pods.avoided("host-1") == ("h1",)


def test_a_replaced_pod_may_wait_for_a_node_before_the_node_has_to_see_it() -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    pods.see(ended(137), deleted=False, now=2.0)
    pods.order("host-1", now=10.0)
    placed = pod(uid="u2", created="2026-11-18T10:00:10Z")
    assert pods.see({**placed, "spec": {}}, deleted=False, now=11.0) == []
    assert pods.see(placed, deleted=False, now=30.0) == [], "the scheduler has just chosen the node"
    assert pods.check(now=29.5 + UNTAKEN_S) == []
    (event,) = pods.check(now=30.5 + UNTAKEN_S)
    assert event == HostWent("host-1", f"node h1 has not seen its pod (for {UNTAKEN_S:g} s)")


def test_a_host_that_came_to_the_predecessor_is_replaced_as_one_that_came() -> None:
    pods = PodTracker(HOSTS, patience_s=60.0)
    pods.adopt([running()])
    pods.see(ended(137), deleted=False, now=2.0)
    pods.order("host-1", now=10.0)
    pods.see(pod(uid="u2", created="2026-11-18T10:00:10Z"), deleted=False, now=11.0)
    (event,) = pods.check(now=11.5 + UNTAKEN_S)
    assert event == HostWent("host-1", f"node h1 has not seen its pod (for {UNTAKEN_S:g} s)")


def test_the_first_pod_of_a_host_is_waited_for_on_a_slow_node() -> None:
    pods = tracker()
    pods.see(pod(), deleted=False, now=1.0)
    assert pods.check(now=5.0 + UNTAKEN_S) == []


def test_nodes_are_avoided_in_each_term_of_the_users_affinity() -> None:
    zones = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [zones, {"matchFields": []}]
            }
        }
    }
    deployment = Deployment(
        job="run1",
        hosts=HOSTS,
        settings=KubernetesSection(image="x"),
        namespace="runs",
        workload=Workload.PODS,
        template={"spec": {"affinity": affinity}},
    )
    made = manifests.pod(deployment, "host-1", name="p", owner_uid="u", avoided=("h1", "h2"))["spec"][
        "affinity"
    ]
    assert "podAntiAffinity" in made
    terms = made["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("h1", "h2")]
    assert terms == [{**zones, "matchFields": others}, {"matchFields": others}]


def test_a_pod_on_a_node_that_is_silent_is_doubted_and_not_lost() -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    assert pods.see(running(ready="False"), deleted=False, now=2.0) == [
        HostDoubted("host-1", "its node h1 is not ready")
    ]
    assert pods.see(running(), deleted=False, now=3.0) == [HostDoubted("host-1", "")]


def test_a_pod_that_is_being_deleted_is_left_in_order_and_lost_if_it_is_silent() -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    going = running()
    going["metadata"]["deletionTimestamp"] = "2026-11-19T15:00:30Z"
    why = "its pod is being deleted"
    assert pods.see(going, deleted=False, now=2.0) == [
        HostDoubted("host-1", why),
        HostLeaves("host-1", why),
    ]
    assert pods.see(going, deleted=False, now=3.0) == [], "it is told once"
    assert pods.see(going, deleted=True, now=4.0) == [HostWent("host-1", "its pod was deleted")]


def test_the_pod_that_a_job_makes_by_itself_is_kept_when_its_host_is_ordered() -> None:
    pods = tracker()
    pods.see(running(uid="u1"), deleted=False, now=1.0)
    assert pods.see(ended(137, uid="u1"), deleted=False, now=2.0) != []
    pods.see(running(uid="u2"), deleted=False, now=3.0)
    assert [each.uid for each in pods.order("host-1", now=4.0)] == ["u1"]
    assert pods.check(now=4.0) == [HostCame("host-1", "pod kintsugi-run1-0-u2 on h1")]


def test_a_pod_that_was_given_up_counts_no_more_though_it_is_shown_as_running() -> None:
    pods = tracker()
    pods.see(running(uid="u1"), deleted=False, now=1.0)
    assert [each.uid for each in pods.order("host-1", now=2.0)] == ["u1"]
    assert pods.see(running(uid="u1", ready="False"), deleted=False, now=3.0) == []
    assert pods.see(running(uid="u2"), deleted=False, now=4.0) == [
        HostCame("host-1", "pod kintsugi-run1-0-u2 on h1")
    ]
    assert pods.see(running(uid="u1"), deleted=True, now=5.0) == []


def test_a_pod_that_a_list_does_not_show_any_more_was_deleted() -> None:
    pods = tracker()
    pods.see(running(), deleted=False, now=1.0)
    assert pods.see_all([], now=2.0) == [HostWent("host-1", "its pod was deleted")]


def test_pods_of_a_job_and_of_volcano_are_known_by_their_index() -> None:
    of_job = running()
    of_job["metadata"]["labels"] = {"kintsugi/run": "run1"}
    of_job["metadata"]["annotations"] = {manifests.COMPLETION_INDEX: "0"}
    of_volcano = running()
    of_volcano["metadata"] |= {
        "name": "kintsugi-run1-agent-0",
        "labels": {"volcano.sh/job-name": "kintsugi-run1"},
    }
    for seen in (of_job, of_volcano):
        assert [type(event) for event in tracker().see(seen, deleted=False, now=1.0)] == [HostCame]


def test_a_doubted_host_is_lost_only_if_it_is_silent_too() -> None:
    record = HostRecord("host-1", phase=HostPhase.READY, was_ready=True)

    def decided(now: float, doubt: str) -> HostDecision:
        return decide(record, now=now, since=0.0, heard_at=100.0, join_s=60.0, doubt=doubt)

    assert decided(100.5, "its node is not ready").action == ""
    silent = decided(100.1 + DOUBTED_SILENT_S, "its node is not ready")
    assert silent.action == "lose" and "its node is not ready, and it is silent" in silent.why
    assert decided(100.1 + DOUBTED_SILENT_S, "").action == ""


# Manifests.


def deployment(workload: Workload, **settings: Any) -> Deployment:
    section = KubernetesSection(image="registry/kintsugi:1", **settings)
    return Deployment(job="run1", hosts=HOSTS, settings=section, namespace="runs", workload=workload)


def pod_specs(made: Deployment) -> list[dict[str, Any]]:
    if made.workload is Workload.PODS:
        return [manifests.pod(made, "host-2", name="x", owner_uid="u")["spec"]]
    spec = manifests.workload_object(made)["spec"]
    return [spec["template"]["spec"] if "template" in spec else spec["tasks"][0]["template"]["spec"]]


@pytest.mark.parametrize("workload", Workload)
def test_no_probe_can_end_a_pod_and_no_pod_can_use_the_api(workload: Workload) -> None:
    for spec in pod_specs(deployment(workload, gpus=8)):
        (container,) = spec["containers"]
        assert not {"livenessProbe", "startupProbe"} & container.keys()
        assert spec["automountServiceAccountToken"] is False
        assert spec["restartPolicy"] == "Never"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert "kintsugi" in container["command"] and "--wait" in container["args"], (
            "the supervisor is process 1"
        )


def test_a_pod_on_its_own_sees_its_own_ticket_only() -> None:
    (spec,) = pod_specs(deployment(Workload.PODS))
    (volume,) = [each for each in spec["volumes"] if each["name"] == "tickets"]
    assert volume["secret"]["items"] == [{"key": "host-2", "path": "host-2"}]


def test_no_ticket_is_in_an_argument_or_an_environment_variable() -> None:
    order = HostOrder("host-1", b"the secret of a ticket")
    coded = base64.b64encode(order.ticket).decode()
    assert manifests.secret(deployment(Workload.JOB), [order])["data"]["host-1"] == coded
    for workload in Workload:
        text = str(pod_specs(deployment(workload)))
        assert coded not in text and "the secret" not in text


def test_the_users_template_is_merged_by_name() -> None:
    theirs = {
        "spec": {
            "containers": [
                {
                    "name": "agent",
                    "command": ["/venv/bin/python", "-m", "kintsugi"],
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                },
                {"name": "log", "image": "l"},
            ],
            "volumes": [{"name": "models", "emptyDir": {}}],
            "tolerations": [{"operator": "Exists"}],
        }
    }
    made = msgspec.structs.replace(deployment(Workload.JOB), template=theirs)
    (spec,) = pod_specs(made)
    assert [each["name"] for each in spec["containers"]] == ["agent", "log"]
    assert [each["mountPath"] for each in spec["containers"][0]["volumeMounts"]][-1] == "/models"
    assert spec["containers"][0]["command"] == ["/venv/bin/python", "-m", "kintsugi"]
    assert spec["containers"][0]["image"] == "registry/kintsugi:1"
    assert len(spec["volumes"]) == 4 and spec["tolerations"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        (
            {"spec": {"containers": [{"name": "agent", "livenessProbe": {}}]}},
            "containers[agent].livenessProbe",
        ),
        ({"spce": {}}, "expected a pod template with `metadata` and `spec`"),
    ],
)
def test_a_template_that_would_break_a_run_is_refused_by_name(template: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[").replace("]", r"\]")):
        manifests.check_template(template, path="pod.yaml")


def test_the_workload_is_chosen_by_what_the_cluster_has() -> None:
    assert choose_workload("auto", version=(1, 30), has_volcano=True) is Workload.VOLCANO
    assert choose_workload("auto", version=(1, 30), has_volcano=False) is Workload.JOB
    assert choose_workload("auto", version=(1, 20), has_volcano=False) is Workload.PODS
    assert choose_workload("pods", version=(1, 30), has_volcano=True) is Workload.PODS
    with pytest.raises(
        ConfigError, match=r"expected Kubernetes 1\.24 or later for an Indexed Job, found 1\.20"
    ):
        choose_workload("job", version=(1, 20), has_volcano=False)
    with pytest.raises(ConfigError, match="expected Volcano"):
        choose_workload("volcano", version=(1, 30), has_volcano=False)


def on_pods(*overrides: str) -> Config:
    given = ("cluster.on=k8s", "cluster.kubernetes.image=registry/kintsugi:1", *overrides)
    return load("grpo_arithmetic", given).config


def planned_resources(*overrides: str) -> dict[str, dict[str, Any]]:
    _, job = yaml.safe_load_all(planned_objects(on_pods(*overrides)))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    resources: dict[str, dict[str, Any]] = container.get("resources", {})
    return resources


def test_manifest_prints_what_would_be_created() -> None:
    text = planned_objects(on_pods("cluster.kubernetes.pods=3", "cluster.kubernetes.spare_pods=1"))
    secret, job = yaml.safe_load_all(text)
    assert (secret["kind"], job["kind"], job["spec"]["completions"]) == ("Secret", "Job", 4)
    with pytest.raises(ConfigError, match=r"cluster\.kubernetes\.image: expected the image of the pods"):
        planned_objects(Config(name="x", cluster=ClusterSection(on="k8s")))


@pytest.mark.parametrize(("pods", "most"), [(1, "6300m"), (2, "3300m"), (3, "3200m"), (7, "1200m")], ids=str)
def test_each_pod_requests_the_cpus_of_the_one_with_most_ranks_and_servers(pods: int, most: str) -> None:
    """Two ranks, a rollout worker and four servers are placed in turn; each host has an agent and a supervisor."""
    counts = ("actor.workers=2", "generation.servers=4", "rollout.workers=1")
    given = planned_resources(f"cluster.kubernetes.pods={pods}", *counts)
    assert given["requests"]["cpu"] == most


def test_each_pod_requests_the_memory_that_check_estimates_for_the_fullest_one() -> None:
    config = on_pods("cluster.kubernetes.pods=1")
    memory = run_memory(config, num_devices=0)
    rank, server, other = (memory.of_role(role).host_bytes for role in (Role.MODEL, Role.SERVER, Role.AGENT))
    counts = config.actor.workers, config.generation.servers, 2 + config.rollout.workers
    expected = sum(count * each for count, each in zip(counts, (rank, server, other), strict=True))
    given = planned_resources("cluster.kubernetes.pods=1")["requests"]["memory"]
    assert 0 <= int(given.removesuffix("Mi")) * 2**20 - expected < 2**20


def test_what_a_pod_requests_can_be_given_and_left_out() -> None:
    given = planned_resources("cluster.kubernetes.cpus=0.5", "cluster.kubernetes.memory_gib=3")
    assert given == {"requests": {"cpu": "500m", "memory": "3072Mi"}}
    assert planned_resources("cluster.kubernetes.cpus=0", "cluster.kubernetes.memory_gib=0") == {}
    of_gpus = planned_resources("cluster.kubernetes.gpus=2", "cluster.kubernetes.cpus=0")
    assert of_gpus["limits"] == {"nvidia.com/gpu": 2} and of_gpus["requests"].keys() == {"memory"}


@pytest.mark.parametrize(
    ("resources", "merged"),
    [
        ({"requests": {"cpu": "3"}}, {"requests": {"cpu": "3", "memory": "1Gi"}}),
        ({"limits": {"cpu": "1"}}, {"requests": {"memory": "1Gi"}, "limits": {"cpu": "1"}}),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, {"limits": {"cpu": "1", "memory": "1Gi"}}),
    ],
)
def test_the_requests_of_the_users_template_hold_and_its_limits_are_requests(
    resources: dict[str, Any], merged: dict[str, Any]
) -> None:
    made = msgspec.structs.replace(
        deployment(Workload.JOB),
        requests={"cpu": "2200m", "memory": "1Gi"},
        template={"spec": {"containers": [{"name": "agent", "resources": resources}]}},
    )
    (spec,) = pod_specs(made)
    assert spec["containers"][0]["resources"] == merged


def test_a_pod_that_no_node_takes_says_what_it_requests_and_what_changes_that() -> None:
    seen = pod(phase="Pending")
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: 3 Insufficient cpu."}
    seen["status"]["conditions"] = [condition]
    found = view(seen, hosts=HOSTS)
    assert found is not None and found.why == "no node takes its pod: 0/3 nodes: 3 Insufficient cpu."
    requests = {"cpu": "2200m", "memory": "1500Mi"}
    seen["spec"] = {"containers": [{"name": "agent", "resources": {"requests": requests}}]}
    found = view(seen, hosts=HOSTS)
    assert found is not None and found.why == (
        "no node takes its pod: 0/3 nodes: 3 Insufficient cpu. "
        "It requests cpu 2200m, memory 1500Mi: see cluster.kubernetes.cpus and .memory_gib."
    )


@pytest.mark.parametrize("name", ["role", "laboratory"])
def test_a_role_that_is_shipped_has_the_rights_that_are_needed_and_no_other(name: str) -> None:
    role = yaml.safe_load((ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text())
    of_a_run = [right for workload in Workload for right in rights(workload)]
    needed = {"role": of_a_run, "laboratory": [*RIGHTS]}[name]
    given = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }

    def triples(right: Right) -> set[tuple[str, str, str]]:
        return {(right.group, right.resource, verb) for verb in right.verbs}

    assert given == {each for right in needed for each in triples(right)}


# Access.


def test_a_kubeconfig_is_read_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    content = {
        "current-context": "x",
        "clusters": [
            {"name": "c", "cluster": {"server": "https://10.0.0.1:6443", "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": "u", "user": {"tokenFile": "token"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "runs"}}],
    }
    path.write_text(yaml.safe_dump(content))
    (tmp_path / "token").write_text("first\n")
    access = load_access({"KUBECONFIG": str(path)})
    assert (access.server, access.namespace, access.token()) == ("https://10.0.0.1:6443", "runs", "first")
    assert access.tls is not None and access.tls.verify_mode is ssl.CERT_NONE
    (tmp_path / "token").write_text("renewed")
    assert access.token() == "renewed"
    path.write_text(yaml.safe_dump(content | {"current-context": "y"}))
    with pytest.raises(UserError, match="expected a kubeconfig with a context 'y'"):
        read_kubeconfig(path)
    with pytest.raises(UserError, match="expects a kubeconfig"):
        load_access({"HOME": str(tmp_path / "nowhere")}, account=tmp_path)


def test_a_credential_plugin_is_asked_and_its_failure_is_told(tmp_path: Path) -> None:
    program = tmp_path / "plugin"
    program.write_text('#!/bin/sh\necho \'{"status": {"token": "of the plugin"}}\'\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert Access("http://x", plugin={"command": str(program)}).token() == "of the plugin"
    program.write_text("#!/bin/sh\necho not logged in >&2; exit 1\n")
    with pytest.raises(WorldError, match="gave no token: not logged in"):
        Access("http://x", plugin={"command": str(program)}, origin="config").token()


def test_a_run_gets_a_host_per_pod_and_a_resumed_launcher_its_own_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    section = KubernetesSection(image="registry/kintsugi:1", pods=2, spare_pods=1)
    cluster = placed_cluster(ClusterSection(on="k8s", kubernetes=section))
    assert (cluster.hosts, cluster.slots, cluster.spare_hosts) == (4, (0, 1, 1, 1), 1)
    assert cluster.address == "127.0.0.1"
    config = Config(name="x", cluster=cluster)
    assert moved(config) == (config, [])
    of_another_pod = config.replace(cluster=cluster.replace(address="203.0.113.9"))
    assert moved(of_another_pod) == (config, ["cluster.address: 127.0.0.1 (was 203.0.113.9)"])
    with pytest.raises(ConfigError, match=r"cluster\.kubernetes\.image: expected the image"):
        placed_cluster(ClusterSection(on="k8s"))


# Requests and watches.


def secret(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"kintsugi/run": "run1"}},
    }


def test_a_request_is_repeated_while_the_server_is_busy_or_fails(server: KubernetesServer) -> None:
    async def ask() -> dict[str, Any]:
        async with Client(server.access()) as client:
            return await client.request("GET", "/version")

    server.refuse_next(429, times=1)
    server.refuse_next(503, times=1)
    assert asyncio.run(ask())["minor"] == "20"
    assert server.requests == ["GET /version"] * 3


def test_refusals_are_not_repeated_and_keep_the_servers_words(server: KubernetesServer) -> None:
    server.rights["reader"] = {("list", "pods")}

    async def ask(token: str) -> ApiError:
        async with Client(server.access(token)) as client:
            with pytest.raises(ApiError) as raised:
                await client.request("POST", PODS.replace("pods", "secrets"), body=secret("a"))
            return raised.value

    forbidden = asyncio.run(ask("reader"))
    assert forbidden.status == 403 and 'User "reader" cannot create resource "secrets"' in str(forbidden)
    unknown = asyncio.run(ask("wrong"))
    assert unknown.status == 401 and "refuses these credentials" in str(unknown)


def test_a_watch_goes_on_after_a_cut_and_a_version_that_is_gone_is_told(server: KubernetesServer) -> None:
    path = PODS.replace("pods", "secrets")

    async def script() -> None:
        async with Client(server.access()) as client:
            _, version = await client.list(path, selector=SELECTOR)
            await client.request("POST", path, body=secret("a"))
            async with aclosing(client.watch(path, selector=SELECTOR, version=version)) as changes:
                change = await anext(changes)
                assert isinstance(change, Changed) and change.object["metadata"]["name"] == "a"
                version = str(await anext(changes))
                server.cut_watches()
                with pytest.raises(ApiError):
                    await anext(changes)
            await client.request("POST", path, body=secret("b"))
            async with aclosing(client.watch(path, selector=SELECTOR, version=version)) as changes:
                change = await anext(changes)
                assert isinstance(change, Changed) and change.object["metadata"]["name"] == "b"
            server.forget_versions()
            async with aclosing(client.watch(path, selector=SELECTOR, version=version)) as changes:
                with pytest.raises(Expired):
                    await anext(changes)

    asyncio.run(asyncio.wait_for(script(), 20))


def test_a_pod_that_no_node_takes_stays_without_one_on_the_small_server(
    server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the script of both servers takes: its pod selects a node that there is not."""
    monkeypatch.setattr(kubernetes_server, "START_S", 0.0)
    server.rights |= {"nothing": set()}
    assert ["exec", "script-pod", 400] in answers(server.access)


# The back end.


def backend(server: KubernetesServer, token: str = "admin", **settings: Any) -> KubernetesBackend:
    section = KubernetesSection(image="kintsugi:1", **settings)
    return KubernetesBackend(
        section, job="run1", hosts=HOSTS, patience_s=20.0, load=lambda: server.access(token)
    )


def order(host: str) -> HostOrder:
    return HostOrder(host, f"{host}\n".encode())


def told(made: KubernetesBackend, kind: type[HostEvent], *hosts: str) -> list[HostEvent]:
    """Poll until these events have come."""
    found: list[HostEvent] = []
    deadline = time.monotonic() + 20
    while not set(hosts) <= {event.host for event in found if isinstance(event, kind)}:
        assert time.monotonic() < deadline, found
        found += made.poll()
        time.sleep(0.01)
    return found


def test_pods_are_followed_across_cut_connections_and_versions_that_are_gone(
    server: KubernetesServer,
) -> None:
    made = backend(server)
    made.start([order(host) for host in HOSTS])
    told(made, HostCame, *HOSTS)
    server.cut_watches()
    server.forget_versions()
    server.end_container(server.pod_of("host-2"), message="out of luck\n")
    assert told(made, HostWent, "host-2") == [HostWent("host-2", "out of luck")]
    made.give_back(timeout_s=5.0)
    assert server.names("pods") == server.names("secrets") == []


def test_missing_rights_are_named_as_the_rule_that_a_role_needs_and_nothing_is_made(
    server: KubernetesServer,
) -> None:
    allowed = {("create", "secrets"), ("patch", "secrets"), ("delete", "secrets"), ("create", "events")}
    server.rights["some"] = (
        allowed | {("list", "events")} | {(verb, "pods") for verb in ("list", "watch", "patch")}
    )
    made = backend(server, "some")
    made.start([order("host-1")])
    (event,) = told(made, HostWent, "host-1")
    assert isinstance(event, HostWent)
    assert "a Role needs verbs [create, delete] on pods in API group ''" in event.why
    made.give_back(timeout_s=5.0)
    assert server.names("secrets") == server.names("pods") == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wrong token", "refuses these credentials"),
        ("quota", "exceeded quota"),
        ("image", 'ImagePullBackOff: Back-off pulling image "kintsugi:1"'),
        ("namespace", 'namespaces "elsewhere" not found'),
        ("no kubeconfig", "KUBECONFIG: expected a file"),
    ],
)
def test_what_can_not_work_is_named_within_seconds_and_nothing_is_left(
    server: KubernetesServer, what: str, said: str
) -> None:
    if what == "quota":
        server.quota = 0
    if what == "image":
        server.bad_images["kintsugi:1"] = "ImagePullBackOff"
    if what == "no kubeconfig":
        made = KubernetesBackend(
            KubernetesSection(),
            job="run1",
            hosts=HOSTS,
            patience_s=20.0,
            load=lambda: load_access({"KUBECONFIG": "/nowhere/config"}),
        )
    else:
        namespace = "elsewhere" if what == "namespace" else ""
        made = backend(server, "wrong" if what == "wrong token" else "admin", namespace=namespace)
    made.start([order("host-1")])
    (event, *_) = told(made, HostWent, "host-1")
    assert isinstance(event, HostWent) and said in event.why
    made.give_back(timeout_s=5.0)
    assert server.names("secrets") == server.names("pods") == []


def test_a_job_that_may_make_no_pod_says_why() -> None:
    server = KubernetesServer(minor="30")
    try:
        server.quota = 0
        made = backend(server)
        made.start([order("host-1")])
        (event,) = told(made, HostWent, "host-1")
        assert isinstance(event, HostWent) and "exceeded quota" in event.why
        made.give_back(timeout_s=5.0)
        assert server.names("jobs") == server.names("secrets") == server.names("pods") == []
    finally:
        server.close()


def test_a_successor_goes_on_with_the_pods_of_its_predecessor_and_removes_them(
    server: KubernetesServer,
) -> None:
    first = backend(server)
    first.start([order(host) for host in HOSTS])
    told(first, HostCame, *HOSTS)
    before = server.running()
    second = backend(server)
    deadline = time.monotonic() + 20
    while server.requests.count(f"GET {PODS}") < 4:  # Both have listed and watch.
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.end_container(server.pod_of("host-1"))
    told(second, HostWent, "host-1")
    second.replace(order("host-1"))
    told(second, HostCame, "host-1")
    assert server.running()["host-2"] == before["host-2"]
    second.give_back(timeout_s=5.0)
    assert server.names("pods") == server.names("secrets") == []
    first.give_back(timeout_s=5.0)


def test_events_about_hosts_are_on_the_job() -> None:
    server = KubernetesServer(minor="30")
    try:
        made = backend(server)
        made.start([order("host-1"), order("host-2")])
        told(made, HostCame, "host-1")
        server.end_container(server.pod_of("host-1"))
        told(made, HostWent, "host-1")
        deadline = time.monotonic() + 20
        while not {"HostStarted", "HostLost"} <= {each["reason"] for each in server.objects("events")}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert {each["involvedObject"]["kind"] for each in server.objects("events")} == {"Job"}
        made.give_back(timeout_s=5.0)
    finally:
        server.close()


# The file with a ticket.


def ticket(number: int, *, made_at: float | None = None) -> bytes:
    manager = Peer("host_manager-0", "1", "host-0", "tcp://127.0.0.1:1", b"")
    wall = time.time() if made_at is None else made_at
    return msgspec.json.encode(
        Ticket("job", "host-1", "supervisor-1", str(number), b"", b"", manager, made_at=wall)
    )


def test_a_ticket_that_the_run_does_not_take_is_followed_by_the_next_one_in_the_file(tmp_path: Path) -> None:
    path, tried = tmp_path / "host-1", []
    path.write_bytes(ticket(1))

    def supervise(given: Ticket, scratch: Path) -> int:
        tried.append(given.incarnation)
        if given.incarnation == "1":
            path.write_bytes(ticket(2))
            raise WorldError("the launcher did not answer")
        return 7

    assert supervise_with_file(path, scratch=tmp_path, supervise=supervise) == 7
    assert tried == ["1", "2"]


def test_a_host_that_is_not_needed_ends_without_an_error_and_one_that_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    def unanswered(given: Ticket, scratch: Path) -> int:
        raise WorldError("the launcher did not answer for 8 s")

    path = tmp_path / "host-1"
    assert supervise_with_file(path, scratch=tmp_path, supervise=unanswered, wait_s=0.2) == 0
    path.write_bytes(ticket(1, made_at=time.time() - STALE_S - 1))
    assert supervise_with_file(path, scratch=tmp_path, supervise=unanswered) == 0
    path.write_bytes(ticket(1))
    with pytest.raises(WorldError, match="did not answer for 8 s"):
        supervise_with_file(path, scratch=tmp_path, supervise=unanswered, another_s=0.2)
