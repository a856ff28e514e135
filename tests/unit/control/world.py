"""The processes that a driven master speaks with: agents, and healthy workers that do what they are asked at once.

Ranks are real as far as recovery goes: the `Processor` and `ReplayAdapter` of the recovery package, whose digests say
which samples were trained in which steps. What a process held is gone when it is killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kintsugi.errors import GroupBroken, RefusedError
from kintsugi.protocol.agents import Inspect, Inspected, ProcessStarted, StartProcess, StopProcess
from kintsugi.protocol.generation import Retire
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import AskStanding, RebuildGroup
from kintsugi.protocol.rollout import EpisodesDone, RunEpisodes
from kintsugi.protocol.training import (
    CallDone,
    CommitStep,
    EvaluatePairs,
    HashWeights,
    PairsEvaluated,
    RunCall,
    Save,
    Saved,
    StartStage,
    WeightsHashed,
)
from kintsugi.protocol.weights import LoadWeights, Publish, Published, WeightsLoaded
from kintsugi.recovery.rank import Flow, Operation, Processor
from kintsugi.recovery.step_calls import StepCalls
from kintsugi.simulation.replay_adapter import ReplayAdapter, ReplaySnapshot, Snapshots
from kintsugi.types import (
    ChildReport,
    FinishReason,
    Role,
    SampleMeta,
    StreamSource,
    Ticket,
    WeightManifest,
    role_of,
    sample_key,
)

Rewards = Callable[[Ticket, int], float]
"""(ticket, sample) → what it earns."""


def every_second_is_right(ticket: Ticket, index: int) -> float:
    return float(index % 2)


def scored(
    ticket: Ticket,
    *,
    version: int,
    holder: str = "rollout-0",
    rewards: Rewards = every_second_is_right,
) -> EpisodesDone:
    metas = []
    for index in range(ticket.num_samples):
        reward, key = rewards(ticket, index), sample_key(ticket.id, index)
        metas.append(
            SampleMeta(
                key, ticket.id, 8, 4, reward, {"exact": reward}, FinishReason.EOS, version, holder, key
            )
        )
    return EpisodesDone(ticket.id, tuple(metas))


class Rank:
    """A model worker of one incarnation."""

    def __init__(self, name: str, world: World, *, host: str) -> None:
        self.name, self._world = name, world
        snapshots = world.snapshots.setdefault(host, {})
        self.adapter = ReplayAdapter(name, snapshots, flow=world.flow, fetch=self._fetch, probe=self._probe)
        self._processor = Processor(self.adapter)
        self._group: dict[str, Rank] = {}
        self._calls = StepCalls()
        self.num_calls = 0
        """Calls that were run, not counting answers from the record."""
        self.operations: list[Operation] = []
        """That were carried out, in their order."""

    def serve(self, body: Body) -> Body:
        match body:
            case RunCall():
                return self._run(body)
            case CommitStep(step=step):
                self.adapter.commit(step)
                self._calls.forget()
                return Ok()
            case StartStage(stage=stage):
                self.adapter.start_stage(stage)
                return self.adapter.standing()
            case Publish(version=version, step=step, transports=()):
                return Published(WeightManifest(version, step, (), 0, ""), ())
            case Publish(version=version, step=step):
                manifest = WeightManifest(version, step, (), 0, self._weights(step))
                return Published(manifest, (StreamSource(self.name),))
            case Save(step=step, folder=folder):
                self._weights(step)
                self._world.checkpoints[f"{folder}/step-{step}"] = self.adapter.committed
                return Saved(step, f"{folder}/step-{step}", self.adapter.committed.digest)
            case EvaluatePairs(step=step, first=first, count=count):
                weights = self._weights(step)
                return PairsEvaluated(
                    step, first, tuple((ord(weights[0]) + first + i) % 2 == 0 for i in range(count))
                )
            case HashWeights():
                return WeightsHashed(self._weights(self.adapter.committed.step))
            case AskStanding():
                return self._calls.standing(
                    self.adapter.standing(),
                    group=self.adapter.generation,
                    ranks=tuple(self._group) if self.adapter.generation else (),
                    is_normal=self._processor.is_normal,
                    is_between_calls=self.adapter.is_between_calls,
                    queued=(),
                )
            case _:
                assert isinstance(body, Operation), body
                ready = self._processor.carry_out(body)
                self._calls.forget()
                self.operations.append(body)
                return ready

    def _run(self, call: RunCall) -> CallDone:
        standing = self.adapter.standing()
        known = self._calls.answer_to(call)
        if known is not None:
            return known
        self._processor.admit(call.step, goes_on=self.adapter.is_between_calls)
        if call.generation != self.adapter.generation or call.stage != standing.stage:
            raise RefusedError(f"expected {self.adapter.generation} {standing.stage}, got {call.generation}")
        self._calls.begin(call)
        try:
            return self._train(call)
        finally:
            self._calls.fail()

    def _train(self, call: RunCall) -> CallDone:
        self._check_group()
        for shard in call.shards:
            for item in shard.items:
                if item.key not in self._world.kept.get(item.holder, ()):
                    raise GroupBroken(f"{item.holder} has no {item.key}")
        before = self._calls.names
        assert before == call.after, f"{call.call} was sent after {call.after}, done is {before}"
        digest, keys = "", [item.key for shard in call.shards for item in shard.items]
        if call.interface.endswith("_train"):
            samples = self._world.batches[call.step, call.generation, call.call]
            trained = samples | {f"{call.call} after {call.after}"}
            digest = self.adapter.train(call.step, trained, prepares=call.prepares)
        outputs = {}
        if call.interface == "reference_inference":
            outputs["reference_kl"] = {key: float(len(key) + ord(key[-1])) for key in keys}
        name = "loss" if call.call == "actor_train" else f"{call.call}_loss"
        done = CallDone(call.step, digest, {name: 0.5}, {"forward": 0.1}, outputs)
        self._calls.end(call, done)
        self.num_calls += 1
        return done

    def _check_group(self) -> None:
        gone = [name for name, rank in self._group.items() if self._world.ranks.get(name) is not rank]
        if gone:
            raise GroupBroken(f"{', '.join(gone)} is gone")

    def _probe(self, request: RebuildGroup) -> None:
        if not set(request.ranks) <= set(self._world.ranks):
            raise GroupBroken(f"not every rank of {request.ranks} is there")
        self._group = {name: self._world.ranks[name] for name in request.ranks}

    def _weights(self, step: int) -> str:
        """Of the weights alone: a new optimizer does not change them."""
        committed = self.adapter.committed
        if committed.step != step:
            raise RefusedError(f"stands at step {committed.step}, not at {step}")
        return hashlib.sha256(repr(committed.vector).encode()).hexdigest()[:12]

    def _fetch(self, source: str, step: int) -> ReplaySnapshot:
        """A checkpoint by its path, a replica by its name; nobody else keeps anything here."""
        if source in self._world.checkpoints:
            return self._world.checkpoints[source]
        rank = self._world.ranks.get(source)
        if rank is None:
            raise RefusedError(f"{source} has nothing")
        if rank.adapter.standing().prepared_step == step:
            rank.adapter.commit(step)  # Nobody asks for a step that is not committed.
        if rank.adapter.committed.step != step or not rank.adapter.committed.stage:
            raise RefusedError(f"{source} stands at step {rank.adapter.committed.step}, not at {step}")
        return rank.adapter.committed


class World:
    """Who lives where, and what each one holds."""

    def __init__(
        self, hosts: dict[str, str], *, flow: Flow, rewards: Rewards = every_second_is_right
    ) -> None:
        """`hosts`: process → where it is planned."""
        self.hosts, self.flow, self.rewards = hosts, flow, rewards
        self.children: dict[str, dict[str, str]] = {host: {} for host in hosts.values()}
        """Host → living process → incarnation."""
        self.ranks: dict[str, Rank] = {}
        self.snapshots: dict[str, Snapshots] = {}
        """Host → what its agent holds."""
        self.checkpoints: dict[str, ReplaySnapshot] = {}
        self.kept: dict[str, set[str]] = {}
        """Rollout worker → keys of the samples that it keeps."""
        self.batches: dict[tuple[int, int, str], set[str]] = {}
        """(step, generation, call) → the samples of all ranks."""

    @property
    def agents(self) -> list[str]:
        return [process for process in self.hosts if role_of(process) is Role.AGENT]

    def living(self) -> list[tuple[str, str, str]]:
        """(process, incarnation, host) of every worker that lives."""
        return [(p, i, host) for host, here in self.children.items() for p, i in here.items()]

    def is_alive(self, process: str) -> bool:
        """Agents live as long as they are known."""
        return process in self.agents or any(process in here for here in self.children.values())

    def reports(self, host: str) -> tuple[ChildReport, ...]:
        return tuple(ChildReport(p, i, 1, b"key") for p, i in self.children[host].items())

    def asked(self, body: Body) -> None:
        """A request is on its way; what a collective sums over is known from all its calls."""
        if isinstance(body, RunCall):
            keys = {f"{item.key} {item.values}" for shard in body.shards for item in shard.items}
            self.batches.setdefault((body.step, body.generation, body.call), set()).update(keys)

    def kill(self, process: str) -> str | None:
        """End a process with all that it held; gives its incarnation, if it lived."""
        self.ranks.pop(process, None)
        self.kept.pop(process, None)
        return next((here.pop(process) for here in self.children.values() if process in here), None)

    def serve(self, to: str, body: Body) -> Body:
        """What the process answers; a KintsugiError when it can not."""
        if to in self.ranks:
            return self.ranks[to].serve(body)
        match body:
            case StartProcess(process=process, incarnation=incarnation):
                return self._start(process, incarnation, host=self.hosts[to])
            case StopProcess(process=process, incarnation=incarnation):
                if self.children[self.hosts[to]].get(process) == incarnation:
                    self.kill(process)
                return Ok()
            case Inspect(process=process, incarnation=incarnation):
                lives = self.children[self.hosts[to]].get(process) == incarnation
                return Inspected("S" if lives else "")
            case RunEpisodes(ticket=ticket, version=version):
                done = scored(ticket, version=version, holder=to, rewards=self.rewards)
                self.kept.setdefault(to, set()).update(meta.key for meta in done.samples)
                return done
            case Retire():
                return Ok()
            case LoadWeights(manifest=manifest):
                return WeightsLoaded(manifest.version, manifest.digest, ("server-0", "server-1"))
            case _:
                raise AssertionError(f"{to} was asked {body}")

    def _start(self, process: str, incarnation: str, *, host: str) -> ProcessStarted:
        here = self.children[host]
        if here.get(process) != incarnation:
            here[process] = incarnation
            if role_of(process) is Role.MODEL:
                self.ranks[process] = Rank(process, self, host=host)
        return ProcessStarted(process, incarnation, 1, b"key")
