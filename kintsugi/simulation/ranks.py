"""Simulated training ranks: the real recovery `Processor` and the torch-free `ReplayAdapter` around them.

A call is a collective of one generation of the group: it ends for everybody or for nobody, a rank that is dead or
stopped keeps the others waiting, and the next round of recovery breaks it. A rank works a step's calls off in the order
in which they were sent; one that the network brings too early waits.

Processor and adapter block where a real rank does; here nothing blocks. A state that has to be fetched raises `NotYet`
out of the operation, and the same operation is carried out again when it has come, which the protocol allows; a group
is joined once all its ranks have come, or have not.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kintsugi.errors import Fault, GroupBroken, KintsugiError, RefusedError
from kintsugi.messages import (
    Body,
    CallDone,
    CommitStep,
    EvaluatePairs,
    FetchSamples,
    FetchWeights,
    HashWeights,
    Ok,
    PairsEvaluated,
    Publish,
    Published,
    RunCall,
    SamplesFetched,
    Save,
    Saved,
    StartStage,
    WeightsFetched,
    WeightsHashed,
)
from kintsugi.operations import FetchState, KeepState, RebuildGroup, StateFetched
from kintsugi.recovery.adapters import ReplayAdapter, Snapshot, Snapshots
from kintsugi.recovery.processor import Flow, Operation, Processor
from kintsugi.simulation.workers import FETCH_DEADLINE_S, Worker, drawn_digest
from kintsugi.transport.exchange import Delivery
from kintsugi.types import StreamSource, WeightManifest

Place = tuple[object, ...]

TRAINING = "_train"
"""How interfaces end that change the state."""


def state_message(state: Snapshot) -> StateFetched:
    """A state on its way; its numbers stand where a real rank names the bulk frames that follow."""
    numbers = ",".join(map(str, state.vector))
    manifest = WeightManifest(state.step, state.step, (), 0, f"{state.digest} {numbers}")
    return StateFetched(manifest, state.stage, 0, 0)


def state_of(message: StateFetched) -> Snapshot:
    digest, _, numbers = message.manifest.digest.partition(" ")
    vector = tuple(int(number) for number in numbers.split(","))
    return Snapshot(message.manifest.step, message.stage, vector, digest, committed=True)


def weights_digest(state: Snapshot) -> str:
    """Of the weights alone: a new optimizer does not change them."""
    return ",".join(map(str, state.vector[:2]))


class NotYet(Exception):
    """Not an error: the operation is to be carried out again when what it waits for has come."""


class Rendezvous:
    """Where ranks meet: by generation for a new group, by call for a collective. One for all ranks of a world."""

    def __init__(self) -> None:
        self._places: dict[Place, dict[str, Rank]] = {}

    def arrive(self, rank: Rank, *, expected: tuple[str, ...]) -> list[Rank]:
        """Everybody at this rank's place, once all are there; else nobody. Who died or left is waited for."""
        place = rank.place
        present = self._places.setdefault(place, {})
        present[rank.name] = rank
        here = [present[name] for name in expected if name in present]
        if len(here) < len(expected) or not all(other.alive and other.place == place for other in here):
            return []
        del self._places[place]
        return here


class HostMemory:
    """What outlives the ranks of a host: snapshots that its agent holds, copies for other hosts, and the disk."""

    def __init__(self, checkpoints: dict[str, Snapshot]) -> None:
        self.checkpoints = checkpoints
        """By path; all hosts share it."""
        self.snapshots: Snapshots = {}
        self.buddies: dict[str, Snapshot] = {}
        """Rank of another host → the latest state that it gave us."""


