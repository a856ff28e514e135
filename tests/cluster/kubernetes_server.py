"""A small server of the Kubernetes API, with a controller of Jobs and a kubelet that only changes states.

It serves what the back end asks for, as a real server does: versions, watches from a version, 409, 401, 403, quotas,
429, versions that are gone (410), connections that are cut. `test_kubernetes_cluster.py` runs one script of requests
here and on a real cluster and compares the answers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import uuid4

from aiohttp import web

from kintsugi.cluster.backends.kubernetes.access import Access
from kintsugi.cluster.backends.kubernetes.manifests import COMPLETION_INDEX

T = TypeVar("T")
Object = dict[str, Any]
Key = tuple[str, str]
"""Resource and name."""
START_S = 0.01
"""Time until a new pod runs, and until a Job replaces one."""
KINDS = {"secrets": "Secret", "pods": "Pod", "events": "Event", "jobs": "Job"}


class KubernetesServer:
    """One namespace, `runs`, of a cluster. Methods may be called from any thread."""

    def __init__(self, *, minor: str = "30") -> None:
        self.minor = minor
        self.rights: dict[str, set[tuple[str, str]] | None] = {"admin": None}
        """Token → (verb, resource) that it may; None: everything."""
        self.bad_images: dict[str, str] = {}
        """Image → reason why it can not be started."""
        self.quota: int | None = None
        self.requests: list[str] = []
        self._refusals: list[int] = []
        self._objects: dict[Key, Object] = {}
        self._log: list[tuple[int, str, Object]] = []
        self._version, self._oldest = 100, 100
        self._watches: set[asyncio.WriteTransport] = set()
        self._changed = asyncio.Event()
        self._commands: dict[str, asyncio.subprocess.Process] = {}
        """Pod → the last command that was run in it."""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="api-server", daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def access(self, token: str = "admin") -> Access:
        return Access(f"http://127.0.0.1:{self.port}", namespace="runs", token=token, origin="kubeconfig")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # What a test changes.

    def ask(self, work: Callable[[], T]) -> T:
        """Run a function on the loop of the server."""

        async def there() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(10)

    def names(self, resource: str) -> list[str]:
        return self.ask(lambda: [name for kind, name in self._objects if kind == resource])

    def objects(self, resource: str) -> list[Object]:
        return self.ask(
            lambda: [
                json.loads(json.dumps(each)) for (kind, _), each in self._objects.items() if kind == resource
            ]
        )

    def running(self) -> dict[str, object]:
        """Ticket that a pod has read → uid of the pod, for those that run."""
        return {
            pod["metadata"]["annotations"]["ticket"]: pod["metadata"]["uid"]
            for pod in self.objects("pods")
            if pod["status"]["phase"] == "Running"
        }

    def pod_of(self, host: str) -> str:
        """Name of the pod that runs with the ticket of a host."""
        (name,) = [
            pod["metadata"]["name"]
            for pod in self.objects("pods")
            if pod["status"]["phase"] == "Running" and pod["metadata"]["annotations"]["ticket"] == host
        ]
        return str(name)

    def end_container(self, name: str, *, code: int = 137, message: str = "") -> None:
        self.ask(lambda: self._end_container(name, code, message))

    def set_ready(self, name: str, *, ready: bool) -> None:
        """What the controller of nodes does with the pods of a node that is silent."""

        def change() -> None:
            pod = self._objects[("pods", name)]
            pod["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
            self._note("MODIFIED", "pods", pod)

        self.ask(change)

    def delete_pod(self, name: str) -> None:
        """`kubectl delete pod`: with a grace period."""
        self.ask(lambda: self._delete("pods", name, grace_s=30))

    def end_command(self, name: str) -> None:
        """End the command that was run in a pod, as a kubelet does some time after the pod was deleted."""
        self.ask(lambda: _kill(self._commands[name]))

    def refuse_next(self, status: int, *, times: int) -> None:
        self.ask(lambda: self._refusals.extend([status] * times))

    def cut_watches(self) -> None:
        def cut() -> None:
            for transport in self._watches:
                transport.abort()

        self.ask(cut)

    def forget_versions(self) -> None:
        """Compaction: watches can only begin at the present version."""

        def forget() -> None:
            self._oldest = self._version
            self._log.clear()

        self.ask(forget)
        self.cut_watches()

    # HTTP.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()
        for command in self._commands.values():
            _kill(command)
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _open(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self._refusals:
            status = self._refusals.pop(0)
            return _status(status, "TooManyRequests", "please try again later", headers={"Retry-After": "0"})
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.rights:
            return _status(401, "Unauthorized", "Unauthorized")
        if request.path == "/version":
            return web.json_response({"major": "1", "minor": self.minor})
        if request.path.endswith("/selfsubjectaccessreviews"):
            asked = (await request.json())["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
            allowed = self._may(token, asked["verb"], resource)
            return web.json_response({"status": {"allowed": allowed}}, status=201)
        parts = request.path.strip("/").split("/")
        if "namespaces" not in parts:
            return web.Response(status=404, text="404 page not found\n")  # A group that is not installed.
        namespace, resource, *name = parts[parts.index("namespaces") + 1 :]
        if name[1:] == ["exec"]:
            return await self._execute(token, request, name[0])
        if refused := self._refusal(token, request, namespace, resource, name):
            return refused
        match request.method:
            case "POST":
                return self._create(resource, await request.json(), namespace)
            case "PATCH":
                return self._patch(resource, name[0], await request.json())
            case "DELETE":
                body = json.loads(await request.text() or "{}")
                return self._delete(resource, name[0], grace_s=body.get("gracePeriodSeconds"))
        if request.query.get("watch"):
            return await self._watch(request, resource)
        return self._list(request, resource)

    def _refusal(
        self, token: str, request: web.Request, namespace: str, resource: str, name: list[str]
    ) -> web.Response | None:
        verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs.get(request.method, "watch" if request.query.get("watch") else "list")
        if not self._may(token, verb, resource):
            shown = f'{resource} "{name[0]}"' if name else resource
            return _status(
                403,
                "Forbidden",
                f'{shown} is forbidden: User "{token}" cannot {verb} resource "{resource}" in API group "" in the '
                f'namespace "{namespace}"',
            )
        if namespace != "runs" and verb == "create":
            return _status(404, "NotFound", f'namespaces "{namespace}" not found')
        return None

    def _may(self, token: str, verb: str, resource: str) -> bool:
        rights = self.rights[token]
        return rights is None or (verb, resource) in rights

    async def _execute(self, token: str, request: web.Request, name: str) -> web.StreamResponse:
        """Run a command, on this machine, and carry its streams over a WebSocket."""
        if not self._may(token, "get", "pods/exec"):
            return _status(403, "Forbidden", f'pods "{name}" is forbidden')
        pod = self._objects.get(("pods", name))
        if pod is None:
            return _status(404, "NotFound", f'pods "{name}" not found')
        if "nodeName" not in pod["spec"]:
            return _status(400, "BadRequest", f"pod {name} does not have a host assigned")
        if request.headers.get("Accept") != "*/*":
            return _status(406, "NotAcceptable", "only the following media types are accepted: ")
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        pipe = asyncio.subprocess.PIPE
        command = request.query.getall("command")
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        carried = [
            asyncio.create_task(_carry(stream, number, socket))
            for number, stream in ((1, process.stdout), (2, process.stderr))
        ]
        self._commands[name] = process
        try:
            async for message in socket:
                process.stdin.write(message.data[1:])
        finally:
            _kill(process)
            await asyncio.gather(*carried)
            await process.wait()
        return socket

    # Objects.

    def _create(self, resource: str, body: Object, namespace: str) -> web.Response:
        metadata = body["metadata"]
        key = (resource, metadata["name"])
        if key in self._objects:
            return _status(409, "AlreadyExists", f'{resource} "{key[1]}" already exists')
        if resource == "pods" and (why := self._over_quota(key[1])):
            return _status(403, "Forbidden", why)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata |= {"uid": str(uuid4()), "namespace": namespace, "creationTimestamp": now}
        if resource == "pods":
            body["status"] = {"phase": "Pending"}
            self._loop.call_later(START_S, self._start_pod, key[1])
        self._objects[key] = body
        self._note("ADDED", resource, body)
        if resource == "jobs":
            self._loop.call_later(START_S, self._control_job, key[1])
        return web.json_response(body, status=201)

    def _over_quota(self, name: str) -> str:
        used = sum(kind == "pods" for kind, _ in self._objects)
        if self.quota is None or used < self.quota:
            return ""
        return (
            f'pods "{name}" is forbidden: exceeded quota: few, requested: pods=1, used: pods={used}, '
            f"limited: pods={self.quota}"
        )

    def _patch(self, resource: str, name: str, body: Object) -> web.Response:
        found = self._objects.get((resource, name))
        if found is None:
            return _status(404, "NotFound", f'{resource} "{name}" not found')
        _merge(found, body)
        self._note("MODIFIED", resource, found)
        if resource == "pods":
            self._read_ticket(found)
        return web.json_response(found)

    def _delete(self, resource: str, name: str, *, grace_s: int | None) -> web.Response:
        found = self._objects.get((resource, name))
        if found is None:
            return _status(404, "NotFound", f'{resource} "{name}" not found')
        if resource == "pods" and grace_s != 0 and found["status"]["phase"] == "Running":
            found["metadata"]["deletionTimestamp"] = found["metadata"]["creationTimestamp"]
            self._note("MODIFIED", resource, found)
            self._loop.call_later(START_S, self._remove, resource, name)
        else:
            self._remove(resource, name)
        # Of a pod, which may stay for a while, the answer is the pod.
        return web.json_response(found if resource == "pods" else {"kind": "Status", "status": "Success"})

    def _remove(self, resource: str, name: str) -> None:
        if (found := self._objects.pop((resource, name), None)) is None:
            return
        self._note("DELETED", resource, found)
        for each in [*self._objects.values()]:
            for owner in each["metadata"].get("ownerReferences", ()):
                if owner["uid"] == found["metadata"]["uid"]:
                    kind = next(key for key, value in KINDS.items() if value == each["kind"])
                    self._delete(kind, each["metadata"]["name"], grace_s=None)
        if resource == "pods":
            for kind, job in [*self._objects]:
                if kind == "jobs":
                    self._loop.call_later(START_S, self._control_job, job)

    def _note(self, change: str, resource: str, subject: Object) -> None:
        self._version += 1
        subject["metadata"]["resourceVersion"] = str(self._version)
        self._log.append((self._version, change, json.loads(json.dumps(subject))))
        self._changed.set()
        self._changed = asyncio.Event()

    # Lists and watches.

    def _list(self, request: web.Request, resource: str) -> web.Response:
        found = [
            each
            for (kind, _), each in self._objects.items()
            if kind == resource and _matches(each, request.query.get("labelSelector", ""))
        ]
        if fields := request.query.get("fieldSelector"):
            wanted = dict(pair.split("=") for pair in fields.split(","))
            found = [
                each for each in found if all(_at(each, path) == value for path, value in wanted.items())
            ]
        version = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": f"{KINDS[resource]}List", "metadata": version, "items": found})

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if seen < self._oldest:
            gone = _status_body(410, "Expired", f"too old resource version: {seen} ({self._oldest})")
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        transport = request.transport
        assert isinstance(transport, asyncio.WriteTransport)
        self._watches.add(transport)
        try:
            while True:
                changed = self._changed
                for version, change, subject in [*self._log]:
                    is_ours = subject["kind"] == KINDS[resource]
                    if (
                        version > seen
                        and is_ours
                        and _matches(subject, request.query.get("labelSelector", ""))
                    ):
                        seen = version
                        await response.write(json.dumps({"type": change, "object": subject}).encode() + b"\n")
                await changed.wait()
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._watches.discard(transport)

    # Kubelet and controllers.

    def _start_pod(self, name: str) -> None:
        pod = self._objects.get(("pods", name))
        if pod is None or pod["spec"].get("nodeSelector"):  # Its only node has no labels.
            return
        (container, *_) = pod["spec"]["containers"]
        if (reason := self.bad_images.get(container["image"])) is not None:
            waiting = {"reason": reason, "message": f'Back-off pulling image "{container["image"]}"'}
            pod["status"] = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
        else:
            pod["spec"]["nodeName"] = "node-1"
            pod["status"] = {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": container["name"], "ready": True, "state": {"running": {}}}],
            }
            self._read_ticket(pod)
        self._note("MODIFIED", "pods", pod)

    def _read_ticket(self, pod: Object) -> None:
        """What the process in a pod finds in its file: a pod whose ticket is not there yet waits for it."""
        notes = pod["metadata"].setdefault("annotations", {})
        (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "tickets"]
        secret = self._objects.get(("secrets", volume["secret"]["secretName"]), {"data": {}})
        path = pod["spec"]["containers"][0]["args"][2].rpartition("/")[2]
        path = path.replace("$(JOB_COMPLETION_INDEX)", notes.get(COMPLETION_INDEX, ""))
        key = next(item["key"] for item in volume["secret"]["items"] if item["path"] == path)
        notes["ticket"] = base64.b64decode(secret["data"].get(key, "")).decode().strip()

    def _end_container(self, name: str, code: int, message: str) -> None:
        pod = self._objects[("pods", name)]
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}
        phase = "Failed" if code else "Succeeded"
        pod["status"] = {"phase": phase, "containerStatuses": [{"state": {"terminated": ended}}]}
        self._note("MODIFIED", "pods", pod)
        for kind, job in [*self._objects]:
            if kind == "jobs":
                self._loop.call_later(START_S, self._control_job, job)

    def _control_job(self, name: str) -> None:
        """Keep one pod per index that has not succeeded."""
        job = self._objects.get(("jobs", name))
        if job is None:
            return
        pods = [each for (kind, _), each in self._objects.items() if kind == "pods"]
        for index in map(str, range(job["spec"]["completions"])):
            own = [pod for pod in pods if pod["metadata"]["annotations"].get(COMPLETION_INDEX) == index]
            if any(pod["status"]["phase"] != "Failed" for pod in own):
                continue
            pod = json.loads(json.dumps(job["spec"]["template"]))
            pod |= {"apiVersion": "v1", "kind": "Pod"}
            owner = {"kind": "Job", "uid": job["metadata"]["uid"], "name": name}
            pod["metadata"] |= {"name": f"{name}-{index}-{uuid4().hex[:5]}", "ownerReferences": [owner]}
            pod["metadata"]["annotations"] = {COMPLETION_INDEX: index}
            answer = self._create("pods", pod, "runs")
            if answer.status != 201:
                self._warn(name, f"Error creating: {json.loads(answer.body)['message']}")  # type: ignore[arg-type]

    def _warn(self, job: str, message: str) -> None:
        subject = {"metadata": {"name": f"{job}.{uuid4().hex[:8]}"}, "kind": "Event", "apiVersion": "v1"}
        subject |= {"involvedObject": {"name": job}, "reason": "FailedCreate", "message": message}
        self._create("events", subject, "runs")


def _kill(command: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        command.kill()


async def _carry(stream: asyncio.StreamReader, number: int, socket: web.WebSocketResponse) -> None:
    """Copy what a command writes; the connection ends with the command."""
    while content := await stream.read(4096):
        if not socket.closed:
            await socket.send_bytes(bytes([number]) + content)
    await socket.close()


def _merge(into: Object, change: Object) -> None:
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _matches(subject: Object, selector: str) -> bool:
    labels = subject["metadata"].get("labels") or {}
    return all(
        labels.get(key) == value for key, value in (pair.split("=") for pair in selector.split(",") if pair)
    )


def _at(subject: Object, path: str) -> Any:
    for part in path.split("."):
        subject = subject.get(part, {})
    return subject


def _status_body(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _status(code: int, reason: str, message: str, *, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(_status_body(code, reason, message), status=code, headers=headers)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a test."""
    return asyncio.run(work)
