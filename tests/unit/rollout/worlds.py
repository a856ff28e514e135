"""A rollout worker with everybody it speaks to, for tests."""

import math
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config.schema import (
    AlgorithmSection,
    Config,
    ModelSection,
    NewModel,
    RolloutSection,
    SamplingSection,
    WarmupSection,
)
from kintsugi.model.plan import plan_model
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.protocol.membership import AddressBook, Register, Registered
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import FetchSamples, RunEpisodes
from kintsugi.rollout.rewards.spec import combined, load_rewards
from kintsugi.rollout.trajectory import int32
from kintsugi.rollout.user_code.channel import GroupScored, RewardCase, UserCodeFailed
from kintsugi.rollout.user_code.reward_runner import call
from kintsugi.rollout.worker import RolloutWorker
from kintsugi.runtime.clock import SystemClock
from kintsugi.telemetry.events import EventLog, QuarantineCause, SamplesQuarantined, records_in
from kintsugi.transport import Delivery, Endpoint, PendingReply, new_key_pair
from kintsugi.types import Completion, FinishReason, Role, SamplingParams, Ticket


class InlineJudging:
    """Judges at once, in this process: for tests that are about something else."""

    holding = False
    """Keep the verdicts back."""

    def __init__(self, settings: Config, **_: Any) -> None:
        self._rewards = load_rewards(settings.algorithm.reward)
        self.verdicts: list[GroupScored | UserCodeFailed] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.verdicts)

    @property
    def name(self) -> str:
        return "reward process"

    def prepare(self) -> None:
        pass

    def submit(self, case: RewardCase, *, alone: bool) -> None:
        outcomes = {reward.name: call(reward, case) for reward in self._rewards}
        values = {name: answer for name, (answer, _) in outcomes.items() if isinstance(answer, list)}
        components, reasons = combined(values, count=len(case.completions))
        self.verdicts.append(GroupScored(case.id, components, reasons, {}))

    def take(self, now: float) -> list[GroupScored | UserCodeFailed]:
        given, self.verdicts = ([], self.verdicts) if InlineJudging.holding else (self.verdicts, [])
        return given

    def next_deadline(self) -> float:
        return math.inf

    def close(self) -> None:
        pass


def config(
    *,
    reward: str = "kintsugi.rollout.rewards.exact_answer",
    timeout_s: float = 10.0,
    environment: str | None = None,
    options: dict[str, Any] | None = None,
) -> Config:
    return Config(
        name="t",
        model=ModelSection(new=NewModel()),
        algorithm=AlgorithmSection(reward=(reward,)),
        warmup=WarmupSection(),
        sampling=SamplingSection(max_new_tokens=5),
        rollout=RolloutSection(
            attempts=2,
            reward_timeout_s=timeout_s,
            environment=environment,
            options=options or {},
            turn_timeout_s=timeout_s,
        ),
    )


class AdvancedClock(SystemClock):
    """The system clock, moved forward by a test."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


class World:
    """A rollout worker, a master that asks and a manager that answers: real sockets, all driven by this thread."""

    def __init__(self, tmp_path: Path, settings: Config) -> None:
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
        self.events = tmp_path / "events.jsonl"
        log = EventLog(self.events, process="rollout-0")
        self.clock = AdvancedClock()
        """The worker's."""
        self.worker = RolloutWorker(bootstrap, settings, self.tokenizer, log=log, clock=self.clock)
        self.answers: list[str] = []
        """Of each turn; `#` stands for the sample."""
        self.held: list[Delivery] = []
        """What the manager was asked and does not answer, while it holds."""
        self.holding = False
        self.num_generated = 0
        self._book_number = 0
        self.master.admit(self.worker.endpoint.peer(host="host-0"))
        self.until(lambda: self.worker.membership.registered)
        self.publish_book()

    def quarantines(self) -> list[tuple[str, QuarantineCause]]:
        """Return ticket and cause of every group that the worker recorded to have given no sample."""
        events = (record.event for record in records_in(self.events.read_bytes().splitlines()))
        return [(event.ticket, event.cause) for event in events if isinstance(event, SamplesQuarantined)]

    def _endpoint(self, name: str, *, incarnation: str = "a", term: int = 0, bind: str = "") -> Endpoint:
        public_key, secret_key = self._keys[name]
        return Endpoint(
            job="j",
            process=name,
            incarnation=incarnation,
            public_key=public_key,
            secret_key=secret_key,
            bind=bind or "tcp://127.0.0.1:*",
            term=term,
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
        """Another one takes over: same key pair, same address, next term."""
        address, term = self.master.address, self.master.term + 1
        self.master.close()
        self.master = self._endpoint("master-0", incarnation=f"m{term}", term=term, bind=address)
        self.publish_book()
        self.until(lambda: self.worker.membership.registered and self.worker.endpoint.term == term)

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
                self.master.reply(delivery, Registered(self.master.term))

    def manager_turn(self) -> None:
        if self.manager is None:
            return
        self.held += self.manager.poll(0.002)
        while self.held and not self.holding:
            delivery = self.held.pop(0)
            request = delivery.body
            assert isinstance(request, Generate)
            self.num_generated += 1
            answer = Generated(request.ticket, request.turn, self._completions(request), "server-0")
            self.manager.reply(delivery, answer)

    def _completions(self, request: Generate) -> tuple[Completion, ...]:
        """The answer of that turn; of later ones, the last."""
        said = self.answers[min(request.turn, len(self.answers) - 1)]
        return tuple(self._completion(sample, said) for sample in request.wanted)

    def _completion(self, sample: int, said: str) -> Completion:
        said = said.replace("#", str(sample))
        ids = [*self.tokenizer.encode(said), self.tokenizer.eos_token_id] if said else []
        logprobs = array("f", [-0.5] * len(ids)).tobytes()
        return Completion(sample, int32(ids), logprobs, int32([3] * len(ids)), FinishReason.EOS)

    def begin(self, body: Body) -> PendingReply:
        asker = self.model if isinstance(body, FetchSamples) else self.master
        return asker.request("rollout-0", body, deadline_s=20.0)

    def ask(self, body: Body) -> PendingReply:
        pending = self.begin(body)
        self.until(lambda: pending.done)
        return pending

    def close(self) -> None:
        self.worker.close()
        self.master.close()
        self.model.close()
        if self.manager:
            self.manager.close()
        os.close(self._lifeline)


def run(
    ticket: str = "grpo:0:0:0",
    *,
    stage: str = "grpo",
    split: str = "train",
    num_samples: int = 2,
    new_tokens: int = 5,
    version: int = 3,
    timeout_s: float = 20.0,
    lineage: int = 0,
) -> RunEpisodes:
    sampling = SamplingParams(max_new_tokens=new_tokens, num_samples=num_samples)
    return RunEpisodes(
        Ticket(ticket, stage, 0, 0, 0, num_samples), split, sampling, version, timeout_s, lineage
    )
