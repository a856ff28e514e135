"""Simulated training ranks: the real recovery `Processor` around the torch-free `ReplayAdapter`.

A call is a collective of one generation of the groups: it ends for all ranks or for none, a rank that is dead or
stopped keeps the others waiting, and the next round of recovery breaks it. A rank runs the calls of a step in the order
in which they were sent; a call that the network delivers too early waits. Ranks that compute a model together get the
same samples, and the last stage answers.

Processor and adapter block where a real rank does; here nothing blocks. A state that has to be fetched raises `NotYet`
out of the operation, which is carried out again when the state has arrived, as the protocol allows; each group of a
generation is joined once all its ranks have arrived, or have not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from kintsugi.errors import Fault, GroupBroken, KintsugiError, RefusedError
from kintsugi.model.seats import Mesh, Seat, holder_of, seat_of
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.recovery import (
    AskStanding,
    FetchState,
    KeepState,
    RankStanding,
    RebuildGroup,
    StateFetched,
)
from kintsugi.protocol.rollout import FetchSamples, SamplesFetched
from kintsugi.protocol.training import (
    CallDone,
    CommitStep,
    EvaluatePairs,
    HashWeights,
    PairsEvaluated,
    PieceSaved,
    RunCall,
    Save,
    Saved,
    SavePiece,
    StartStage,
    WeightsHashed,
)
from kintsugi.protocol.weights import FetchWeights, Publish, Published, WeightsFetched
from kintsugi.recovery.rank import Flow, Operation, Processor
from kintsugi.recovery.step_calls import StepCalls
from kintsugi.simulation.groups import WORLD, Groups, SimulatedGroup, disagreements, members_of
from kintsugi.simulation.replay_adapter import (
    SHARED,
    ReplayAdapter,
    ReplaySnapshot,
    Snapshots,
    digest_of,
    grains_of,
)
from kintsugi.simulation.workers import FETCH_DEADLINE_S, SimulatedWorker, drawn_digest
from kintsugi.transport.rpc import Delivery
from kintsugi.types import Role, StreamSource, WeightManifest, process_id, role_of

Place = tuple[object, ...]

LONGEST_SAVE_S = 0.5
"""A save may take longer than a step."""
TRAINING = "_train"
"""Suffix of interfaces that change the state."""


def state_message(state: ReplaySnapshot) -> StateFetched:
    """Return a state as a message; its numbers are where a real rank names the bulk frames that follow."""
    numbers = ",".join(map(str, state.vector))
    manifest = WeightManifest(state.step, state.step, (), 0, f"{state.digest} {numbers}")
    return StateFetched(manifest, state.stage, 0, 0, box=state.box)


def state_of(message: StateFetched) -> ReplaySnapshot:
    digest, _, numbers = message.manifest.digest.partition(" ")
    vector = tuple(int(number) for number in numbers.split(","))
    return ReplaySnapshot(
        message.manifest.step, message.stage, vector, digest, committed=True, box=message.box
    )


def weights_digest(state: ReplaySnapshot) -> str:
    """Return the digest of the weights alone: a new optimizer does not change them."""
    return ",".join(map(str, state.vector[:2]))


Checkpoints = dict[str, dict[str, ReplaySnapshot]]
"""Path → box → its state."""


class NotYet(Exception):
    """Not an error: the operation has to be carried out again when its data has arrived."""


class Rendezvous:
    """Meeting point of ranks: by generation for a new group, by call for a collective. One for all ranks of a world."""

    def __init__(self) -> None:
        self._places: dict[Place, dict[str, SimulatedRank]] = {}

    def arrive(self, rank: SimulatedRank, *, expected: tuple[str, ...]) -> list[SimulatedRank]:
        """Return all ranks at this rank's place once all have arrived, else none. Dead and absent ranks are awaited."""
        place = rank.place
        present = self._places.setdefault(place, {})
        present[rank.name] = rank
        here = [present[name] for name in expected if name in present]
        if len(here) < len(expected) or not all(other.alive and other.place == place for other in here):
            return []
        del self._places[place]
        return here


