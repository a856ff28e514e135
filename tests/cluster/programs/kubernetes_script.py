"""One script of requests to a server of the Kubernetes API: kubernetes_script.py ADMIN NOTHING WRONG (kubeconfigs)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from kintsugi.cluster.backends.contract import HostOrder
from kintsugi.cluster.backends.kubernetes import manifests
from kintsugi.cluster.backends.kubernetes.access import Access, read_kubeconfig
from kintsugi.cluster.backends.kubernetes.client import ApiError, Changed, Client
from kintsugi.cluster.backends.kubernetes.manifests import Deployment, Workload
from kintsugi.cluster.backends.kubernetes.pod_command import PodCommand
from kintsugi.config.schema import KubernetesSection

CORE = "/api/v1/namespaces/runs"
RUN = Deployment(
    job="script",
    hosts=("host-1",),
    settings=KubernetesSection(image="docker.io/local/nothing:1"),
    namespace="runs",
    workload=Workload.PODS,
)


def answers(access: Callable[[str], Access]) -> list[Any]:
    """Return what a server answers, without what differs from one server to the next."""
    return asyncio.run(_script(access))


async def _script(access: Callable[[str], Access]) -> list[Any]:
    said: list[Any] = []
    pod = manifests.pod(RUN, "host-1", name="script-pod", owner_uid="")
    del pod["metadata"]["ownerReferences"]
    # No node takes it: nothing changes but by this script.
    pod["spec"]["nodeSelector"] = {"there-is": "none"}
    secret = manifests.secret(RUN, [HostOrder("host-1", b"ticket")])

    async with Client(access("admin")) as client:

        async def ask(method: str, path: str, body: Any = None, *, of: Client = client) -> Any:
            try:
                answer = await of.request(method, path, body=body, timeout_s=5.0)
            except ApiError as error:
                # The words after the name of the server's own caller differ.
                said.append([method, path, error.status, error.reason])
                return {}
            said.append([method, path, answer.get("kind"), (answer.get("data") or {})])
            return answer

        version = await client.request("GET", "/version")
        said.append([version["major"], "".join(filter(str.isdigit, version["minor"]))])
        _, since = await client.list(f"{CORE}/pods", selector=RUN.selector)
        await ask("GET", "/apis/batch.volcano.sh/v1alpha1")
        await ask("POST", f"{CORE}/secrets", secret)
        await ask("POST", f"{CORE}/secrets", secret)
        await ask("PATCH", f"{CORE}/secrets/{RUN.name}", {"data": {"host-2": "dA=="}})
        await ask("PATCH", f"{CORE}/secrets/{RUN.name}", {"data": {"host-2": None}})
        await ask("PATCH", f"{CORE}/secrets/none", {"data": {}})
        await ask("POST", "/api/v1/namespaces/elsewhere/secrets", {**secret, "metadata": {"name": "x"}})
        made = await ask("POST", f"{CORE}/pods", pod)
        said.append(sorted({"uid", "resourceVersion", "creationTimestamp"} & made["metadata"].keys()))
        said.append(made["status"]["phase"])
        await ask("POST", f"{CORE}/pods", pod)
        await ask("PATCH", f"{CORE}/pods/script-pod", {"metadata": {"annotations": {"a": "b"}}})
        said += [await _execute(client, "script-pod"), await _execute(client, "none")]
        found, _ = await client.list(f"{CORE}/pods", selector=RUN.selector)
        said.append([each["metadata"]["name"] for each in found])
        others, _ = await client.list(f"{CORE}/pods", selector="kintsugi/run=other")
        said.append(len(others))
        await ask(
            "DELETE",
            f"{CORE}/pods/script-pod",
            {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0},
        )
        await ask("DELETE", f"{CORE}/pods/script-pod")
        await ask("DELETE", f"{CORE}/secrets/{RUN.name}")
        said.append(await _changes(client, since))
        for user in ("nothing", "wrong"):
            async with Client(access(user)) as other:
                said.append(await _execute(other, "script-pod"))
                await ask("GET", f"{CORE}/pods", of=other)
                await ask("POST", f"{CORE}/secrets", secret, of=other)
    return said


async def _execute(client: Client, pod: str) -> list[Any]:
    """Status with which a command in a pod without a node is refused."""
    try:
        async with PodCommand(client, f"{CORE}/pods/{pod}", container="agent", command=["true"]):
            return ["exec", pod, "started"]
    except ApiError as error:
        return ["exec", pod, error.status]


async def _changes(client: Client, since: str) -> list[Any]:
    """Kinds of the changes of the pod since a version, each kind once in a row."""
    kinds: list[str] = []
    async with aclosing(client.watch(f"{CORE}/pods", selector=RUN.selector, version=since)) as changes:
        async for change in changes:
            if isinstance(change, Changed) and (not kinds or kinds[-1] != change.kind):
                kinds.append(change.kind)
            if kinds[-1:] == ["DELETED"]:
                return kinds
    return kinds


if __name__ == "__main__":
    named = dict(zip(("admin", "nothing", "wrong"), sys.argv[1:], strict=True))
    sys.stdout.write(json.dumps(answers(lambda user: read_kubeconfig(Path(named[user])))))
