"""Dispatch of groups to rollout workers: training tickets and evaluation problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage
from kintsugi.control.decision import DecisionBuilder
from kintsugi.control.due import steps_ahead
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.pending import PendingRequests, Purpose, RequestId
from kintsugi.control.protocol import Raise, Tell
from kintsugi.control.task_queue import TaskScheduler, TaskStatus
from kintsugi.errors import DataError, Fault, ProcessDied
from kintsugi.graph.advantages import is_uninformative
from kintsugi.journal.facts import (
    FilterReason,
    SampleQuarantined,
    SamplesScored,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketReturned,
    TicketsIssued,
)
from kintsugi.protocol.rollout import Drop, EpisodesDone, RunEpisodes
from kintsugi.samples.admission import admissible
from kintsugi.samples.batch_selection import BatchChoice, choose_batch
from kintsugi.telemetry.events import FaultHandled
from kintsugi.types import Role, SampleMeta, SampleText, SamplingParams, Ticket, sample_key, ticket_id

CAPACITY = 64
"""Groups that one rollout worker runs at once."""


class EpisodeDispatch:
    """Issues tickets, hands groups to rollout workers, and enters their results into the ledger."""

    def __init__(
        self, config: Config, *, decision: DecisionBuilder, pending: PendingRequests, num_rows: int
    ) -> None:
        self._config, self._decision, self._pending, self._num_rows = config, decision, pending, num_rows
        self._scheduler = TaskScheduler(capacity=CAPACITY)
        self._failures: Counter[str] = Counter()
        self._texts: dict[str, SampleText] = {}
        self._request_ids: dict[str, RequestId] = {}
        """Group → its latest request. An answer to an earlier request is late and must not be taken for an answer to
        this one."""
        self._num_asked = 0
        self._unreachable: set[str] = set()
        """Workers that get no requests until the next tick, so that a request that fails immediately is not repeated in
        a loop."""
        self.evaluation: Evaluation | None = None
        self.last_reason = ""
        """Reason why the latest group or sample was quarantined."""
        self.timing: Counter[str] = Counter()
        """Seconds that workers spent per call on groups that train, since the counter was cleared."""

    def collect(self, stage: Stage, now: float) -> None:
        """Issue as many tickets as the staleness bound allows, and hand out those that wait.

        The bound counts from the version that the servers have for sampled groups, and from the step for rows of the
        data. After a rollback the youngest tickets wait for their own step.
        """
        state, counters = self._decision.state, self._decision.state.ledger.stage(stage.name)
        version, staleness = state.step, 0
        if stage.samples_completions:
            version, staleness = state.version, steps_ahead(self._config, state)
        if version < 0:  # No version is current: running groups continue, and no new ones are issued.
            return
        issued = counters.num_issued
        count, reason = admissible(
            num_issued=issued,
            num_dropped=counters.num_dropped,
            version=version - stage.first_step + 1,
            batch_size=stage.algorithm.batch_size,
            max_staleness=staleness,
            num_steps=stage.algorithm.steps,
        )
        if count > 0:
            self._decision.add_fact(
                TicketsIssued(next_tickets(stage, num_issued=issued, count=count, num_rows=self._num_rows))
            )
            self._decision.explain(f"issued {count}: {reason}")
        for ticket in self._waiting(stage, too_many=max(0, -count)):
            if self._scheduler.status(ticket) is TaskStatus.UNKNOWN:
                self._scheduler.submit(ticket)
        self.hand_out(now)

    def _waiting(self, stage: Stage, *, too_many: int) -> list[str]:
        """Return the tickets that may be handed out: all but the `too_many` youngest that are in no batch. Some of the
        youngest may be running or complete already; older ones that were lost must not wait in their place."""
        ledger = self._decision.state.ledger
        waiting = [ticket.id for ticket in ledger.issued_unassigned() if ticket.stage == stage.name]
        if not too_many:
            return waiting
        counters, in_batch = ledger.stage(stage.name), ledger.in_batch(self._decision.state.step + 1)
        free = counters.num_issued - counters.num_dropped - counters.num_trained - len(in_batch)
        oldest = {candidate.ticket for candidate in ledger.candidates(max(0, free - too_many))}
        return [ticket for ticket in waiting if ticket in oldest]

    @property
    def most_groups(self) -> int:
        """Number of groups that could run at once."""
        return CAPACITY * max(1, len(self._decision.state.members.live(Role.ROLLOUT)))

    @property
    def num_waiting(self) -> int:
        """Number of groups that are not handed out."""
        return self._scheduler.num_pending

    def num_ready(self, stage: Stage) -> int:
        """Return how many groups of the next batch are complete, in any order."""
        size = stage.algorithm.batch_size
        waiting = self._decision.state.ledger.candidates(size + self._config.asynchrony.overtake)
        return min(size, sum(group.is_ready for group in waiting))

    def next_batch(self, stage: Stage) -> tuple[str, ...]:
        """Return the batch of the next step, or nothing while it is incomplete. Groups that have become too stale are
        dropped; groups that are complete already, or the next prompts, replace them."""
        choice = self._choose(stage)
        while choice.expired:
            for ticket, reason in choice.expired.items():
                self.last_reason = reason
                self._decision.add_fact(TicketExpired(ticket, reason))
            choice = self._choose(stage)
        if choice.batch and choice.reason:
            self._decision.explain(choice.reason)
        return choice.batch

    def _choose(self, stage: Stage) -> BatchChoice:
        state, section = self._decision.state, self._config.asynchrony
        size = stage.algorithm.batch_size
        return choose_batch(
            state.ledger.candidates(size + section.overtake),
            size=size,
            version=state.step,
            max_staleness=section.max_staleness,
            overtake=section.overtake,
        )

    def resample(self, stage: Stage) -> None:
        """Filter uninformative groups (dynamic sampling), so that the next prompts replace them.

        A group is considered once all older groups of the step are complete and kept, or passed over. The order of
        issue makes the result independent of the order of arrival, also for the groups that are kept because the bound
        is reached. A filtered group stays filtered and counts for its step, also when the step is collected again after
        a fault.
        """
        ledger, step = self._decision.state.ledger, self._decision.state.step + 1
        size, limit = stage.algorithm.batch_size, self._config.sampling.max_new_tokens
        left = stage.algorithm.resampling_rounds * size
        left -= len(ledger.dropped_in(step, reason=FilterReason.EQUAL_REWARDS)) if left else 0
        while left > 0:
            uninformative = (
                ticket
                for ticket in self._choose(stage).complete
                if is_uninformative(stage, ledger.metas(ticket), max_new_tokens=limit)
            )
            ticket = next(uninformative, None)
            if ticket is None:
                return
            self._decision.add_fact(TicketFiltered(ticket, FilterReason.EQUAL_REWARDS))
            left -= 1

    def drop_unusable(self, stage: Stage, *, before: int) -> str | None:
        """Quarantine groups that cannot be trained; return the problem when there are too many, not counting `before`.

        The next prompt replaces a quarantined group. A step that loses more groups than its batch has ends the run:
        further prompts are not likely to be better.
        """
        ledger = self._decision.state.ledger
        for ticket in ledger.unusable_tickets():
            self._decision.add_fact(TicketFiltered(ticket, FilterReason.TOO_FEW_VALID))
        failed = ledger.stage(stage.name).num_failed - before
        if failed <= stage.algorithm.batch_size:
            return None
        why = f"{failed} groups of step {self._decision.state.step + 1} were set aside, more than its batch_size"
        return f"{why}; the last: {self.last_reason}"

    def evaluate(self, evaluation: Evaluation, now: float) -> None:
        """Start an evaluation. The run waits for it, so its problems precede groups of later steps."""
        self.evaluation = evaluation
        self._scheduler.submit_first(evaluation.tasks)
        self.hand_out(now)

    def hand_out(self, now: float) -> None:
        """Assign waiting groups to workers with free capacity."""
        live, pace = self._decision.state.members.live(Role.ROLLOUT), self._decision.state.pace
        self._scheduler.limit = None if pace is None or self.evaluation is not None else pace.groups
        reachable = [worker for worker in live if worker not in self._unreachable]
        for name, worker in self._scheduler.assign(reachable):
            self._run(name, worker, now)

    def tick(self, now: float, *, rolling: bool) -> None:
        """Retry unreachable workers, in phases in which groups are handed out."""
        self._unreachable.clear()
        if rolling:
            self.hand_out(now)

    def done(self, done: EpisodesDone, worker: str) -> str | None:
        """Take the result of a group. A result that the ledger does not accept (late, moved, repeated) is ignored.

        Return the problem of an evaluation answer, which can be neither ignored nor quarantined.
        """
        self._request_ids.pop(done.ticket, None)
        self._scheduler.complete(done.ticket)
        if self.evaluation is not None and done.ticket in self.evaluation.tasks:
            return self.evaluation.take(done)
        ledger = self._decision.state.ledger
        # A group that runs again may give other samples than before; quarantined samples stay quarantined.
        aside = ledger.quarantined_of(done.ticket)
        facts: list[SampleQuarantined | SamplesScored] = [
            SampleQuarantined(key, reason) for key, reason in done.quarantined.items() if key not in aside
        ]
        self.last_reason = next(iter(done.quarantined.values()), self.last_reason)
        samples = tuple(meta for meta in done.samples if meta.key not in aside)
        if samples:
            facts.append(SamplesScored(done.ticket, samples))
        self._texts.update(done.texts)
        self.timing.update(done.timing)
        for fact in facts:
            refusal = ledger.accepts(fact)
            if refusal is not None:
                self._decision.explain(f"ignored {worker}'s answer for {done.ticket}: {refusal}")
                return None
            self._decision.add_fact(fact)
        self._failures.pop(done.ticket, None)
        return None

    def take_texts(self, batch: Sequence[SampleMeta]) -> dict[str, SampleText]:
        """Return the texts of a batch, and forget them."""
        return {meta.key: text for meta in batch if (text := self._texts.pop(meta.key, None)) is not None}

    def failed(self, name: str, fault: Fault, *, worker: str) -> Fault | None:
        """Take the failure of a whole group; return the fault if it ends the run.

        A fault of the data repeats itself: the group is quarantined. Any other fault may pass: the group is tried
        again, and after its last attempt the run ends with the fault. To quarantine it would make the batch depend on
        chance.
        """
        is_evaluation = self._is_evaluation(name)
        if not is_evaluation and not self._is_running(name):
            self._scheduler.complete(name)  # A new master requested it again, though it was scored.
            return None
        if fault.kind == ProcessDied.__name__:  # The group is not the cause.
            self._unreachable.add(worker)
        else:
            self._failures[name] += 1
        if fault.kind == DataError.__name__ and not is_evaluation:
            self._set_aside(name, fault)
            return None
        if self._failures[name] >= self._config.rollout.attempts:
            return fault
        if not is_evaluation:
            self._decision.add_fact(TicketReturned(name, fault.message))
        self._scheduler.put_back(name)
        return None

    def _is_evaluation(self, name: str) -> bool:
        return self.evaluation is not None and name in self.evaluation.tasks

    def _is_running(self, name: str) -> bool:
        ledger = self._decision.state.ledger
        return name in ledger.running_on(ledger.worker_of(name)[0])

    def _set_aside(self, name: str, fault: Fault) -> None:
        ledger = self._decision.state.ledger
        self._scheduler.cancel(name)
        self._failures.pop(name, None)
        self.last_reason = fault.message
        for index in range(ledger.ticket(name).num_samples):
            quarantined = SampleQuarantined(sample_key(name, index), fault.message)
            if ledger.accepts(quarantined) is None:
                self._decision.add_fact(quarantined)
        message = f"{name} is quarantined: {fault.message}"
        self._decision.add_effect(Raise.of(FaultHandled(message, of=fault.process, fault=fault.id)))

    def worker_lost(self, worker: str) -> None:
        """Return the groups that a lost worker ran or held, under the same tickets and so with the same noise.

        Groups of a batch in training stay: their trajectories are fetched already, or the step fails, and then
        `reclaim` returns them.
        """
        ledger = self._decision.state.ledger
        training = ledger.in_batch(self._decision.state.step + 1)
        for ticket in ledger.assigned_to(worker):
            if ticket in training:
                self._scheduler.cancel(ticket)  # A new master requested it again, though it was scored.
            else:
                self._decision.add_fact(TicketReturned(ticket, f"{worker} was lost"))
        waiting = {ticket.id for ticket in ledger.issued_unassigned()}
        for task in self._scheduler.lost(worker):
            # It is in a batch or trained; only its text was requested again.
            if task not in waiting and not self._is_evaluation(task):
                self._scheduler.cancel(task)

    def reclaim(self) -> None:
        """Return those groups of the batch to the queue that a lost worker held, before the batch is trained
        (again)."""
        state = self._decision.state
        for ticket in state.ledger.in_batch(state.step + 1):
            worker, incarnation = state.ledger.worker_of(ticket)
            if not state.members.is_live(worker, incarnation):
                self._decision.add_fact(TicketReturned(ticket, f"{worker} was lost"))

    def adopt(self, now: float) -> None:
        """After a takeover, request again what the journal lists as running or held by a worker; each worker answers
        once.

        The last master may have died before it sent the workers the list of trained groups.
        """
        state = self._decision.state
        self.release_trained()
        for worker in state.members.live(Role.ROLLOUT):
            for ticket in state.ledger.assigned_to(worker):
                if state.ledger.worker_of(ticket)[1] == state.members.members[worker].incarnation:
                    self._scheduler.adopt(ticket, worker)
                    self._ask(ticket, worker, now)

    def release_trained(self) -> None:
        """Let the workers drop what the last step trained or filtered, and forget the texts of these groups."""
        state = self._decision.state
        ended = (*state.ledger.trained_in(state.step), *state.ledger.dropped_in(state.step))
        for name in ended:
            for index in range(state.ledger.ticket(name).num_samples):
                self._texts.pop(sample_key(name, index), None)
        for worker in state.members.live(Role.ROLLOUT) if ended else ():
            self._decision.add_effect(Tell(worker, Drop(ended)))

    def discard_all(self) -> None:
        """After a rollback, forget all running and waiting groups; they are issued again in their turn."""
        self._scheduler.clear()
        self._pending.withdraw_all(Purpose.EPISODE)
        self._failures.clear()
        self._texts.clear()
        self._request_ids.clear()
        self.evaluation = None

    def rebalance(self, now: float) -> None:
        """After a worker joined, move a share of the unfinished groups to it. Finished groups stay, even if a new
        master has requested their texts again."""
        members = self._decision.state.members
        moves = self._scheduler.rebalance(
            members.live(Role.ROLLOUT),
            may_move=lambda task: self._is_evaluation(task) or self._is_running(task),
        )
        for move in moves:
            self._pending.withdraw(self._request_ids.pop(move.task).token)
            self._decision.add_effect(Tell(move.source, Drop((move.task,))))
            if not self._is_evaluation(move.task):
                self._decision.add_fact(
                    TicketReturned(move.task, f"moved from {move.source} to {move.target}")
                )
            self._run(move.task, move.target, now)
        self.hand_out(now)

    def _run(self, name: str, worker: str, now: float) -> None:
        if not self._is_evaluation(name):
            state = self._decision.state
            incarnation = state.members.members[worker].incarnation
            version = state.version if state.version >= 0 else state.ledger.version_of(name)
            self._decision.add_fact(TicketAssigned(name, worker, incarnation, version))
        self._ask(name, worker, now)

    def _ask(self, name: str, worker: str, now: float) -> None:
        state = self._decision.state
        timeout_s = self._pending.deadline_s(RunEpisodes)
        if self.evaluation is not None and name in self.evaluation.tasks:
            ticket, sampling = self.evaluation.tasks[name]
            body = RunEpisodes(ticket, "eval", sampling, state.step, timeout_s)
        else:
            ticket, version = state.ledger.ticket(name), state.ledger.version_of(name)
            sampling = self._sampling(ticket.num_samples)
            body = RunEpisodes(ticket, "train", sampling, version, timeout_s, state.lineage)
        self._num_asked += 1
        request_id = RequestId(Purpose.EPISODE, name, state.term, self._num_asked)
        self._request_ids[name] = request_id
        self._pending.ask(request_id, worker, body, now)

    def _sampling(self, num_samples: int) -> SamplingParams:
        return SamplingParams(
            temperature=self._config.sampling.temperature,
            max_new_tokens=self._config.sampling.max_new_tokens,
            num_samples=num_samples,
            seed=self._config.seed,
        )


def next_tickets(stage: Stage, *, num_issued: int, count: int, num_rows: int) -> tuple[Ticket, ...]:
    """Return the next prompts in the order of the stage; a new epoch begins at the end of the data."""
    tickets = []
    for number in range(num_issued, num_issued + count):
        epoch, position = divmod(number, num_rows)
        name = ticket_id(stage.name, epoch=epoch, position=position)
        tickets.append(Ticket(name, stage.name, epoch, position, 0, stage.algorithm.group_size))
    return tuple(tickets)