class HostMemory:
    """Memory that survives the ranks of a host: snapshots that its agent holds, replicas for other hosts, and the
    disk."""

    def __init__(self, checkpoints: Checkpoints, unfinished: Checkpoints) -> None:
        self.checkpoints = checkpoints
        """Checkpoints by path; all hosts share them."""
        self.unfinished = unfinished
        """Boxes that ranks have written for checkpoints that are being saved, by the name of the save."""
        self.snapshots: Snapshots = {}
        self.replicas: dict[tuple[str, int], ReplaySnapshot] = {}
        """Box and step → its state, which a rank of another host has sent: the latest two of each box."""

    def keep(self, state: ReplaySnapshot) -> None:
        """As `cluster.peer_snapshots`: later steps were undone, of earlier ones the last stays."""
        steps = sorted(step for box, step in self.replicas if box == state.box)
        for step in steps:
            if step >= state.step or step != max([each for each in steps if each < state.step]):
                del self.replicas[state.box, step]
        self.replicas[state.box, state.step] = state

    def forget_before(self, step: int, *, living: Collection[str]) -> None:
        """As `cluster.agent`: no group returns to an earlier step, and living ranks remove their own snapshots."""
        for key in [key for key in self.replicas if key[1] < step]:
            del self.replicas[key]
        for owner, held in list(self.snapshots.items()):
            if holder_of(owner) not in living and all(each.step < step for each in held):
                del self.snapshots[owner]


