"""No module blocks except through `runtime.wait`: then the heartbeat says for whom and for what a process waits.

The check reads the source. A blocking primitive is fine where `runtime.wait` calls it: inside an argument of `wait(…)`,
or in a function whose name says that it is an attempt.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kintsugi

PACKAGE = Path(kintsugi.__file__).parent
RUNTIME = "runtime/waits.py"

NON_BLOCKING_PIPE = "the pipe is opened with O_NONBLOCK"
IN_THE_JAIL = "a program of its own, without the package; its caller waits for it through runtime.wait"
IN_THE_LOOP_OF_THE_API = (
    "asyncio in the thread that talks to the API server; the process's own loop only takes its events"
)
ALLOWED = {
    ("checkpoint/store.py", "others.wait()"): "our own method; `BoxWriters` waits through runtime.wait",
    (
        "config/framework_rules.py",
        "subprocess.run(command, capture_output=True, text=True, check=True, timeout=INSPECT_TIMEOUT_S)",
    ): "in the user's command, before a process of a run starts; with a timeout",
    (
        "generation/backends/remote.py",
        "self._dialect.connect(self._client, greeting)",
    ): "our own method; its request declares the wait",
    (
        "generation/backends/vllm_plugin/kintsugi_vllm.py",
        "digest.result()",
    ): "in a worker of vLLM, without the package; its caller waits for an answer with a deadline",
    ("training/box_saving.py", "asked.result()"): "our own handle; `_await` saw it done",
    (
        "training/host_group.py",
        "self._router.poll(milliseconds(timeout_s))",
    ): "an attempt of runtime.wait, in `HostGroup._exchange`",
    ("training/host_group.py", "rendezvous.connect(keys)"): "our own method; it waits through runtime.wait",
    (
        "training/host_group.py",
        "connections.connect(self._poll(lambda: self._addresses(store), whom=self._others))",
    ): "our own method: ZeroMQ connects in the background",
    (
        "training/host_group.py",
        "socket.create_connection((host, port), timeout=CONNECT_S)",
    ): "`_poll` declares it",
    ("training/host_group.py", "store.get(name)"): "our own store, which declares it",
    ("cluster/backends/kubernetes/backend.py", "task.result()"): "of a task that is done",
    ("cluster/backends/kubernetes/backend.py", "asyncio.wait(tasks)"): IN_THE_LOOP_OF_THE_API,
    (
        "cluster/backends/kubernetes/backend.py",
        "asyncio.wait_for(self._wake.wait(), CHECK_S)",
    ): IN_THE_LOOP_OF_THE_API,
    ("cluster/backends/kubernetes/backend.py", "self._wake.wait()"): IN_THE_LOOP_OF_THE_API,
    ("cluster/backends/kubernetes/backend.py", "asyncio.sleep(WATCH_PAUSE_S)"): IN_THE_LOOP_OF_THE_API,
    ("cluster/backends/kubernetes/backend.py", "asyncio.sleep(CHECK_S)"): IN_THE_LOOP_OF_THE_API,
    ("cluster/backends/kubernetes/backend.py", "asyncio.sleep(LOOK_S)"): IN_THE_LOOP_OF_THE_API,
    ("cluster/backends/kubernetes/client.py", "asyncio.sleep(pause_s)"): IN_THE_LOOP_OF_THE_API,
    (
        "cluster/backends/kubernetes/client.py",
        (
            "self._session.get(self.access.server + path, params=query, headers=self._headers('GET', renew=False), "
            "ssl=self.access.tls or True, server_hostname=self.access.server_name, timeout=timeout)"
        ),
    ): IN_THE_LOOP_OF_THE_API,
    ("cluster/backends/ray.py", "os.read(self._events, 65536)"): NON_BLOCKING_PIPE,
    (
        "cluster/backends/command.py",
        "os.read(self._answers, 65536)",
    ): "`wait_readable` has found something to read",
    (
        "lab/injector/injector.py",
        "remote.connect(target)",
    ): "our own method; its answer is awaited through runtime.wait",
    ("lab/injector/injector.py", "self._run.remote.connect(host)"): "the same method",
    ("lab/scenarios/runner.py", "run.remote.connect(host)"): "the same method",
    (
        "model/gguf_weights.py",
        "flush.result()",
    ): "in the user's command, of its own thread, which brings a file to the disk",
    (
        "model/sliced_logprobs.py",
        "(of_slice - rest).gather(0, settings.owners(targets)[None])",
    ): "of a tensor, on its device",
    (
        "cluster/backends/ray_actor.py",
        "os.read(reader, 64)",
    ): "in an actor of Ray, of a child that forks and ends, in the same moment",
    ("cluster/child.py", "os.read(self.report, 65536)"): NON_BLOCKING_PIPE,
    ("cluster/launcher.py", "os.read(self.report, 65536)"): NON_BLOCKING_PIPE,
    ("cluster/launcher.py", "os.read(self._stop_requests, 256)"): NON_BLOCKING_PIPE,
    ("cluster/host_manager_process.py", "os.read(self._report, 65536)"): NON_BLOCKING_PIPE,
    ("cluster/host_supervisor.py", "beat.result()"): "it is done: nothing is waited for",
    ("cluster/host_supervisor.py", "mirror.result()"): "it is done: nothing is waited for",
    ("cluster/joining.py", "os.read(descriptor, MOST_TICKET_BYTES)"): "runtime.wait saw it readable",
    ("cluster/joining.py", "probe.connect(address)"): "a datagram socket, which only looks at the routes",
    ("cluster/agent.py", "os.read(gate, 1)"): "runtime.wait saw it readable",
    ("cluster/standby.py", "channel.recv(MOST_BYTES)"): "a non-blocking socket",
    ("cluster/standby.py", "os.waitpid(pid, 0)"): "reaps a child that was just forked and killed",
    ("cli/supervisor.py", "os.read(result, 65536)"): "runtime.wait saw it readable",
    ("runtime/signals.py", "os.read(self._reader, 256)"): NON_BLOCKING_PIPE,
    ("rollout/sandbox/sandbox.py", "os.read(descriptor, _CHUNK)"): NON_BLOCKING_PIPE,
    ("rollout/sandbox/jail.py", "os.read(reader, 4096)"): IN_THE_JAIL,
    ("rollout/sandbox/jail.py", "poller.poll(look_s * 1000)"): IN_THE_JAIL,
    ("rollout/sandbox/jail.py", "poller.poll()"): IN_THE_JAIL,
    ("rollout/sandbox/sandbox.py", "each.result()"): "runtime.wait saw that it has ended",
    ("rollout/sandbox/jail.py", "os.wait4(-1, 0)"): IN_THE_JAIL,
    ("rollout/sandbox/jail.py", "os.waitpid(pid, 0)"): IN_THE_JAIL,
    ("rollout/sandbox/jail.py", "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)"): IN_THE_JAIL,
    (
        "cluster/shared_memory.py",
        "self._listener.accept()",
    ): "a non-blocking socket, watched by the agent's loop",
    (
        "cluster/shared_memory.py",
        "socket.recv_fds(connection, _MOST_BYTES, 1)",
    ): "seen readable, by loop or wait",
    ("cluster/fork_server.py", "listener.accept()"): "a non-blocking socket that runtime.wait saw readable",
    ("cluster/orphans.py", "os.waitpid(pid, 0)"): "takes the remains of a process that has ended",
    ("cluster/fork_server.py", "self._socket.recv(MOST_BYTES)"): "a non-blocking socket, watched by the loop",
    ("cluster/fork_server.py", "socket.recv_fds(connection, MOST_BYTES, 8)"): "runtime.wait saw it readable",
    ("cluster/spawn.py", "socket.recv_fds(orders, MOST_BYTES, 8)"): "runtime.wait saw it readable",
    ("cluster/spares.py", "self._socket.recv(len(PREPARED))"): "a non-blocking socket, watched by the loop",
    ("cluster/fork_server.py", "os.read(reader, 4)"): "of a child that forks and ends, in the same moment",
    (
        "cluster/fork_server.py",
        "os.waitpid(between, 0)",
    ): "reaps that child, which exits right after its fork",
    (
        "model/torch_internals.py",
        "start_all_to_all(backend, sent, into=received, sent=lengths, received=lengths, timeout=timeout).wait()",
    ): "as the construction of the group: in threads for which runtime.wait waits; the library ends it at the timeout",
    ("model/torch_internals.py", "backend.broadcast([tensor], options)"): "starts it; the caller waits",
    (
        "training/process_group.py",
        "store.view.get(key)",
    ): "our own store, which declares it",
    ("training/process_group.py", "store.get(SECRET_KEY)"): "our own store, which declares it",
    (
        "weights/transports/collective.py",
        "store.get(f'{source.key}/secret')",
    ): "our own store, which declares it",
    (
        "transport/store.py",
        "self._poller.poll(milliseconds(until_s))",
    ): "the store's own loop, an attempt of runtime.wait",
    (
        "training/process_group.py",
        "socket.create_connection(self._address, timeout=LONGEST_CONNECT_S)",
    ): "`_poll` declares it",
    (
        "training/process_group.py",
        "rendezvous.connect(device)",
    ): "our own method; it waits through runtime.wait",
    (
        "training/process_group.py",
        "work.wait()",
    ): "collects the error of a collective that runtime.wait saw completed",
    (
        "weights/transports/collective.py",
        "probe.connect((host, port))",
    ): "a datagram socket: nothing is sent",
    (
        "weights/transports/collective.py",
        "start_broadcast(group, part, timeout=timeout).wait()",
    ): "in a thread for which runtime.wait waits, and the library ends it in time",
    ("lab/faults/memory.py", "os.waitpid(hog, 0)"): "takes the remains of a process that was killed",
    (
        "lab/testbed/name_server.py",
        "server.recvfrom(4096)",
    ): "a non-blocking socket that runtime.wait saw readable",
    ("lab/testbed/packets.py", "self._socket.recv(1 << 17)"): "a non-blocking socket",
    ("lab/testbed/packets.py", "self._socket.recv(4096)"): "the kernel answers within the call that asked",
    (
        "lab/testbed/outputs.py",
        "os.read(source, READ_BYTES)",
    ): "a thread that only copies output; it ends with the command that writes it, and no process waits for it",
    ("lab/residue/probe_workload.py", "self._listener.accept()"): "runtime.wait saw it readable",
    ("lab/residue/probe_workload.py", "connections[descriptor].recv(64)"): "runtime.wait saw it readable",
    ("training/sample_fetch.py", "answer.result()"): "our own `Future`; runtime.wait saw it done",
    ("process/loop_calls.py", "future.result()"): "our own `Future`; it waits through runtime.wait",
    (
        "transport/endpoint.py",
        "self._poller.poll(milliseconds(timeout_s))",
    ): "the loop itself: `poll` and `call` reach it through runtime.wait",
    (
        "cli/page.py",
        "os.read(int(lifeline), LONGEST_TOKEN)",
    ): "the token is in the pipe before the process starts",
    ("transport/sockets.py", "dealer.connect(peer.address)"): "ZeroMQ connects in the background",
    (
        "telemetry/store/index.py",
        "sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)",
    ): "opens a file; whoever else fills the store holds it for a piece at a time, and no process of a run asks it",
    (
        "process/shell.py",
        "self.submit(process, body, deadline_s=deadline_s).result()",
    ): "our own `Future`; it waits through runtime.wait",
}
"""(file, call) → why this one call may be made outside of `runtime.wait`."""

BLOCKING_FUNCTIONS = {
    "time.sleep",
    "asyncio.sleep",
    "select.select",
    "signal.sigwait",
    "signal.sigwaitinfo",
    "signal.pause",
    "subprocess.run",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "concurrent.futures.wait",
    "futures.wait",
    "socket.create_connection",
    "os.read",
    "os.readv",
}
RECEIVING_METHODS = {
    "accept",
    "recv",
    "recvmsg",
    "recv_into",
    "recvfrom",
    "recv_fds",
    "recv_multipart",
    "communicate",
    "connect",
}
WAITING_METHODS = {"wait", "wait_for", "result", "monitored_barrier", "sigtimedwait"}
COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "init_process_group",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; empty parts where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def full_name(node: ast.expr, imported_from: dict[str, str]) -> str:
    """What a call is called where it comes from: `from time import sleep as doze` makes `doze` a `time.sleep`."""
    first, dot, rest = dotted(node).partition(".")
    return f"{imported_from.get(first, first)}{dot}{rest}"


def mentions(call: ast.Call, *names: str) -> bool:
    """Whether an argument of the call is, or is made of, one of these names: `NOBLOCK`, `os.WEXITED | os.WNOHANG`."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    words = {
        word.attr if isinstance(word, ast.Attribute) else word.id
        for argument in arguments
        for word in ast.walk(argument)
        if isinstance(word, ast.Attribute | ast.Name)
    }
    return bool(words & set(names))


