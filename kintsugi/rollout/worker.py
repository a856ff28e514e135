"""The rollout worker: runs groups of episodes, scores them, and keeps the trajectories until they are trained.

One loop consumes requests (run this group, hand over these samples, forget those) and answers of the generation
manager; it waits for either and for finished rewards. Rewards are the user's code and run in a thread beside it, so
that heartbeats go on and a deadline can be kept.

It outlives master and manager. A master that took over asks again for what it knows no answer to: a group that runs
is not begun twice, a finished one is answered from what is kept. A group whose manager died waits for the next one.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from pathlib import Path

import msgspec

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import Config, Stage, stages
from kintsugi.data.source import Order, Source, open_source
from kintsugi.errors import DataError, DeadlineExceeded, KintsugiError, ProcessDied, RefusedError
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
from kintsugi.rollout.episode import demonstrated_trajectory, describe, int32, sampled_trajectory
from kintsugi.rollout.scoring import RewardFailed, RewardThread, load_rewards
from kintsugi.runtime import COUNTERS, SYSTEM_CLOCK, WAITS, wait
from kintsugi.transport import Delivery, PendingReply
from kintsugi.types import Completion, Finish, Role, Row, SampleText, Trajectory, Wait, process_id, sample_key
from kintsugi.worker import Membership, open_endpoint

IDLE_S = 0.25
MANAGER = process_id(Role.MANAGER, 0)


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


class Finished(msgspec.Struct, frozen=True):
    """A group that was answered; kept until its samples are trained, or until the next evaluation."""

    request: RunEpisodes
    done: EpisodesDone
    trajectories: dict[str, Trajectory]


class Scoring(msgspec.Struct):
    """A reward that is being computed, or waits for those before it."""

    group: Group
    texts: list[str]
    future: Future[list[dict[str, float]]]
    since: float
    until: float = float("inf")
    """Set when it is the first in line, so the time of others does not count."""


class RolloutWorker:
    """State of one rollout worker; `turn` is one round of its loop."""

    def __init__(self, bootstrap: Bootstrap, config: Config, tokenizer: Tokenizer, *, log: EventLog) -> None:
        self._process, self._config, self._tokenizer, self._log = bootstrap.process, config, tokenizer, log
        self._stages: dict[str, Stage] = {stage.name: stage for stage in stages(config)}
        self._sources: dict[str, Source] = {}
        self._orders: dict[str, Order] = {}
        self._rewards = load_rewards(config.algorithm.reward)
        self._reward_thread = RewardThread(self._rewards)
        self._scoring: deque[Scoring] = deque()
        self._running: dict[str, Group] = {}
        self._unsent: list[Group] = []
        """To be asked of the manager, as soon as there is one."""
        self._finished: dict[str, Finished] = {}
        self._evaluated_version = -1
        self._declared: Wait | None = None
        """For the generation of the oldest group."""
        self._wait = 0
        self._clock = SYSTEM_CLOCK
        self.endpoint = open_endpoint(bootstrap)
        self.membership = Membership(self.endpoint, bootstrap, capabilities={})
        self.endpoint.watch(bootstrap.lifeline, self._orphaned)
        self._lifeline = bootstrap.lifeline

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
        self._ask_manager()
        self._collect_scores()
        self.membership.load = float(len(self._scoring))
        self._declare()
        self.membership.tick(self._clock.monotonic())

    def _declare(self) -> None:
        """Say that this process waits for the manager while a group is being generated: the heartbeats carry it."""
        oldest = next((group for group in self._running.values() if not group.completions), None)
        # Compared as a whole: a master that took over gives a group that runs more time.
        awaited = None if oldest is None else Wait(MANAGER, "Generated", oldest.since, oldest.deadline)
        if awaited == self._declared:
            return
        if self._declared is not None:
            WAITS.end(self._wait)
        if awaited is not None:
            self._wait = WAITS.begin(awaited)
        self._declared = awaited

    def close(self) -> None:
        self._reward_thread.abandon()
        self.endpoint.close()

    def _attempt(self, remaining_s: float) -> list[Delivery] | None:
        if self._scoring:
            remaining_s = min(remaining_s, self._scoring[0].until - self._clock.monotonic())
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
        fault = self.endpoint.fail(delivery, error)
        self._log.emit(FaultSeen(fault))

    def _hand_over(self, delivery: Delivery, keys: tuple[str, ...]) -> None:
        try:
            samples = tuple(self._finished[key.rsplit("/", 1)[0]].trajectories[key] for key in keys)
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
        for delivery in () if group is None else group.deliveries:
            self.endpoint.fail(delivery, RefusedError(f"{ticket} was dropped"))

    def _is_running(self, group: Group) -> bool:
        return self._running.get(group.request.ticket.id) is group

    def _begin(self, delivery: Delivery, request: RunEpisodes) -> None:
        ticket = request.ticket
        if request.split == "eval" and request.version != self._evaluated_version:
            self._forget_evaluation(request.version)
        row = self._row(request)
        prompt = self._tokenizer.encode_prompt(row.prompt, chat=self._config.data.chat_template)
        self._check_length(len(prompt) + request.sampling.max_new_tokens, row)
        now = self._clock.monotonic()
        group = Group([delivery], request, row, int32(prompt), now, now + request.timeout_s)
        if request.split == "train" and self._stages[ticket.stage].algorithm.name == "sft":
            self._demonstrate(group, prompt)
        else:
            self._running[ticket.id] = group
            self._unsent.append(group)

    def _forget_evaluation(self, next_version: int) -> None:
        """Nobody drops evaluation problems: what one version said is of no use once the next one is asked."""
        self._evaluated_version = next_version
        for ticket, finished in list(self._finished.items()):
            if finished.request.split == "eval":
                del self._finished[ticket]

    def _row(self, request: RunEpisodes) -> Row:
        ticket, split = request.ticket, request.split
        if split not in self._sources:
            self._sources[split] = open_source(self._config.data, split=split)
        source = self._sources[split]
        if split == "eval":
            return source.row(ticket.position)
        if ticket.stage not in self._orders:
            seed, shuffle = self._stages[ticket.stage].seed, self._config.data.shuffle
            self._orders[ticket.stage] = Order(
                num_rows=len(source), seed=seed, stage=ticket.stage, shuffle=shuffle
            )
        order = self._orders[ticket.stage]
        return source.row(order.index(epoch=ticket.epoch, position=ticket.position))

    def _check_length(self, length: int, row: Row) -> None:
        limit = self._config.generation.max_length
        if length > limit:
            raise DataError(
                f"prompt {row.prompt[:40]!r}: prompt and completion need {length} tokens, "
                f"generation.max_length is {limit}"
            )

    def _demonstrate(self, group: Group, prompt: list[int]) -> None:
        text = group.row.columns.get("completion")
        if not isinstance(text, str):
            raise DataError(
                f"SFT needs a completion for prompt {group.row.prompt[:40]!r}: set data.completion_column"
            )
        completion = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
        trajectory = demonstrated_trajectory(group.request.ticket.id, prompt, completion)
        self._finish(group, [trajectory], [text], [{}], timing={"demonstrate": self._since(group.since)})

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
        request = group.request
        body = Generate(
            request.ticket.id, 0, group.prompt, request.sampling, request.version, timeout_s=timeout_s
        )
        self.endpoint.request(
            MANAGER,
            body,
            deadline_s=timeout_s,
            on_done=lambda pending: self._generated(group, pending),
        )

    def _generated(self, group: Group, pending: PendingReply) -> None:
        if not self._is_running(group):
            return
        try:
            answer = pending.result().expect(Generated)
        except (ProcessDied, DeadlineExceeded):  # A later order may have given it more time.
            self._unsent.append(group)
            return
        except KintsugiError as error:
            self._give_up(group, error)
            return
        group.completions = answer.completions
        group.generated_s = self._since(group.since)
        COUNTERS.add("completions", len(answer.completions))
        self._score(group)

    def _give_up(self, group: Group, error: KintsugiError) -> None:
        del self._running[group.request.ticket.id]
        for delivery in group.deliveries:
            self._fail(delivery, error)

    def _score(self, group: Group) -> None:
        texts = [self._text(completion) for completion in group.completions]
        self._scoring.append(Scoring(group, texts, self._submit(group, texts), self._clock.monotonic()))

    def _submit(self, group: Group, texts: list[str]) -> Future[list[dict[str, float]]]:
        future = self._reward_thread.submit(
            prompt=group.row.prompt, completions=texts, columns=group.row.columns
        )
        future.add_done_callback(lambda _: self.endpoint.wake())
        return future

    def _text(self, completion: Completion) -> str:
        ids = memoryview(completion.tokens).cast("i").tolist()
        return self._tokenizer.text_of_completion(ids, ended=completion.finish is Finish.EOS)

    def _collect_scores(self) -> None:
        """Take finished rewards in order. The first in line has a deadline; past it, its thread is given up."""
        while self._scoring:
            first, now = self._scoring[0], self._clock.monotonic()
            if not first.future.done() and now < first.until:
                limit_s = self._config.rollout.reward_timeout_s
                first.until = min(first.until, now + limit_s)
                return
            self._scoring.popleft()
            if not first.future.done():
                self._replace_reward_thread()
            self._take_score(first, now)

    def _take_score(self, scoring: Scoring, now: float) -> None:
        group = scoring.group
        if not self._is_running(group):
            return
        error = _error_of(scoring, limit_s=self._config.rollout.reward_timeout_s)
        if error is not None:
            self._score_again(group, error)
            return
        trajectories = [
            sampled_trajectory(group.request.ticket.id, group.prompt, completion)
            for completion in group.completions
        ]
        timing = {"actor_generate": group.generated_s, "reward": now - scoring.since}
        self._finish(group, trajectories, scoring.texts, scoring.future.result(timeout=0), timing=timing)

    def _replace_reward_thread(self) -> None:
        """A reward hangs: leave its thread behind and give those that waited for it to a new one."""
        self._reward_thread.abandon()
        self._reward_thread = RewardThread(self._rewards)
        for scoring in self._scoring:
            if not scoring.future.done():
                scoring.future = self._submit(scoring.group, scoring.texts)

    def _score_again(self, group: Group, error: RewardFailed) -> None:
        """Try once more; after the last attempt the samples are set aside with the reason, never scored 0.

        Nobody will drop such a group, so it is not kept: asked for again, it is run again.
        """
        if group.attempts < self._config.rollout.attempts:
            group.attempts += 1
            self._score(group)
            return
        ticket = group.request.ticket
        self._log.emit(Note(f"{ticket.id} quarantined: {error}"))
        keys = [sample_key(ticket.id, completion.sample) for completion in group.completions]
        self._answer(group, EpisodesDone(ticket.id, (), dict.fromkeys(keys, str(error))))

    def _finish(
        self,
        group: Group,
        trajectories: list[Trajectory],
        texts: list[str],
        components: list[dict[str, float]],
        *,
        timing: dict[str, float],
    ) -> None:
        ticket = group.request.ticket
        metas = tuple(
            describe(trajectory, ticket=ticket.id, holder=self._process, components=parts)
            for trajectory, parts in zip(trajectories, components, strict=True)
        )
        kept: dict[str, Trajectory] = {}
        said: dict[str, SampleText] = {}
        if group.request.split == "train":
            kept = {trajectory.key: trajectory for trajectory in trajectories}
            said = {m.key: SampleText(group.row.prompt, text) for m, text in zip(metas, texts, strict=True)}
        done = EpisodesDone(ticket.id, metas, texts=said, timing=timing)
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


def _error_of(scoring: Scoring, *, limit_s: float) -> RewardFailed | None:
    if not scoring.future.done():
        return RewardFailed(f"reward took longer than rollout.reward_timeout_s={limit_s}")
    error = scoring.future.exception(timeout=0)
    if error is None:
        return None
    return error if isinstance(error, RewardFailed) else RewardFailed(f"{type(error).__name__}: {error}")


def main(bootstrap: Bootstrap) -> int:
    config = load_config(Path(bootstrap.run_dir) / "config.yaml")
    log = EventLog(events_path(bootstrap.run_dir, bootstrap.process), process=bootstrap.process)
    _, tokenizer = plan_model(config)
    worker = RolloutWorker(bootstrap, config, tokenizer, log=log)
    while worker.membership.shutdown_reason is None:
        worker.turn()
    worker.close()
    return 0
