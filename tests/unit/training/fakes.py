"""A model worker whose shell, segments and peers are of the test's making."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kintsugi.bulk.endpoint import BulkEndpoint
from kintsugi.checkpoint.snapshot import SnapshotSegments
from kintsugi.config.schema import (
    AlgorithmSection,
    Config,
    ModelSection,
    NewModel,
    ReferenceSection,
    WarmupSection,
)
from kintsugi.config.stages import stages
from kintsugi.errors import ProcessDied, RefusedError, UnknownPeer, WorldError, fault_of
from kintsugi.model.plan import plan_companions, plan_model
from kintsugi.model.seats import mesh_of, seat_of
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.process.membership import ShuttingDown
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.bulk import OpenBulk
from kintsugi.protocol.membership import Failed, Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import RankReady, RebuildGroup
from kintsugi.protocol.rollout import FetchSamples, SamplesFetched
from kintsugi.protocol.training import CallDone, CommitStep, RunCall, StartStage
from kintsugi.protocol.wire import Envelope, MessageKind
from kintsugi.training.checkpoint_delivery import CheckpointDelivery
from kintsugi.training.initial_weights import load_model
from kintsugi.training.state import TrainingState
from kintsugi.training.torch_framework import TorchFramework
from kintsugi.training.worker import ModelWorker
from kintsugi.transport import Delivery, Reply, new_key_pair
from kintsugi.types import Peer
from kintsugi.weights.publish import Publisher
from kintsugi.weights.transports.device import DeviceSlots
from tests.unit.training.world import CPU, Batch, calls_of, new_batch, rewarded

CONFIG = Config(
    name="test",
    seed=7,
    model=ModelSection(new=NewModel(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=2)),
    algorithm=AlgorithmSection(steps=5),
    warmup=WarmupSection(steps=2),
)
BETA_CONFIG = msgspec.structs.replace(CONFIG, algorithm=AlgorithmSection(steps=5, beta=0.1))
PPO_CONFIG = msgspec.structs.replace(
    CONFIG,
    algorithm=AlgorithmSection(name="ppo", steps=5, beta=0.1),
    reference=ReferenceSection(moving_average=0.9),
)
"""With everything that a rank can hold: a critic, and a reference that moves."""
GRPO = stages(CONFIG)[1]
BATCH = new_batch([(8, 3), (12, 7), (5, 1), (9, 0)])


class Done:
    """An answer that is there already, or an error."""

    done = True

    def __init__(self, answer: Callable[[], Reply]) -> None:
        self._answer = answer

    def result(self) -> Reply:
        return self._answer()


class FakeShell:
    """Requests are put in by the test, replies are taken out; other processes are functions."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.keys = new_key_pair()
        self.arrivals: deque[Delivery] = deque()
        self.num_arrived = 0
        self.replies: list[Body] = []
        self.bulk: dict[str, BulkEndpoint] = {}
        """Bulk endpoints of the processes that this one reaches."""
        self.peers: dict[str, Callable[[Body], Reply]] = {}
        self.hosts: dict[str, str] = {}
        self.asked: list[tuple[str, Body]] = []
        self.on_send: Callable[[Body], object] = lambda body: None
        self.shutting_down = False

    def arrive(self, *bodies: Body) -> None:
        self.arrivals.extend(self.delivery_of(body) for body in bodies)
        self.num_arrived += len(bodies)

    def delivery_of(self, body: Body) -> Delivery:
        envelope = Envelope("job", 1, "master-0", "a", 1, MessageKind.REQUEST)
        peer = self.peer("master-0") or Peer("master-0", "a", "host-0", "", b"")
        return Delivery(envelope, body, peer, b"")

    def peer(self, process: str) -> Peer | None:
        known = process in self.peers or process in self.hosts
        return Peer(process, "a", self.hosts.get(process, "host-0"), "", b"") if known else None

    def next_request(self, timeout_s: float) -> Delivery | None:
        return self.arrivals.popleft() if self.arrivals else None

    def take_all(self) -> list[Delivery]:
        if self.shutting_down:
            raise ShuttingDown("the test says so")
        taken = list(self.arrivals)
        self.arrivals.clear()
        return taken

    def reply(self, delivery: Delivery, body: Body) -> None:
        self.replies.append(body)

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        self.replies.append(Failed(fault_of(error, process=self.process, time=0.0)))

    def submit(self, process: str, body: Body, *, deadline_s: float) -> ReplyHandle:
        self.asked.append((process, body))
        self.on_send(body)
        return Done(lambda: self.peers.get(process, self._unknown(process))(body))

    @staticmethod
    def _unknown(process: str) -> Callable[[Body], Reply]:
        def ask(body: Body) -> Reply:
            raise UnknownPeer(f"{process} is not in the address book")

        return ask

    def send(self, process: str, body: Body) -> None:
        raise AssertionError("a rank sends no message that expects no reply")

    def report(self, *, load: float, gauges: dict[str, float]) -> None:
        pass

    def wake(self) -> None:
        pass


