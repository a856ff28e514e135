import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kintsugi.config.schema import AlgorithmSection, Config, RolloutSection
from kintsugi.errors import ConfigError, DataError
from kintsugi.rollout.rewards.spec import RewardFailed, load_rewards
from kintsugi.rollout.user_code import process
from kintsugi.rollout.user_code.channel import (
    GroupScored,
    RewardCase,
    UserCodeFailed,
    UserCodeRefused,
    attempt_send,
    receive,
)
from kintsugi.rollout.user_code.process import MOST_STARTS, UserProcess
from kintsugi.rollout.user_code.reward_runner import call
from tests.unit.rollout.reward_functions import FOLDER, told

HERE = "tests.unit.rollout.reward_functions"
ROOT = Path(__file__).parents[3]


class Watching:
    """The loop of a process that does nothing but judge."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._callbacks[descriptor] = callback

    def unwatch(self, descriptor: int) -> None:
        self._callbacks.pop(descriptor, None)

    def turn(self) -> None:
        poller = select.poll()
        for descriptor in self._callbacks:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(20):
            self._callbacks[descriptor]()


class Court:
    """A reward process and its verdicts."""

    def __init__(self, *rewards: str, timeout_s: float) -> None:
        self._loop = Watching()
        self.notes: list[str] = []
        config = Config(
            name="t",
            algorithm=AlgorithmSection(reward=rewards),
            rollout=RolloutSection(reward_timeout_s=timeout_s),
        )
        self.judging = UserProcess(config, loop=self._loop, note=self.notes.append)
        self._count = 0

    def ask(self, *completions: str, alone: bool = False) -> int:
        self._count += 1
        self.judging.submit(RewardCase(self._count, "1+1=", completions, {"answer": "2"}), alone=alone)
        return self._count

    def verdicts(self, count: int) -> dict[int, GroupScored | UserCodeFailed]:
        found: dict[int, GroupScored | UserCodeFailed] = {}
        until = time.monotonic() + 20.0
        while len(found) < count:
            assert time.monotonic() < until, "no verdict"
            self._loop.turn()
            said = self.judging.take(time.monotonic())
            found |= {each.id: each for each in said if isinstance(each, GroupScored | UserCodeFailed)}
        return found

    def judge(self, *completions: str) -> GroupScored | UserCodeFailed:
        name = self.ask(*completions)
        return self.verdicts(1)[name]

    def message(self, *completions: str) -> str:
        verdict = self.judge(*completions)
        assert isinstance(verdict, UserCodeFailed)
        return verdict.message


@pytest.fixture
def court(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Court]]:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    opened: list[Court] = []

    def build(*names: str, timeout_s: float = 10.0) -> Court:
        opened.append(Court(*(f"{HERE}.{name}" for name in names), timeout_s=timeout_s))
        return opened[-1]

    yield build
    for each in opened:
        each.judging.close()


def test_functions_run_in_a_process_of_their_own_in_the_recipes_order(court: Callable[..., Court]) -> None:
    here = court("length * 0.5", "half", "one_thread")
    verdict = here.judge("12", "")
    assert isinstance(verdict, GroupScored)
    assert [list(parts.items()) for parts in verdict.components] == [
        [("length", 2.0), ("half", 0.5), ("one_thread", 1.0)],
        [("length", 0.0), ("half", 0.5), ("one_thread", 1.0)],
    ]
    assert set(verdict.seconds) == {"length", "half", "one_thread"} and min(verdict.seconds.values()) >= 0.0
    assert told("process") == [f"{here.judging.pid} False False"]
    assert here.judging.pid != os.getpid()


def test_a_worker_that_did_not_run_itself_blames_no_function_that_has_answered_meanwhile(
    court: Callable[..., Court],
) -> None:
    here = court("half", timeout_s=0.3)
    here.judge("a")
    pid, asked = here.judging.pid, here.ask("b")
    time.sleep(1.0)
    assert here.judging.next_deadline() < time.monotonic(), "the time of the function is over"
    taken = here.judging.take(time.monotonic())
    verdict = taken[0] if taken else here.verdicts(1)[asked]
    assert isinstance(verdict, GroupScored) and verdict.id == asked
    assert (here.judging.pid, here.notes) == (pid, [])


def test_a_worker_that_judges_nothing_has_no_reward_process(court: Callable[..., Court]) -> None:
    here = court("half")
    assert here.judging.take(time.monotonic()) == [] and here.judging.pid is None


def test_asynchronous_functions_of_many_groups_run_at_once(court: Callable[..., Court]) -> None:
    here = court("meeting", "half")
    asked = [here.ask("a"), here.ask("b"), here.ask("c")]
    verdicts = here.verdicts(3)
    assert sorted(told("meeting")) == ["a", "b", "c"]
    for name in asked:
        verdict = verdicts[name]
        assert isinstance(verdict, GroupScored)
        assert list(verdict.components[0].items()) == [("meeting", 1.0), ("half", 0.5)]


def test_a_value_that_is_no_number_concerns_its_sample_only(court: Callable[..., Court]) -> None:
    verdict = court("half", "some_unjudged").judge("a", "b", "c", "d", "e")
    assert isinstance(verdict, GroupScored)
    assert verdict.components == [{"half": 0.5, "some_unjudged": 1.0}, {}, {}, {}, {}]
    assert [why.partition(": ")[2] for why in verdict.reasons.values()] == [
        "expected a finite number, got None",
        "expected a finite number, got nan",
        "expected a finite number, got '0.5'",
        "no such unit",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", "reward 'broken' raised RuntimeError: no verdict (line "),
        ("exiting", "reward 'exiting' raised SystemExit: enough"),
        ("interrupting", "reward 'interrupting' raised KeyboardInterrupt: stop"),
        ("too_few", "reward 'too_few': expected 2 numbers, got 1"),
        ("nothing", "reward 'nothing': expected a list of 2 numbers, got NoneType"),
        ("not_async", "reward 'not_async': returned something to await; make it an `async def`"),
    ],
)
def test_each_way_to_fail_gives_one_clear_reason(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (reward,) = load_rewards([f"{HERE}.{name}"])
    answer, _ = call(reward, RewardCase(1, "1+1=", ("a", "b"), {}))
    assert isinstance(answer, RewardFailed) and str(answer).startswith(expected)


def test_a_process_goes_on_after_functions_have_failed(court: Callable[..., Court]) -> None:
    here = court("broken", "async_wrong")
    for _ in range(2):
        assert here.message("a", "b").startswith("reward 'broken' raised RuntimeError")
    assert here.notes == [] and told("broken") == ["2", "2"]


def test_each_way_in_which_an_asynchronous_function_fails_is_told_and_the_process_lives(
    court: Callable[..., Court],
) -> None:
    here = court("async_wrong", timeout_s=0.2)
    for way, expected in {
        "lies": "reward 'async_wrong': expected a list of 1 numbers, got str",
        "hangs": "reward 'async_wrong' took longer than `rollout.reward_timeout_s`=0.2 s",
        "cancels": "reward 'async_wrong' raised CancelledError: by itself (line ",
        "exits": "reward 'async_wrong' raised SystemExit: enough (line ",
    }.items():
        assert here.message(way).startswith(expected)
    assert here.notes == []


def test_a_function_that_hangs_is_killed_and_those_that_waited_are_judged(
    court: Callable[..., Court],
) -> None:
    here = court("hanging_on_x", timeout_s=1.0)
    guilty, innocent = here.ask("x"), here.ask("a")
    first = here.judging.pid
    verdicts = here.verdicts(2)
    refused, judged = verdicts[guilty], verdicts[innocent]
    assert (
        isinstance(refused, UserCodeFailed)
        and "longer than `rollout.reward_timeout_s`=1 s" in refused.message
    )
    assert isinstance(judged, GroupScored)
    assert told("hanging") == ["x", "a"]
    assert here.judging.pid != first and not Path(f"/proc/{first}").exists()
    assert len(here.notes) == 1
    (started,) = told("started")
    assert has_ended(int(started)), "what the function had started was left"


def has_ended(pid: int) -> bool:
    """Whether a process of this machine is gone, or will be when its remains are taken away."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    ended = bool(poller.poll(5000))
    os.close(pidfd)
    return ended