class SimulatedRank(SimulatedWorker):
    """One model worker. While a call or an operation waits, requests wait too, unless recovery interrupts."""

    def __init__(
        self,
        *arguments: Any,
        rendezvous: Rendezvous,
        memory: HostMemory,
        flow: Flow,
        num_ranks: int,
        mesh: Mesh,
        violated: Callable[[str], None],
        **names: Any,
    ) -> None:
        """`violated` is told what must not happen."""
        super().__init__(*arguments, **names)
        self._violated = violated
        self._rendezvous, self._memory = rendezvous, memory
        self._ranks = [process_id(Role.MODEL, index) for index in range(num_ranks)]
        self.adapter = ReplayAdapter(
            self.name,
            memory.snapshots,
            flow=flow,
            fetch=self._fetch,
            probe=self._probe,
            mesh=mesh,
            fetch_box=self._fetch_box,
        )
        self.processor = Processor(self.adapter)
        self.capabilities = {"store": self.address, "flow": flow.value}
        self.place: Place = ()
        """Place at which it waits for the others."""
        self._groups: Groups = {}
        """Those of the current generation; none while it is being formed, or has ended."""
        self._joined: dict[str, SimulatedGroup] = {}
        """Groups of the generation that is being formed."""
        self._found: dict[tuple[str, int, str, str], ReplaySnapshot | Fault] = {}
        self._busy: Delivery | None = None
        self._backlog: deque[Delivery] = deque()
        self._step_calls = StepCalls()
        self._samples: dict[str, str] = {}
        """Sample key → its contents; of the current step, once all of this rank's share have arrived."""
        self._published = -1
        self._awaiting_save: list[Delivery] = []
        self._num_saves = 0
        self._attempt = 0
        """Number of the current attempt: an answer to an earlier one comes too late."""

    # Requests.

    def serve(self, delivery: Delivery, body: Body) -> None:
        if isinstance(body, FetchWeights | FetchState):
            self._answer_now(delivery, body)
        elif isinstance(body, AskStanding):
            self.endpoint.reply(delivery, self._standing())
        elif isinstance(body, Save):
            self._begin_save(delivery, body)
        elif isinstance(body, SavePiece):
            self._begin_box(delivery, body)
        elif isinstance(body, RunCall) and self._step_calls.is_done(body.step, body.call):
            self._answer_again(delivery, body)
        elif self._busy is None and not self._is_early(body):
            self._begin(delivery)
        elif self._busy is not None and isinstance(body, Operation) and self._interrupts(body):
            self._interrupt()
            self._begin(delivery)
        else:
            self._backlog.append(delivery)

    def _is_early(self, body: Body) -> bool:
        """Return whether a call has to wait for others of its step that were sent before it."""
        if not isinstance(body, RunCall) or body.generation != self.adapter.generation:
            return False
        return not all(self._step_calls.is_done(body.step, name) for name in body.after)

    def _standing(self) -> RankStanding:
        return self._step_calls.standing(
            self.adapter.standing(),
            group=self.adapter.generation,
            ranks=self._members,
            is_normal=self.processor.is_normal,
            is_between_calls=self.adapter.is_between_calls,
            queued=[delivery.body for delivery in self._backlog if isinstance(delivery.body, RunCall)],
        )

    @property
    def _members(self) -> tuple[str, ...]:
        """Ranks of the group, in rank order; none while there is no group."""
        return self._groups[WORLD].ranks if self.adapter.generation else ()

    def _interrupts(self, operation: Operation) -> bool:
        assert self._busy is not None
        if isinstance(self._busy.body, Operation):
            return operation.sequence > self._busy.body.sequence
        return self.processor.interrupts(operation)

    def _interrupt(self) -> None:
        """Give up the current work. A rank in the middle of its update is left half updated."""
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
        self._step_calls.fail()
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
            self._step_calls.fail()
            self.endpoint.fail(delivery, type(error).__name__, str(error), cause=error.cause)
        else:
            assert answer is not None
            self.endpoint.reply(delivery, answer)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start what has arrived meanwhile; each start may end with the next one."""
        due = next((delivery for delivery in self._backlog if not self._is_early(delivery.body)), None)
        if due is not None and self._busy is None and self.alive:
            self._backlog.remove(due)
            self._begin(due)

    def _again(self, attempt: int) -> None:
        """Repeat the current operation: its data has arrived."""
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
            case EvaluatePairs():
                return self._evaluate(body)
            case HashWeights():
                return WeightsHashed(weights_digest(self.adapter.committed))
            case RebuildGroup() if self._must_meet(body):
                self._meet(body)
                raise NotYet
            case _ if isinstance(body, Operation):
                return self._recover(body)
            case _:
                raise RefusedError(f"a model worker does not answer {type(body).__name__}")

    def _answer_again(self, delivery: Delivery, call: RunCall) -> None:
        """Answer a call that has ended, also while another one runs."""
        try:
            answer = self._step_calls.answer_to(call)
        except RefusedError as error:
            self.endpoint.fail(delivery, type(error).__name__, str(error))
        else:
            assert answer is not None
            self.endpoint.reply(delivery, answer)

    def _answer_now(self, delivery: Delivery, body: FetchWeights | FetchState) -> None:
        standing = self.adapter.standing()
        if isinstance(body, FetchState) and standing.prepared_step == body.step and not standing.half_updated:
            self.adapter.commit(body.step)  # A step that is not committed is never requested.
        state = self.adapter.committed
        if isinstance(body, FetchWeights):
            if body.version == self._published:
                self.endpoint.reply(delivery, WeightsFetched(body.version))
            else:
                why = f"version {body.version} is not published here, {self._published} is"
                self.endpoint.fail(delivery, "RefusedError", why)
        elif (
            state.step == body.step and state.box == body.box and state.stage and self._has_committed_state()
        ):
            self.endpoint.reply(delivery, state_message(state))
        elif body.owner:
            self._answer_held_box(delivery, body)
        else:
            self.endpoint.fail(delivery, "RefusedError", f"stands at step {state.step}, not at {body.step}")

    def _answer_held_box(self, delivery: Delivery, body: FetchState) -> None:
        """Give a box from the snapshots of this host: of one that this rank held before, of a lost rank, or of its own
        predecessor."""
        held = self._memory.snapshots.get(body.owner, ())
        found = [each for each in held if (each.step, each.box) == (body.step, body.box)]
        if found:
            self.endpoint.reply(delivery, state_message(found[-1]))
        else:
            self.endpoint.fail(
                delivery, "RefusedError", f"no box {body.box} of step {body.step} of {body.owner}"
            )

    def _has_committed_state(self) -> bool:
        """Return whether the committed state exists: a half-made update keeps it, unless the device was reset."""
        return self.adapter.flow is Flow.ROLLBACK or not self.adapter.standing().half_updated

    # A step.

    def _run_call(self, call: RunCall) -> Body:
        standing = self.adapter.standing()
        known = self._step_calls.answer_to(call)
        if known is not None:
            return known
        self.processor.admit(call.step, goes_on=self.adapter.is_between_calls)
        if not self.adapter.generation or call.generation != self.adapter.generation:
            raise RefusedError(f"expected generation {self.adapter.generation}, got {call.generation}")
        if call.stage != standing.stage:
            raise RefusedError(f"this rank is in stage {standing.stage!r}, not in {call.stage!r}")
        self._step_calls.begin(call)
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
        """Request samples from their holders; lost samples break the step, and the cause is not this rank."""
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
            ):  # As the real rank verifies fetched samples.
                self._finish(None, GroupBroken(f"{holder} answered with other samples than were asked for"))
                return
            fetched[holder] = {sample.key: sample.tokens.decode() for sample in answer.samples}
            if len(fetched) == num_holders:
                self._samples = {key: says for part in fetched.values() for key, says in part.items()}
                self._join(call)

        self.endpoint.request(holder, FetchSamples(keys), deadline_s=FETCH_DEADLINE_S, on_done=answered)

    def _join(self, call: RunCall) -> None:
        self.place = ("call", self.adapter.generation, call.step, call.call)
        arrived = self._rendezvous.arrive(self, expected=self._members)
        if not arrived:
            return
        for problem in disagreements(
            {rank.name: rank._groups for rank in arrived}, self._members, self.adapter.mesh
        ):
            self._violated(problem)
        shares: dict[int, list[str]] = {}
        for rank in arrived:  # Those that compute a model together have the same samples.
            part = self.adapter.mesh.data_index(self._members.index(rank.name))
            share = shares.setdefault(part, rank._share())
            assert share == rank._share(), f"{rank.name} has other samples than its neighbours"
        samples = [sample for share in shares.values() for sample in share]
        assert len(samples) == len(set(samples)), "a sample is in two shards"
        delay_s = self.world.random.uniform(0.01, 0.1)
        for rank in arrived:
            rank.after(delay_s, rank._called, rank._attempt, samples)

    def _share(self) -> list[str]:
        """Return this rank's samples of the current call, and the values that the master sent about each."""
        assert self._busy is not None and isinstance(self._busy.body, RunCall)
        items = [item for shard in self._busy.body.shards for item in shard.items]
        return [f"{item.key} {self._samples[item.key]} {sorted(item.values.items())}" for item in items]

    def _called(self, attempt: int, samples: list[str]) -> None:
        """Finish the collective of a call. The state after a training call depends on the samples, on the values that
        the master computed for them, and on the calls before; the last call of the step prepares it."""
        if attempt != self._attempt:
            return
        assert self._busy is not None and isinstance(self._busy.body, RunCall)
        call = self._busy.body
        self.world.note(self.name, f"{call.call} of step {call.step}")
        self.count("steps")
        digest, before = "", list(self._step_calls.names)
        if call.interface.endswith(TRAINING):
            keys = [*samples, f"{call.call} after {before}"]
            digest = self.adapter.train(call.step, keys, prepares=call.prepares)
        outputs: dict[str, dict[str, float]] = {}
        if call.interface == "reference_inference" and self.adapter.seat.is_last:
            outputs["reference_kl"] = {
                key: float(len(key) + int(says, 16) % 7) for key, says in self._samples.items()
            }
        answer = CallDone(call.step, digest, {f"{call.call}_loss": 0.0}, outputs=outputs)
        self._step_calls.end(call, answer)
        self._finish(answer, None)

    def _commit(self, step: int) -> None:
        self.adapter.commit(step)
        self._step_calls.forget()
        self._samples = {}
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

    def _begin_save(self, delivery: Delivery, request: Save) -> None:
        """Save beside everything else; a request that arrives meanwhile is answered when the save has ended."""
        self._awaiting_save.append(delivery)
        if len(self._awaiting_save) > 1:
            return
        state = self.adapter.committed
        if request.step != state.step:
            self._awaiting_save.clear()
            why = f"expected to save step {state.step}, got {request.step}"
            self.endpoint.fail(delivery, "RefusedError", why)
            return
        delay_s = self.world.random.uniform(0.05, LONGEST_SAVE_S)
        path = f"{request.folder}/step-{state.step}"
        mesh, seat = self.adapter.mesh, self.adapter.seat
        if mesh.boxes == 1:
            self.after(delay_s, self._saved, state, path, {})
            return
        self._num_saves += 1
        name = f"{path} by {self.name} {self.incarnation} {self._num_saves}"
        boxes = self._memory.unfinished[name] = {}
        for box in range(mesh.boxes):
            if box != seat.number:
                ranks = mesh.ranks or self._ranks
                others = [rank for rank in ranks if seat_of(rank, mesh) == mesh.seat(box)]
                self.after(delay_s, self._ask_box, mesh.seat(box).box, others, state, path, name)
        self.after(delay_s, self._saved, state, path, boxes)

    def _ask_box(self, box: str, others: list[str], state: ReplaySnapshot, path: str, name: str) -> None:
        """Ask the first of these ranks to write its box, and the next one if it does not."""
        if not self._awaiting_save:
            return
        if not others:
            why = f"no rank has written a box of step {state.step}"
            waiting, self._awaiting_save = self._awaiting_save, []
            for delivery in waiting:
                self.endpoint.fail(delivery, "RefusedError", why)
            return

        def answered(answer: Body | None, fault: Fault | None) -> None:
            if isinstance(answer, PieceSaved):
                self._saved(state, path, self._memory.unfinished[name])
            else:
                self._ask_box(box, others[1:], state, path, name)

        manifest = WeightManifest(state.step, state.step, (), 0, state.digest)
        body = SavePiece(name, StateFetched(manifest, state.stage, 0, 0, box=box))
        self.endpoint.request(others[0], body, deadline_s=FETCH_DEADLINE_S, on_done=answered)

    def _begin_box(self, delivery: Delivery, request: SavePiece) -> None:
        """Write the own box for another rank's save, unless the state of that step is not here, or not any more."""
        step, standing = request.state.manifest.step, self.adapter.standing()
        if standing.prepared_step == step and not standing.half_updated:
            self.adapter.commit(step)  # A step that is not committed is never saved.
        state = self.adapter.committed
        wanted = step, request.state.stage, request.state.box
        if (state.step, state.stage, state.box) != wanted or not self._has_committed_state():
            self.endpoint.fail(delivery, "RefusedError", f"stands at step {state.step}, not at {step}")
            return
        delay_s = self.world.random.uniform(0.01, LONGEST_SAVE_S)
        self.after(delay_s, self._write_box, delivery, request.folder, state)

    def _write_box(self, delivery: Delivery, name: str, state: ReplaySnapshot) -> None:
        self._memory.unfinished[name][state.box] = state
        self.endpoint.reply(delivery, PieceSaved(state.box, 0, state.digest, ()))

    def _saved(self, state: ReplaySnapshot, path: str, others: dict[str, ReplaySnapshot]) -> None:
        """Put a checkpoint in place, once all its boxes are written."""
        boxes = {**others, state.box: state}
        if len(boxes) < Seat.of(state.box).boxes or not self._awaiting_save:
            return
        assert {(box.step, box.stage) for box in boxes.values()} == {(state.step, state.stage)}
        self._memory.checkpoints[path] = boxes
        waiting, self._awaiting_save = self._awaiting_save, []
        for delivery in waiting:
            self.endpoint.reply(delivery, Saved(state.step, path, state.digest))

    def _evaluate(self, request: EvaluatePairs) -> Body:
        state = self.adapter.committed
        if request.step != state.step:
            raise RefusedError(f"expected to evaluate step {state.step}, got {request.step}")
        weights, positions = weights_digest(state), range(request.first, request.first + request.count)
        correct = tuple(int(drawn_digest(str(position), weights), 16) % 2 == 0 for position in positions)
        return PairsEvaluated(request.step, request.first, correct)

    # Recovery.

    def _recover(self, operation: Operation) -> Body:
        try:
            answer = self.processor.carry_out(operation)
        finally:
            if not self.adapter.generation:
                self._leave()
        self._step_calls.forget()
        self._samples, self._found = {}, {}
        return answer

    def _leave(self) -> None:
        """Leave the groups of a generation that is over."""
        self._groups = {}

    def _must_meet(self, request: RebuildGroup) -> bool:
        """Whether a rank has to meet the others first. One that is in the generation does not form its groups again: a
        rank that has missed them waits in vain."""
        is_in = request.generation == self.adapter.generation
        return request.sequence >= self.processor.sequence and not is_in and not self._has_met(request)

    def _has_met(self, request: RebuildGroup) -> bool:
        """Whether all groups of a generation are formed, so that the rank can take it over."""
        members = members_of(self.name, request.ranks, self.adapter.mesh_of(request))
        return self._joined.keys() == members.keys() and self._joined[WORLD].generation == request.generation

    def _meet(self, request: RebuildGroup) -> None:
        """Form the groups of a generation; a rank that is late breaks it for all."""
        self._joined = {}
        self.after(request.timeout_s, self._give_up_meeting, self._attempt)
        self._meet_next(request)

    def _meet_next(self, request: RebuildGroup) -> None:
        """Arrive at the meeting point of the next group."""
        members = members_of(self.name, request.ranks, self.adapter.mesh_of(request))
        axis = next(axis for axis in members if axis not in self._joined)
        self.place = ("group", request.generation, request.ranks, request.sequence, axis, members[axis])
        arrived = self._rendezvous.arrive(self, expected=members[axis])
        group = SimulatedGroup(axis, request.generation, members[axis])
        for rank in arrived:
            rank.after(0.001 + 0.004 * self.world.random.random(), rank._met_group, rank._attempt, group)

    def _met_group(self, attempt: int, group: SimulatedGroup) -> None:
        if attempt != self._attempt or self._busy is None:
            return
        request = self._busy.body
        assert isinstance(request, RebuildGroup)
        self._joined[group.axis] = group
        if not self._has_met(request):
            self._meet_next(request)
            return
        self._begin(self._busy)

    def _give_up_meeting(self, attempt: int) -> None:
        if attempt == self._attempt and self._busy is not None:
            busy, self._busy, self.place = self._busy, None, ()
            assert isinstance(busy.body, RebuildGroup)
            self._fail_to_meet(busy, busy.body)

    def _fail_to_meet(self, delivery: Delivery, request: RebuildGroup) -> None:
        """Fail the probe collective, as happens when a rank does not arrive."""
        self._busy = delivery
        self._joined = {}
        try:
            answer: Body | None = self._recover(request)
            error: KintsugiError | None = None
        except KintsugiError as problem:
            answer, error = None, problem
        self._finish(answer, error)

    def _probe(self, request: RebuildGroup) -> None:
        if not self._has_met(request):
            raise GroupBroken(f"not every rank of generation {request.generation} came")
        self._groups, self._joined = self._joined, {}

    def _fetch(self, source: str, step: int) -> ReplaySnapshot:
        """Request a state from a replica, another host's agent or the disk; the answer is kept until it is requested
        again."""
        saved = self._memory.checkpoints.get(source)
        if saved is not None:
            return self._of_checkpoint(saved)
        owner = self.name if role_of(source) is Role.AGENT else ""
        return self._fetch_box(source, step, owner, self.adapter.box)

    def _of_checkpoint(self, saved: dict[str, ReplaySnapshot]) -> ReplaySnapshot:
        """The own box, from those of any mesh."""
        mine = self.adapter.box
        if mine in saved:
            return saved[mine]
        grains: dict[int, int] = {}
        for box, held in saved.items():
            grains |= dict(zip(grains_of(box), held.vector[SHARED:], strict=True))
        first = next(iter(saved.values()))
        vector = (*first.vector[:SHARED], *(grains[grain] for grain in grains_of(mine)))
        digest = digest_of(first.step, first.stage, vector, box=mine)
        return first._replace(vector=vector, digest=digest, box=mine)

    def _fetch_box(self, source: str, step: int, owner: str, box: str) -> ReplaySnapshot:
        """Request a box from a rank or an agent."""
        found = self._found.get((source, step, owner, box))
        if isinstance(found, Fault):
            raise RefusedError(found.message, cause=found)
        if found is not None:
            return found
        attempt = self._attempt

        def fetched(answer: Body | None, fault: Fault | None) -> None:
            if isinstance(answer, StateFetched):
                self._found[source, step, owner, box] = state_of(answer)
            else:
                assert fault is not None
                self._found[source, step, owner, box] = fault
            self._again(attempt)

        body = FetchState(step, owner=owner, box=box)
        self.world.after(0.0, self.enter, self._ask_state, (source, body, fetched))
        raise NotYet

    def _ask_state(self, source: str, body: FetchState, fetched: Any) -> None:
        self.endpoint.request(source, body, deadline_s=FETCH_DEADLINE_S, on_done=fetched)
