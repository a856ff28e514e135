"""A whole cluster in one thread on virtual time: the very same master, with workers that only pretend.

Simulated workers answer after delays drawn from a seed. A model step is a collective: ranks answer when all of them
were asked, with a state digest that depends on the previous state and on exactly which samples were trained, so two
runs end in the same digest only if they trained the same batches.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable

import msgspec

from kintsugi.config import Config
from kintsugi.control.layout import plan_layout
from kintsugi.control.master import Master
from kintsugi.control.phases import Phase
from kintsugi.control.protocol import (
    Began,
    Effect,
    Event,
    Exited,
    Finish,
    Forget,
    Joined,
    Replied,
    Request,
    RequestFailed,
    Tick,
)
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault
from kintsugi.facts import Fact
from kintsugi.messages import (
    Body,
    CallDone,
    EpisodesDone,
    HashWeights,
    LoadWeights,
    Ok,
    ProcessStarted,
    Publish,
    Published,
    RunCall,
    RunEpisodes,
    Save,
    Saved,
    StartProcess,
    WeightsHashed,
    WeightsLoaded,
)
from kintsugi.runtime import VirtualClock, random_stream
from kintsugi.types import Finish as FinishReason
from kintsugi.types import Peer, Role, SampleMeta, StreamSource, WeightManifest, role_of, sample_key

TICK_S = 0.2
DETECTION_S = 0.002
"""From a process's end to the agent's message: the kernel says so at once."""


class Kill(msgspec.Struct, frozen=True):
    """End a process when the run first reaches a phase of a step."""

    process: str
    step: int
    phase: Phase


class Outcome(msgspec.Struct):
    """What a simulated run came to."""

    facts: list[Fact]
    outcome: str
    state_digest: str
    kills_fired: list[Kill]
    num_events: int
    virtual_s: float


class SimulatedCluster:
    """Drives one master through a run. `run()` gives the facts it would have journaled."""

    def __init__(
        self,
        config: Config,
        *,
        seed: int,
        num_rows: int = 1000,
        kills: Iterable[Kill] = (),
        unscorable_stage: str | None = None,
    ) -> None:
        """`unscorable_stage`: rewards of this stage's samples always fail."""
        self._clock = VirtualClock()
        self._random = random_stream(seed, "simulation")
        min_valid = 2 if config.algorithm.group_size > 1 else 1
        self._state = MasterState(min_valid=min_valid, keep_checkpoints=config.checkpoint.keep)
        self._layout = plan_layout(config)
        self._master = Master(
            config,
            state=self._state,
            layout=self._layout,
            num_rows=num_rows,
            num_eval_rows=config.data.num_eval,
            checkpoint_folder="checkpoints",
        )
        self._kills = list(kills)
        self._unscorable_stage = unscorable_stage
        self._fired: list[Kill] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._alive: dict[str, str] = {}
        self._digest = "initial"
        self._step_calls: dict[int, dict[str, Request]] = {}
        self._facts: list[Fact] = []
        self._finished: str | None = None
        self.num_events = 0

    def run(self, *, limit_s: float = 3600.0) -> Outcome:
        """Until the master finishes; a run that is not over at `limit_s` of virtual time hangs, which is a bug."""
        self._feed(Began("simulated", "", "1"))
        for plan in self._layout:
            if plan.role is Role.AGENT:
                self._alive[plan.process] = "0"
                self._after(0.01, self._join(plan.process, "0"))
        self._after(TICK_S, self._tick)
        while self._finished is None:
            assert self._queue, "nothing is under way and the run has not ended"
            due, _, action = heapq.heappop(self._queue)
            assert due < limit_s, (
                f"still running after {limit_s} s of virtual time, in phase {self._master.phase}"
            )
            self._clock.advance(due - self._clock.monotonic())
            action()
        return Outcome(
            self._facts, self._finished, self._digest, self._fired, self.num_events, self._clock.monotonic()
        )

    def _tick(self) -> None:
        self._feed(Tick())
        self._after(TICK_S, self._tick)

    def _feed(self, event: Event) -> None:
        self.num_events += 1
        decision = self._master.decide(event, self._clock.monotonic())
        self._facts.extend(decision.facts)
        for effect in decision.effects:
            self._act(effect)
        self._fire_kills()

    def _act(self, effect: Effect) -> None:
        match effect:
            case Request():
                self._request(effect)
            case Forget(process=process):
                self._alive.pop(process, None)
            case Finish(outcome=outcome):
                self._finished = outcome
            case _:
                pass  # Messages and records that no simulated worker reacts to.

    def _fire_kills(self) -> None:
        due = [
            kill
            for kill in self._kills
            if kill.step == self._state.step + 1
            and kill.phase is self._master.phase
            and kill.process in self._alive
        ]
        for kill in due:
            self._kills.remove(kill)
            self._fired.append(kill)
            incarnation = self._alive.pop(kill.process)
            exited = Exited(kill.process, incarnation, -9)
            self._after(DETECTION_S, lambda exited=exited: self._feed(exited))  # type: ignore[misc]

    def _request(self, request: Request) -> None:
        incarnation = self._alive.get(request.to)
        if incarnation is None:
            fault = Fault("unreachable", "ProcessDied", request.to, f"{request.to} is not there", 0.0)
            self._after(0.0, lambda: self._feed(RequestFailed(request.token, request.to, fault)))
        elif isinstance(request.body, RunCall):
            self._join_collective(request, request.body)
        else:
            self._answer(request, self._answer_to(request), incarnation)

    def _answer(self, request: Request, body: Body, incarnation: str) -> None:
        """After a while, if the process still lives then."""

        def arrive() -> None:
            if self._alive.get(request.to) == incarnation:
                self._feed(Replied(request.token, request.to, body))

        self._after(self._random.uniform(0.001, 0.3), arrive)

    def _answer_to(self, request: Request) -> Body:
        match request.body:
            case StartProcess(process=process, incarnation=incarnation):
                self._alive[process] = incarnation
                self._after(self._random.uniform(0.3, 2.0), self._join(process, incarnation))
                return ProcessStarted(process, incarnation, 1000 + self._number, b"key")
            case RunEpisodes():
                return self._episodes(request.to, request.body)
            case Publish(version=version, step=step):
                manifest = WeightManifest(version, step, (), 0, self._digest)
                return Published(manifest, (StreamSource(request.to),))
            case LoadWeights(manifest=manifest):
                servers = tuple(name for name in sorted(self._alive) if role_of(name) is Role.SERVER)
                return WeightsLoaded(manifest.version, manifest.digest, servers)
            case Save(step=step, folder=folder):
                return Saved(step, f"{folder}/step-{step}", self._digest)
            case HashWeights():
                return WeightsHashed(self._digest)
            case _:
                return Ok()

    def _episodes(self, worker: str, request: RunEpisodes) -> EpisodesDone:
        ticket = request.ticket
        if ticket.stage == self._unscorable_stage:
            keys = [sample_key(ticket.id, index) for index in range(ticket.num_samples)]
            return EpisodesDone(ticket.id, (), dict.fromkeys(keys, "no verdict"))
        metas = []
        for index in range(ticket.num_samples):
            draw = random_stream(0, ticket.id, index)
            key, length = sample_key(ticket.id, index), draw.randint(2, 20)
            metas.append(
                SampleMeta(
                    key=key,
                    ticket=ticket.id,
                    num_tokens=length + 4,
                    num_loss_tokens=length,
                    reward=(reward := float(draw.random() < 0.5)),
                    reward_components={"reward": reward},
                    finish=FinishReason.EOS,
                    version=request.version,
                    holder=worker,
                    digest=key,
                )
            )
        return EpisodesDone(ticket.id, tuple(metas))

    def _join_collective(self, request: Request, call: RunCall) -> None:
        """Ranks answer together, once all of them were asked; a dead one keeps the others waiting."""
        asked = self._step_calls.setdefault(call.step, {})
        asked[request.to] = request
        ranks = [plan.process for plan in self._layout if plan.role is Role.MODEL]
        if not all(rank in asked for rank in ranks):
            return
        keys = sorted(
            item.key
            for other in asked.values()
            if isinstance(other.body, RunCall)
            for shard in other.body.shards
            for item in shard.items
        )
        assert len(keys) == len(set(keys)), "a sample is in two shards"
        self._digest = hashlib.sha256(repr((self._digest, call.step, keys)).encode()).hexdigest()[:16]
        for rank, other in self._step_calls.pop(call.step).items():
            self._answer(other, CallDone(call.step, self._digest, {"loss": 0.0}), self._alive[rank])

    def _join(self, process: str, incarnation: str) -> Callable[[], None]:
        host = next(plan.host for plan in self._layout if plan.process == process)

        def join() -> None:
            if self._alive.get(process) == incarnation:
                peer = Peer(process, incarnation, host, f"sim://{process}", b"key")
                self._feed(Joined(peer, role_of(process), 1))

        return join

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self._clock.monotonic() + delay_s, self._number, action))
