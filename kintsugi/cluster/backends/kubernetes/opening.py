"""From the configuration of a run to its back end: the pod template of the user, and what each host must have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from kintsugi.cluster.backends.contract import Backend, HostOrder
from kintsugi.cluster.backends.kubernetes import manifests
from kintsugi.cluster.backends.kubernetes.backend import KubernetesBackend
from kintsugi.cluster.backends.kubernetes.manifests import Deployment, Workload, check_template
from kintsugi.cluster.joining import HostNeeds, versions
from kintsugi.config.schema import Config, KubernetesSection
from kintsugi.errors import ConfigError

PATIENCE = 0.75
"""Part of the time for a start in which a pod must have got a node and an image."""


def host_names(settings: KubernetesSection) -> tuple[str, ...]:
    """Return the names of the hosts that are pods."""
    return tuple(f"host-{number}" for number in range(1, settings.pods + settings.spare_pods + 1))


def read_template(settings: KubernetesSection) -> dict[str, Any]:
    """Return the pod template of the user; ConfigError names what is wrong with its file."""
    if not settings.template:
        return {}
    path = Path(settings.template)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cluster.kubernetes.template: expected a YAML file, got {path}: {why}") from error
    return check_template(content, path=settings.template)


def check_settings(settings: KubernetesSection) -> None:
    """Raise ConfigError for what no cluster could start."""
    if not settings.image:
        raise ConfigError(
            "cluster.kubernetes.image: expected the image of the pods, got none: `--image REGISTRY/NAME:TAG`; "
            "deploy/kubernetes has a Dockerfile"
        )
    if settings.pods < 1:
        raise ConfigError(f"cluster.kubernetes.pods: expected at least one pod, got {settings.pods}")
    read_template(settings)


def open_kubernetes(config: Config, *, job: str) -> tuple[Backend, dict[str, HostNeeds], dict[str, str]]:
    """Open the back end; return it with what each host has to have, and names of machines, which pods do not have."""
    settings = config.cluster.kubernetes
    check_settings(settings)
    hosts = host_names(settings)
    backend = KubernetesBackend(
        settings,
        job=job,
        hosts=hosts,
        patience_s=PATIENCE * config.cluster.start_timeout_s,
        template=read_template(settings),
    )
    needs = HostNeeds(versions(), settings.gpus)
    return backend, {host: msgspec.structs.replace(needs) for host in hosts}, {}


def planned_objects(config: Config) -> str:
    """Return the objects of a run as YAML, without its tickets. No cluster is asked: `auto` is an Indexed Job."""
    settings = config.cluster.kubernetes
    check_settings(settings)
    deployment = Deployment(
        job="RUN",
        hosts=host_names(settings),
        settings=settings,
        namespace=settings.namespace or "default",
        workload=Workload.JOB if settings.workload == "auto" else Workload(settings.workload),
        template=read_template(settings),
    )
    orders = [HostOrder(host, b"a ticket for one use") for host in deployment.hosts]
    objects = [manifests.secret(deployment, orders)]
    if deployment.workload is Workload.PODS:
        for index, host in enumerate(deployment.hosts):
            name = f"{deployment.name}-{index}-NUMBER"
            objects.append(manifests.pod(deployment, host, name=name, owner_uid="UID-OF-THE-SECRET"))
    else:
        objects.append(manifests.workload_object(deployment))
    return yaml.safe_dump_all(objects, sort_keys=False)
