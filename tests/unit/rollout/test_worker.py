import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
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
from kintsugi.errors import RefusedError, RemoteError
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
from kintsugi.runtime import WAITS
from kintsugi.transport import Delivery, Endpoint, PendingReply, new_key_pair
from kintsugi.types import Completion, Finish, Role, Sampling, Ticket, Wait

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
        self._keys = {name: new_key_pair() for name in ("master-0", "manager-0", "model-0", "rollout-0")}
        self.master = self._endpoint("master-0")
        self.manager: Endpoint | None = self._endpoint("manager-0")
        self.model = self._endpoint("model-0")
        read_end, self._lifeline = os.pipe()
        bootstrap = Bootstrap(
            job="j",
            run_dir=str(tmp_path),
            process="rollout-0",
            role=Role.ROLLOUT,
            host="host-0",
            incarnation="a",
            public_key=self._keys["rollout-0"][0],
            secret_key=self._keys["rollout-0"][1],
            master=self.master.peer(host="host-0"),
            lifeline=read_end,
        )
        _, self.tokenizer = plan_model(settings)
        log = EventLog(tmp_path / "events.jsonl", process="rollout-0")
        self.worker = RolloutWorker(bootstrap, settings, self.tokenizer, log=log)
        self.answers: list[str] = []
        self.held: list[Delivery] = []
        """What the manager was asked and does not answer, while it holds."""
        self.holding = False
        self.num_generated = 0
        self._book_number = 0
        self.master.admit(self.worker.endpoint.peer(host="host-0"))
        self.until(lambda: self.worker.membership.registered)
        self.publish_book()

    def _endpoint(self, name: str, *, incarnation: str = "a", epoch: int = 0, bind: str = "") -> Endpoint:
        public_key, secret_key = self._keys[name]
        return Endpoint(
            job="j",
            process=name,
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
            bind=bind or "tcp://127.0.0.1:*",
            epoch=epoch,
        )

    def publish_book(self, *, manager_registered: bool = True) -> None:
        """Everybody learns who is there now."""
        self._book_number += 1
        peers = [each.peer(host="host-0") for each in (self.master, self.model, self.worker.endpoint)]
        if self.manager:
            peer = self.manager.peer(host="host-0")
            peers.append(peer if manager_registered else msgspec.structs.replace(peer, address=""))
        book = AddressBook(self._book_number, tuple(peers))
        self.master.set_book(book)
        self.model.set_book(book)
        if self.manager:
            self.manager.set_book(book)
        self.master.send("rollout-0", book)
        self.until(lambda: self.worker.endpoint.book_number == self._book_number)

    def kill_manager(self) -> None:
        assert self.manager is not None
        self.manager.close()
        self.manager = None
        self.held.clear()

    def restart_manager(self) -> None:
        self._keys["manager-0"] = new_key_pair()
        self.manager = self._endpoint("manager-0", incarnation="b")

    def restart_master(self) -> None:
        """Another one takes over: same key pair, same address, next epoch."""
        address, epoch = self.master.address, self.master.epoch + 1
        self.master.close()
        self.master = self._endpoint("master-0", incarnation=f"m{epoch}", epoch=epoch, bind=address)
        self.publish_book()
        self.until(lambda: self.worker.membership.registered and self.worker.endpoint.epoch == epoch)

    def until(self, condition: Callable[[], bool], *, turns: int = 2000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.master_turn()
            self.manager_turn()
            self.model.poll(0)
            self.worker.turn()
        raise AssertionError("it did not happen")

    def master_turn(self) -> None:
        for delivery in self.master.poll(0.002):
            if isinstance(delivery.body, Register):
                self.master.reply(delivery, Registered(self.master.epoch))

    def manager_turn(self) -> None:
        if self.manager is None:
            return
        self.held += self.manager.poll(0.002)
        while self.held and not self.holding:
            delivery = self.held.pop(0)
            request = delivery.body
            assert isinstance(request, Generate)
            self.num_generated += 1
            self.manager.reply(delivery, Generated(request.ticket, 0, self._completions(request), "server-0"))

    def _completions(self, request: Generate) -> tuple[Completion, ...]:
        ids = [*self.tokenizer.encode(self.answers[0]), self.tokenizer.eos_token_id]
        logprobs = array("f", [-0.5] * len(ids)).tobytes()
        return tuple(
            Completion(sample, int32(ids), logprobs, int32([3] * len(ids)), Finish.EOS)
            for sample in request.wanted
        )

    def begin(self, body: Body) -> PendingReply:
        asker = self.model if isinstance(body, FetchSamples) else self.master
        return asker.request("rollout-0", body, deadline_s=20.0)

    def ask(self, body: Body) -> PendingReply:
        pending = self.begin(body)
        self.until(lambda: pending.done)
        return pending

    def close(self) -> None:
        RELEASE.set()
        self.worker.close()
        self.master.close()
        self.model.close()
        if self.manager:
            self.manager.close()
        os.close(self._lifeline)


def generation_waits() -> list[Wait]:
    return [wait for wait in WAITS.declared() if wait.what == "Generated"]


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
    ticket: str = "grpo:0:0:0",
    *,
    stage: str = "grpo",
    split: str = "train",
    num_samples: int = 2,
    new_tokens: int = 5,
    version: int = 3,
    timeout_s: float = 20.0,
) -> RunEpisodes:
    sampling = Sampling(max_new_tokens=new_tokens, num_samples=num_samples)
    return RunEpisodes(Ticket(ticket, stage, 0, 0, 0, num_samples), split, sampling, version, timeout_s)


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
    first = here.begin(run("grpo:0:0:0"))
    second = here.begin(run("grpo:0:1:0"))
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