def is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (0, False)


def blocks(call: ast.Call, imported_from: dict[str, str]) -> bool:
    """Whether a call may stand still, judged by its name and arguments.

    `with lock:` is left alone: a lock of ours is held for a few operations in memory and never across a wait, which
    `acquire` called by hand does not show.
    """
    name = full_name(call.func, imported_from)
    last = name.split(".")[-1]
    if name in BLOCKING_FUNCTIONS:
        return True
    if name in ("os.waitpid", "os.waitid", "os.wait", "os.wait3", "os.wait4"):
        return not mentions(call, "WNOHANG")
    if name in ("fcntl.flock", "fcntl.lockf"):
        return not mentions(call, "LOCK_NB", "LOCK_UN")
    if last == "TCPStore":
        return True
    if last in COLLECTIVES and _is_of_torch(name, call):
        return not _has_keyword(call, "async_op", value=True)
    return isinstance(call.func, ast.Attribute) and _method_blocks(call.func, call, name)


def _method_blocks(function: ast.Attribute, call: ast.Call, name: str) -> bool:
    receiver = ast.unparse(function.value).lower()
    match function.attr:
        case "result" if "pending" in receiver:
            return False  # our own `PendingReply` asserts that it is done instead of waiting
        case method if method in WAITING_METHODS:
            return name not in ("runtime.wait", "kintsugi.runtime.waits.wait") and not _has_no_time(call)
        case method if method in RECEIVING_METHODS:
            return not mentions(call, "NOBLOCK", "MSG_DONTWAIT", "DONTWAIT")
        case "acquire":
            return not (_has_no_time(call) or _has_keyword(call, "blocking", value=False))
        case "select":
            return "select" in receiver and not _has_no_time(call)
        case "poll":
            # A process's `poll()` only looks; a poller's waits unless it is given no time. `Endpoint.poll` declares it.
            if not call.args and not call.keywords:
                return "poll" in receiver
            return not _has_no_time(call) and receiver.split(".")[-1].lstrip("_") != "endpoint"
        case "join":
            return _joins_a_thread(receiver, call)
        case "get":
            return _waits_for_an_item(receiver, call)
    return False


