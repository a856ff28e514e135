import errno
import json
import os
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kintsugi.cluster.orphans import subreaper
from kintsugi.errors import ConfigError, UserError
from kintsugi.rollout.sandbox import jail, sandbox
from kintsugi.rollout.sandbox.sandbox import SandboxFailed, SandboxLimits, SandboxOutcome, run, run_python
from tests.unit.rollout.escapes import ATTEMPTS, DAEMON, FORK_BOMB

ROOT = Path(__file__).parents[3]
SECRET = "nobody may read this"

REFUSED = {
    "internet socket": "EPERM",
    "virtual machine socket": "EPERM",
    "netlink socket": "EPERM",
    "abstract unix socket": "ECONNREFUSED",
    "run folder": "ENOENT",
    "secret file": "ENOENT",
    "path out of the root": "ENOENT",
    "environment of the parent": "ENOENT",
    "own proc": "ENOENT",
    "environment": "['PYTHONHASHSEED']",
    "descriptors": "[]",
    "writing outside": "EROFS",
    "writing the library": "EACCES or EROFS",
    "writing the library after remounting": "EPERM",
    "ptrace": "EPERM",
    "memory of the first process": "EPERM",
    "new namespaces": "EPERM",
    "other root": "EPERM",
    "other user": "EPERM",
    "memory without limit": "EPERM",
    "raising limits": "ValueError",
    "large file": "EFBIG",
    "many files": "EMFILE",
    "killing the parent by its number": "ESRCH",
    # The kernel takes the signal and drops it: it is the first process of its namespace.
    "killing the first process": "None",
    "any signal to the first process": "None",
    "limits of the first process": "EPERM",
    "priority of the first process": "EPERM",
    "own limits and processors": "None",
    "semaphores, which are memory of the kernel": "EPERM",
    "many timers, which are memory of the kernel": "EAGAIN",
    "installed packages": "[[]]",
    # There is nobody but the first process and the program itself.
    "killing everybody": "ESRCH",
    "killing the group of the parent": "ESRCH",
    "killing the own group": "None",
}


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that anybody may read, were it visible, and a key in the environment."""
    tmp_path.chmod(0o755)
    file = tmp_path / "keys"
    file.write_text(SECRET)
    monkeypatch.setenv("API_KEY", SECRET)
    return file


@pytest.fixture
def world(secret: Path) -> Iterator[str]:
    """What the attempts are aimed at: listening sockets, files, this process; as the program's input."""
    inherited = os.open(secret, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    name = f"\0kintsugi-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as internet, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(name)
        unix.listen()
        aims = ["127.0.0.1", internet.getsockname()[1], name, str(secret.parent), str(secret), os.getpid()]
        yield json.dumps(aims)
    os.close(inherited)


def test_no_attempt_to_get_out_succeeds(world: str) -> None:
    outcome = run_python(ATTEMPTS, stdin=world)
    assert outcome.reason == "", outcome.stderr
    check_refusals(outcome)


def test_an_ordinary_user_has_the_same_sandbox(world: str) -> None:
    """Through a user namespace, where the kernel permits it."""
    outcome = without_rights(lambda: run_python(ATTEMPTS, stdin=world))
    if isinstance(outcome, str):
        pytest.skip(f"the kernel permits no user namespaces: {outcome}")
    check_refusals(outcome)


def check_refusals(outcome: SandboxOutcome) -> None:
    """That every attempt was made, and what the kernel said to it."""
    found = json.loads(outcome.stdout)
    user, processes = found.pop("user"), found.pop("processes")
    if found["writing the library"] in (
        "EACCES",
        "EROFS",
    ):  # Whose the library is decides what is said first.
        found["writing the library"] = REFUSED["writing the library"]
    assert found == REFUSED
    assert user >= jail.FIRST_USER and processes == [2, 1]
    assert SECRET not in outcome.stdout


def without_rights(work: Callable[[], SandboxOutcome]) -> SandboxOutcome | str:
    """Do it in a process that has given up every capability; gives the message where isolation is impossible."""

    def body() -> Any:
        header, data = struct.pack("=Ii", 0x20080522, 0), bytes(24)
        jail._call(jail._numbers()["capset"], header, data)
        outcome = work()
        return [outcome.stdout, outcome.stderr, outcome.code, outcome.reason]

    answer = in_child(body)
    return answer if isinstance(answer, str) else SandboxOutcome(*answer)


def in_child(body: Callable[[], Any]) -> Any:
    """What `body` gives in a forked process, or the message of the user's mistake that it ends with."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = body()
        except UserError as error:
            answer = str(error)
        except BaseException as error:  # noqa: BLE001 - nothing may return into the test runner
            answer = f"unexpected {error!r}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = json.load(file)
    os.waitpid(pid, 0)
    return answer


def refusing_namespaces(work: Callable[[], Any]) -> Any:
    """Do it in a process to which the kernel refuses every namespace, as in many containers."""

    def body() -> Any:
        numbers = jail._NUMBERS[platform.machine()]
        kept = ("audit", "clone", "clone3", "socket", "socketpair", "unshare")
        jail._NUMBERS[platform.machine()] = {name: numbers[name] for name in kept}
        jail.refuse_system_calls()
        sandbox._Permission.is_isolation_known = False
        return work()

    return in_child(body)


def test_where_isolation_is_impossible_nothing_runs(tmp_path: Path) -> None:
    answer = refusing_namespaces(lambda: run_python("print(1)").stdout)
    assert answer.startswith(
        "programs can not be isolated on this machine (unsharing namespaces: Operation not"
    )
    assert "`rollout.allow_unsandboxed=true`" in answer


def test_where_isolation_is_impossible_the_user_may_allow_it_explicitly(tmp_path: Path) -> None:
    def work() -> Any:
        sandbox.permit_unsandboxed(True)
        outcome = run_python("import os; print(sorted(os.environ), os.listdir('.'))")
        return [outcome.stdout, outcome.reason]

    stdout, reason = refusing_namespaces(work)
    assert (stdout, reason) == ("['LC_CTYPE', 'PYTHONHASHSEED'] ['program.py']\n", "")


def test_a_machine_that_can_isolate_does_so_also_when_it_need_not() -> None:
    sandbox.permit_unsandboxed(True)
    try:
        assert run_python("import os; print(os.getpid())").stdout == "2\n"
    finally:
        sandbox.permit_unsandboxed(False)


def test_a_program_gets_input_and_gives_output_and_code() -> None:
    source = "import sys; print(input()[::-1]); print('é', file=sys.stderr); sys.exit(3)"
    outcome = run_python(source, stdin="olleh\n")
    assert (outcome.stdout, outcome.stderr, outcome.code) == ("hello\n", "é\n", 3)
    assert outcome.reason == "exited with code 3"
    assert 0.0 < outcome.cpu_s < 2.0 and outcome.memory_bytes > 2**20


def test_what_a_program_prints_of_a_set_is_the_same_every_time() -> None:
    source = "print({str(i) for i in range(50)}, id(object()))"
    first, second = run_python(source), run_python(source)
    assert first.stdout == second.stdout


def test_any_command_can_be_run() -> None:
    outcome = run([sys.executable, "-I", "-c", "print(open('given').read())"], files={"given": "content"})
    assert outcome.stdout == "content\n"


def test_a_fork_bomb_reaches_its_limit() -> None:
    outcome = run_python(FORK_BOMB, limits=SandboxLimits(processes=6))
    assert outcome.stdout == f"4 {errno.EAGAIN}\n"


def test_a_memory_bomb_reaches_its_limit() -> None:
    outcome = run_python(
        "kept = []\nwhile True: kept.append(bytearray(2**20))", limits=SandboxLimits(memory_bytes=2**27)
    )
    assert outcome.code == 1 and outcome.reason == "needed more than 128 MiB of memory"
    assert outcome.memory_bytes > 2**26


@pytest.mark.slow
def test_an_endless_loop_is_ended_by_its_processor_time() -> None:
    outcome = run_python("while True: pass", limits=SandboxLimits(cpu_s=1))
    assert outcome.reason == "used more than 1 s of processor time"


@pytest.mark.slow
def test_an_endless_loop_that_ignores_the_signal_is_killed() -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    outcome = run_python(ignoring + "while True: pass", limits=SandboxLimits(cpu_s=1))
    assert outcome.reason == "used more than 1 s of processor time" and outcome.code == -signal.SIGKILL


def test_a_program_that_waits_for_ever_is_ended() -> None:
    outcome = run_python("import time\nwhile True: time.sleep(9)", limits=SandboxLimits(idle_s=0.4))
    assert outcome.reason == "stood still for 0.4 s"


SIX_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        until = time.process_time() + 0.4
        while time.process_time() < until: pass
        os._exit(0)
for _ in range(6): os.wait()
"""
THREE_LARGE_CHILDREN = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        kept = bytearray(60 << 20)
        time.sleep(30)
time.sleep(30)
"""
UNHURRIED = """
import time
while True:
    until = time.process_time() + 0.02
    while time.process_time() < until: pass
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_the_processor_time_of_all_processes_of_a_program_counts() -> None:
    outcome = run_python(SIX_CHILDREN, limits=SandboxLimits(cpu_s=1))
    assert outcome.reason == "used more than 1 s of processor time" and outcome.cpu_s > 1.0


def test_the_memory_of_all_processes_of_a_program_counts() -> None:
    outcome = run_python(THREE_LARGE_CHILDREN, limits=SandboxLimits(memory_bytes=2**27))
    assert outcome.reason == "needed more than 128 MiB of memory"


def test_a_program_that_neither_stands_still_nor_ends_is_too_slow_which_is_a_verdict() -> None:
    outcome = run_python(UNHURRIED, limits=SandboxLimits(idle_s=0.5, slow_s=1.0))
    assert outcome.reason == "was not done after 1 s"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut(stream: str) -> None:
    source = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
    outcome = run_python(source, limits=SandboxLimits(output_bytes=10_000))
    assert outcome.reason == "wrote more than 10000 bytes"
    assert getattr(outcome, stream) == "x" * 10_000


def descendants_of(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *(inner for child in children for inner in descendants_of(child))]


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    with subreaper():
        before = descendants_of(os.getpid())
        assert run_python(DAEMON).stdout == "left one behind\n"
        assert descendants_of(os.getpid()) == before


def jail_of(parent: int) -> list[int]:
    """The jail that a process has started, the first process inside, and the program, once it runs."""
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        if len(found := descendants_of(parent)) == 3:
            return found
        time.sleep(0.01)
    raise AssertionError("no jail was seen")


def have_ended(pidfds: list[int]) -> bool:
    pollers = [select.poll() for _ in pidfds]
    for poller, pidfd in zip(pollers, pidfds, strict=True):
        poller.register(pidfd, select.POLLIN)
    return all(poller.poll(5000) for poller in pollers)


SLEEPING = "import time\ntime.sleep(60)"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_sandbox_that_is_killed_is_no_verdict_on_the_program(victim: int) -> None:
    """Whoever asks may ask again; nothing of it is left."""
    held: list[int] = []

    def kill() -> None:
        found = jail_of(os.getpid())
        held.extend(os.pidfd_open(pid) for pid in found)
        os.kill(found[victim], signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(SandboxFailed, match="before the program was done"):
        run_python(SLEEPING)
    killer.join(10)
    assert len(held) == 3 and have_ended(held)
    for pidfd in held:
        os.close(pidfd)


def test_nothing_is_left_when_the_caller_is_killed() -> None:
    program = f"from kintsugi.rollout.sandbox.sandbox import run_python\nrun_python({SLEEPING!r})"
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    held = [os.pidfd_open(pid) for pid in jail_of(caller.pid)]
    caller.kill()
    caller.wait(10)
    assert have_ended(held)
    for pidfd in held:
        os.close(pidfd)


def test_a_machine_too_busy_to_be_done_is_no_verdict_on_the_program() -> None:
    with pytest.raises(SandboxFailed, match=r"a program was not done after 0\.3 s"):
        run_python("while True: pass", limits=SandboxLimits(deadline_s=0.3))


def test_a_program_that_is_killed_while_the_machine_runs_out_of_memory_has_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run_python(source).reason == "killed by SIGKILL"
    times = iter([3, 4])
    monkeypatch.setattr(sandbox, "_times_out_of_memory", lambda: next(times))
    with pytest.raises(SandboxFailed, match="ran out of memory"):
        run_python(source)


def test_an_isolated_machine_is_required_by_doing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.require()
    monkeypatch.setattr(sandbox, "_LIBRARIES", ())
    monkeypatch.setattr(sandbox, "_visible", lambda command: [os.path.realpath(command)])
    with pytest.raises(ConfigError, match="can not be isolated"):
        sandbox.require()
