"""Runs in pods of a real Kubernetes cluster, which do not see the run folder, end in the bits of one machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from kintsugi.cluster.backends.kubernetes.access import Access, read_kubeconfig
from kintsugi.cluster.backends.kubernetes.backend import KubernetesBackend
from kintsugi.cluster.backends.kubernetes.manifests import GRACE_S as POD_GRACE_S
from kintsugi.cluster.host_manager import DOUBTED_SILENT_S, GONE_S
from kintsugi.cluster.namespaces import enter
from kintsugi.config.schema import KubernetesSection
from kintsugi.journal.facts import StepCommitted
from kintsugi.journal.journal import read_facts
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert, HostLost, read_events
from tests.cluster import kubernetes_cluster, kustomize
from tests.cluster.hosts_runs import (
    LONGEST_S,
    SLOWLY,
    assert_lost_host_is_diagnosed,
    boxes,
    faults_of_soak,
    finish,
    num_steps,
    places_of_fault,
    ranks_joined,
    saved_files,
    train_alone,
    wait_for_step,
    weights_of,
    write_inputs,
)
from tests.cluster.kubernetes_cluster import GRACE_S, NAMESPACE, ROOT, KubernetesCluster
from tests.cluster.kubernetes_images import EMPTY, HOST
from tests.cluster.kubernetes_server import KubernetesServer
from tests.cluster.programs.kubernetes_script import answers
from tests.cluster.tiny_runs import until
from tests.unit.cluster.test_backends import (
    HOSTS,
    Engine,
    test_a_host_can_be_replaced_before_its_engine_has_noticed_its_loss,
    test_a_lost_host_is_told_and_the_others_go_on,
    test_each_ordered_host_comes_once_with_its_own_ticket,
    test_nothing_is_left_after_all_was_given_back_and_it_may_be_given_back_twice,
    test_one_host_is_replaced_and_the_others_keep_their_supervisors,
)

PATIENTLY = "cluster.start_timeout_s=300"
"""For a busy machine: a run has to begin, however long that takes."""
TOLD_S = 5.0
"""For a kubelet, the API server and the host manager to tell of what they know, on a busy machine."""
NOTICED_S = {
    "killed process": TOLD_S,
    "deleted pod": POD_GRACE_S + TOLD_S,
    "silent": GRACE_S + DOUBTED_SILENT_S + TOLD_S,
    "closed": GONE_S + TOLD_S,
}
"""Loss → the time after which the host is given up at the latest, as docs/cluster.md has it. How long the new pod then
takes to start says more about the load of this machine."""

__all__ = [
    "test_a_host_can_be_replaced_before_its_engine_has_noticed_its_loss",
    "test_a_lost_host_is_told_and_the_others_go_on",
    "test_each_ordered_host_comes_once_with_its_own_ticket",
    "test_nothing_is_left_after_all_was_given_back_and_it_may_be_given_back_twice",
    "test_one_host_is_replaced_and_the_others_keep_their_supervisors",
]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.kubernetes,
    pytest.mark.skipif(
        kubernetes_cluster.missing() is not None,
        reason=f"a Kubernetes cluster can not be had: {kubernetes_cluster.missing()}",
    ),
]


needs_kustomize = pytest.mark.skipif(kustomize.missing() is not None, reason=f"{kustomize.missing()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    made = KubernetesCluster(tmp_path_factory.mktemp("k8s"), count=3)
    write_inputs(made.runs, pauses_s={"rewards": 0.1, "slow_rewards": 1.0})
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights_of_one_machine(cluster: KubernetesCluster) -> str:
    return train_alone(cluster)


def start(cluster: KubernetesCluster, name: str, *overrides: str) -> tuple[subprocess.Popen[str], Path]:
    run_dir = cluster.runs / name
    command = cluster.start(
        "train", "recipe.yaml", f"run_dir={run_dir}", *cluster.on_pods(), PATIENTLY, *overrides
    )
    return command, run_dir


def supervisors(cluster: KubernetesCluster) -> dict[str, int]:
    """Index of a host → pid of its supervisor, on this machine's table of processes."""
    found = {}
    for index, pod in cluster.pods().items():
        for pid, command in cluster.pids_of_pod(pod).items():
            if " agent --join " in command:
                found[index] = pid
    return found


