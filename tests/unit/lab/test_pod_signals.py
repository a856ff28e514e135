"""Orders of the laboratory for hosts that are pods: what is signalled in them, and which pod is deleted."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.cluster.backends.kubernetes import manifests
from kintsugi.cluster.backends.kubernetes.client import ApiError, Client
from kintsugi.cluster.backends.kubernetes.manifests import Deployment, Workload
from kintsugi.cluster.backends.kubernetes.rights import check_rights
from kintsugi.config.schema import KubernetesSection
from kintsugi.lab.injector.injection import Ability, Injection
from kintsugi.lab.testbed.pod_signals import RIGHTS, HostPod, refusal_of_pods, refused
from kintsugi.lab.testbed.remote_orders import FaultAnswer, FaultOrder, Signalled, SignalOrder
from tests.cluster.kubernetes_server import KubernetesServer
from tests.cluster.tiny_runs import until
from tests.unit.lab.test_remote_hosts import Machine

RUN = Deployment(
    job="run1",
    hosts=("host-1", "host-2"),
    settings=KubernetesSection(image="local"),
    namespace="runs",
    workload=Workload.PODS,
    template={
        "spec": {"containers": [{"name": "agent", "command": [sys.executable, "-P", "-m", "kintsugi"]}]}
    },
)
PODS = "/api/v1/namespaces/runs/pods"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "scratch")
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    made = KubernetesServer()
    yield made
    made.close()


async def make_pod(client: Client, server: KubernetesServer, name: str, *, scratch: Path) -> None:
    """Create the pod of host-2, whose scratch folder is one of this machine, and wait until it runs."""
    pod = manifests.pod(RUN, "host-2", name=name, owner_uid="")
    del pod["metadata"]["ownerReferences"]
    (container,) = pod["spec"]["containers"]
    container["args"][container["args"].index("--scratch") + 1] = str(scratch)
    pod["spec"]["volumes"] = [each for each in pod["spec"]["volumes"] if each["name"] == "tickets"]
    await client.request("POST", PODS, body=pod)
    running = asyncio.to_thread(until, lambda: "Running" in str(server.objects("pods")), "the pod")
    await running


def ask(
    server: KubernetesServer, machine: Machine, *orders: SignalOrder, again: bool = False
) -> list[Signalled]:
    """Answers to orders for host-2. With `again` its pod is another one after the first order."""

    async def answers() -> list[Signalled]:
        found = []
        async with Client(server.access()) as client, HostPod(client, "host-2", namespace="runs") as pod:
            await make_pod(client, server, "first", scratch=machine.scratch)
            for order in orders:
                line = await pod.answer(msgspec.json.encode(order) + b"\n")
                found.append(msgspec.json.decode(line, type=Signalled))
                if again and order is orders[0]:
                    await client.request("DELETE", f"{PODS}/first", body={"gracePeriodSeconds": 0})
                    server.end_command("first")
                    await make_pod(client, server, "second", scratch=machine.scratch)
        return found

    return asyncio.run(answers())


def test_a_process_of_a_pod_is_signalled_in_it(server: KubernetesServer, machine: Machine) -> None:
    orders = SignalOrder("run1", 0), SignalOrder("run1", signal.SIGKILL, {"model-0": machine.child})
    assert ask(server, machine, *orders) == [Signalled(()), Signalled(("model-0",))]
    assert machine.supervisor.wait(timeout=5.0) == 0, "it has seen its child end"
    assert server.names("pods") == ["first"]


def test_a_whole_host_ends_with_its_pod_which_is_deleted_by_force(
    server: KubernetesServer, machine: Machine
) -> None:
    order = SignalOrder("run1", signal.SIGKILL, {"agent-2": machine.child}, is_whole=True)
    assert ask(server, machine, order) == [Signalled(("agent-2",))]
    until(lambda: not machine.child_runs, "the end of what was below the supervisor")
    assert server.names("pods") == []


def test_an_order_goes_to_the_pod_that_has_replaced_the_first_one(
    server: KubernetesServer, machine: Machine
) -> None:
    orders = SignalOrder("run1", 0), SignalOrder("run1", signal.SIGKILL, {"model-0": machine.child})
    assert ask(server, machine, *orders, again=True)[1] == Signalled(("model-0",))
    assert server.requests.count(f"GET {PODS}/second/exec") == 1


def test_a_host_without_a_pod_is_not_signalled_and_no_other_is(
    server: KubernetesServer, machine: Machine
) -> None:
    order = SignalOrder("run2", signal.SIGKILL, {"model-0": machine.child})
    assert ask(server, machine, order) == [Signalled((), is_reached=False)]
    assert machine.child_runs


class VanishingPod(HostPod):
    """A host whose pod is deleted after it was found, before a command is started in it."""

    async def _find(self, job: str) -> dict[str, Any] | None:
        found = await super()._find(job)
        await self._client.request("DELETE", f"{PODS}/first", body={"gracePeriodSeconds": 0})
        return found


def test_a_pod_that_vanishes_while_it_is_found_does_not_end_the_laboratory(
    server: KubernetesServer, machine: Machine
) -> None:
    line = msgspec.json.encode(SignalOrder("run1", signal.SIGKILL, {"model-0": machine.child}))

    async def answer() -> None:
        async with Client(server.access()) as client, VanishingPod(client, "host-2", namespace="runs") as pod:
            await make_pod(client, server, "first", scratch=machine.scratch)
            await pod.answer(line)

    with pytest.raises(ApiError, match=r"pods/first/exec is refused: .*\(404\)") as told:
        asyncio.run(answer())
    assert refusal(told.value) == Signalled((), is_reached=False)


def refusal(error: ApiError) -> Signalled:
    """Answer to an order that the API server has refused."""
    return msgspec.json.decode(refused(SignalOrder("run1", signal.SIGKILL), error), type=Signalled)


@pytest.mark.parametrize(("status", "why"), [(0, ""), (404, ""), (429, ""), (503, ""), (403, "forbidden")])
def test_only_a_refusal_that_stays_is_told_to_the_laboratory(status: int, why: str) -> None:
    assert refusal(ApiError("forbidden", status=status)) == Signalled((), is_reached=False, why=why)


def test_a_right_that_the_laboratory_lacks_is_named_as_a_rule(server: KubernetesServer) -> None:
    server.rights["launcher"] = {("list", "pods"), ("delete", "pods")}

    async def check(user: str) -> None:
        async with Client(server.access(user)) as client:
            await check_rights(client, RIGHTS, namespace="runs")

    asyncio.run(check("admin"))
    with pytest.raises(ApiError, match=r"a Role needs verbs \[get, create\] on pods/exec in API group ''"):
        asyncio.run(check("launcher"))


NETWORK = Injection(ability=Ability.NETWORK_DELAY, target="model-1")
CPU = Injection(ability=Ability.CPU, target="rollout-1", amount={"share": 0.95})
MEMORY = Injection(ability=Ability.MEMORY, target="rollout-1", amount={"rate": 1e9})


@pytest.mark.parametrize(
    ("context", "faults", "why"),
    [
        (
            "",
            [NETWORK],
            r"a pod of this template may not change its network: expected `capabilities.add: \[NET_ADMIN, SYS_ADMIN",
        ),
        ("{capabilities: {add: [NET_ADMIN]}}", [NETWORK], r"expected `capabilities.add: \[SYS_ADMIN\]`"),
        ("{capabilities: {add: [NET_ADMIN, CAP_SYS_ADMIN]}}", [NETWORK], "^$"),
        ("", [CPU], "^$"),
        (
            "",
            [CPU, MEMORY],
            "memory: a pod of this template may not make control groups: expected `privileged: true`",
        ),
        ("{privileged: true}", [NETWORK, CPU, MEMORY], "^$"),
    ],
)
def test_a_fault_that_a_pod_may_not_have_is_refused_by_what_its_template_lacks(
    tmp_path: Path, context: str, faults: list[Injection], why: str
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text(f"spec: {{containers: [{{name: agent, securityContext: {context or '{}'}}}]}}\n")
    for settings in (KubernetesSection(template=str(template)), *([] if context else [KubernetesSection()])):
        assert re.search(why, refusal_of_pods(settings, faults))


def test_a_fault_is_injected_by_the_program_in_the_pod_and_undone_at_its_end(
    server: KubernetesServer, machine: Machine
) -> None:
    full = Injection(ability=Ability.DEVICE_MEMORY, target="model-0", amount={"share": 1.0})
    usual = resource.prlimit(machine.child, resource.RLIMIT_DATA)
    limits = []

    async def answers() -> list[FaultAnswer]:
        found = []
        async with Client(server.access()) as client, HostPod(client, "host-2", namespace="runs") as pod:
            await make_pod(client, server, "first", scratch=machine.scratch)
            for do in ("prepare", "begin", "end", "close"):
                order = FaultOrder(job="run1", do=do, fault="1", injection=full, pid=machine.child)
                line = await pod.answer(msgspec.json.encode(order) + b"\n")
                found.append(msgspec.json.decode(line, type=FaultAnswer))
                limits.append(resource.prlimit(machine.child, resource.RLIMIT_DATA))
        return found

    told = asyncio.run(answers())
    assert not any(answer.why for answer in told), told
    reports = [answer.report for answer in told]
    assert [report and report.what for report in reports] == ["ready", "began", "ended", None]
    assert limits[0] == usual != limits[1] and limits[2:] == [usual, usual]
    assert server.requests.count(f"GET {PODS}/first/exec") == 1, "one program carries out all orders"