class Rank(Worker):
    """One model worker. While a call or an operation waits, requests wait too, unless recovery interrupts."""

    def __init__(
        self, *arguments: Any, rendezvous: Rendezvous, memory: HostMemory, flow: Flow, **names: Any
    ) -> None:
        super().__init__(*arguments, **names)
        self._rendezvous, self._memory = rendezvous, memory
        self.adapter = ReplayAdapter(
            self.name, memory.snapshots, flow=flow, fetch=self._fetch, probe=self._probe
        )
        self.processor = Processor(self.adapter)
        self.capabilities = {"store": self.address, "flow": flow.value}
        self.place: Place = ()
        """Where it waits for the others."""
        self._members: tuple[str, ...] = ()
        """Of the group, in rank order."""
        self._met = False
        self._found: dict[tuple[str, int], Snapshot | Fault] = {}
        self._busy: Delivery | None = None
        self._backlog: deque[Delivery] = deque()
        self._answers: dict[tuple[int, str], CallDone] = {}
        """(step, call) → the answer to it, until the step is committed or given up."""
        self._samples: dict[str, str] = {}
        """Sample key → what it says; of the present step, once all of this rank's share are there."""
        self._published = -1
        self._attempt = 0
        """Counts what it is busy with: an answer to an earlier attempt comes too late."""

    # Requests.

    def serve(self, delivery: Delivery, body: Body) -> None:
        if isinstance(body, FetchWeights | FetchState):
            self._answer_now(delivery, body)
        elif self._busy is None and not self._is_early(body):
            self._begin(delivery)
        elif self._busy is not None and isinstance(body, Operation) and self._interrupts(body):
            self._interrupt()
            self._begin(delivery)
        else:
            self._backlog.append(delivery)

    def _is_early(self, body: Body) -> bool:
        """Whether a call has to wait for others of its step that were sent before it."""
        if not isinstance(body, RunCall) or body.generation != self.adapter.generation:
            return False
        return any((body.step, name) not in self._answers for name in body.after)

    def _interrupts(self, operation: Operation) -> bool:
        assert self._busy is not None
        if isinstance(self._busy.body, Operation):
            return operation.sequence > self._busy.body.sequence
        return self.processor.interrupts(operation)

    def _interrupt(self) -> None:
        """Give up what runs. A rank that was in the middle of its update is left half updated."""
        busy, self._busy, self.place = self._busy, None, ()
        self._attempt += 1
        assert busy is not None
        body, why = busy.body, GroupBroken("it was given up: recovery has begun")
        if isinstance(body, RebuildGroup):
            self._fail_to_meet(busy, body)
            return
        if (
            isinstance(body, RunCall)
            and body.interface.endswith(TRAINING)
            and self._samples
            and self.world.random.random() < 0.3
        ):
            self.adapter.train(body.step, self._samples, interrupted=True)
        self.endpoint.fail(busy, type(why).__name__, str(why))

    def _begin(self, delivery: Delivery) -> None:
        self._busy = delivery
        self._attempt += 1
        try:
            answer = self._carry_out(delivery.body)
        except NotYet:
            return
        except KintsugiError as error:
            self._finish(None, error)
        else:
            self._finish(answer, None)

    def _finish(self, answer: Body | None, error: KintsugiError | None) -> None:
        delivery, self._busy, self.place = self._busy, None, ()
        assert delivery is not None
        self._attempt += 1
        if error is not None:
            self.endpoint.fail(delivery, type(error).__name__, str(error), cause=error.cause)
        else:
            assert answer is not None
            self.endpoint.reply(delivery, answer)
        self._work_off()

    def _work_off(self) -> None:
        """Take up what has arrived meanwhile; taking one up may end with the next."""
        due = next((delivery for delivery in self._backlog if not self._is_early(delivery.body)), None)
        if due is not None and self._busy is None and self.alive:
            self._backlog.remove(due)
            self._begin(due)

    def _again(self, attempt: int) -> None:
        """What the present operation waited for has come."""
        if attempt == self._attempt and self._busy is not None:
            self._begin(self._busy)

    def _carry_out(self, body: Body) -> Body:
        match body:
            case RunCall():
                return self._run_call(body)
            case CommitStep(step=step):
                self._commit(step)
                return Ok()
            case StartStage(stage=stage):
                self.adapter.start_stage(stage)
                return self.adapter.standing()
            case Publish():
                return self._publish(body)
            case Save(step=step, folder=folder):
                return self._save(step, f"{folder}/step-{step}")
            case EvaluatePairs():
                return self._evaluate(body)
            case HashWeights():
                return WeightsHashed(weights_digest(self.adapter.committed))
            case RebuildGroup() if body.sequence >= self.processor.sequence and not self._met:
                self._meet(body)
                raise NotYet
            case _ if isinstance(body, Operation):
                return self._recover(body)
            case _:
                raise RefusedError(f"a model worker does not answer {type(body).__name__}")

    def _answer_now(self, delivery: Delivery, body: FetchWeights | FetchState) -> None:
        standing = self.adapter.standing()
        if isinstance(body, FetchState) and standing.prepared_step == body.step and not standing.half_updated:
            self.adapter.commit(body.step)  # Nobody asks for a step that is not committed.
        state = self.adapter.committed
        if isinstance(body, FetchWeights):
            if body.version == self._published:
                self.endpoint.reply(delivery, WeightsFetched(body.version))
            else:
                why = f"version {body.version} is not published here, {self._published} is"
                self.endpoint.fail(delivery, "RefusedError", why)
        elif state.step == body.step and state.stage and self._has_committed_state():
            self.endpoint.reply(delivery, state_message(state))
        else:
            self.endpoint.fail(delivery, "RefusedError", f"stands at step {state.step}, not at {body.step}")

    def _has_committed_state(self) -> bool:
        """A half-made update leaves the committed copy alone, unless the device that held it was reset."""
        return self.adapter.flow is Flow.ROLLBACK or not self.adapter.standing().half_updated

    # A step.

    def _run_call(self, call: RunCall) -> Body:
        standing = self.adapter.standing()
        if (call.step, call.call) in self._answers:
            return self._answers[call.step, call.call]
        self.processor.admit(call.step, goes_on=self.adapter.is_between_calls)
        if not self.adapter.generation or call.generation != self.adapter.generation:
            raise RefusedError(f"expected generation {self.adapter.generation}, got {call.generation}")
        if call.stage != standing.stage:
            raise RefusedError(f"this rank is in stage {standing.stage!r}, not in {call.stage!r}")
        wanted: dict[str, list[str]] = {}
        for shard in call.shards:
            for item in shard.items:
                if item.key not in self._samples:
                    wanted.setdefault(item.holder, []).append(item.key)
        if not wanted:
            self._join(call)
        fetched: dict[str, dict[str, str]] = {}
        for holder, keys in wanted.items():
            order = (self._attempt, call, holder, tuple(keys), fetched, len(wanted))
            self.world.after(0.0, self.enter, self._fetch_samples, order)
        raise NotYet

    def _fetch_samples(
        self,
        attempt: int,
        call: RunCall,
        holder: str,
        keys: tuple[str, ...],
        fetched: dict[str, dict[str, str]],
        num_holders: int,
    ) -> None:
        """Ask who holds samples; a step whose samples are gone is broken by somebody else than this rank."""
        if attempt != self._attempt:
            return

        def answered(answer: Body | None, fault: Fault | None) -> None:
            if attempt != self._attempt:
                return
            if not isinstance(answer, SamplesFetched):
                assert fault is not None
                self._finish(None, GroupBroken(f"{holder}: {fault.message}", cause=fault))
                return
            if (
                tuple(sample.key for sample in answer.samples) != keys
            ):  # As the real rank checks what it fetched.
                self._finish(None, GroupBroken(f"{holder} answered with other samples than were asked for"))
                return
            fetched[holder] = {sample.key: sample.tokens.decode() for sample in answer.samples}
            if len(fetched) == num_holders:
                self._samples = {key: says for part in fetched.values() for key, says in part.items()}
                self._join(call)

        self.endpoint.request(holder, FetchSamples(keys), deadline_s=FETCH_DEADLINE_S, on_done=answered)

    def _join(self, call: RunCall) -> None:
        self.place = ("call", self.adapter.generation, call.step, call.call)
        everybody = self._rendezvous.arrive(self, expected=self._members)
        if not everybody:
            return
        samples = [sample for rank in everybody for sample in rank._share()]
        assert len(samples) == len(set(samples)), "a sample is in two shards"
        delay_s = self.world.random.uniform(0.01, 0.1)
        for rank in everybody:
            rank.after(delay_s, rank._called, rank._attempt, call, samples)

    def _share(self) -> list[str]:
        """This rank's samples of the call that it is busy with, and what it was told about each."""
        assert self._busy is not None and isinstance(self._busy.body, RunCall)
        items = [item for shard in self._busy.body.shards for item in shard.items]
        return [f"{item.key} {self._samples[item.key]} {sorted(item.values.items())}" for item in items]

    def _called(self, attempt: int, call: RunCall, samples: list[str]) -> None:
        """The call's collective is through. The state after a training call depends on the samples, on what the master
        computed about them, and on the calls before; the step's last one prepares it."""
        if attempt != self._attempt:
            return
        self.world.note(self.name, f"{call.call} of step {call.step}")
        self.count("steps")
        digest, before = "", [name for _, name in self._answers]
        if call.interface.endswith(TRAINING):
            keys = [*samples, f"{call.call} after {before}"]
            digest = self.adapter.train(call.step, keys, prepares=call.prepares)
        outputs: dict[str, dict[str, float]] = {}
        if call.interface == "reference_inference":
            outputs["reference_kl"] = {
                key: float(len(key) + int(says, 16) % 7) for key, says in self._samples.items()
            }
        answer = CallDone(call.step, digest, {f"{call.call}_loss": 0.0}, outputs=outputs)
        self._answers[call.step, call.call] = answer
        self._finish(answer, None)

    def _commit(self, step: int) -> None:
        self.adapter.commit(step)
        self._answers, self._samples = {}, {}
        agents = sorted(name for name in self.endpoint.directory.peers if name.startswith("agent-"))
        others = [name for name in agents if self.endpoint.directory.peers[name].host != self.host]
        if others:
            body = KeepState(self.name, state_message(self.adapter.committed))
            self.endpoint.request(
                others[0], body, deadline_s=FETCH_DEADLINE_S, on_done=lambda answer, fault: None
            )

    def _publish(self, request: Publish) -> Body:
        state = self.adapter.committed
        if request.step != state.step:
            raise RefusedError(f"expected to publish step {state.step}, got {request.step}")
        self._published = request.version
        manifest = WeightManifest(request.version, request.step, (), 0, weights_digest(state))
        return Published(manifest, (StreamSource(self.name),))

    def _save(self, step: int, path: str) -> Body:
        state = self.adapter.committed
        if step != state.step:
            raise RefusedError(f"expected to save step {state.step}, got {step}")
        self._memory.checkpoints[path] = state
        return Saved(step, path, state.digest)

    def _evaluate(self, request: EvaluatePairs) -> Body:
        state = self.adapter.committed
        if request.step != state.step:
            raise RefusedError(f"expected to evaluate step {state.step}, got {request.step}")
        weights, positions = weights_digest(state), range(request.first, request.first + request.count)
        correct = tuple(int(drawn_digest(str(position), weights), 16) % 2 == 0 for position in positions)
        return PairsEvaluated(request.step, request.first, correct)

    # Recovery.

    def _recover(self, operation: Operation) -> Body:
        answer = self.processor.carry_out(operation)
        self._answers, self._samples, self._found = {}, {}, {}
        return answer

    def _meet(self, request: RebuildGroup) -> None:
        """Come to where the ranks of a generation meet; who is not there in time breaks it for all."""
        self.place = ("group", request.generation, request.ranks, request.sequence)
        self.after(request.timeout_s, self._give_up_meeting, self._attempt)
        for rank in self._rendezvous.arrive(self, expected=request.ranks):
            rank.after(0.001 + 0.004 * self.world.random.random(), rank._all_met, rank._attempt)

    def _all_met(self, attempt: int) -> None:
        if attempt != self._attempt or self._busy is None:
            return
        request = self._busy.body
        assert isinstance(request, RebuildGroup)
        self._met, self._members = True, request.ranks
        self._begin(self._busy)
        self._met = False

    def _give_up_meeting(self, attempt: int) -> None:
        if attempt == self._attempt and self._busy is not None:
            busy, self._busy, self.place = self._busy, None, ()
            assert isinstance(busy.body, RebuildGroup)
            self._fail_to_meet(busy, busy.body)

    def _fail_to_meet(self, delivery: Delivery, request: RebuildGroup) -> None:
        """The probe collective fails, as it does when a rank does not come."""
        self._busy = delivery
        try:
            answer: Body | None = self._recover(request)
            error: KintsugiError | None = None
        except KintsugiError as problem:
            answer, error = None, problem
        self._finish(answer, error)

    def _probe(self, request: RebuildGroup) -> None:
        if not self._met:
            raise GroupBroken(f"not every rank of generation {request.generation} came")

    def _fetch(self, source: str, step: int) -> Snapshot:
        """Ask a replica, another host's agent or the disk for a state; the answer is kept until it is asked again."""
        found = self._found.get((source, step)) or self._memory.checkpoints.get(source)
        if isinstance(found, Fault):
            raise RefusedError(found.message, cause=found)
        if found is not None:
            return found
        attempt = self._attempt

        def fetched(answer: Body | None, fault: Fault | None) -> None:
            if isinstance(answer, StateFetched):
                self._found[source, step] = state_of(answer)
            else:
                assert fault is not None
                self._found[source, step] = fault
            self._again(attempt)

        body = FetchState(step, owner=self.name)
        self.world.after(0.0, self.enter, self._ask_state, (source, body, fetched))
        raise NotYet

    def _ask_state(self, source: str, body: FetchState, fetched: Any) -> None:
        self.endpoint.request(source, body, deadline_s=FETCH_DEADLINE_S, on_done=fetched)