def wait_for_replacement(
    cluster: KubernetesCluster, run_dir: Path, index: str, before: dict[str, int]
) -> float:
    """Wait until another supervisor of a host has joined the run; return after how many seconds the host was given
    up. The others are the same."""
    since, host = time.time(), f"host-{int(index) + 1}"

    def has_joined() -> bool:
        events = [each.event for each in read_events(run_dir, process="host_manager-0")]
        return len([each for each in events if f"{host} joined" in str(each)]) == 2

    until(has_joined, f"another supervisor of {host}", timeout_s=120.0)
    took_s = time.time() - since
    lost_at, *_ = [
        each.stamp.time
        for each in read_events(run_dir, process="host_manager-0")
        if isinstance(each.event, Alert) and re.match(rf"{host} \(.*\) is lost: ", each.event.message)
    ]
    noticed_s = lost_at - since
    after = supervisors(cluster)
    assert after[index] != before[index]
    assert {key: pid for key, pid in after.items() if key != index} == {
        key: pid for key, pid in before.items() if key != index
    }, "exactly one pod is replaced"
    sys.stderr.write(
        f"\n{run_dir.name}: lost after {noticed_s:.1f} s, another one joined after {took_s:.1f} s\n"
    )
    return noticed_s


def test_three_pods_end_in_the_bits_of_one_machine_and_nothing_is_left(
    cluster: KubernetesCluster, weights_of_one_machine: str
) -> None:
    command, run_dir = start(cluster, "undisturbed")
    wait_for_step(run_dir, 2, command)
    pods = cluster.pods()
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == 3, "one pod per node"
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    assert (run_dir / "checkpoints" / "step-000007" / "trainer.safetensors").exists()
    cluster.assert_nothing_left()


def test_a_pod_requests_what_the_manifest_shows_and_its_node_grants_it(
    cluster: KubernetesCluster, weights_of_one_machine: str
) -> None:
    few = ("actor.workers=1", "generation.servers=1", "rollout.workers=1", "cluster.kubernetes.cpus=null")
    code, planned = cluster.ask("manifest", "recipe.yaml", *cluster.on_pods()[2:], *few)
    assert code == 0, planned
    (_, job) = yaml.safe_load_all(planned)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    requests = container["resources"]["requests"]
    assert requests["cpu"] == "1200m", "a rank or a server, with an agent and a supervisor"
    command, run_dir = start(cluster, "requests", *few)
    wait_for_step(run_dir, 6, command)
    for index, pod in cluster.pods().items():
        (made,) = pod["spec"]["containers"]
        assert made["resources"]["requests"] == requests
        assert pod["status"]["qosClass"] == "Burstable"
        group = cluster.cgroups_of_pod(pod)
        assert int((group["cpu"] / "cpu.shares").read_text()) == 1200 * 1024 // 1000
        lines = (line.split() for line in (group["memory"] / "memory.stat").read_text().splitlines())
        found = {name: int(value) for name, value in lines}
        used = (found["total_rss"] + found["total_shmem"]) >> 20
        sys.stderr.write(f"\nhost-{int(index) + 1}: {used} MiB of {requests['memory']} requested\n")
        assert used <= int(requests["memory"].removesuffix("Mi"))
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    cluster.assert_nothing_left()


def test_pods_that_no_node_can_take_are_named_with_what_they_request(cluster: KubernetesCluster) -> None:
    on = (*cluster.on_pods(), "cluster.kubernetes.cpus=64", "cluster.start_timeout_s=20")
    code, output = cluster.ask("train", "recipe.yaml", f"run_dir={cluster.runs}/too-much", *on)
    assert code != 0
    said = " ".join(output.split())
    assert "3 Insufficient cpu" in said and "It requests cpu 64" in said, output
    assert "see cluster.kubernetes.cpus and .memory_gib" in said, output
    cluster.assert_nothing_left()


TWO_SHARDS = ("actor.workers=2", "actor.layout.shards=2", "cluster.kubernetes.pods=2")
LAST_STEP = 7


@pytest.fixture(scope="module")
def weights_of_one_rank(cluster: KubernetesCluster) -> str:
    return train_alone(cluster, "actor.workers=1", name="one-rank")


@pytest.mark.parametrize("what", ["deleted pod", "node without power"])
def test_a_pod_that_is_lost_with_the_only_part_of_a_cut_state_changes_no_bit_of_one_rank(
    cluster: KubernetesCluster, weights_of_one_rank: str, what: str
) -> None:
    command, run_dir = start(cluster, f"cut-{what.partition(' ')[0]}", *TWO_SHARDS, SLOWLY)
    wait_for_step(run_dir, 2, command)
    before = supervisors(cluster)
    assert before.keys() == {"0", "1"}
    pod = cluster.pods()["1"]
    node = pod["spec"]["nodeName"]
    if what == "deleted pod":
        cluster.api("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}")
    else:
        cluster.power_off(node)
    try:
        wait_for_replacement(cluster, run_dir, "1", before)
        finish(command)
    finally:
        if what == "node without power":
            cluster.power_on(node)
    assert ranks_joined(run_dir, 2) == [1, 2], "only the rank of the lost pod was started again"
    assert weights_of(run_dir) == weights_of_one_rank
    assert saved_files(run_dir, last_step=LAST_STEP) == boxes(2)
    until(lambda: len(cluster.ready_nodes()) == 3, "the node", timeout_s=120.0)
    cluster.assert_nothing_left()