def _has_keyword(call: ast.Call, name: str, *, value: object) -> bool:
    return any(
        keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value
        for keyword in call.keywords
    )


def _has_no_time(call: ast.Call) -> bool:
    """Zero seconds, or the `False` of "do not block", as first argument or timeout."""
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "timeout")]
    return any(map(is_zero, given))


def _is_of_torch(name: str, call: ast.Call) -> bool:
    """A function of `torch.distributed`, however it was imported, or one called by its bare name."""
    module = name.rpartition(".")[0]
    return module in ("", "dist", "torch.distributed", "distributed") or mentions(call, "async_op")


def _joins_a_thread(receiver: str, call: ast.Call) -> bool:
    """A thread's or process's join has no argument, or seconds; a string's has one iterable."""
    if not call.args or any(keyword.arg == "timeout" for keyword in call.keywords):
        return True
    argument = call.args[0]
    seconds = isinstance(argument, ast.Constant) and isinstance(argument.value, int | float)
    named = dotted(argument).split(".")[-1]
    return (
        seconds
        or named.endswith(("_s", "seconds", "timeout"))
        or receiver.endswith(("thread", "process", "worker"))
    )


def _waits_for_an_item(receiver: str, call: ast.Call) -> bool:
    """A queue's get waits, and so does a store's; a mapping's has a key as first argument and no such keywords."""
    keywords = {keyword.arg for keyword in call.keywords}
    if _has_keyword(call, "block", value=False) or _has_no_time(call):
        return False
    block = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is True
    nothing = not call.args and not (keywords & {"key", "name", "default"})
    return nothing or block or bool(keywords & {"block", "timeout"}) or receiver.endswith("store")


