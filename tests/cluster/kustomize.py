"""`kubectl kustomize`, which builds the objects of a folder, and an overlay for the cluster of the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kubernetes_cluster import NAMESPACE, KubernetesCluster
from tests.cluster.kubernetes_images import HOST

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes"


def missing() -> str | None:
    """Why nothing can be built here."""
    return None if shutil.which("kubectl") else "kubectl is not installed"


def build(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` would create."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def write_launcher(cluster: KubernetesCluster) -> Path:
    """Write an overlay over the base, and create its volume; return the folder of the volume."""
    overlay, volume = cluster.folder / "overlay", cluster.folder / "volume"
    shutil.copytree(BASE, overlay / "base")
    volume.mkdir()
    recipe = yaml.safe_load((cluster.runs / "recipe.yaml").read_text())
    recipe["algorithm"]["reward"] = ["slow_rewards.py:odd_digits"]
    pods = {"pods": 3, "image": HOST, "cpus": 0.5, "template": "template.yaml"}
    recipe["cluster"] = {"on": "k8s", "start_timeout_s": 300, "kubernetes": pods}
    (overlay / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shutil.copy(cluster.runs / "slow_rewards.py", overlay)
    shutil.copy(cluster.template(), overlay / "template.yaml")
    spec = cluster.pod_with_python("launcher")
    (container,) = spec["containers"]
    del container["command"]
    container["env"] += [
        {"name": "PATH", "value": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin"},
        # The nodes have no kube-proxy, which would bring the address of the service to the API server.
        {"name": "KUBERNETES_SERVICE_HOST", "value": cluster.head.address},
        {"name": "KUBERNETES_SERVICE_PORT", "value": "6443"},
    ]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "kintsugi-launcher"}}
    built = {
        "resources": ["base"],
        "namespace": NAMESPACE,
        "configMapGenerator": [
            {
                "name": "kintsugi-recipe",
                "behavior": "replace",
                "files": ["recipe.yaml", "slow_rewards.py", "template.yaml"],
            }
        ],
        "images": [{"name": "registry.example/kintsugi", "newName": HOST.rpartition(":")[0], "newTag": "1"}],
        "patches": [{"patch": yaml.safe_dump(job | {"spec": {"template": {"spec": spec}}})}],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(built))
    disk = {
        "capacity": {"storage": "100Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(volume)},
        "claimRef": {"namespace": NAMESPACE, "name": "kintsugi-runs"},
    }
    cluster.api("POST", "/api/v1/persistentvolumes", {"metadata": {"name": "runs"}, "spec": disk})
    return volume