@pytest.mark.parametrize("what", ["killed process", "deleted pod"])
def test_one_pod_is_replaced_and_the_others_keep_their_processes(
    cluster: KubernetesCluster, weights_of_one_machine: str, what: str
) -> None:
    command, run_dir = start(cluster, what.replace(" ", "-"))
    wait_for_step(run_dir, 2, command)
    before = supervisors(cluster)
    assert before.keys() == {"0", "1", "2"}
    if what == "killed process":
        os.kill(before["1"], signal.SIGKILL)
    else:
        name = cluster.pods()["1"]["metadata"]["name"]
        cluster.api("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")
    assert wait_for_replacement(cluster, run_dir, "1", before) < NOTICED_S[what]
    finish(command)
    assert weights_of(run_dir) == weights_of_one_machine
    told = [record.event for record in read_events(run_dir, process="host_manager-0")]
    moved = [event for event in told if isinstance(event, Alert) and "is to be left" in event.message]
    assert bool(moved) == (what == "deleted pod"), "SIGTERM has its processes moved between two steps"
    reasons = {event["reason"] for event in cluster.items("events")}
    assert {"HostStarted", "HostLost"} <= reasons
    cluster.assert_nothing_left()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("silent", "is not ready, and it is silent"),
        ("closed", "its connection was closed, and it is silent"),
    ],
    ids=["silent", "closed"],
)
def test_a_node_that_is_powered_off_costs_one_pod(
    cluster: KubernetesCluster, weights_of_one_machine: str, what: str, said: str
) -> None:
    command, run_dir = start(cluster, f"off-{what}", SLOWLY)
    wait_for_step(run_dir, 2, command)
    before = supervisors(cluster)
    node = cluster.pods()["2"]["spec"]["nodeName"]
    cluster.power_off(node, is_silent=what == "silent")
    try:
        noticed_s = wait_for_replacement(cluster, run_dir, "2", before)
        finish(command)
    finally:
        cluster.power_on(node)
    assert noticed_s < NOTICED_S[what]
    assert weights_of(run_dir) == weights_of_one_machine
    told = [record.event for record in read_events(run_dir, process="host_manager-0")]
    assert any(isinstance(event, HostLost) and said in event.message for event in told), told
    until(lambda: len(cluster.ready_nodes()) == 3, "the node", timeout_s=120.0)
    cluster.assert_nothing_left()


def test_a_soak_loses_whole_pods_and_ends_in_the_bits_of_its_undisturbed_twin(
    cluster: KubernetesCluster,
) -> None:
    report = cluster.runs / "soak.json"
    code, output = cluster.ask(
        *("soak", "recipe.yaml", f"run_dir={cluster.runs}/soak", "--faults", "2", "--json", str(report)),
        *("--role", "node", *cluster.on_pods(), PATIENTLY),
        timeout_s=2 * LONGEST_S,
        user="laboratory",
    )
    assert code == 0, output
    faults = faults_of_soak(report, roles={"node", "model"})
    sys.stderr.write("".join(f"\n{_described(fault)}" for fault in faults) + "\n")
    for fault in faults:
        places = places_of_fault(cluster.runs / "soak", fault)
        assert places <= {"host-1", "host-2", "host-3"}, "it was injected into a pod"
    cluster.assert_nothing_left()


def _described(fault: dict[str, Any]) -> str:
    times = ", ".join(
        f"{name} {fault[name] or 0:.0f}" for name in ("detected_ms", "next_step_ms", "recovered_ms")
    )
    return f"{fault['kind']} {fault['role']} while {fault['phase']}: {times}"


def test_an_experiment_that_loses_a_pod_is_diagnosed(cluster: KubernetesCluster) -> None:
    result = cluster.runs / "lab.json"
    code, output = cluster.ask(
        *("lab", "run", "node_loss", "--profile", "ours", "--folder", str(cluster.runs / "lab")),
        *("--json", str(result), *cluster.on_pods(), PATIENTLY),
        timeout_s=2 * LONGEST_S,
        user="laboratory",
    )
    assert code == 0, output
    assert_lost_host_is_diagnosed(result)
    cluster.assert_nothing_left()


