"""The kustomize base of `deploy/kubernetes`, as kubectl builds it: alone, and under the overlay of docs/cluster.md."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from kintsugi.cluster.backends.kubernetes.opening import planned_objects
from kintsugi.config.recipe import load
from tests.cluster.kustomize import BASE, build, missing
from tests.docs.pages import FENCE, ROOT

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"kustomize can not be had: {missing()}")

Objects = dict[str, dict[str, Any]]


@pytest.fixture(params=["base", "overlay"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """Kind → the only object of that kind."""
    folder = BASE
    if request.param == "overlay":
        folder = write_overlay(tmp_path)
    objects = build(folder)
    found = {each["kind"]: each for each in objects}
    assert len(found) == len(objects)
    return found


def write_overlay(folder: Path) -> Path:
    """Write the overlay of the documentation beside a copy of the base; return its folder."""
    shutil.copytree(BASE, folder / "deploy" / "kubernetes")
    page = (ROOT / "docs" / "cluster.md").read_text()
    (shown,) = [each for each in FENCE.finditer(page) if "kustomization.yaml" in each["attributes"]]
    overlay = folder / "deploy" / "arithmetic"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(shown["body"])
    (image,) = yaml.safe_load(shown["body"])["images"]
    recipe = (BASE / "recipe.yaml").read_text()
    named = f"{image['newName']}:{image['newTag']}"
    (overlay / "recipe.yaml").write_text(recipe.replace("registry.example/kintsugi:1", named))
    return overlay


def launcher_of(built: Objects) -> dict[str, Any]:
    """The pod of the launcher's Job."""
    spec: dict[str, Any] = built["Job"]["spec"]["template"]["spec"]
    return spec


def planned(built: Objects, folder: Path) -> list[dict[str, Any]]:
    """What `kintsugi manifest` shows of the recipe in the ConfigMap, in the namespace of the launcher."""
    (content,) = built["ConfigMap"]["data"].values()
    (folder / "recipe.yaml").write_text(content)
    namespace = built["Job"]["metadata"]["namespace"]
    config = load(folder / "recipe.yaml", [f"cluster.kubernetes.namespace={namespace}"]).config
    return list(yaml.safe_load_all(planned_objects(config)))


def test_every_object_is_in_one_namespace_and_every_name_leads_to_another_object(built: Objects) -> None:
    kinds = {"ServiceAccount", "Role", "RoleBinding", "ConfigMap", "PersistentVolumeClaim", "Job"}
    assert built.keys() == kinds, "the Secret of the tickets is made for each session"
    names = {kind: each["metadata"]["name"] for kind, each in built.items()}
    (namespace,) = {each["metadata"]["namespace"] for each in built.values()}
    binding, spec = built["RoleBinding"], launcher_of(built)
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", names["Role"])
    account = {"kind": "ServiceAccount", "name": names["ServiceAccount"], "namespace": namespace}
    assert binding["subjects"] == [account]
    assert spec["serviceAccountName"] == names["ServiceAccount"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == names["PersistentVolumeClaim"]
    assert volumes["recipe"]["configMap"]["name"] == names["ConfigMap"]
    (container,) = spec["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    assert built["ConfigMap"]["data"].keys() == {"recipe.yaml"}
    assert "cp -L /recipe/*" in container["command"][-1] and "train recipe.yaml" in container["command"][-1]


def test_the_launcher_may_create_what_the_manifest_shows_and_its_pods_have_its_image(
    built: Objects, tmp_path: Path
) -> None:
    rights = {
        (group, resource, verb)
        for rule in built["Role"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    shown = planned(built, tmp_path)
    assert {each["kind"] for each in shown} == {"Secret", "Job"}
    for each in shown:
        group = each["apiVersion"].rpartition("/")[0]
        assert (group, f"{each['kind'].lower()}s", "create") in rights
        assert each["metadata"]["namespace"] == built["Job"]["metadata"]["namespace"]
    (launcher,) = launcher_of(built)["containers"]
    (host,) = shown[-1]["spec"]["template"]["spec"]["containers"]
    assert host["image"] == launcher["image"]


def test_every_container_requests_cpus_and_memory(built: Objects, tmp_path: Path) -> None:
    pods = [launcher_of(built), planned(built, tmp_path)[-1]["spec"]["template"]["spec"]]
    for each in pods:
        (container,) = each["containers"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
