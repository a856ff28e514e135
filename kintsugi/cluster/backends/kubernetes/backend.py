"""Pods as hosts: the contract of back ends (`cluster/backends/contract.py`) on a thread with an event loop.

    start, replace ─► orders ─► loop: Secret, Job or pods ─► API server
    poll ◄─ events ◄─ tracker (`pods.py`) ◄─ watch of the pods of this run

The loop consumes orders and changes of pods; it waits for both, and for nothing else. A host that is replaced gets a
new ticket in the Secret, then its pod is deleted, by force: its supervisor is silent or has ended. The controller of a
Job then makes a new one; without a Job this loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec

from kintsugi.cluster.backends.contract import HostCame, HostEvent, HostLeaves, HostOrder, HostWent
from kintsugi.cluster.backends.kubernetes import manifests
from kintsugi.cluster.backends.kubernetes.access import Access, load_access
from kintsugi.cluster.backends.kubernetes.client import ApiError, Client, Expired
from kintsugi.cluster.backends.kubernetes.manifests import Deployment, Workload
from kintsugi.cluster.backends.kubernetes.pods import PodTracker
from kintsugi.cluster.backends.kubernetes.rights import check_rights
from kintsugi.config.schema import KubernetesSection
from kintsugi.errors import DeadlineExceeded, KintsugiError
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import wait

CHECK_S = 0.5
"""Time between looks at hosts for which nothing happens."""
UNMADE_S = 1.5
"""Time after which the events of a Job are asked why it makes no pod."""
WATCH_PAUSE_S = 0.5
"""Pause after a watch that failed."""
FORCE_S = 1.5
"""Part of the time of `give_back` that is left when pods are deleted by force."""
LOOK_S = 0.1


class KubernetesBackend:
    """The pods of one run."""

    def __init__(
        self,
        settings: KubernetesSection,
        *,
        job: str,
        hosts: Sequence[str],
        patience_s: float,
        template: dict[str, Any] | None = None,
        requests: dict[str, str] | None = None,
        load: Callable[[], Access] = load_access,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`job` identifies the session of the run, `patience_s` is the time for a pod to start. `load` finds the API
        server; an error that it raises is told of every host that is ordered."""
        deployment = Deployment(
            job=job,
            hosts=tuple(hosts),
            settings=settings,
            namespace=settings.namespace,
            workload=Workload.PODS,
            template=template or {},
            requests=requests or {},
        )
        self._orders: deque[tuple[HostOrder, ...]] = deque()
        self._events: deque[HostEvent] = deque()
        self._stop_within_s: float | None = None
        self._ended = threading.Event()
        self._bug: BaseException | None = None
        """Unexpected error that has ended the thread."""
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        tracker = PodTracker(hosts, patience_s=patience_s)
        self._thread = threading.Thread(
            target=self._run, args=(deployment, tracker, load, clock), name="kubernetes", daemon=True
        )
        self._thread.start()

    def start(self, orders: Sequence[HostOrder]) -> None:
        self._put(tuple(orders))

    def replace(self, order: HostOrder) -> None:
        self._put((order,))

    def _put(self, orders: tuple[HostOrder, ...]) -> None:
        self._orders.append(orders)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._wake.set)

    def poll(self) -> list[HostEvent]:
        if self._bug is not None:
            raise self._bug  # The host manager ends with it; its successor goes on with the pods.
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def asked_to_end(self, host: str, why: str) -> None:
        self._events.append(HostLeaves(host, why))

    def give_back(self, *, timeout_s: float) -> None:
        if self._stop_within_s is None:
            self._stop_within_s = max(0.5, timeout_s)
            self._wake_up()

        def attempt(remaining_s: float) -> bool | None:
            return self._ended.wait(remaining_s) or None

        with contextlib.suppress(DeadlineExceeded):
            wait(attempt, whom="the API server", what="the end of all pods", timeout_s=timeout_s + 1.0)

    def _run(
        self, deployment: Deployment, tracker: PodTracker, load: Callable[[], Access], clock: Clock
    ) -> None:
        """Body of the thread."""
        try:
            self._loop.run_until_complete(self._serve(deployment, tracker, load, clock))
        except BaseException as error:  # noqa: BLE001 - the outermost boundary of this thread; raised by `poll`.
            self._bug = error
        finally:
            self._loop.close()
            self._ended.set()

    async def _serve(
        self, deployment: Deployment, tracker: PodTracker, load: Callable[[], Access], clock: Clock
    ) -> None:
        while True:
            try:
                async with Client(load(), clock=clock) as client:
                    engine = _Engine(client, deployment, tracker, self._events, clock)
                    await self._take_orders(engine)
                    return
            except (KintsugiError, OSError) as error:
                # Every order is answered with it: what is wrong here may be right for a later one.
                while not self._orders and self._stop_within_s is None:
                    await self._woken()
                if self._stop_within_s is not None:
                    return
                self._events += [HostWent(order.host, str(error)) for order in self._orders.popleft()]

    async def _take_orders(self, engine: _Engine) -> None:
        # Nothing is asked of the cluster before the first order, unless a predecessor has left pods.
        tasks = [
            asyncio.create_task(engine.watch(), name="watch"),
            asyncio.create_task(engine.check(), name="check"),
        ]
        try:
            while self._stop_within_s is None:
                if self._orders:
                    await engine.carry_out(self._orders.popleft())
                else:
                    await self._woken()
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await engine.give_back(self._stop_within_s)

    async def _woken(self) -> None:
        """Wait for an order, for a while."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), CHECK_S)
        self._wake.clear()


class _Engine:
    """Everything that is asked of one cluster."""

    def __init__(
        self,
        client: Client,
        deployment: Deployment,
        tracker: PodTracker,
        events: deque[HostEvent],
        clock: Clock,
    ) -> None:
        self._client, self._tracker, self._events, self._clock = client, tracker, events, clock
        namespace = deployment.namespace or client.access.namespace
        self._deployment = msgspec.structs.replace(deployment, namespace=namespace)
        self._is_known = False
        """The workload has been chosen, and the rights for it are there."""
        self._has_objects = False
        self._about: dict[str, Any] | None = None
        """Object that events of ours are about: the Job, or the Secret."""

    @property
    def _folder(self) -> str:
        return f"/api/v1/namespaces/{self._deployment.namespace}"

    @property
    def _jobs(self) -> str:
        group = "batch.volcano.sh/v1alpha1" if self._deployment.workload is Workload.VOLCANO else "batch/v1"
        return f"/apis/{group}/namespaces/{self._deployment.namespace}/jobs"

    # Orders.

    async def carry_out(self, orders: Sequence[HostOrder]) -> None:
        """Put tickets into the Secret and get a new pod for each of their hosts."""
        now = self._clock.monotonic()
        old = [pod for order in orders for pod in self._tracker.order(order.host, now=now)]
        try:
            await self._know_cluster()
            uid = await self._put_tickets(orders)
            for pod in old:
                await self._delete_pod(pod.name)
            if self._deployment.workload is Workload.PODS:
                for order in orders:
                    await self._create_pod(order.host, owner_uid=uid)
            else:
                await self._ensure_job()
            for order in orders:
                if (kept := self._tracker.current(order.host)) is not None:
                    await self._nudge(kept.name)
        except (KintsugiError, OSError) as error:
            for order in orders:
                self._tell(self._tracker.refuse(order.host, str(error)))
            return
        self._tell(self._tracker.check(now=self._clock.monotonic()))

    async def _know_cluster(self) -> None:
        """Choose what keeps the pods, and compare the rights of this account with those that are needed."""
        if self._is_known:
            return
        version = await self._client.request("GET", "/version")
        found = tuple(int("".join(filter(str.isdigit, str(version[part])))) for part in ("major", "minor"))
        has_volcano = await self._has_volcano()
        workload = manifests.choose_workload(
            self._deployment.settings.workload, version=(found[0], found[1]), has_volcano=has_volcano
        )
        self._deployment = msgspec.structs.replace(self._deployment, workload=workload)
        await check_rights(self._client, manifests.rights(workload), namespace=self._deployment.namespace)
        self._is_known = True

    async def _has_volcano(self) -> bool:
        try:
            await self._client.request("GET", "/apis/batch.volcano.sh/v1alpha1")
        except ApiError as error:
            if error.status in (403, 404):
                return False
            raise
        return True

    async def _put_tickets(self, orders: Sequence[HostOrder]) -> str:
        """Write tickets; return the uid of the Secret."""
        path = f"{self._folder}/secrets"
        if not self._has_objects:
            with contextlib.suppress(_Exists):
                made = await self._create(path, manifests.secret(self._deployment, orders))
                self._has_objects = True
                self._about = self._about or {**made, "apiVersion": "v1", "kind": "Secret"}
                return str(made["metadata"]["uid"])
        body = {"data": manifests.ticket_data(orders)}
        try:
            made = await self._client.request("PATCH", f"{path}/{self._deployment.name}", body=body)
        except ApiError as error:
            if error.status != 404:
                raise
            self._has_objects = False
            made = await self._create(path, manifests.secret(self._deployment, orders))
        self._has_objects = True
        self._about = self._about or {**made, "apiVersion": "v1", "kind": "Secret"}
        return str(made["metadata"]["uid"])

    async def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._client.request("POST", path, body=body)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                raise _Exists(str(error), status=409) from error
            raise

    async def _ensure_job(self) -> None:
        """Create the Job, unless it is there. The Secret goes with it."""
        with contextlib.suppress(_Exists):
            made = await self._create(self._jobs, manifests.workload_object(self._deployment))
            group = self._jobs.removeprefix("/apis/").partition("/namespaces")[0]
            self._about = {**made, "apiVersion": group, "kind": "Job"}
            owner = manifests.owned_by(
                "Job", group, name=self._deployment.name, uid=str(made["metadata"]["uid"])
            )
            path = f"{self._folder}/secrets/{self._deployment.name}"
            await self._client.request("PATCH", path, body={"metadata": owner})

    async def _create_pod(self, host: str, *, owner_uid: str) -> None:
        name = f"{self._deployment.name}-{self._deployment.hosts.index(host)}-{uuid4().hex[:6]}"
        with contextlib.suppress(_Exists):  # The answer to the first attempt was lost.
            avoided = self._tracker.avoided(host)
            pod = manifests.pod(self._deployment, host, name=name, owner_uid=owner_uid, avoided=avoided)
            await self._create(f"{self._folder}/pods", pod)

    async def _delete_pod(self, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        await self._delete(f"{self._folder}/pods/{name}", body)

    async def _delete(self, path: str, body: dict[str, Any]) -> None:
        try:
            await self._client.request("DELETE", path, body=body)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _nudge(self, name: str) -> None:
        """Change a pod that waits for its ticket, so that its kubelet brings the new Secret at once."""
        body = {"metadata": {"annotations": {manifests.TICKET_NOTE: uuid4().hex[:6]}}}
        with contextlib.suppress(ApiError):  # It brings it within about a minute by itself.
            await self._client.request("PATCH", f"{self._folder}/pods/{name}", body=body)

    # What happens.

    async def watch(self) -> None:
        """Follow the pods of this run. Consumes changes; waits for the API server; a cut connection is made again."""
        path, version = f"{self._folder}/pods", ""
        is_first = True
        while True:
            try:
                if not version:
                    pods, version = await self._client.list(path, selector=self._deployment.selector)
                    if is_first:
                        self._tracker.adopt(pods)
                        self._has_objects = self._has_objects or bool(pods)
                        is_first = False
                    self._tell(self._tracker.see_all(pods, now=self._clock.monotonic()))
                async with contextlib.aclosing(
                    self._client.watch(path, selector=self._deployment.selector, version=version)
                ) as changes:
                    async for change in changes:
                        if isinstance(change, str):
                            version = change
                            continue
                        deleted = change.kind == "DELETED"
                        now = self._clock.monotonic()
                        self._tell(self._tracker.see(change.object, deleted=deleted, now=now))
            except Expired:
                version = ""
            except KintsugiError:
                # The API server is away, or refuses this account now: hosts live on without it.
                await asyncio.sleep(WATCH_PAUSE_S)

    async def check(self) -> None:
        """Tell what follows from time alone, and ask a Job why it makes no pod."""
        while True:
            await asyncio.sleep(CHECK_S)
            now = self._clock.monotonic()
            self._tell(self._tracker.check(now=now))
            waiting = self._tracker.waiting(now=now, longer_than_s=UNMADE_S)
            if waiting and self._is_known and self._deployment.workload is not Workload.PODS:
                with contextlib.suppress(KintsugiError):
                    if why := await self._why_unmade():
                        for host in waiting:
                            self._tell(self._tracker.refuse(host, why))

    async def _why_unmade(self) -> str:
        """Return the last warning about the Job."""
        query = {"fieldSelector": f"involvedObject.name={self._deployment.name},reason=FailedCreate"}
        answer = await self._client.request("GET", f"{self._folder}/events", query=query)
        events = answer.get("items") or ()
        return str(events[-1].get("message", "")) if events else ""

    def _tell(self, events: Sequence[HostEvent]) -> None:
        self._events += events
        for event in events:
            if self._about is not None and isinstance(event, HostCame | HostWent):
                came = isinstance(event, HostCame)
                message = f"{event.host}: {event.place if isinstance(event, HostCame) else event.why}"
                told = manifests.event(
                    self._deployment,
                    self._about,
                    reason="HostStarted" if came else "HostLost",
                    message=message,
                    name=f"{self._deployment.name}.{uuid4().hex[:12]}",
                    time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                )
                self._background(self._post_event(told))

    def _background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name="event")
        _BACKGROUND.add(task)
        task.add_done_callback(_BACKGROUND.discard)

    async def _post_event(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(KintsugiError):  # Told on the run's own page and log too.
            await self._client.request("POST", f"{self._folder}/events", body=event, timeout_s=2.0)

    # The end.

    async def give_back(self, timeout_s: float) -> None:
        """Delete everything of this run, and wait until no pod of it is left."""
        until = self._clock.monotonic() + timeout_s
        with contextlib.suppress(KintsugiError, OSError):
            if self._has_objects:
                await self._know_cluster()
                await self._delete_all(timeout_s=max(0.5, timeout_s - FORCE_S))
            forced = False
            while self._has_objects and self._clock.monotonic() < until:
                pods, _ = await self._client.list(
                    f"{self._folder}/pods", selector=self._deployment.selector, timeout_s=FORCE_S
                )
                if not pods:
                    return
                if not forced and until - self._clock.monotonic() < FORCE_S:
                    forced = True
                    for pod in pods:
                        await self._delete_pod(pod["metadata"]["name"])
                await asyncio.sleep(LOOK_S)

    async def _delete_all(self, *, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                options = {"apiVersion": "v1", "kind": "DeleteOptions"}
                if self._deployment.workload is not Workload.PODS:
                    path = f"{self._jobs}/{self._deployment.name}"
                    await self._delete(path, options | {"propagationPolicy": "Background"})
                pods, _ = await self._client.list(f"{self._folder}/pods", selector=self._deployment.selector)
                for pod in pods:
                    await self._delete(f"{self._folder}/pods/{pod['metadata']['name']}", options)
                await self._delete(f"{self._folder}/secrets/{self._deployment.name}", options)


_BACKGROUND: set[asyncio.Task[None]] = set()
"""Events that are on their way; a loop only holds weak references to its tasks."""


class _Exists(ApiError):
    """An object of this name is there."""