def test_a_laboratory_that_may_run_no_command_in_a_pod_is_refused_before_anything_starts(
    cluster: KubernetesCluster,
) -> None:
    code, output = cluster.ask("soak", "recipe.yaml", f"run_dir={cluster.runs}/refused", *cluster.on_pods())
    assert code != 0
    assert "a Role needs verbs [get, create] on pods/exec in API group ''" in output, output
    assert not (cluster.runs / "refused").exists()
    cluster.assert_nothing_left()


WRONG: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "wrong key": ("wrong", HOST, (), "refuses these credentials"),
    "no permission": (
        "nothing",
        HOST,
        (),
        "a Role needs verbs [create, patch, delete] on secrets in API group ''",
    ),
    "no such image": ("launcher", "docker.io/local/nothing:1", (), "ErrImageNeverPull"),
    "image without Python": ("launcher", EMPTY, (), "host-"),
    "no such namespace": ("admin", HOST, ("--namespace", "elsewhere"), 'namespaces "elsewhere" not found'),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_can_not_work_is_named_within_seconds_and_nothing_is_left(
    cluster: KubernetesCluster, what: str
) -> None:
    user, image, more, said = WRONG[what]
    run_dir = cluster.runs / what.replace(" ", "-")
    since = time.monotonic()
    on = cluster.on_pods(image=image)
    if what == "image without Python":
        template = cluster.runs / "empty.yaml"
        template.write_text('{"spec": {"containers": [{"name": "agent", "imagePullPolicy": "Never"}]}}')
        on[-1] = f"cluster.kubernetes.template={template}"
    code, output = cluster.ask("train", "recipe.yaml", f"run_dir={run_dir}", *on, *more, user=user)
    assert code != 0
    assert said in output and "joining the run" in output, output
    sys.stderr.write(f"\n{what}: {time.monotonic() - since:.1f} s: {output.strip().splitlines()[-1]}\n")
    assert time.monotonic() - since < 60.0
    cluster.assert_nothing_left()


def test_a_quota_that_is_exceeded_is_named(cluster: KubernetesCluster) -> None:
    quotas = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    cluster.api("POST", quotas, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}})
    until(
        lambda: cluster.api("GET", f"{quotas}/few").get("status", {}).get("hard"), "the quota", timeout_s=30.0
    )
    try:
        run_dir = cluster.runs / "quota"
        code, output = cluster.ask("train", "recipe.yaml", f"run_dir={run_dir}", *cluster.on_pods())
        assert code != 0
        assert "exceeded quota: few" in output, output
    finally:
        cluster.api("DELETE", f"{quotas}/few")
    cluster.assert_nothing_left()


def test_an_image_without_torch_is_named(cluster: KubernetesCluster) -> None:
    path = cluster.template("without-torch.yaml")
    site = cluster.runs.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'torch':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
    )
    text = path.read_text().replace(f"value: {ROOT}\n", f"value: {site}:{ROOT}\n")
    text = text.replace("  volumes:\n", f"  volumes:\n  - name: site\n    hostPath: {{path: {site}}}\n")
    path.write_text(
        text.replace("    volumeMounts:\n", f"    volumeMounts:\n    - name: site\n      mountPath: {site}\n")
    )
    on = cluster.on_pods()
    on[-1] = f"cluster.kubernetes.template={path}"
    code, output = cluster.ask("train", "recipe.yaml", f"run_dir={cluster.runs}/torch", *on)
    assert code != 0
    assert "expected torch" in output and "found none" in output, output
    cluster.assert_nothing_left()


# The contract of back ends, with pods that only read their tickets.

READER = 'trap "exit 0" TERM; until [ -s "$2" ]; do sleep 0.1; done; cat "$2" > "/tickets/$HOSTNAME"; sleep 600 & wait'


