"""The groups that are running: training tickets and evaluation problems, over the rollout workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kintsugi.buffer.admission import admissible
from kintsugi.buffer.choosing import Choice, choose_batch
from kintsugi.config import Config
from kintsugi.control.agenda import steps_ahead
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.protocol import Raise, Tell
from kintsugi.control.scheduler import TaskScheduler, TaskStatus
from kintsugi.errors import DataError, Fault, ProcessDied
from kintsugi.facts import (
    FilterReason,
    SampleQuarantined,
    SamplesScored,
    TicketAssigned,
    TicketExpired,
    TicketFiltered,
    TicketReturned,
    TicketsIssued,
)
from kintsugi.graph.advantages import is_uninformative
from kintsugi.messages import Drop, EpisodesDone, RunEpisodes
from kintsugi.stages import Stage
from kintsugi.types import Role, SampleMeta, SampleText, Sampling, Ticket, sample_key, ticket_id

EPISODE = "episode"
CAPACITY = 64
"""Groups that one rollout worker runs at once."""


class Episodes:
    """Issues tickets, hands groups to rollout workers, and takes what comes back into the ledger."""

    def __init__(self, config: Config, *, draft: Draft, talk: Conversation, num_rows: int) -> None:
        self._config, self._draft, self._talk, self._num_rows = config, draft, talk, num_rows
        self._scheduler = TaskScheduler(capacity=CAPACITY)
        self._failures: Counter[str] = Counter()
        self._texts: dict[str, SampleText] = {}
        self._tokens: dict[str, str] = {}
        """Group → the request that it was last asked with; never used again, for a late answer must not be taken for
        that to a later request."""
        self._num_asked = 0
        self._unreachable: set[str] = set()
        """Workers that are asked nothing until the next tick, so that a request that fails at once is not repeated at
        once."""
        self.evaluation: Evaluation | None = None
        self.last_reason = ""
        """Why the latest group or sample was set aside."""
        self.timing: Counter[str] = Counter()
        """Seconds that workers spent per call on groups that train, since it was last cleared."""

    def collect(self, stage: Stage, now: float) -> None:
        """Issue what may be issued and hand out what waits; after a rollback the youngest wait for their own step.

        What is sampled goes by the weights that the servers have; rows of the data by the step that learns them.
        """
        state, counters = self._draft.state, self._draft.state.ledger.stage(stage.name)
        version, staleness = state.step, 0
        if stage.samples_completions:
            version, staleness = state.version, steps_ahead(self._config, state)
        if version < 0:  # Nobody has weights that count: what is under way goes on, nothing new begins.
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
            self._draft.fact(
                TicketsIssued(next_tickets(stage, num_issued=issued, count=count, num_rows=self._num_rows))
            )
            self._draft.because(f"issued {count}: {reason}")
        for ticket in self._waiting(stage, too_many=max(0, -count)):
            if self._scheduler.status(ticket) is TaskStatus.UNKNOWN:
                self._scheduler.submit(ticket)
        self.hand_out(now)

    def _waiting(self, stage: Stage, *, too_many: int) -> list[str]:
        """Tickets that may be handed out, but for so many of the youngest that are in no batch. Some of those may run
        already, or be complete: then older ones that were lost must not wait in their place."""
        ledger = self._draft.state.ledger
        waiting = [ticket.id for ticket in ledger.issued_unassigned() if ticket.stage == stage.name]
        if not too_many:
            return waiting
        counters, in_batch = ledger.stage(stage.name), ledger.in_batch(self._draft.state.step + 1)
        free = counters.num_issued - counters.num_dropped - counters.num_trained - len(in_batch)
        oldest = {candidate.ticket for candidate in ledger.candidates(max(0, free - too_many))}
        return [ticket for ticket in waiting if ticket in oldest]

    @property
    def most_groups(self) -> int:
        """That could run at once."""
        return CAPACITY * max(1, len(self._draft.state.members.live(Role.ROLLOUT)))

    @property
    def num_waiting(self) -> int:
        """Groups that are not handed out."""
        return self._scheduler.num_pending

    def next_batch(self, stage: Stage) -> tuple[str, ...]:
        """The batch of the next step, if it is complete; what became too old for it is dropped, and replaced by what
        is complete already or else by the next prompt."""
        choice = self._choose(stage)
        while choice.expired:
            for ticket, reason in choice.expired.items():
                self.last_reason = reason
                self._draft.fact(TicketExpired(ticket, reason))
            choice = self._choose(stage)
        if choice.batch and choice.reason:
            self._draft.because(choice.reason)
        return choice.batch

    def _choose(self, stage: Stage) -> Choice:
        state, section = self._draft.state, self._config.asynchrony
        size = stage.algorithm.batch_size
        return choose_batch(
            state.ledger.candidates(size + section.overtake),
            size=size,
            version=state.step,
            max_staleness=section.max_staleness,
            overtake=section.overtake,
        )

    def resample(self, stage: Stage) -> None:
        """Dynamic sampling: groups that say nothing are filtered, so that the next prompts replace them.

        A group is judged when all older ones of the step are complete and kept, or passed over: in the order of issue,
        so that which groups are replaced, and which are kept because the bound is reached, does not depend on who
        arrives when. What was filtered stays so and counts for its step, whoever collects it again after a fault.
        """
        ledger, step = self._draft.state.ledger, self._draft.state.step + 1
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
            self._draft.fact(TicketFiltered(ticket, FilterReason.EQUAL_REWARDS))
            left -= 1

    def drop_unusable(self, stage: Stage, *, before: int) -> str | None:
        """Set aside groups that can not be trained; gives what is wrong when there are too many, `before` not counted.

        A group that was set aside is replaced by the next prompt, but not for ever: a step that loses more groups than
        it needs will not get better by taking more.
        """
        ledger = self._draft.state.ledger
        for ticket in ledger.unusable_tickets():
            self._draft.fact(TicketFiltered(ticket, FilterReason.TOO_FEW_VALID))
        failed = ledger.stage(stage.name).num_failed - before
        if failed <= stage.algorithm.batch_size:
            return None
        why = f"{failed} groups of step {self._draft.state.step + 1} were set aside, more than its batch_size"
        return f"{why}; the last: {self.last_reason}"

    def evaluate(self, evaluation: Evaluation, now: float) -> None:
        """The run waits for it, so it goes before groups of later steps."""
        self.evaluation = evaluation
        self._scheduler.submit_first(evaluation.tasks)
        self.hand_out(now)

    def hand_out(self, now: float) -> None:
        """Give waiting groups to workers that have room."""
        live, pace = self._draft.state.members.live(Role.ROLLOUT), self._draft.state.pace
        self._scheduler.limit = None if pace is None or self.evaluation is not None else pace.groups
        reachable = [worker for worker in live if worker not in self._unreachable]
        for name, worker in self._scheduler.assign(reachable):
            self._run(name, worker, now)

    def tick(self, now: float, *, rolling: bool) -> None:
        """Who could not be reached a moment ago may be asked again, where groups are handed out at all."""
        self._unreachable.clear()
        if rolling:
            self.hand_out(now)

    def done(self, done: EpisodesDone, worker: str) -> str | None:
        """A group came back; what the ledger does not accept (late, moved, repeated) is ignored with its reason.

        Gives what is wrong with an evaluation answer, which can neither be ignored nor set aside.
        """
        self._tokens.pop(done.ticket, None)
        self._scheduler.complete(done.ticket)
        if self.evaluation is not None and done.ticket in self.evaluation.tasks:
            return self.evaluation.take(done)
        ledger = self._draft.state.ledger
        # A group that is run again may give other samples than before; what was set aside stays so.
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
                self._draft.because(f"ignored {worker}'s answer for {done.ticket}: {refusal}")
                return None
            self._draft.fact(fact)
        self._failures.pop(done.ticket, None)
        return None

    def take_texts(self, batch: Sequence[SampleMeta]) -> dict[str, SampleText]:
        """What the samples of a batch say; given out once, then forgotten."""
        return {meta.key: text for meta in batch if (text := self._texts.pop(meta.key, None)) is not None}

    def failed(self, name: str, fault: Fault, *, worker: str) -> Fault | None:
        """A group failed as a whole.

        What is wrong with its data is wrong every time: it is set aside with its reason. What is wrong with the world
        may pass: it is tried again, and after the last attempt the run ends with that fault. Setting it aside would
        make the batch depend on the world.
        """
        is_evaluation = self._is_evaluation(name)
        if not is_evaluation and not self._is_running(name):
            self._scheduler.complete(name)  # Asked for again by a new master, though it was scored.
            return None
        if fault.kind == ProcessDied.__name__:  # Not the group's doing.
            self._unreachable.add(worker)
        else:
            self._failures[name] += 1
        if fault.kind == DataError.__name__ and not is_evaluation:
            self._set_aside(name, fault)
            return None
        if self._failures[name] >= self._config.rollout.attempts:
            return fault
        if not is_evaluation:
            self._draft.fact(TicketReturned(name, fault.message))
        self._scheduler.put_back(name)
        return None

    def _is_evaluation(self, name: str) -> bool:
        return self.evaluation is not None and name in self.evaluation.tasks

    def _is_running(self, name: str) -> bool:
        ledger = self._draft.state.ledger
        return name in ledger.running_on(ledger.worker_of(name)[0])

    def _set_aside(self, name: str, fault: Fault) -> None:
        ledger = self._draft.state.ledger
        self._scheduler.cancel(name)
        self._failures.pop(name, None)
        self.last_reason = fault.message
        for index in range(ledger.ticket(name).num_samples):
            quarantined = SampleQuarantined(sample_key(name, index), fault.message)
            if ledger.accepts(quarantined) is None:
                self._draft.fact(quarantined)
        self._draft.do(Raise(f"{name} is quarantined: {fault.message}"))

    def worker_lost(self, worker: str) -> None:
        """What it ran or kept is issued again under the same tickets, so with the same noise.

        Groups of a batch in training stay: their trajectories have been fetched, or the step fails and is undone,
        and then `reclaim` issues them again.
        """
        ledger = self._draft.state.ledger
        training = ledger.in_batch(self._draft.state.step + 1)
        for ticket in ledger.assigned_to(worker):
            if ticket in training:
                self._scheduler.cancel(ticket)  # Asked for again by a new master, though it was scored.
            else:
                self._draft.fact(TicketReturned(ticket, f"{worker} was lost"))
        waiting = {ticket.id for ticket in ledger.issued_unassigned()}
        for task in self._scheduler.lost(worker):
            # In a batch, or trained: only its text was asked for again.
            if task not in waiting and not self._is_evaluation(task):
                self._scheduler.cancel(task)

    def reclaim(self) -> None:
        """Before a batch is trained (again): what is kept by somebody who is gone has to be run again."""
        state = self._draft.state
        for ticket in state.ledger.in_batch(state.step + 1):
            worker, incarnation = state.ledger.worker_of(ticket)
            if not state.members.is_live(worker, incarnation):
                self._draft.fact(TicketReturned(ticket, f"{worker} was lost"))

    def adopt(self, now: float) -> None:
        """A new master: ask the workers again for what the journal says they run or keep; they answer once.

        The last master may have died before it told them that the last batch is trained.
        """
        state = self._draft.state
        self.let_go()
        for worker in state.members.live(Role.ROLLOUT):
            for ticket in state.ledger.assigned_to(worker):
                if state.ledger.worker_of(ticket)[1] == state.members.members[worker].incarnation:
                    self._scheduler.adopt(ticket, worker)
                    self._ask(ticket, worker, now)

    def let_go(self) -> None:
        """Tell the workers what the last step trained and dropped, so that they do not keep it any longer; nor are the
        texts kept here of what was dropped, or answered again though it was trained."""
        state = self._draft.state
        ended = (*state.ledger.trained_in(state.step), *state.ledger.dropped_in(state.step))
        for name in ended:
            for index in range(state.ledger.ticket(name).num_samples):
                self._texts.pop(sample_key(name, index), None)
        for worker in state.members.live(Role.ROLLOUT) if ended else ():
            self._draft.do(Tell(worker, Drop(ended)))

    def void(self) -> None:
        """Steps were undone: whatever runs or waits was for them, and is asked for again in its turn."""
        self._scheduler.clear()
        self._talk.withdraw_all(EPISODE)
        self._failures.clear()
        self._texts.clear()
        self._tokens.clear()
        self.evaluation = None

    def rebalance(self, now: float) -> None:
        """A worker joined: give it a share of what the others have not finished. What is finished stays, though a new
        master asked for its text again."""
        members = self._draft.state.members
        moves = self._scheduler.rebalance(
            members.live(Role.ROLLOUT),
            may_move=lambda task: self._is_evaluation(task) or self._is_running(task),
        )
        for move in moves:
            self._talk.withdraw(self._tokens.pop(move.task))
            self._draft.do(Tell(move.source, Drop((move.task,))))
            if not self._is_evaluation(move.task):
                self._draft.fact(TicketReturned(move.task, f"moved from {move.source} to {move.target}"))
            self._run(move.task, move.target, now)
        self.hand_out(now)

    def _run(self, name: str, worker: str, now: float) -> None:
        if not self._is_evaluation(name):
            state = self._draft.state
            incarnation = state.members.members[worker].incarnation
            version = state.version if state.version >= 0 else state.ledger.version_of(name)
            self._draft.fact(TicketAssigned(name, worker, incarnation, version))
        self._ask(name, worker, now)

    def _ask(self, name: str, worker: str, now: float) -> None:
        state = self._draft.state
        timeout_s = self._talk.deadline_s(RunEpisodes)
        if self.evaluation is not None and name in self.evaluation.tasks:
            ticket, sampling = self.evaluation.tasks[name]
            body = RunEpisodes(ticket, "eval", sampling, state.step, timeout_s)
        else:
            ticket, version = state.ledger.ticket(name), state.ledger.version_of(name)
            sampling = self._sampling(ticket.num_samples)
            body = RunEpisodes(ticket, "train", sampling, version, timeout_s, state.lineage)
        self._num_asked += 1
        self._tokens[name] = f"{EPISODE} {state.epoch}.{self._num_asked} {name}"
        self._talk.ask(self._tokens[name], worker, body, now)

    def _sampling(self, num_samples: int) -> Sampling:
        return Sampling(
            temperature=self._config.sampling.temperature,
            max_new_tokens=self._config.sampling.max_new_tokens,
            num_samples=num_samples,
            seed=self._config.seed,
        )


def episode_of(token: str) -> str | None:
    """The group that a token asks for, if it asks for one."""
    kind, _, rest = token.partition(" ")
    return rest.partition(" ")[2] if kind == EPISODE else None


def next_tickets(stage: Stage, *, num_issued: int, count: int, num_rows: int) -> tuple[Ticket, ...]:
    """The next prompts in the stage's order; past the end of the data a new epoch begins."""
    tickets = []
    for number in range(num_issued, num_issued + count):
        epoch, position = divmod(number, num_rows)
        name = ticket_id(stage.name, epoch=epoch, position=position)
        tickets.append(Ticket(name, stage.name, epoch, position, 0, stage.algorithm.group_size))
    return tuple(tickets)
