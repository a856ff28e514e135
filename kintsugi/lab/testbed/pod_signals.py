"""Orders of the laboratory for a host that is a pod: a process beside the laboratory, which talks to the API server.

    python -m kintsugi.lab.testbed.pod_signals HOST NAMESPACE

    laboratory ── order ──► pod_signals ── command in the pod ──► kintsugi host-signals ── signals
                                 └──────── deletion by force, of a whole host ──► API server

The loop consumes one order per line of standard input and answers each with a line, as `remote_signals.py` does; it
waits for the next order, and for the pod's answer with a deadline. When the pod of the host is another one meanwhile,
the order goes to that one.

The supervisor is the first process of its pod, and the kernel takes no SIGKILL for it from within: a whole host is lost
by the deletion of its pod, by force, and what is below the supervisor is killed in the same instant.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from kintsugi.cluster.backends.kubernetes.access import load_access
from kintsugi.cluster.backends.kubernetes.client import ApiError, Client
from kintsugi.cluster.backends.kubernetes.manifests import CONTAINER, RUN_LABEL, Right
from kintsugi.cluster.backends.kubernetes.opening import read_template
from kintsugi.cluster.backends.kubernetes.pod_command import PodCommand
from kintsugi.cluster.backends.kubernetes.pods import PodPhase, index_of, view
from kintsugi.cluster.backends.kubernetes.rights import check_rights
from kintsugi.config.schema import KubernetesSection
from kintsugi.lab.injector.checks import NETWORK
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.testbed.remote_orders import (
    ANSWER_BEGINS,
    Order,
    Signalled,
    SignalOrder,
    read_order,
    unreached,
)

RIGHTS = (Right("", "pods", ("list", "delete")), Right("", "pods/exec", ("get", "create")))
"""Rights of the laboratory besides those of a run (`deploy/kubernetes/laboratory.yaml`). To start a command, older
servers ask for `get`, newer ones for `create`."""
NETWORK_CAPABILITIES = frozenset({"NET_ADMIN", "SYS_ADMIN"})
"""Rules about packets, and the network namespace of the target."""
GROUPED = frozenset({Ability.MEMORY, Ability.DEVICE_SLOW})
"""Faults that need a control group. CPU can be taken away by neighbours instead, and memory by a limit (`room`)."""
START_S = 60.0
"""Time for the first answer, and for a fault to be prepared or undone: interpreters are started in the pod."""
ANSWER_S = 10.0


def check_laboratory_rights(namespace: str) -> None:
    """Raise ApiError if this account may not run commands in pods, by the rules that a Role needs."""

    async def check() -> None:
        async with Client(load_access()) as client:
            await check_rights(client, RIGHTS, namespace=namespace or client.access.namespace)

    asyncio.run(check())


def refusal_of_pods(settings: KubernetesSection, faults: Iterable[Injection]) -> str:
    """Return why pods of this template can not have one of these faults; empty if they can. ConfigError for a template
    that is wrong.

    A pod has its own network, which it may change only with capabilities that its template adds; control groups are
    writable in a privileged pod only. Other faults need nothing that pods do not have.
    """
    context: dict[str, Any] = {}
    for container in (read_template(settings).get("spec") or {}).get("containers") or []:
        if container.get("name") == CONTAINER:
            context = container.get("securityContext") or {}
    if context.get("privileged"):
        return ""
    added = {name.removeprefix("CAP_") for name in (context.get("capabilities") or {}).get("add") or []}
    for fault in faults:
        needs: str = ""
        if fault.ability in NETWORK and not added >= NETWORK_CAPABILITIES:
            absent = ", ".join(sorted(NETWORK_CAPABILITIES - added))
            needs = f"may not change its network: expected `capabilities.add: [{absent}]`"
        elif fault.ability in GROUPED and "room" not in fault.amount:
            needs = "may not make control groups: expected `privileged: true`"
        if needs:
            return (
                f"{fault.ability.value}: a pod of this template {needs} in the `securityContext` of the container "
                f"`{CONTAINER}` of `cluster.kubernetes.template`"
            )
    return ""


class HostPod:
    """The pod of one host, whichever it is now; used as an asynchronous context."""

    def __init__(self, client: Client, host: str, *, namespace: str) -> None:
        self._client, self._index = client, int(host.rpartition("-")[2]) - 1
        self._host = host
        self._pods = f"/api/v1/namespaces/{namespace or client.access.namespace}/pods"
        self._open = AsyncExitStack()
        self._command: PodCommand | None = None
        self._path = ""
        """Path of the pod that the command runs in."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._disconnect()

    async def answer(self, line: bytes) -> bytes:
        """Carry out the order of a line; return the line of the answer. ApiError if the API server refuses."""
        order, line = read_order(line), line.strip()  # An empty line would end the program in the pod.
        is_whole = isinstance(order, SignalOrder) and order.is_whole
        is_quick = isinstance(order, SignalOrder) and self._command is not None
        is_deleted = False
        for _ in range(2):
            timeout_s = ANSWER_S if is_quick else START_S
            command = self._command or await self._connect(order.job)
            if command is None:
                break
            if is_whole:
                # First: the supervisor would restart what is killed.
                is_deleted = await self._delete()
            if (told := await command.ask(line, begin=ANSWER_BEGINS, timeout_s=timeout_s)) is not None:
                return told
            await self._disconnect()
            if is_deleted:
                break
        if isinstance(order, SignalOrder):
            return msgspec.json.encode(Signalled(tuple(order.pids) if is_deleted else (), is_reached=False))
        return unreached(order)

    async def _connect(self, job: str) -> PodCommand | None:
        """Start `host-signals` in the pod of the host; None if none runs."""
        if (pod := await self._find(job)) is None:
            return None
        (container,) = [each for each in pod["spec"]["containers"] if each["name"] == CONTAINER]
        arguments = container["args"]
        scratch = arguments[arguments.index("--scratch") + 1]
        self._path = f"{self._pods}/{pod['metadata']['name']}"
        command = PodCommand(
            self._client,
            self._path,
            container=CONTAINER,
            command=[*container["command"], "host-signals", self._host, scratch],
        )
        self._command = await self._open.enter_async_context(command)
        return self._command

    async def _find(self, job: str) -> dict[str, Any] | None:
        """Return the newest pod of the host that runs."""
        pods, _ = await self._client.list(self._pods, selector=f"{RUN_LABEL}={job}")
        own = [pod for pod in pods if index_of(pod) == self._index]
        seen = [(view(pod, hosts=[self._host] * (self._index + 1)), pod) for pod in own]
        there = [
            (known.created, pod)
            for known, pod in seen
            if known is not None and known.phase is PodPhase.RUNNING and not known.is_going
        ]
        return max(there, key=lambda each: each[0])[1] if there else None

    async def _delete(self) -> bool:
        """Delete the pod by force; False if it is gone."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        try:
            await self._client.request("DELETE", self._path, body=options)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def _disconnect(self) -> None:
        self._command = None
        await self._open.aclose()


def refused(order: Order, error: ApiError) -> bytes:
    """Return the answer to an order that the API server has refused. What may pass ends no laboratory, and neither does
    a pod that was deleted after it was found (404)."""
    is_passing = error.may_pass or error.status == 404
    return unreached(order, why="" if is_passing else str(error))


async def _serve(host: str, namespace: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    async with Client(load_access()) as client, HostPod(client, host, namespace=namespace) as pod:
        async for line in reader:
            try:
                told = await pod.answer(line)
            except ApiError as error:
                told = refused(read_order(line), error)
            sys.stdout.write(f"{told.decode()}\n")
            sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Body of the process."""
    host, namespace = arguments
    asyncio.run(_serve(host, namespace))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