class RealEngine(Engine):
    """Pods of the real cluster. The thread of the back end is in the network of the control plane."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self._cluster = cluster
        self._tickets = cluster.folder / "tickets"
        self._tickets.mkdir(exist_ok=True)
        template = yaml.safe_load(cluster.template("contract.yaml").read_text())
        (container,) = template["spec"]["containers"]
        container["command"] = ["sh", "-c", READER]
        container["volumeMounts"].append({"name": "read", "mountPath": "/tickets"})
        template["spec"]["volumes"].append({"name": "read", "hostPath": {"path": str(self._tickets)}})
        self.backend = KubernetesBackend(
            KubernetesSection(image=HOST),
            job=uuid4().hex[:12],
            hosts=HOSTS,
            patience_s=60.0,
            template=template,
            requests={"cpu": "500m"},
            load=self._access,
        )

    def _access(self) -> Access:
        enter(self._cluster.head.namespaces[:1])
        return read_kubeconfig(self._cluster.kubeconfig("launcher"))

    def _pods(self) -> dict[str, dict[str, Any]]:
        """Ticket that a pod has read → the pod, of those that run."""
        found = {}
        for pod in self._cluster.pods().values():
            read = self._tickets / pod["metadata"]["name"]
            if pod["status"]["phase"] == "Running" and read.exists() and (ticket := read.read_text().strip()):
                found[ticket] = pod
        return found

    def running(self) -> dict[str, object]:
        return {ticket: pod["metadata"]["uid"] for ticket, pod in self._pods().items()}

    def lose(self, host: str) -> None:
        for pid in self._cluster.pids_of_pod(self._pods()[host]):
            with suppress(ProcessLookupError):  # The others end with the first process of the container.
                os.kill(pid, signal.SIGKILL)

    def advance(self) -> None:
        time.sleep(0.05)


@pytest.fixture
def engine(cluster: KubernetesCluster) -> Iterator[Engine]:
    made = RealEngine(cluster)
    yield made
    made.backend.give_back(timeout_s=5.0)
    cluster.assert_nothing_left()


@needs_kustomize
def test_a_launcher_whose_pod_is_deleted_is_resumed_from_its_volume_by_another_pod(
    cluster: KubernetesCluster, weights_of_one_machine: str
) -> None:
    """The kustomize base as it is shipped, with a recipe and the Python of this machine."""
    volume = kustomize.write_launcher(cluster)
    jobs = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/kintsugi-launcher"
    run_dir = volume / "run"
    try:
        for each in kustomize.build(cluster.folder / "overlay"):
            answer = cluster.make(each)
            # The cluster has this role already.
            assert answer["kind"] == each["kind"] or answer["reason"] == "AlreadyExists", answer
        until(lambda: num_steps(run_dir) >= 2, "step 2", timeout_s=LONGEST_S)
        (pod,) = launchers(cluster)
        cluster.api("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
        until(lambda: bool({*launchers(cluster)} - {pod}), "another launcher", timeout_s=LONGEST_S)
        assert num_steps(run_dir) < 9, "it was stopped before its end"

        def is_over() -> bool:
            status = cluster.api("GET", jobs).get("status", {})
            assert not any(each["type"] == "Failed" for each in status.get("conditions", ())), status
            return bool(status.get("succeeded"))

        until(is_over, "the end of the Job", timeout_s=LONGEST_S)
        assert weights_of(run_dir) == weights_of_one_machine
        facts = read_facts(RunFolder(run_dir).journal_file)
        committed = [fact.step for fact in facts if isinstance(fact, StepCommitted)]
        assert committed == list(range(1, LAST_STEP + 1)), "no step was lost"
    finally:
        cluster.api("DELETE", f"{jobs}?propagationPolicy=Background")
    cluster.assert_nothing_left()


def launchers(cluster: KubernetesCluster) -> list[str]:
    """Pods of the launcher's Job."""
    pods = cluster.items("pods")
    return [
        each["metadata"]["name"]
        for each in pods
        if each["metadata"]["labels"].get("job-name") == "kintsugi-launcher"
    ]


@needs_kustomize
def test_the_kustomize_base_is_taken_by_the_real_api_server(cluster: KubernetesCluster) -> None:
    """Without effect (`dryRun=All`), each under a name of its own: the cluster has a role of this name."""
    built = kustomize.build(kustomize.BASE)
    assert {each["kind"] for each in built} >= {"Role", "ServiceAccount", "ConfigMap", "Job"}
    for each in built:
        each["metadata"]["name"] += "-tried"
        answer = cluster.make(each, query="?dryRun=All")
        assert (answer["kind"], answer["metadata"].get("name")) == (each["kind"], each["metadata"]["name"]), (
            answer
        )


def test_the_small_server_answers_as_the_real_one(cluster: KubernetesCluster) -> None:
    """The same requests on both; what is compared are statuses, reasons, kinds and changes."""
    small = KubernetesServer(minor="20")
    small.rights |= {"nothing": set()}
    try:
        ours = answers(small.access)
    finally:
        small.close()
    program = ROOT / "tests" / "cluster" / "programs" / "kubernetes_script.py"
    result = subprocess.run(
        [
            *cluster._in(cluster.head.name, "net"),
            *(
                sys.executable,
                str(program),
                *(str(cluster.kubeconfig(user)) for user in ("admin", "nothing", "wrong")),
            ),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    theirs: list[Any] = json.loads(result.stdout)
    assert ours == theirs
