"""The rollout worker: runs groups of episodes, scores them, and keeps the trajectories until they are trained.

One loop consumes requests (run this group, hand over these samples, forget those), answers of the generation manager
(`generating.py`) and what the user's code says: rewards and environments run in a process beside it
(`user_process.py`), so that heartbeats go on and a deadline can be kept. A group is run in one of three ways: answered
in one turn and judged (`answering.py`), played as episodes of several turns (`acting.py`), or taken from the data.

It outlives master and manager. A master that took over asks again for what it knows no answer to: a group that runs
is not begun twice, a finished one is answered from what is kept. A group whose manager died waits for the next one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import LEARN_PAIRS, Config
from kintsugi.data.columns import CHOSEN, COMPLETION, REJECTED
from kintsugi.data.feed import Feed
from kintsugi.data.saved import saved_samples
from kintsugi.data.streams import RowNotYet
from kintsugi.data.tokens import Fed
from kintsugi.errors import DataError, DeadlineExceeded, KintsugiError, RefusedError
from kintsugi.messages import Drop, EpisodesDone, FetchSamples, RunEpisodes, SamplesFetched
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.observe.events import EventLog, FaultSeen, Note, events_path
from kintsugi.recipe import load_config
from kintsugi.rollout.acting import Acting
from kintsugi.rollout.answering import Answering
from kintsugi.rollout.episode import demonstrated_trajectory, describe, int32
from kintsugi.rollout.generating import MANAGER, Generating
from kintsugi.rollout.groups import Finished, Group, Outcome, Sample, Unread, is_same
from kintsugi.rollout.replay import replay
from kintsugi.rollout.scoring import rewards_of, total
from kintsugi.rollout.user_process import UserProcess
from kintsugi.runtime import COUNTERS, IDLENESS, SPANS, SYSTEM_CLOCK, WAITS, wait
from kintsugi.stages import Stage, stages
from kintsugi.transport import Delivery
from kintsugi.types import Row, SampleText, Trajectory, Wait, ticket_of
from kintsugi.worker import Membership, open_endpoint

IDLE_S = 0.25
MAKE_READY_S = 0.01
"""Spent on the next rows in a turn in which nobody asked for anything."""


class RolloutWorker:
    """State of one rollout worker; `turn` is one round of its loop."""

    def __init__(self, bootstrap: Bootstrap, config: Config, tokenizer: Tokenizer, *, log: EventLog) -> None:
        self._process, self._config, self._tokenizer, self._log = bootstrap.process, config, tokenizer, log
        self._stages: dict[str, Stage] = {stage.name: stage for stage in stages(config)}
        self._run_dir = Path(bootstrap.run_dir)
        self._max_positions = plan_model(config)[0].max_positions
        self._feed: Feed | None = None
        """Opened when the first row is asked for."""
        self._rewards = rewards_of(config)
        self._running: dict[str, Group] = {}
        self._unread: list[Unread] = []
        self._finished: dict[str, Finished] = {}
        self._evaluated_version = -1
        self._declared: Wait | None = None
        """For the generation of the oldest group, or the user's code."""
        self._wait = 0
        self._clock = SYSTEM_CLOCK
        self.endpoint = open_endpoint(bootstrap)
        self.membership = Membership(self.endpoint, bootstrap, capabilities={})
        self.endpoint.watch(bootstrap.lifeline, self._orphaned)
        self._lifeline = bootstrap.lifeline
        self._generating = Generating(self.endpoint, clock=self._clock)
        self._beside = UserProcess(config, loop=self.endpoint, note=lambda text: log.emit(Note(text)))
        self._way = self._way_of(config)

    def _way_of(self, config: Config) -> Answering | Acting:
        """How groups that are sampled are run."""
        if config.rollout.environment is None:
            return Answering(
                config,
                self._tokenizer,
                generating=self._generating,
                process=self._beside,
                finish=self._finish,
                give_up=self._give_up,
                clock=self._clock,
            )
        return Acting(
            config,
            generating=self._generating,
            process=self._beside,
            finish=self._finish,
            give_up=self._give_up,
            clock=self._clock,
        )

    def _orphaned(self) -> None:
        self.endpoint.unwatch(self._lifeline)
        self.membership.shutdown_reason = "agent and launcher are gone"

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
        if self._feed is not None and not deliveries:
            self._feed.make_ready(within_s=MAKE_READY_S)
        self._begin_unread()
        for said in self._beside.take(self._clock.monotonic()):
            self._way.take(said)
        self._generating.turn()
        self.membership.load = float(self._way.load)
        self._declare()
        self.membership.tick(self._clock.monotonic())

    def _declare(self) -> None:
        """Say that this process waits for the manager while something is being generated, or else for the user's code:
        the heartbeats carry it."""
        generated, used = self._generating.oldest(), self._way.oldest()
        # Compared as a whole: a master that took over gives a group that runs more time.
        awaited: Wait | None = None
        if generated is not None:
            awaited = Wait(MANAGER, "Generated", generated.since, generated.deadline)
        elif used is not None:
            since, group = used
            awaited = Wait(self._beside.name, "an outcome", since, group.deadline)
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
        self._beside.close()
        self.endpoint.close()

    def _attempt(self, remaining_s: float) -> list[Delivery] | None:
        is_asked = self._beside.is_asked
        if is_asked:
            remaining_s = min(remaining_s, self._beside.next_deadline() - self._clock.monotonic())
        deliveries = self.endpoint.poll(max(0.0, remaining_s))
        return deliveries if deliveries or is_asked else None

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
        """Begin a group, unless this one is running or finished: then somebody else wants its answer too."""
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
        """Forget a group. If it runs, its orders are refused, and what still comes of it is ignored."""
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
            row, fed = self._row(request)
        except RowNotYet as error:
            if not self._unread:
                self._log.emit(Note(f"waiting for a stream: {error}"))
            self._unread.append(Unread(delivery, request, now, now + request.timeout_s))
            return
        group = Group([delivery], request, row, int32(fed.prompt), now, now + request.timeout_s)
        if request.split == "train" and saved_samples(row):
            self._finish(group, replay(ticket, row))
        elif request.split == "train" and not self._stages[ticket.stage].samples_completions:
            self._demonstrate(group, fed)
        else:
            self._check_length(len(fed.prompt) + request.sampling.max_new_tokens, row)
            self._running[ticket.id] = group
            self._way.begin(group)

    def _forget_evaluation(self, next_version: int) -> None:
        """Nobody drops evaluation problems: what one version said is of no use once the next one is asked."""
        self._evaluated_version = next_version
        for ticket, finished in list(self._finished.items()):
            if finished.request.split == "eval":
                del self._finished[ticket]

    def _begin_unread(self) -> None:
        """Begin groups whose rows have come out of the stream meanwhile; one that does not come in time is an error."""
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
        except KintsugiError as error:  # Of another one, whoever begins it will be told.
            return not isinstance(error, RowNotYet)
        return True

    def _row(self, request: RunEpisodes) -> tuple[Row, Fed]:
        if self._feed is None:
            self._feed = Feed(self._config, self._tokenizer, run_dir=self._run_dir)
        ticket = request.ticket
        if request.split == "eval":
            return self._feed.held_out(ticket.position)
        seed = self._stages[ticket.stage].seed
        return self._feed.training(
            stage=ticket.stage, seed=seed, epoch=ticket.epoch, position=ticket.position
        )

    def _check_length(self, length: int, row: Row) -> None:
        limit = self._config.generation.max_length
        if length > limit:
            raise DataError(
                f"prompt {row.prompt[:40]!r}: prompt and completion need {length} tokens, "
                f"generation.max_length is {limit}"
            )

    def _demonstrate(self, group: Group, fed: Fed) -> None:
        """Hand out what the row says: the completion to learn or, of a pair, the chosen one and the rejected one. What
        is learned for an environment is shown by it."""
        ticket = group.request.ticket
        if fed.longest > self._max_positions:
            raise DataError(
                f"prompt {group.row.prompt[:40]!r}: prompt and answer have {fed.longest} tokens, the model has "
                f"{self._max_positions} positions"
            )
        pairs = self._stages[ticket.stage].algorithm.name in LEARN_PAIRS
        if isinstance(self._way, Acting) and not pairs:
            self._running[ticket.id] = group
            self._way.begin(group, demonstrate=True)
            return
        samples = [
            Sample(
                demonstrated_trajectory(ticket.id, fed.prompt, fed.answers[name], sample=sample),
                SampleText(group.row.prompt, group.row.columns[name]),
                {},
            )
            for sample, name in enumerate((CHOSEN, REJECTED) if pairs else (COMPLETION,))
        ]
        self._finish(group, Outcome(samples, timing={"demonstrate": self._clock.monotonic() - group.since}))

    def _give_up(self, group: Group, error: KintsugiError) -> None:
        del self._running[group.ticket]
        group.is_open = False
        for delivery in group.deliveries:
            self._fail(delivery, error)

    def _finish(self, group: Group, outcome: Outcome) -> None:
        """Keep what came of a group and say so. One of which nothing came will be dropped by nobody, so it is not kept:
        asked for again, it is run again."""
        if not outcome.samples:
            reason = next(iter(outcome.quarantined.values()))
            self._log.emit(Note(f"{group.ticket} quarantined: {reason}"))
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
        kept: dict[str, Trajectory] = {}
        said: dict[str, SampleText] = {}
        if group.request.split == "train":
            kept = {sample.trajectory.key: sample.trajectory for sample in outcome.samples}
            said = {sample.trajectory.key: sample.text for sample in outcome.samples}
        done = EpisodesDone(group.ticket, metas, outcome.quarantined, texts=said, timing=outcome.timing)
        self._finished[group.ticket] = Finished(group.request, done, kept)
        COUNTERS.add("groups")
        self._answer(group, done)

    def _answer(self, group: Group, done: EpisodesDone) -> None:
        # A demonstration was never running: it is finished as soon as it is asked for.
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
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    log = EventLog(events_path(bootstrap.run_dir, bootstrap.process), process=bootstrap.process)
    _, tokenizer = plan_model(config)
    worker = RolloutWorker(bootstrap, config, tokenizer, log=log)
    while worker.membership.shutdown_reason is None:
        worker.turn()
    worker.close()
    return 0