def test_a_function_that_forks_and_returns_twice_is_heard_once(court: Callable[..., Court]) -> None:
    here = court("forking")
    assert all(isinstance(here.judge(name), GroupScored) for name in "abc")
    assert here.notes == []


def test_a_function_that_closes_everything_has_failed_and_its_process_is_replaced(
    court: Callable[..., Court], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EXIT_S", 0.2)
    here = court("closing")
    assert here.message("a") == "the reward process closed its connection to the worker"


def test_a_process_that_says_what_can_not_be_understood_is_replaced(court: Callable[..., Court]) -> None:
    here = court("babbling")
    assert here.message("a").startswith("the reward process sent a message that cannot be decoded")


def test_a_process_that_dies_with_groups_unread_is_replaced_and_they_are_judged(
    court: Callable[..., Court],
) -> None:
    """The kernel tells of the unread ones with an error of its own, to whoever sends or receives next."""
    here = court("half")
    here.judge("a")
    assert here.judging.pid is not None
    judge = os.pidfd_open(here.judging.pid)
    signal.pidfd_send_signal(judge, signal.SIGSTOP)
    here.ask("b")
    signal.pidfd_send_signal(judge, signal.SIGKILL)
    assert has_ended(here.judging.pid)
    os.close(judge)
    here.ask("c")
    assert all(isinstance(verdict, GroupScored) for verdict in here.verdicts(2).values())
    assert here.notes == ["the reward process killed by SIGKILL; it is replaced"]


def test_what_was_said_last_is_heard_though_something_was_left_unread() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            attempt_send(ours, RewardCase(1, "1+1=", ("2",), {}))
            attempt_send(theirs, UserCodeRefused("not importable"))
        content = receive(ours)
        assert content is not None and b"not importable" in content
        assert receive(ours) is None


def test_a_function_that_crashes_its_process_is_blamed_alone_in_the_end(court: Callable[..., Court]) -> None:
    here = court("killing_on_x")
    first, guilty, last = here.ask("a"), here.ask("x"), here.ask("b")
    verdicts = here.verdicts(3)
    refused = verdicts[guilty]
    assert isinstance(refused, UserCodeFailed) and refused.message == "the reward process killed by SIGSEGV"
    assert isinstance(verdicts[first], GroupScored) and isinstance(verdicts[last], GroupScored)
    assert told("killing") == ["a", "x", "b"]
    (started,) = told("started")
    assert has_ended(int(started)), "what the function had started was left"


@pytest.mark.slow
def test_whoever_was_blamed_with_another_is_cleared_when_judged_alone(court: Callable[..., Court]) -> None:
    here = court("async_blocking_on_x", timeout_s=1.0)
    innocent, guilty = here.ask("a"), here.ask("x")
    verdicts = here.verdicts(2)
    assert isinstance(verdicts[guilty], UserCodeFailed)
    again = [here.ask("x", alone=True), here.ask("a", alone=True)]
    verdicts |= here.verdicts(2)
    assert isinstance(verdicts[again[0]], UserCodeFailed) and isinstance(verdicts[again[1]], GroupScored), (
        innocent
    )


def test_a_module_that_can_not_be_imported_is_refused_with_what_was_searched(
    court: Callable[..., Court], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Court("my_lost_module.reward", timeout_s=1.0)
    here.judging.prepare()
    with pytest.raises(ConfigError) as caught:
        here.verdicts(1)
    here.judging.close()
    message = str(caught.value)
    assert "my_lost_module.reward" in message and "ModuleNotFoundError" in message
    assert str(ROOT) in message


@pytest.mark.slow
def test_a_module_that_ends_its_process_is_refused_after_a_few_tries(tmp_path: Path) -> None:
    file = tmp_path / "deadly.py"
    file.write_text("import os\nos._exit(7)\n")
    here = Court(f"{file}:reward", timeout_s=1.0)
    here.judging.prepare()
    with pytest.raises(
        ConfigError, match=f"exited with code 7 while it imported.*{MOST_STARTS} times in a row"
    ):
        here.verdicts(1)
    here.judging.close()


@pytest.mark.slow
def test_a_reward_that_uses_torch_and_its_device_finds_a_process_that_was_not_forked(tmp_path: Path) -> None:
    """A context of CUDA does not survive a fork; with a GPU, this process has one."""
    import torch

    if torch.cuda.is_available():
        torch.ones(1, device="cuda")
    file = tmp_path / "with_torch.py"
    file.write_text(
        "import torch\n"
        "DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "def reward(completions, **columns):\n"
        "    return torch.tensor([len(c) for c in completions], dtype=torch.float32, device=DEVICE) * 2\n"
    )
    here = Court(f"{file}:reward", timeout_s=60.0)
    verdict = here.judge("a", "bc")
    here.judging.close()
    assert isinstance(verdict, GroupScored)
    assert verdict.components == [{"reward": 2.0}, {"reward": 4.0}]


def test_a_column_that_can_not_be_handed_over_is_the_datas_fault(court: Callable[..., Court]) -> None:
    here = court("half")
    with pytest.raises(DataError, match="columns of prompt '1=' can not be given to the reward"):
        here.judging.submit(RewardCase(1, "1=", ("a",), {"image": object()}))
    with pytest.raises(DataError, match="surrogates not allowed"):
        here.judging.submit(RewardCase(1, "1=", ("a",), {"half": "\ud800"}))


def test_the_process_ends_when_its_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in the middle of a function that hangs."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    program = (
        "from tests.unit.rollout.test_user_process import Court, HERE\n"
        "court = Court(f'{HERE}.hanging_once', timeout_s=30.0)\n"
        "court.ask('a')\n"
        "court.verdicts(1)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    until = time.monotonic() + 20.0
    while not told("hanging"):
        assert worker.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    judge = os.pidfd_open(int(told("hanging")[0]))
    worker.kill()
    worker.wait(10)
    poller = select.poll()
    poller.register(judge, select.POLLIN)
    assert poller.poll(5000), "the reward process outlived its worker"
    os.close(judge)