def test_a_master_that_took_over_gets_the_answer_of_a_group_that_was_running(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    here.begin(run())
    here.until(lambda: len(here.held) == 1)
    here.restart_master()
    again = here.begin(run(timeout_s=30.0))
    here.ask(Ping())
    here.holding = False
    here.until(lambda: again.done)
    assert len(again.result().expect(EpisodesDone).samples) == 2
    assert here.num_generated == 1


def test_a_group_that_is_asked_for_again_has_the_time_of_the_later_order(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    here.begin(run(timeout_s=0.2))
    here.until(lambda: len(here.held) == 1)
    again = here.begin(run())
    here.until(lambda: len(here.held) == 2)
    here.holding = False
    here.until(lambda: again.done)
    assert len(again.result().expect(EpisodesDone).samples) == 2


def test_a_group_that_is_given_more_time_is_declared_with_it(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    here.begin(run(timeout_s=20.0))
    here.until(lambda: len(here.held) == 1)
    (before,) = generation_waits()
    again = here.begin(run(timeout_s=40.0))
    here.ask(Ping())
    (after,) = generation_waits()
    assert after.since == before.since and after.until > before.until + 10.0
    here.holding = False
    here.until(lambda: again.done)
    assert generation_waits() == []


def test_a_master_that_took_over_gets_a_finished_group_as_it_was_answered_before(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers = ["12"]
    first = here.ask(run()).result().expect(EpisodesDone)
    here.restart_master()
    here.answers = ["99"]
    assert here.ask(run()).result().expect(EpisodesDone) == first
    assert [text.completion for text in first.texts.values()] == ["12", "12"]
    assert here.num_generated == 1


def test_the_same_group_with_other_weights_is_run_anew(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    old = here.begin(run(version=3))
    here.until(lambda: len(here.held) == 1)
    new = here.begin(run(version=4))
    here.until(lambda: len(here.held) == 2)
    with pytest.raises(RemoteError, match="grpo:0:0:0 was dropped"):
        old.result()
    here.holding = False
    here.until(lambda: new.done)
    here.until(lambda: here.num_generated == 2)
    assert here.ask(run(version=4)).result().body == new.result().body
    here.ask(run(version=5))
    assert here.num_generated == 3


@pytest.mark.parametrize("moment", ["generating", "failing", "scoring"])
def test_a_dropped_group_is_not_kept_when_it_ends(moment: str, world: Callable[[Config], World]) -> None:
    here = world(config(reward=f"{__name__}.hanging"))
    here.answers, here.holding = ["12"], moment != "scoring"
    pending = here.begin(run())
    here.until(lambda: CALLS == [1] if moment == "scoring" else len(here.held) == 1)
    here.master.send("rollout-0", Drop(("grpo:0:0:0",)))
    here.until(lambda: pending.done)
    if moment == "failing":
        assert here.manager is not None
        here.manager.fail(here.held.pop(), RefusedError("not now"))
    here.holding = False
    RELEASE.set()
    here.ask(run("grpo:0:1:0"))
    with pytest.raises(RemoteError, match="does not keep sample"):
        here.ask(FetchSamples(("grpo:0:0:0/0",))).result()


def test_an_evaluation_is_answered_again_until_the_next_version_is_evaluated(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers = ["12"]
    problem = run("eval:3:0:0", stage="eval", split="eval", version=3)
    first = here.ask(problem).result().body
    here.restart_master()
    assert here.ask(problem).result().body == first
    assert here.num_generated == 1
    here.ask(run("eval:4:0:0", stage="eval", split="eval", version=4))
    here.ask(problem)
    assert here.num_generated == 3


def test_a_group_outlives_the_manager_and_is_asked_of_the_next_one(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    pending = here.begin(run())
    here.until(lambda: len(here.held) == 1)
    here.kill_manager()
    here.publish_book()
    late = here.begin(run("grpo:0:1:0"))
    here.ask(Ping())
    assert not pending.done and not late.done
    here.restart_manager()
    here.publish_book(manager_registered=False)
    here.ask(Ping())
    here.publish_book()
    here.until(lambda: len(here.held) == 2)
    asked = [delivery.body for delivery in here.held]
    assert all(isinstance(body, Generate) and body.timeout_s < 20.0 for body in asked)
    here.holding = False
    here.until(lambda: pending.done and late.done)
    assert all(len(p.result().expect(EpisodesDone).samples) == 2 for p in (pending, late))


def test_a_manager_that_is_replaced_in_one_address_book_is_asked_again_too(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    pending = here.begin(run())
    here.until(lambda: len(here.held) == 1)
    here.kill_manager()
    here.restart_manager()
    here.holding = False
    here.publish_book()
    here.until(lambda: pending.done)
    assert len(pending.result().expect(EpisodesDone).samples) == 2


def test_a_group_fails_at_its_deadline_when_no_manager_comes(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.kill_manager()
    here.publish_book()
    pending = here.ask(run(timeout_s=0.1))
    with pytest.raises(RemoteError, match="for manager-0: Generate grpo:0:0:0"):
        pending.result()
