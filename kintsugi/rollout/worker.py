"""The rollout worker: runs groups of episodes, scores them, and keeps the trajectories until they are trained.

One loop consumes requests (run this group, hand over these samples, forget those) and answers of the generation
manager; it waits for either and for finished rewards. Rewards are the user's code and run in a process beside it
(`judge.py`), so that heartbeats go on and a deadline can be kept.

It outlives master and manager. A master that took over asks again for what it knows no answer to: a group that runs
is not begun twice, a finished one is answered from what is kept. A group whose manager died waits for the next one.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import LEARN_PAIRS, Config
from kintsugi.data.columns import CHOSEN, COMPLETION, REJECTED
from kintsugi.data.feed import Feed
from kintsugi.data.saved import saved_samples
from kintsugi.data.streams import RowNotYet
from kintsugi.data.tokens import Fed
from kintsugi.errors import ConfigError, DataError, DeadlineExceeded, KintsugiError, ProcessDied, RefusedError
from kintsugi.messages import (
    Drop,
    EpisodesDone,
    FetchSamples,
    Generate,
    Generated,
    RunEpisodes,
    SamplesFetched,
)
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.observe.events import EventLog, FaultSeen, Note, events_path
from kintsugi.recipe import load_config
from kintsugi.rollout.episode import demonstrated_trajectory, describe, int32, sampled_trajectory, whole
from kintsugi.rollout.judge import Case, Failed, Judged
from kintsugi.rollout.judging import Judging
from kintsugi.rollout.replay import replay
from kintsugi.rollout.scoring import parse_rewards, total
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, WAITS, wait
from kintsugi.stages import Stage, stages
from kintsugi.transport import Delivery, PendingReply
from kintsugi.types import (
    Completion,
    Finish,
    Role,
    Row,
    SampleText,
    Trajectory,
    Wait,
    process_id,
    sample_key,
    ticket_of,
)
from kintsugi.worker import Membership, open_endpoint

IDLE_S = 0.25
MANAGER = process_id(Role.MANAGER, 0)
MAKE_READY_S = 0.01
"""Spent on the next rows in a turn in which nobody asked for anything."""


class Group(msgspec.Struct, eq=False):
    """One group on its way: asked of the servers, then of the reward functions."""

    deliveries: list[Delivery]
    """All that asked for it, to be answered alike; those of a master that is gone lead nowhere."""
    request: RunEpisodes
    row: Row
    prompt: bytes
    since: float
    deadline: float
    """Of the latest order."""
    completions: tuple[Completion, ...] = ()
    generated_s: float = 0.0
    attempts: int = 1


class Unread(msgspec.Struct, frozen=True):
    """An order whose row has not come out of its stream."""

    delivery: Delivery
    request: RunEpisodes
    since: float
    deadline: float


class Finished(msgspec.Struct, frozen=True):
    """A group that was answered; kept until its samples are trained, or until the next evaluation."""

    request: RunEpisodes
    done: EpisodesDone
    trajectories: dict[str, Trajectory]


class Scoring(msgspec.Struct, frozen=True):
    """A group that is being judged, or waits for those before it."""

    group: Group
    texts: list[str]
    since: float


class RolloutWorker:
    """State of one rollout worker; `turn` is one round of its loop."""

    def __init__(self, bootstrap: Bootstrap, config: Config, tokenizer: Tokenizer, *, log: EventLog) -> None:
        self._process, self._config, self._tokenizer, self._log = bootstrap.process, config, tokenizer, log
        self._stages: dict[str, Stage] = {stage.name: stage for stage in stages(config)}
        self._run_dir = Path(bootstrap.run_dir)
        self._max_positions = plan_model(config)[0].max_positions
        self._feed: Feed | None = None
        """Opened when the first row is asked for."""
        self._rewards = parse_rewards(config.algorithm.reward)
        self._scoring: dict[int, Scoring] = {}
        self._cases = itertools.count()
        self._running: dict[str, Group] = {}
        self._unread: list[Unread] = []
        self._unsent: list[Group] = []
        """To be asked of the manager, as soon as there is one."""
        self._finished: dict[str, Finished] = {}
        self._evaluated_version = -1
        self._declared: Wait | None = None
        """For the generation of the oldest group, or its verdict."""
        self._wait = 0
        self._clock = SYSTEM_CLOCK
        self.endpoint = open_endpoint(bootstrap)
        self.membership = Membership(self.endpoint, bootstrap, capabilities={})
        self.endpoint.watch(bootstrap.lifeline, self._orphaned)
        self._lifeline = bootstrap.lifeline
        self._judging = Judging(config, loop=self.endpoint, note=lambda text: log.emit(Note(text)))

    def _orphaned(self) -> None:
        self.endpoint.unwatch(self._lifeline)
        self.membership.shutdown_reason = "agent and launcher are gone"

    def turn(self) -> None:
        try:
            deliveries = wait(self._attempt, whom="anyone", what="a request", timeout_s=IDLE_S)
        except DeadlineExceeded:
            deliveries = []
        for delivery in deliveries:
            if not self.membership.handle(delivery):
                self._handle(delivery)
        if self._feed is not None and not deliveries:
            self._feed.make_ready(within_s=MAKE_READY_S)
        self._begin_unread()
        self._ask_manager()
        self._collect_scores()
        self.membership.load = float(len(self._scoring))
        self._declare()
        self.membership.tick(self._clock.monotonic())

    def _declare(self) -> None:
        """Say that this process waits for the manager while a group is being generated, or for the reward process
        while one is judged: the heartbeats carry it."""
        oldest = next((group for group in self._running.values() if not group.completions), None)
        judged = next(iter(self._scoring.values()), None)
        # Compared as a whole: a master that took over gives a group that runs more time.
        awaited: Wait | None = None
        if oldest is not None:
            awaited = Wait(MANAGER, "Generated", oldest.since, oldest.deadline)
        elif judged is not None:
            awaited = Wait("reward process", "Judged", judged.since, judged.group.deadline)
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
        self._judging.close()
        self.endpoint.close()

    def _attempt(self, remaining_s: float) -> list[Delivery] | None:
        if self._scoring:
            remaining_s = min(remaining_s, self._judging.next_deadline() - self._clock.monotonic())
        deliveries = self.endpoint.poll(max(0.0, remaining_s))
        return deliveries if deliveries or self._scoring else None

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
        if finished is not None and _is_same(finished.request, request):
            self.endpoint.reply(delivery, finished.done)
        elif running is not None and _is_same(running.request, request):
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
        for delivery in unread if group is None else group.deliveries:
            self.endpoint.fail(delivery, RefusedError(f"{ticket} was dropped"))

    def _is_running(self, group: Group) -> bool:
        return self._running.get(group.request.ticket.id) is group

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
            past = replay(ticket, row)
            self._finish(group, *past.given, timing={}, quarantined=past.missing)
        elif request.split == "train" and not self._stages[ticket.stage].samples_completions:
            self._demonstrate(group, fed)
        else:
            self._check_length(len(fed.prompt) + request.sampling.max_new_tokens, row)
            self._running[ticket.id] = group
            self._unsent.append(group)

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
        """Hand out what the row says: the completion to learn or, of a pair, the chosen one and the rejected one."""
        ticket = group.request.ticket
        if fed.longest > self._max_positions:
            raise DataError(
                f"prompt {group.row.prompt[:40]!r}: prompt and answer have {fed.longest} tokens, the model has "
                f"{self._max_positions} positions"
            )
        pairs = self._stages[ticket.stage].algorithm.name in LEARN_PAIRS
        columns = (CHOSEN, REJECTED) if pairs else (COMPLETION,)
        trajectories = [
            demonstrated_trajectory(ticket.id, fed.prompt, fed.answers[name], sample=sample)
            for sample, name in enumerate(columns)
        ]
        texts = [group.row.columns[name] for name in columns]
        timing = {"demonstrate": self._since(group.since)}
        self._finish(group, trajectories, texts, [{} for _ in texts], timing=timing)

    def _ask_manager(self) -> None:
        """Send what was not sent, once the address book has a manager; what has no time left fails."""
        manager = self.endpoint.peers.get(MANAGER)
        unsent, self._unsent = self._unsent, []
        for group in unsent:
            now = self._clock.monotonic()
            if not self._is_running(group):
                continue
            if now >= group.deadline:
                what = f"Generate {group.request.ticket.id}"
                self._give_up(group, DeadlineExceeded(whom=MANAGER, what=what, waited_s=now - group.since))
            elif manager is None or not manager.address:
                self._unsent.append(group)
            else:
                self._generate(group, timeout_s=group.deadline - now)

    def _generate(self, group: Group, *, timeout_s: float) -> None:
        """Ask the manager; it spreads groups over the servers and moves those of a dead one."""
        self._judging.prepare()
        request = group.request
        body = Generate(
            request.ticket.id, 0, group.prompt, request.sampling, request.version, timeout_s=timeout_s
        )
        self.endpoint.request(MANAGER, body, deadline_s=timeout_s, on_done=partial(self._generated, group))

    def _generated(self, group: Group, pending: PendingReply) -> None:
        if not self._is_running(group):
            return
        try:
            completions = whole(pending.result().expect(Generated))
        except (ProcessDied, DeadlineExceeded):  # A later order may have given it more time.
            self._unsent.append(group)
            return
        except KintsugiError as error:
            self._give_up(group, error)
            return
        group.completions = completions
        group.generated_s = self._since(group.since)
        COUNTERS.add("completions", len(completions))
        self._score(group)

    def _give_up(self, group: Group, error: KintsugiError) -> None:
        del self._running[group.request.ticket.id]
        for delivery in group.deliveries:
            self._fail(delivery, error)

    def _score(self, group: Group) -> None:
        """A group that has failed before is judged alone, so that it is not blamed for another's fault."""
        texts = [self._text(completion) for completion in group.completions]
        case = Case(next(self._cases), group.row.prompt, tuple(texts), group.row.columns)
        try:
            self._judging.submit(case, alone=group.attempts > 1)
        except DataError as error:
            self._give_up(group, error)
            return
        self._scoring[case.id] = Scoring(group, texts, self._clock.monotonic())

    def _text(self, completion: Completion) -> str:
        ids = memoryview(completion.tokens).cast("i").tolist()
        return self._tokenizer.text_of_completion(ids, ended=completion.finish is Finish.EOS)

    def _collect_scores(self) -> None:
        now = self._clock.monotonic()
        for verdict in self._judging.take(now):
            scoring = self._scoring.pop(verdict.id)
            if not self._is_running(scoring.group):
                continue
            match verdict:
                case Judged():
                    self._take_score(scoring, verdict, now)
                case Failed(message=message, kind=DataError.__name__):
                    self._give_up(scoring.group, DataError(message))
                case Failed(message=message, kind=ConfigError.__name__):
                    self._give_up(scoring.group, ConfigError(message))
                case Failed(message=message):
                    self._score_again(scoring.group, message)

    def _take_score(self, scoring: Scoring, verdict: Judged, now: float) -> None:
        """What was judged goes on its way; what could not be is set aside, sample by sample, with its reason."""
        group, ticket = scoring.group, scoring.group.request.ticket.id
        judged = [index for index in range(len(group.completions)) if index not in verdict.reasons]
        quarantined = {
            sample_key(ticket, group.completions[index].sample): reason
            for index, reason in verdict.reasons.items()
        }
        if not judged:
            self._set_aside(group, quarantined)
            return
        timing = {"actor_generate": group.generated_s, "reward": now - scoring.since}
        self._finish(
            group,
            [sampled_trajectory(ticket, group.prompt, group.completions[index]) for index in judged],
            [scoring.texts[index] for index in judged],
            [verdict.components[index] for index in judged],
            timing=timing | {f"reward.{name}": seconds for name, seconds in verdict.seconds.items()},
            quarantined=quarantined,
        )

    def _score_again(self, group: Group, reason: str) -> None:
        """Try once more; after the last attempt the samples are set aside with the reason, never scored 0."""
        if group.attempts < self._config.rollout.attempts:
            group.attempts += 1
            self._score(group)
            return
        ticket = group.request.ticket.id
        keys = [sample_key(ticket, completion.sample) for completion in group.completions]
        self._set_aside(group, dict.fromkeys(keys, reason))

    def _set_aside(self, group: Group, quarantined: dict[str, str]) -> None:
        """Nobody will drop such a group, so it is not kept: asked for again, it is run again."""
        ticket = group.request.ticket.id
        self._log.emit(Note(f"{ticket} quarantined: {next(iter(quarantined.values()))}"))
        self._answer(group, EpisodesDone(ticket, (), quarantined))

    def _finish(
        self,
        group: Group,
        trajectories: list[Trajectory],
        texts: list[str],
        components: list[dict[str, float]],
        *,
        timing: dict[str, float],
        quarantined: dict[str, str] | None = None,
    ) -> None:
        ticket = group.request.ticket
        metas = tuple(
            describe(
                trajectory,
                ticket=ticket.id,
                holder=self._process,
                components=parts,
                reward=total(parts, self._rewards),
            )
            for trajectory, parts in zip(trajectories, components, strict=True)
        )
        kept: dict[str, Trajectory] = {}
        said: dict[str, SampleText] = {}
        if group.request.split == "train":
            kept = {trajectory.key: trajectory for trajectory in trajectories}
            said = {m.key: SampleText(group.row.prompt, text) for m, text in zip(metas, texts, strict=True)}
        done = EpisodesDone(ticket.id, metas, quarantined or {}, texts=said, timing=timing)
        self._finished[ticket.id] = Finished(group.request, done, kept)
        COUNTERS.add("groups")
        self._answer(group, done)

    def _answer(self, group: Group, done: EpisodesDone) -> None:
        # A demonstration was never running: it is finished as soon as it is asked for.
        self._running.pop(done.ticket, None)
        for delivery in group.deliveries:
            self.endpoint.reply(delivery, done)

    def _since(self, start: float) -> float:
        return self._clock.monotonic() - start


def _is_same(order: RunEpisodes, other: RunEpisodes) -> bool:
    """The same group with the same weights, however long each of those who ask would wait for it."""
    return order == msgspec.structs.replace(other, timeout_s=order.timeout_s)


def main(bootstrap: Bootstrap) -> int:
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    log = EventLog(events_path(bootstrap.run_dir, bootstrap.process), process=bootstrap.process)
    _, tokenizer = plan_model(config)
    worker = RolloutWorker(bootstrap, config, tokenizer, log=log)
    while worker.membership.shutdown_reason is None:
        worker.turn()
    worker.close()
    return 0
