"""Rollout worker process: runs groups of episodes, scores them, and keeps the trajectories until they are trained.

One loop consumes requests (run a group, send samples, drop groups), replies of the generation manager
(`generation_client.py`) and messages of the user process. The user's rewards and environments run in that process
(`user_code/`), so that heartbeats continue and deadlines can be enforced. A group is run in one of three ways: sampled
in one turn and scored (`single_turn.py`), run as episodes of several turns (`multi_turn.py`), or taken from the data.

The worker outlives master and manager. A new master requests again every group that it has no answer for: a group that
runs is not started twice, and a finished one is answered from memory. When the manager dies, its groups wait for the
next manager.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from kintsugi.config.recipe import load_config
from kintsugi.config.schema import LEARN_PAIRS, Config
from kintsugi.config.stages import Stage, stages
from kintsugi.data.columns import CHOSEN, COMPLETION, REJECTED
from kintsugi.data.prefetch import PrefetchingReader
from kintsugi.data.saved_rollouts import saved_samples
from kintsugi.data.streams import RowNotYet
from kintsugi.data.tokenized import TokenizedRow
from kintsugi.errors import DataError, DeadlineExceeded, KintsugiError, RefusedError
from kintsugi.model.plan import plan_architecture, plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.process.membership import Membership, open_endpoint
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.rollout import Drop, EpisodesDone, FetchSamples, RunEpisodes, SamplesFetched
from kintsugi.rollout.generation_client import MANAGER, GenerationClient
from kintsugi.rollout.group import (
    FinishedGroup,
    GroupOutcome,
    GroupSample,
    RolloutGroup,
    UnreadGroup,
    is_same,
    sample_text,
)
from kintsugi.rollout.multi_turn import MultiTurnGroups
from kintsugi.rollout.replay import replay
from kintsugi.rollout.rewards.spec import rewards_of, total
from kintsugi.rollout.single_turn import SingleTurnGroups
from kintsugi.rollout.trajectory import demonstrated_trajectory, describe, int32
from kintsugi.rollout.user_code.process import UserProcess
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.counters import COUNTERS, IDLENESS
from kintsugi.runtime.spans import SPANS
from kintsugi.runtime.waits import WAITS, wait
from kintsugi.telemetry.events import EventLog, FaultSeen, Note, SamplesQuarantined
from kintsugi.transport import Delivery
from kintsugi.types import Row, SampleText, Trajectory, Wait, ticket_of

IDLE_S = 0.25
MAKE_READY_S = 0.01
"""Time spent on preparing the next rows in an iteration without requests."""


class RolloutWorker:
    """State of one rollout worker; `turn` is one iteration of its loop."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        config: Config,
        tokenizer: Tokenizer,
        *,
        log: EventLog,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._process = bootstrap.process
        self._config = config
        self._tokenizer = tokenizer
        self._log = log
        self._stages: dict[str, Stage] = {stage.name: stage for stage in stages(config)}
        self._run_dir = Path(bootstrap.run_dir)
        self._max_positions = plan_architecture(config).max_positions
        self._reader: PrefetchingReader | None = None
        """Opened while the worker waits for its first request, or by that request if it comes first."""
        self._has_tried_data = False
        self._rewards = rewards_of(config)
        self._running: dict[str, RolloutGroup] = {}
        self._unread: list[UnreadGroup] = []
        self._finished: dict[str, FinishedGroup] = {}
        self._evaluated_version = -1
        self._declared: Wait | None = None
        """Declared wait: for the generation of the oldest group, or for the user's code."""
        self._wait = 0
        self._clock = clock
        self.endpoint = open_endpoint(bootstrap, clock=clock)
        self.membership = Membership(self.endpoint, bootstrap, capabilities={})
        self.membership.end_with_lifeline(bootstrap.lifeline)
        self._generation = GenerationClient(self.endpoint, clock=self._clock)
        self._user_process = UserProcess(config, loop=self.endpoint, note=lambda text: log.emit(Note(text)))
        self._sampled_groups = self._open_sampled_groups(config)

    def _open_sampled_groups(self, config: Config) -> SingleTurnGroups | MultiTurnGroups:
        """Choose how sampled groups are run: in one turn, or in an environment."""
        if config.rollout.environment is None:
            return SingleTurnGroups(
                config,
                self._tokenizer,
                generation=self._generation,
                process=self._user_process,
                finish=self._finish,
                give_up=self._give_up,
                clock=self._clock,
            )
        return MultiTurnGroups(
            config,
            generation=self._generation,
            process=self._user_process,
            finish=self._finish,
            give_up=self._give_up,
            clock=self._clock,
        )

    def turn(self) -> None:
        since, is_idle = self._clock.monotonic(), not self._running
        try:
            deliveries = wait(self._attempt, whom="anyone", what="a request", timeout_s=IDLE_S)
        except DeadlineExceeded:
            deliveries = []
        if is_idle:
            IDLENESS.add(self._clock.monotonic() - since)
        for delivery in deliveries:
            if not self.membership.handle(delivery):
                self._handle(delivery)
        if not deliveries:
            self._make_ready()
        self._begin_unread()
        for message in self._user_process.take(self._clock.monotonic()):
            self._sampled_groups.take(message)
        self._generation.turn()
        self.membership.load = float(self._sampled_groups.load)
        self._declare()
        self.membership.tick(self._clock.monotonic())

    def _make_ready(self) -> None:
        """Open the data before the first request, so that it does not wait for it; then prefetch the next rows."""
        if self._reader is not None:
            self._reader.make_ready(within_s=MAKE_READY_S)
        elif self.membership.registered and not self._has_tried_data:
            self._has_tried_data = True
            # Raised again by the first request, which can report it.
            with contextlib.suppress(KintsugiError):
                self._open_reader()

    def _declare(self) -> None:
        """Declare a wait for the manager while something is being generated, else for the user's code; heartbeats
        report it."""
        generating = self._generation.oldest()
        in_user_code = self._sampled_groups.oldest()
        # Compared with its deadline: a new master extends the deadline of a running group.
        awaited: Wait | None = None
        if generating is not None:
            awaited = Wait(MANAGER, "Generated", generating.since, generating.deadline)
        elif in_user_code is not None:
            since, group = in_user_code
            awaited = Wait(self._user_process.name, "an outcome", since, group.deadline)
        elif self._unread:
            awaited = Wait("stream", "the next row", self._unread[0].since, self._unread[0].deadline)
        if awaited == self._declared:
            return
        if self._declared is not None:
            WAITS.end(self._wait)
        if awaited is not None:
            self._wait = WAITS.begin(awaited)
        self._declared = awaited

    def close(self) -> None:
        if self._declared is not None:
            WAITS.end(self._wait)
        self._user_process.close()
        self.endpoint.close()

    def _attempt(self, remaining_s: float) -> list[Delivery] | None:
        is_busy = self._user_process.is_busy
        if is_busy:
            remaining_s = min(remaining_s, self._user_process.next_deadline() - self._clock.monotonic())
        deliveries = self.endpoint.poll(max(0.0, remaining_s))
        return deliveries if deliveries or is_busy else None

    def _handle(self, delivery: Delivery) -> None:
        match delivery.body:
            case RunEpisodes() as request:
                self._take_order(delivery, request)
            case FetchSamples(keys=keys):
                self._hand_over(delivery, keys)
            case Drop(tickets=tickets):
                for ticket in tickets:
                    self._drop(ticket)
            case other:
                self._fail(delivery, RefusedError(f"a rollout worker takes no {type(other).__name__}"))

    def _fail(self, delivery: Delivery, error: KintsugiError) -> None:
        self._log.emit(FaultSeen(self.endpoint.fail(delivery, error)))

    def _hand_over(self, delivery: Delivery, keys: tuple[str, ...]) -> None:
        try:
            samples = tuple(self._finished[ticket_of(key)].trajectories[key] for key in keys)
        except KeyError as error:
            self._fail(delivery, RefusedError(f"{self._process} does not keep sample {error}"))
            return
        self.endpoint.reply(delivery, SamplesFetched(samples))

    def _take_order(self, delivery: Delivery, request: RunEpisodes) -> None:
        """Start a group. If it is running, the request waits for the same result; if finished, it is answered."""
        ticket = request.ticket.id
        running, finished = self._running.get(ticket), self._finished.get(ticket)
        if finished is not None and is_same(finished.request, request):
            self.endpoint.reply(delivery, finished.done)
        elif running is not None and is_same(running.request, request):
            running.deliveries.append(delivery)
            running.deadline = self._clock.monotonic() + request.timeout_s
        else:
            self._drop(ticket)
            try:
                self._begin(delivery, request)
            except KintsugiError as error:
                self._fail(delivery, error)

    def _drop(self, ticket: str) -> None:
        """Drop a group. If it runs, its requests are refused and its later results ignored."""
        self._finished.pop(ticket, None)
        group = self._running.pop(ticket, None)
        unread = [each.delivery for each in self._unread if each.request.ticket.id == ticket]
        self._unread = [each for each in self._unread if each.request.ticket.id != ticket]
        if group is not None:
            group.is_open = False
        for delivery in unread if group is None else group.deliveries:
            self.endpoint.fail(delivery, RefusedError(f"{ticket} was dropped"))

    def _begin(self, delivery: Delivery, request: RunEpisodes) -> None:
        ticket = request.ticket
        if request.split == "eval" and request.version != self._evaluated_version:
            self._forget_evaluation(request.version)
        now = self._clock.monotonic()
        try:
            row, tokens = self._row(request)
        except RowNotYet as error:
            if not self._unread:
                self._log.emit(Note(f"waiting for a stream: {error}"))
            self._unread.append(UnreadGroup(delivery, request, now, now + request.timeout_s))
            return
        group = RolloutGroup([delivery], request, row, int32(tokens.prompt), now, now + request.timeout_s)
        if request.split == "train" and saved_samples(row):
            self._finish(group, replay(ticket, row))
        elif request.split == "train" and not self._stages[ticket.stage].samples_completions:
            self._demonstrate(group, tokens)
        else:
            self._check_length(len(tokens.prompt) + request.sampling.max_new_tokens, row)
            self._running[ticket.id] = group
            self._sampled_groups.begin(group)

    def _forget_evaluation(self, next_version: int) -> None:
        """Drop the groups of the previous evaluation when that of the next version begins; the master drops none."""
        self._evaluated_version = next_version
        for ticket, finished in list(self._finished.items()):
            if finished.request.split == "eval":
                del self._finished[ticket]

    def _begin_unread(self) -> None:
        """Start groups for which the stream has delivered the row; fail those that have waited too long."""
        unread, self._unread = self._unread, []
        for each in unread:
            now = self._clock.monotonic()
            left_s = each.deadline - now
            if left_s <= 0:
                what = f"the row of {each.request.ticket.id}"
                self._fail(
                    each.delivery, DeadlineExceeded(whom="stream", what=what, waited_s=now - each.since)
                )
            elif self._has_come(each.request):
                self._take_order(each.delivery, msgspec.structs.replace(each.request, timeout_s=left_s))
            else:
                self._unread.append(each)

    def _has_come(self, request: RunEpisodes) -> bool:
        try:
            self._row(request)
        except KintsugiError as error:  # Any other error is reported when the group is started.
            return not isinstance(error, RowNotYet)
        return True

    def _open_reader(self) -> PrefetchingReader:
        if self._reader is None:
            self._reader = PrefetchingReader(self._config, self._tokenizer, run_dir=self._run_dir)
        return self._reader

    def _row(self, request: RunEpisodes) -> tuple[Row, TokenizedRow]:
        reader = self._open_reader()
        ticket = request.ticket
        if request.split == "eval":
            return reader.held_out(ticket.position)
        seed = self._stages[ticket.stage].seed
        return reader.training(stage=ticket.stage, seed=seed, epoch=ticket.epoch, position=ticket.position)

    def _check_length(self, length: int, row: Row) -> None:
        limit = self._config.generation.max_length
        if length > limit:
            raise DataError(
                f"prompt {row.prompt[:40]!r}: prompt and completion need {length} tokens, "
                f"generation.max_length is {limit}"
            )

    def _demonstrate(self, group: RolloutGroup, tokens: TokenizedRow) -> None:
        """Answer with the completions of the row: the one to imitate, or the chosen and the rejected one of a pair. In
        an environment the environment demonstrates."""
        ticket = group.request.ticket
        if tokens.longest > self._max_positions:
            raise DataError(
                f"prompt {group.row.prompt[:40]!r}: prompt and answer have {tokens.longest} tokens, the model has "
                f"{self._max_positions} positions"
            )
        pairs = self._stages[ticket.stage].algorithm.name in LEARN_PAIRS
        if isinstance(self._sampled_groups, MultiTurnGroups) and not pairs:
            self._running[ticket.id] = group
            self._sampled_groups.begin(group, demonstrate=True)
            return
        samples = [
            GroupSample(
                demonstrated_trajectory(ticket.id, tokens.prompt, tokens.answers[name], sample=sample),
                sample_text(group.row, group.row.columns[name]),
                {},
            )
            for sample, name in enumerate((CHOSEN, REJECTED) if pairs else (COMPLETION,))
        ]
        self._finish(
            group, GroupOutcome(samples, timing={"demonstrate": self._clock.monotonic() - group.since})
        )

    def _give_up(self, group: RolloutGroup, error: KintsugiError) -> None:
        del self._running[group.ticket]
        group.is_open = False
        for delivery in group.deliveries:
            self._fail(delivery, error)

    def _finish(self, group: RolloutGroup, outcome: GroupOutcome) -> None:
        """Store the result of a group and answer its requests. A group without samples is not stored, because the
        master would never drop it; if requested again, it is run again."""
        if not outcome.samples:
            reason = next(iter(outcome.quarantined.values()))
            message = f"{group.ticket} quarantined: {reason}"
            self._log.emit(SamplesQuarantined(message, ticket=group.ticket, cause=outcome.cause))
            self._answer(group, EpisodesDone(group.ticket, (), outcome.quarantined))
            return
        metas = tuple(
            describe(
                sample.trajectory,
                ticket=group.ticket,
                holder=self._process,
                components=sample.components,
                reward=total(sample.components, self._rewards),
            )
            for sample in outcome.samples
        )
        trajectories: dict[str, Trajectory] = {}
        texts: dict[str, SampleText] = {}
        if group.request.split == "train":
            trajectories = {sample.trajectory.key: sample.trajectory for sample in outcome.samples}
            texts = {sample.trajectory.key: sample.text for sample in outcome.samples}
        done = EpisodesDone(group.ticket, metas, outcome.quarantined, texts=texts, timing=outcome.timing)
        self._finished[group.ticket] = FinishedGroup(group.request, done, trajectories)
        COUNTERS.add("groups")
        self._answer(group, done)

    def _answer(self, group: RolloutGroup, done: EpisodesDone) -> None:
        # A demonstration was never running: it is finished as soon as it is requested.
        self._running.pop(done.ticket, None)
        group.is_open = False
        for delivery in group.deliveries:
            self.endpoint.reply(delivery, done)
        about = {
            "ticket": group.ticket,
            "split": group.request.split,
            "version": group.request.version,
            "samples": len(done.samples),
            "quarantined": len(done.quarantined) or None,
        }
        SPANS.add("episode", about, since=group.since)


def main(bootstrap: Bootstrap) -> int:
    config = load_config(RunFolder(bootstrap.run_dir).config_file)
    log = EventLog(RunFolder(bootstrap.run_dir).events_file(bootstrap.process), process=bootstrap.process)
    _, tokenizer = plan_model(config)
    worker = RolloutWorker(bootstrap, config, tokenizer, log=log)
    while worker.membership.shutdown_reason is None:
        worker.turn()
    worker.close()
    return 0
