"""The experiments of the laboratory in pods of a real Kubernetes cluster: faults that a pod may have, and a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kintsugi.lab.scenarios.experiments import experiments_folder
from tests.cluster import kubernetes_cluster
from tests.cluster.hosts_runs import LONGEST_S
from tests.cluster.kubernetes_cluster import KubernetesCluster
from tests.cluster.lab_runs import assert_diagnosed, assert_faults_fired, state_of

PATIENTLY = "cluster.start_timeout_s=300"
"""For a busy machine: a run has to begin, however long that takes."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.kubernetes,
    pytest.mark.skipif(
        kubernetes_cluster.missing() is not None,
        reason=f"a Kubernetes cluster can not be had: {kubernetes_cluster.missing()}",
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    made = KubernetesCluster(tmp_path_factory.mktemp("kubernetes"), count=2)
    yield made
    made.close()


def template_with(cluster: KubernetesCluster, *capabilities: str) -> Path:
    """The pod template of the tests, for pods that have capabilities."""
    template = yaml.safe_load(cluster.template().read_text())
    (container,) = template["spec"]["containers"]
    container["securityContext"] = {"capabilities": {"add": list(capabilities)}}
    path = cluster.runs / "able.yaml"
    path.write_text(yaml.safe_dump(template))
    return path


def longer_s1(cluster: KubernetesCluster) -> Path:
    """S1 with steps that outlast its fault: with the run its pods end, and with them what the fault has counted."""
    text = (experiments_folder() / "S1.yaml").read_text()
    recipe = experiments_folder() / "workloads" / "grpo.yaml"
    text = text.replace("workloads/grpo.yaml", str(recipe)).replace(
        "algorithm.steps: 28", "algorithm.steps: 70"
    )
    path = cluster.runs / "S1.yaml"
    path.write_text(text)
    return path


def run_s1(cluster: KubernetesCluster, name: str, *overrides: str) -> tuple[int, str, Path]:
    """Run S1 in pods; return its exit code, its output and its folder."""
    folder = cluster.runs / name
    code, output = cluster.ask(
        *("lab", "run", str(longer_s1(cluster)), "--profile", "ours", "--folder", str(folder)),
        *("--json", f"{folder}.json", *cluster.on_pods(pods=2), PATIENTLY, *overrides),
        timeout_s=2 * LONGEST_S,
        user="laboratory",
    )
    return code, output, folder


def test_a_pod_that_may_not_change_its_network_is_refused_before_anything_starts(
    cluster: KubernetesCluster,
) -> None:
    code, output, folder = run_s1(cluster, "refused")
    assert code != 0
    assert "S1: --on k8s: host-2: network_delay: a pod of this template may not change its network" in output
    assert not folder.exists()
    cluster.assert_nothing_left()


def test_an_experiment_that_slows_the_link_of_a_pod_is_diagnosed_and_nothing_is_left(
    cluster: KubernetesCluster,
) -> None:
    places = (cluster.head, *cluster.places)
    before = state_of(places)
    template = template_with(cluster, "NET_ADMIN", "SYS_ADMIN")
    code, output, folder = run_s1(cluster, "able", f"cluster.kubernetes.template={template}")
    assert (folder / "runs.json").exists(), (code, output)
    (marker,) = assert_faults_fired(folder, "S1")
    assert marker["host"] in ("host-1", "host-2")
    assert_diagnosed(Path(f"{folder}.json"))
    cluster.assert_nothing_left()
    assert state_of(places) == before