def undeclared_waits(source: str, file: str) -> Iterator[str]:
    """`file:line function: call` for every blocking call outside of `runtime.wait`."""
    tree = ast.parse(source)
    imported_from = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        if isinstance(node, ast.ImportFrom)
        else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }

    def visit(node: ast.AST, function: str, inside_wait: bool) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
            inside_wait = inside_wait or function.lstrip("_").startswith("attempt")
        if isinstance(node, ast.Call):
            name = full_name(node.func, imported_from)
            if name in ("wait", "runtime.wait", "kintsugi.runtime.waits.wait"):
                inside_wait = True
            elif not inside_wait and blocks(node, imported_from) and (file, ast.unparse(node)) not in ALLOWED:
                yield f"{file}:{node.lineno} {function}: {ast.unparse(node)}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, inside_wait)

    yield from visit(tree, "module", False)


MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", [file for file in MODULES if file != RUNTIME])
def test_every_wait_is_declared(file: str) -> None:
    assert list(undeclared_waits((PACKAGE / file).read_text(), file)) == []


@pytest.mark.parametrize(
    "bypass",
    [
        "time.sleep(1)",
        "from time import sleep\nsleep(1)",
        "await asyncio.sleep(1)",
        "select.select([a], [], [])",
        "poller.poll()",
        "poller.poll(1000)",
        "epoll.poll(timeout=1)",
        "thread.join()",
        "process.join(timeout=5)",
        "thread.join(5)",
        "event.wait()",
        "process.wait(timeout=3)",
        "work.wait()",
        "queue.get()",
        "queue.get(timeout=1)",
        "queue.get(block=True)",
        "future.result()",
        "os.waitpid(pid, 0)",
        "os.waitid(os.P_PIDFD, fd, os.WEXITED)",
        "listening.accept()",
        "socket.recv(10)",
        "zmq_socket.recv_multipart()",
        "subprocess.run(['x'])",
        "process.communicate()",
        "lock.acquire()",
        "lock.acquire(timeout=3)",
        "os.read(descriptor, 10)",
        "socket.create_connection(address)",
        "sock.connect(address)",
        "socket.recv_fds(connection, 10, 1)",
        "selector.select()",
        "selector.select(3)",
        "q.get(True)",
        "q.get(True, 3)",
        "store.get('key')",
        "thread.join(seconds)",
        "self._worker.join(remaining_s)",
        "zmq.Poller().poll()",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "fcntl.lockf(file, fcntl.LOCK_SH)",
        "all_reduce(tensor)",
        "dist.broadcast(tensor, 0)",
        "torch.distributed.init_process_group('gloo')",
        "from torch import distributed as d\nd.barrier()",
        "import torch.distributed as d\nd.all_reduce(tensor)",
        "import time as t\nt.sleep(1)",
        "from torch.distributed import all_gather as collect\ncollect(tensors, tensor)",
        "TCPStore('localhost', 1)",
        "dist.TCPStore('localhost', 1)",
        "def helper():\n    time.sleep(1)\nwait(helper, whom='x', what='y', timeout_s=1)",
    ],
)
def test_a_wait_that_bypasses_the_one_function_is_found(bypass: str) -> None:
    source = bypass if not bypass.startswith("await") else f"async def main():\n    {bypass}"
    assert list(undeclared_waits(source, "planted.py")) != []


