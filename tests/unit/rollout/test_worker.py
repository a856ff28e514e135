import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import (
    AlgorithmSection,
    Config,
    ModelSection,
    NewModel,
    RolloutSection,
    SamplingSection,
    WarmupSection,
)
from kintsugi.errors import RemoteError
from kintsugi.messages import (
    AddressBook,
    Body,
    Drop,
    EpisodesDone,
    FetchSamples,
    Generate,
    Generated,
    Ping,
    Register,
    Registered,
    RunEpisodes,
    SamplesFetched,
)
from kintsugi.model.plan import plan_model
from kintsugi.observe.events import EventLog
from kintsugi.rollout import worker as worker_module
from kintsugi.rollout.episode import int32, trajectory_digest
from kintsugi.rollout.worker import RolloutWorker
from kintsugi.transport import Endpoint, PendingReply, new_key_pair
from kintsugi.types import Completion, Finish, Role, Sampling, Ticket

RELEASE = Event()
CALLS: list[int] = []


def broken(completions: list[str], **columns: Any) -> list[float]:
    CALLS.append(len(completions))
    raise RuntimeError("no verdict")


def hanging(completions: list[str], **columns: Any) -> list[float]:
    """Hangs when it is called for the first time, until the test is over."""
    if CALLS == []:
        CALLS.append(1)
        RELEASE.wait(30)
    return [1.0] * len(completions)


def config(*, reward: str = "kintsugi.rollout.rewards.exact_answer", timeout_s: float = 10.0) -> Config:
    return Config(
        name="t",
        model=ModelSection(new=NewModel()),
        algorithm=AlgorithmSection(reward=(reward,)),
        warmup=WarmupSection(),
        sampling=SamplingSection(max_new_tokens=5),
        rollout=RolloutSection(attempts=2, reward_timeout_s=timeout_s),
    )


class World:
    """A rollout worker, a master that asks and a manager that answers: real sockets, all driven by this thread."""

    def __init__(self, tmp_path: Path, settings: Config) -> None:
        CALLS.clear()
        RELEASE.clear()
        keys = {name: new_key_pair() for name in ("master-0", "manager-0", "rollout-0")}
        self.master, self.manager = (self._endpoint(name, keys[name]) for name in ("master-0", "manager-0"))
        read_end, self._lifeline = os.pipe()
        bootstrap = Bootstrap(
            job="j",
            run_dir=str(tmp_path),
            process="rollout-0",
            role=Role.ROLLOUT,
            host="host-0",
            incarnation="a",
            public_key=keys["rollout-0"][0],
            secret_key=keys["rollout-0"][1],
            master=self.master.peer(host="host-0"),
            lifeline=read_end,
        )
        _, self.tokenizer = plan_model(settings)
        log = EventLog(tmp_path / "events.jsonl", process="rollout-0")
        self.worker = RolloutWorker(bootstrap, settings, self.tokenizer, log=log)
        peers = [e.peer(host="host-0") for e in (self.master, self.manager, self.worker.endpoint)]
        for endpoint in (self.master, self.manager):
            for peer in peers:
                if peer.process != endpoint.process:
                    endpoint.admit(peer)
        self.answers: list[str] = []
        self.until(lambda: self.worker.membership.registered)
        self.master.send("rollout-0", AddressBook(1, tuple(peers)))
        self.until(lambda: "manager-0" in self.worker.endpoint.peers)

    @staticmethod
    def _endpoint(name: str, keys: tuple[bytes, bytes]) -> Endpoint:
        return Endpoint(job="j", process=name, incarnation="a", public_key=keys[0], secret_key=keys[1])

    def until(self, condition: Callable[[], bool], *, turns: int = 2000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.master_turn()
            self.manager_turn()
            self.worker.turn()
        raise AssertionError("it did not happen")

    def master_turn(self) -> None:
        for delivery in self.master.poll(0.002):
            if isinstance(delivery.body, Register):
                self.master.reply(delivery, Registered(0))

    def manager_turn(self) -> None:
        for delivery in self.manager.poll(0.002):
            request = delivery.body
            assert isinstance(request, Generate)
            self.manager.reply(delivery, Generated(request.ticket, 0, self._completions(request), "server-0"))

    def _completions(self, request: Generate) -> tuple[Completion, ...]:
        ids = [*self.tokenizer.encode(self.answers[0]), self.tokenizer.eos_token_id]
        logprobs = array("f", [-0.5] * len(ids)).tobytes()
        return tuple(
            Completion(sample, int32(ids), logprobs, int32([3] * len(ids)), Finish.EOS)
            for sample in request.wanted
        )

    def ask(self, body: Body) -> PendingReply:
        pending = self.master.request("rollout-0", body, deadline_s=20.0)
        self.until(lambda: pending.done)
        return pending

    def close(self) -> None:
        RELEASE.set()
        self.worker.close()
        self.master.close()
        self.manager.close()
        os.close(self._lifeline)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Config], World]]:
    monkeypatch.setattr(worker_module, "IDLE_S", 0.002)
    opened: list[World] = []

    def build(settings: Config) -> World:
        opened.append(World(tmp_path, settings))
        return opened[-1]

    yield build
    for each in opened:
        each.close()