def _fill_with_nothing(weights: Mapping[str, Tensor]) -> None:
    for view in weights.values():
        view.fill_(math.nan)


OPENED: list[BulkEndpoint] = []
"""Bulk endpoints of this test; a fixture closes them after it."""


def bulk_of(shell: FakeShell) -> BulkEndpoint:
    """Bulk endpoint of a process whose control channel is a function call."""

    def call(process: str, request: OpenBulk, deadline_s: float) -> Reply:
        if process not in shell.bulk:
            raise ProcessDied(f"{process} is gone")
        peer = Peer(shell.process, "a", "host-0", "", b"")
        return Reply(shell.bulk[process].server.open_session(peer, request.certificate))

    bulk = BulkEndpoint(
        process=shell.process,
        mode="authenticated",
        peer_of=lambda process: Peer(process, "a", "host-0", "", b""),
        call=call,
    )
    OPENED.append(bulk)
    return bulk


class Rank:
    """A worker with its fake shell."""

    def __init__(
        self,
        process: str = "model-0",
        *,
        batch: Batch = BATCH,
        seed: int = 7,
        segments: SnapshotSegments | None = None,
        config: Config = CONFIG,
        is_blank: bool = False,
        delivery: CheckpointDelivery | None = None,
        shares_weights: bool = False,
    ) -> None:
        """`seed` is that of the initial weights; a blank rank has none yet. With `delivery` its host does not have the
        run folder. With `shares_weights` it computes in bfloat16, and servers read its weights where they are."""
        assert config.model.new is not None
        new = msgspec.structs.replace(config.model.new, seed=seed)
        model = load_model(
            msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, new=new)), device=CPU
        )
        self.config = config
        self.stage = stages(config)[-1]
        self.batch = rewarded(batch) if self.stage.has_critic else batch
        self.shell = FakeShell(process)
        self.shell.peers["rollout-0"] = lambda body: holder(body, batch)
        self.state = TrainingState(
            model,
            companions=plan_companions(config),
            compute_dtype=torch.bfloat16 if shares_weights else torch.float32,
            process=process,
            segments=segments,
            seat=seat_of(process, mesh_of(config.actor.layout)),
            shares_weights=shares_weights,
        )
        slots = DeviceSlots(CPU, host="host-0", versions_kept=1, shared=self.state.shared_weights)
        self.num_renewed = 0
        self.saves_beside = False
        """Whether requests go on while a save is under way."""
        self.bulk = bulk_of(self.shell)
        self.worker = ModelWorker(
            self.shell,
            self.state,
            framework=TorchFramework(CPU),
            config=config,
            tokenizer=tokenizer,
            publisher=Publisher(
                process=process,
                host="host-0",
                segments=None,
                bulk=self.bulk.server,
                device=slots if shares_weights else None,
            ),
            bulk=self.bulk,
            host="host-0",
            run_dir=Path("nowhere"),
            segments=segments,
            renew=self._renew,
            is_blank=is_blank,
            delivery=delivery,
        )
        if is_blank:
            self.state.fill_initial(_fill_with_nothing)

    def _renew(self) -> None:
        self.num_renewed += 1

    def ask(self, *bodies: Body) -> Body:
        """Put requests in, let the worker handle everything, give the last reply."""
        self.put(*bodies)
        return self.shell.replies[-1]

    def put(self, *bodies: Body) -> None:
        """Put requests in and let the worker handle what it can."""
        self.shell.arrive(*bodies)
        replies, before = self.shell.replies, -1
        # What came too early is handled after the request that it waited for, if that has come.
        while self.shell.arrivals or before < len(replies) < self.shell.num_arrived:
            before = len(replies)
            self.worker.turn(0.0)
            self.end_save()

    def end_save(self) -> None:
        """Wait until a save, which replies from its own thread, has ended."""
        thread = self.worker._saver._thread
        if thread is not None and not self.saves_beside:
            thread.join(10)

    def start(self) -> Rank:
        """Stand before the first step of the main stage: both warm-up steps are skipped over."""
        self.ask(rebuild(1), StartStage("warmup", 0))
        for step in (1, 2):
            self.ask(sft_call(step), CommitStep(step))
        assert isinstance(self.ask(StartStage(self.stage.name, 2)), RankReady)
        return self

    def calls(self, step: int) -> list[RunCall]:
        """Those of a step of the main stage, in their order."""
        names = calls_of(self.stage)
        calls = []
        for index, interface in enumerate(names):
            call = self.batch.call(
                self.stage, step=step, rank=0, world_size=1, num_shards=4, interface=interface
            )
            calls.append(msgspec.structs.replace(call, after=tuple(names[:index])))
        return calls

    def train(self, step: int) -> str:
        """Train and commit a step of the main stage; its digest."""
        digest = ""
        for call in self.calls(step):
            done = self.ask(call)
            assert isinstance(done, CallDone), done
            digest = done.state_digest
        assert self.ask(CommitStep(step)) == Ok()
        return digest

    def refusal(self, body: Body) -> str:
        answer = self.ask(body)
        assert isinstance(answer, Failed), answer
        return f"{answer.fault.kind}: {answer.fault.message}"


