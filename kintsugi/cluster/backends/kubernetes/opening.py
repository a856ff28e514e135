"""From the configuration of a run to its back end: the pod template of the user, what each pod requests of its node,
and what each host must have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kintsugi.cluster.backends.contract import Backend, HostOrder
from kintsugi.cluster.backends.kubernetes import manifests
from kintsugi.cluster.backends.kubernetes.backend import KubernetesBackend
from kintsugi.cluster.backends.kubernetes.manifests import Deployment, Workload, check_template
from kintsugi.cluster.joining import HostNeeds, versions
from kintsugi.config.schema import ClusterSection, Config, KubernetesSection
from kintsugi.control.placement import plan_layout
from kintsugi.errors import ConfigError
from kintsugi.model.memory import PLAIN_PROCESS_BYTES, RunMemory
from kintsugi.model.plan import plan_architecture, plan_companions
from kintsugi.types import Role

PATIENCE = 0.75
"""Part of the time for a start in which a pod must have got a node and an image."""
COMPUTING_CPUS, OTHER_CPUS = 1.0, 0.1
"""CPUs of a rank or a generation server, which compute in one thread, and of any other process: those pass messages
and wait."""
COMPUTING = (Role.MODEL, Role.SERVER)


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


def placed_in_pods(cluster: ClusterSection) -> ClusterSection:
    """Return the section with one host per pod besides the launcher's machine."""
    settings = cluster.kubernetes
    hosts = host_names(settings)
    return msgspec.structs.replace(
        cluster, hosts=1 + len(hosts), slots=(0, *(1 for _ in hosts)), spare_hosts=settings.spare_pods
    )


def pod_requests(config: Config) -> dict[str, str]:
    """Return what each pod requests of its node. All pods are alike, as a spare one may get the processes of any
    other: it is what the pod needs that needs most."""
    settings = config.cluster.kubernetes
    memory = RunMemory(config, plan_architecture(config), plan_companions(config), settings.gpus)
    roles: dict[str, list[Role]] = {host: [] for host in host_names(settings)}
    for process in plan_layout(config):
        if process.host in roles:
            roles[process.host].append(process.role)
    cpus, size = settings.cpus, settings.memory_gib
    if cpus is None:
        cpus = max(OTHER_CPUS + sum(map(_cpus, each)) for each in roles.values())  # With the supervisor.
    if size is None:
        size = max(PLAIN_PROCESS_BYTES + memory.of_host(each) for each in roles.values()) / 2**30
    asked = {"cpu": f"{round(1000 * cpus)}m", "memory": f"{math.ceil(1024 * size)}Mi"}
    return {name: amount for name, amount in asked.items() if amount not in ("0m", "0Mi")}


def _cpus(role: Role) -> float:
    return COMPUTING_CPUS if role in COMPUTING else OTHER_CPUS


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
        requests=pod_requests(config),
    )
    needs = HostNeeds(versions(), settings.gpus)
    return backend, {host: msgspec.structs.replace(needs) for host in hosts}, {}


def planned_objects(config: Config) -> str:
    """Return the objects of a run as YAML, without its tickets. No cluster is asked: `auto` is an Indexed Job."""
    settings = config.cluster.kubernetes
    check_settings(settings)
    placed = msgspec.structs.replace(config, cluster=placed_in_pods(config.cluster))
    deployment = Deployment(
        job="RUN",
        hosts=host_names(settings),
        settings=settings,
        namespace=settings.namespace or "default",
        workload=Workload.JOB if settings.workload == "auto" else Workload(settings.workload),
        template=read_template(settings),
        requests=pod_requests(placed),
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
