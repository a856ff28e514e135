"""Everything that is created in a cluster, and the files of `deploy/kubernetes`, against the published schemas."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kintsugi.cluster.backends.contract import HostOrder
from kintsugi.cluster.backends.kubernetes import manifests
from kintsugi.cluster.backends.kubernetes.manifests import Deployment, Workload
from kintsugi.config.schema import KubernetesSection
from tests.cluster import kustomize

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate: make test-extras"
)
VERSIONS = ("1.25", "1.30", "1.37")


def deployment(workload: Workload) -> Deployment:
    return Deployment(
        job="0123456789ab",
        hosts=("host-1", "host-2"),
        settings=KubernetesSection(image="registry/kintsugi:1", gpus=8),
        namespace="runs",
        workload=workload,
        template={"spec": {"tolerations": [{"operator": "Exists"}]}},
        requests={"cpu": "2200m", "memory": "861Mi"},
    )


def created() -> list[dict[str, Any]]:
    pods, job = deployment(Workload.PODS), deployment(Workload.JOB)
    secret = manifests.secret(job, [HostOrder("host-1", b"ticket")])
    about = {**secret, "metadata": secret["metadata"] | {"uid": "1234"}}
    return [
        secret,
        manifests.workload_object(job),
        manifests.pod(pods, "host-2", name="kintsugi-0123456789ab-1-abcdef", owner_uid="1234"),
        manifests.event(job, about, reason="HostLost", message="…", name="x.1", time="2026-11-18T12:00:00Z"),
    ]


def built() -> list[dict[str, Any]]:
    """The base as kustomize builds it, where there is a kubectl."""
    return kustomize.build(kustomize.BASE) if kustomize.missing() is None else []


def shipped() -> list[dict[str, Any]]:
    files = [path for path in kustomize.BASE.glob("*.yaml") if path.stem not in ("kustomization", "recipe")]
    return [each for path in sorted(files) for each in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_the_strict_sense(version: str) -> None:
    objects = created() + shipped() + built()
    assert {each["kind"] for each in objects} >= {"Secret", "Job", "Pod", "Event", "Role", "RoleBinding"}
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    job = manifests.workload_object(deployment(Workload.JOB))
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.30", strict=True)