def run(
    ticket: str = "grpo:0:0:0", *, stage: str = "grpo", num_samples: int = 2, new_tokens: int = 5
) -> RunEpisodes:
    sampling = Sampling(max_new_tokens=new_tokens, num_samples=num_samples)
    return RunEpisodes(
        Ticket(ticket, stage, 0, 0, 0, num_samples), "train", sampling, version=3, timeout_s=20.0
    )


def test_a_group_is_generated_scored_kept_and_handed_over(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers = ["12"]
    done = here.ask(run()).result().expect(EpisodesDone)
    assert [meta.key for meta in done.samples] == ["grpo:0:0:0/0", "grpo:0:0:0/1"]
    assert all(meta.version == 3 and meta.holder == "rollout-0" for meta in done.samples)
    assert all(meta.num_loss_tokens == 3 for meta in done.samples)
    assert [text.completion for text in done.texts.values()] == ["12", "12"]
    fetched = here.ask(FetchSamples(tuple(meta.key for meta in done.samples))).result().expect(SamplesFetched)
    assert [trajectory_digest(t) for t in fetched.samples] == [meta.digest for meta in done.samples]


def test_a_demonstration_needs_no_generation(world: Callable[[Config], World]) -> None:
    here = world(config())
    done = here.ask(run("warmup:0:0:0", stage="warmup", num_samples=1)).result().expect(EpisodesDone)
    (meta,) = done.samples
    assert meta.num_loss_tokens == len(done.texts[meta.key].completion) + 1
    assert meta.version == -1


def test_dropped_samples_are_gone(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers = ["12"]
    here.ask(run())
    here.master.send("rollout-0", Drop(("grpo:0:0:0",)))
    here.ask(Ping())
    with pytest.raises(RemoteError, match="does not keep sample"):
        here.ask(FetchSamples(("grpo:0:0:0/0",))).result()


def test_a_reward_that_raises_is_tried_again_and_then_quarantined_with_its_reason(
    world: Callable[[Config], World],
) -> None:
    here = world(config(reward=f"{__name__}.broken"))
    here.answers = ["12"]
    done = here.ask(run()).result().expect(EpisodesDone)
    assert done.samples == ()
    assert set(done.quarantined) == {"grpo:0:0:0/0", "grpo:0:0:0/1"}
    assert all("RuntimeError: no verdict" in reason for reason in done.quarantined.values())
    assert CALLS == [2, 2]


def test_a_reward_that_hangs_is_left_behind_and_the_groups_after_it_are_scored(
    world: Callable[[Config], World],
) -> None:
    here = world(config(reward=f"{__name__}.hanging", timeout_s=0.3))
    here.answers = ["12"]
    first = here.master.request("rollout-0", run("grpo:0:0:0"), deadline_s=20.0)
    second = here.master.request("rollout-0", run("grpo:0:1:0"), deadline_s=20.0)
    here.until(lambda: first.done and second.done)
    assert CALLS == [1]
    assert all(len(p.result().expect(EpisodesDone).samples) == 2 for p in (first, second))


def test_a_prompt_that_does_not_fit_is_refused_with_the_limit(world: Callable[[Config], World]) -> None:
    here = world(config())
    with pytest.raises(RemoteError, match=r"generation\.max_length is 32"):
        here.ask(run(new_tokens=64)).result()


def test_the_end_of_the_lifeline_ends_the_worker(world: Callable[[Config], World]) -> None:
    here = world(config())
    os.close(here._lifeline)
    here.until(lambda: here.worker.membership.shutdown_reason is not None)
    here._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert here.worker.membership.shutdown_reason == "agent and launcher are gone"