@pytest.mark.parametrize(
    "innocent",
    [
        "', '.join(names)",
        "settings.get('key')",
        "settings.get('key', None)",
        "os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)",
        "socket.recv(zmq.NOBLOCK)",
        "popen.poll()",
        "poller.poll(0)",
        "self._endpoint.poll(0.1)",
        "pending.result()",
        "future.result(timeout=0)",
        "wait(lambda s: event.wait(s) or None, whom='x', what='y', timeout_s=1)",
        "runtime.wait(lambda s: queue.get(timeout=s), whom='x', what='y', timeout_s=1)",
        "def _attempt_join(s):\n    thread.join(s)",
        "os.path.join(folder, name)",
        "separator.join(lines)",
        "with lock:\n    table[key] = value",
        "lock.acquire(blocking=False)",
        "lock.acquire(False)",
        "q.get(False)",
        "q.get(block=False)",
        "selector.select(0)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_UN)",
        "dist.all_reduce(tensor, async_op=True)",
        "functools.reduce(add, numbers)",
    ],
)
def test_what_does_not_block_or_is_declared_is_left_alone(innocent: str) -> None:
    assert list(undeclared_waits(innocent, "planted.py")) == []


@pytest.mark.parametrize(("file", "call"), ALLOWED)
def test_every_exception_to_the_rule_is_still_there_and_still_needed(file: str, call: str) -> None:
    found = ast.walk(ast.parse((PACKAGE / file).read_text()))
    assert call in {ast.unparse(node) for node in found if isinstance(node, ast.Call)}