def tokenizer() -> Tokenizer:
    return plan_model(CONFIG)[1]


def holder(body: Body, batch: Batch) -> Reply:
    assert isinstance(body, FetchSamples)
    return Reply(SamplesFetched(tuple(batch.trajectories[key] for key in body.keys)))


def rebuild(generation: int) -> RebuildGroup:
    return RebuildGroup(generation, ("model-0",), "", sequence=generation)


def sft_call(step: int) -> RunCall:
    stage = stages(CONFIG)[0]
    return BATCH.call(stage, step=step, rank=0, world_size=1, num_shards=4)


def grpo_call(step: int = 3, *, generation: int = 1) -> RunCall:
    call = BATCH.call(GRPO, step=step, rank=0, world_size=1, num_shards=4)
    return msgspec.structs.replace(call, generation=generation)


def half_call(step: int) -> RunCall:
    return BATCH.call(GRPO, step=step, rank=0, world_size=2, num_shards=4)


class FakeSegments:
    """The agent's memory of one host, without an agent: it outlives every rank of the test."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, int]] = {}
        self.gone = False

    def create(self, name: str, size: int) -> int:
        self._check()
        if name not in self._held or self._held[name][1] != size:
            self.remove(name)
            descriptor = os.memfd_create(name.replace("/", "-"))
            os.ftruncate(descriptor, size)
            self._held[name] = descriptor, size
        return os.dup(self._held[name][0])

    def open(self, name: str) -> int:
        self._check()
        if name not in self._held:
            raise RefusedError(f"no segment {name}")
        return os.dup(self._held[name][0])

    def remove(self, name: str) -> None:
        descriptor, _ = self._held.pop(name, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)

    def names(self) -> list[str]:
        return sorted(self._held)

    def close(self) -> None:
        for name in self.names():
            self.remove(name)

    def _check(self) -> None:
        if self.gone:
            raise WorldError("the agent of this host is gone")
