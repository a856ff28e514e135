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
RUNTIME = "runtime.py"

ALLOWED = {
    ("transport/endpoint.py", "turn"): "the loop's own poll: `poll` and `call` reach it through runtime.wait",
    ("worker.py", "call"): "`Future.result` waits through runtime.wait",
    ("cluster/segments.py", "_accept"): "a non-blocking socket, watched by the agent's loop",
    ("cluster/segments.py", "_serve"): "a non-blocking socket, watched by the agent's loop",
    ("cluster/template.py", "receive"): "called by the loop when the socket is readable",
    ("cluster/template.py", "_fork_for_grandparent"): "reaps a child that exits right after its fork",
    ("training/group.py", "_run"): "collects the error of a collective that runtime.wait saw completed",
    ("training/group.py", "connect"): "asks for the result only of what is done",
    ("training/samples.py", "_fetch"): "takes answers that runtime.wait saw done",
}
"""(file, function) → why it may block by itself."""

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
}
SOCKET_METHODS = {
    "accept",
    "recv",
    "recvmsg",
    "recv_into",
    "recvfrom",
    "recv_multipart",
    "communicate",
    "barrier",
}
WAITING_METHODS = {"wait", "wait_for", "result", "monitored_barrier", "sigtimedwait"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; empty parts where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


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
    """Whether a call may stand still, judged by its name and arguments."""
    name = dotted(call.func)
    name = imported_from.get(name, name)
    if name in BLOCKING_FUNCTIONS:
        return True
    if name in ("os.waitpid", "os.waitid", "os.wait", "os.wait3", "os.wait4"):
        return not mentions(call, "WNOHANG")
    if not isinstance(call.func, ast.Attribute):
        return False
    method = call.func.attr
    keywords = {keyword.arg for keyword in call.keywords}
    if method in WAITING_METHODS:
        no_time = any(keyword.arg == "timeout" and is_zero(keyword.value) for keyword in call.keywords)
        return (
            name not in ("runtime.wait", "kintsugi.runtime.wait")
            and not no_time
            and not _settled_result(call)
        )
    if method in SOCKET_METHODS:
        return not mentions(call, "NOBLOCK", "MSG_DONTWAIT", "DONTWAIT")
    if method == "poll":
        # A process's `poll()` only looks; a poller's waits unless it is given no time.
        if not call.args and not keywords:
            return "poll" in dotted(call.func.value)
        return not (call.args and is_zero(call.args[0])) and not _is_endpoint(call)
    if method == "join":
        # A thread's or process's join has no argument or a timeout; a string's has one iterable.
        return (
            not call.args
            or "timeout" in keywords
            or "timeout" in dotted(call.args[0])
            or _is_number(call.args[0])
        )
    if method == "get":
        # A queue's get waits; a mapping's has a key as first argument and no such keywords.
        return (not call.args and not (keywords & {"key", "name", "default"})) or bool(
            keywords & {"block", "timeout"}
        )
    return False


def _settled_result(call: ast.Call) -> bool:
    """`result` of a request that is known to be done: our own `PendingReply` asserts that instead of waiting."""
    return (
        isinstance(call.func, ast.Attribute) and call.func.attr == "result" and "pending" in dotted(call.func)
    )


def _is_endpoint(call: ast.Call) -> bool:
    """`Endpoint.poll` declares its wait itself."""
    return (
        isinstance(call.func, ast.Attribute)
        and dotted(call.func.value).split(".")[-1].lstrip("_") == "endpoint"
    )


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def undeclared_waits(source: str, file: str) -> Iterator[str]:
    """`file:line function: call` for every blocking call outside of `runtime.wait`."""
    tree = ast.parse(source)
    imported_from = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def visit(node: ast.AST, function: str, inside_wait: bool) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
            inside_wait = inside_wait or function.lstrip("_").startswith("attempt")
        if isinstance(node, ast.Call):
            name = imported_from.get(dotted(node.func), dotted(node.func))
            if name in ("wait", "runtime.wait", "kintsugi.runtime.wait"):
                inside_wait = True
            elif not inside_wait and (file, function) not in ALLOWED and blocks(node, imported_from):
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
    ],
)
def test_what_does_not_block_or_is_declared_is_left_alone(innocent: str) -> None:
    assert list(undeclared_waits(innocent, "planted.py")) == []


def test_every_exception_to_the_rule_still_exists() -> None:
    for file, function in ALLOWED:
        assert f"def {function}(" in (PACKAGE / file).read_text()
