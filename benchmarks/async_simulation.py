"""A discrete-event model of a training run: groups, servers, a judge, the ranks, and the bound on staleness.

Synchronous and asynchronous runs are the same model with another bound, as they are the same program. A server decodes
all its rows in lockstep: a step takes `decode_s` plus `decode_row_s` for each row, so few rows are as slow as many
where the first term is the larger one. That is what a long tail costs, on a core as on an accelerator.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Groups = Sequence[tuple[int, ...]]
"""Tokens of every sample of every group, in the order of issue; taken from the beginning again at the end."""


@dataclass(frozen=True)
class Costs:
    """Seconds that things take on one device."""

    decode_s: float
    """A decoding step, whatever the number of rows."""
    decode_row_s: float
    """The same for each row."""
    group_s: float
    """Control of one group: tickets, messages, bookkeeping. Where cores are shared, work that is done for one group
    after the other and takes its share of them; elsewhere only the time from a ticket to its first token."""
    train_s: float
    """A training step, whatever the number of tokens."""
    train_token_s: float
    """The same for each token, prompts included, of one rank."""
    publish_s: float
    """From the last gradient to weights that tickets can be issued for; work in the same sense."""
    judge_s: float = 0.0
    """Latency of the reward."""


@dataclass(frozen=True)
class Cluster:
    """`Cluster(servers=2, ranks=2, slots=128, cores=2)` is four processes that share two cores."""

    servers: int
    ranks: int
    slots: int
    cores: int | None = None
    """Cores that servers and ranks share as an operating system does; None: each has a device, or they take
    turns."""
    most_groups: int = 1 << 30
    """In flight between ticket and reward."""


@dataclass(frozen=True)
class Run:
    batch_size: int
    """Groups."""
    prompt_tokens: int
    max_staleness: int
    steps: int


@dataclass(frozen=True)
class Span:
    """Some steps of a run, and what all devices together did meanwhile."""

    seconds: float
    row_s: float = 0.0
    """Device-seconds of servers, the part that rows cost."""
    base_s: float = 0.0
    """The same, the part that every decoding step costs: large where rows are few."""
    train_s: float = 0.0
    """Device-seconds of ranks."""

    def since(self, earlier: Span) -> Span:
        return Span(
            self.seconds - earlier.seconds,
            self.row_s - earlier.row_s,
            self.base_s - earlier.base_s,
            self.train_s - earlier.train_s,
        )


@dataclass(frozen=True)
class Outcome:
    commits: tuple[Span, ...]
    """From the first ticket to the end of each step."""
    max_staleness: int

    @property
    def whole(self) -> Span:
        return self.commits[-1]

    def steps(self, first: int, last: int) -> Span:
        """What the steps after the `first` ones took, up to the end of step `last`."""
        return self.commits[last - 1].since(self.commits[first - 1])


@dataclass
class _Server:
    rows: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (clock at which it ends, group)."""
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    """(tokens, group) without a slot."""
    clock: float = 0.0
    """Tokens that each row has got since the beginning."""
    at: float = 0.0
    plan: int = 0
    """Number of the latest planned end; earlier ones are void."""

    @property
    def load(self) -> int:
        return len(self.rows) + len(self.queue)


_Kind = Literal["controlled", "arrive", "end", "judged", "trained", "published"]


class _Simulation:
    def __init__(self, costs: Costs, cluster: Cluster, run: Run, groups: Groups) -> None:
        self._costs, self._cluster, self._run, self._groups = costs, cluster, run, groups
        self._servers = [_Server() for _ in range(cluster.servers)]
        self._by_load = [(0, index) for index in range(cluster.servers)]
        self._events: list[tuple[float, int, _Kind, int, int]] = []
        self._count = itertools.count()
        self._now = 0.0
        self._num_issued = self._version = self._step = 0
        self._in_flight = 0
        self._left: dict[int, int] = {}
        """Group → samples that are not done."""
        self._began: dict[int, int] = {}
        """Group → version at its issue."""
        self._num_scored: Counter[int] = Counter()
        """Step → groups of it that are scored."""
        self._training_left: float | None = None
        """Seconds on unshared devices; None while the ranks wait."""
        self._training_at, self._training_plan = 0.0, 0
        self._speed = 1.0
        """Speed of each process, relative to one with a device of its own."""
        self._jobs: deque[tuple[float, _Kind, int]] = deque()
        """What control has to do: (seconds, what follows, of which group or step)."""
        self._job_at, self._job_plan = 0.0, 0
        self._row_s = self._base_s = self._train_s = 0.0
        self._staleness = 0
        self._commits: list[Span] = []

    def run(self) -> Outcome:
        self._issue()
        while self._step < self._run.steps:
            self._now, _, kind, who, plan = heapq.heappop(self._events)
            match kind:
                case "controlled" if plan == self._job_plan:
                    self._end_job()
                case "arrive":
                    self._arrive(who)
                case "end" if plan == self._servers[who].plan:
                    self._end_rows(who)
                case "judged":
                    self._num_scored[who // self._run.batch_size] += 1
                    self._in_flight -= 1
                    self._issue()
                    self._train()
                case "trained" if plan == self._training_plan:
                    self._commit()
                case "published":
                    self._version = who
                    self._issue()
                case _:
                    pass
        return Outcome(tuple(self._commits), self._staleness)

    def _plan(self, delay_s: float, kind: _Kind, who: int, plan: int = 0) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._count), kind, who, plan))

    def _issue(self) -> None:
        """The admission rule of `kintsugi/samples/batch_selection.py`; nothing is issued for steps that will not be."""
        run = self._run
        last = min(self._version + run.max_staleness + 1, run.steps)
        room = self._cluster.most_groups - self._in_flight
        for _ in range(min(last * run.batch_size - self._num_issued, room)):
            self._began[self._num_issued] = self._version
            self._control(self._costs.group_s, "arrive", self._num_issued)
            self._num_issued += 1
            self._in_flight += 1

    def _control(self, seconds: float, then: _Kind, who: int) -> None:
        if self._cluster.cores is None:
            self._plan(seconds, then, who)
            return
        self._jobs.append((seconds, then, who))
        if len(self._jobs) == 1:
            self._job_at = self._now
            if not self._keep_pace():
                self._plan_job()

    def _end_job(self) -> None:
        _, then, who = self._jobs.popleft()
        self._job_at = self._now
        self._plan(0.0, then, who)
        if not self._keep_pace() and self._jobs:
            self._plan_job()

    def _arrive(self, group: int) -> None:
        """To the server with the fewest samples."""
        lengths = self._groups[group % len(self._groups)]
        self._left[group] = len(lengths)
        index = self._least_loaded()
        server = self._servers[index]
        self._advance(server)
        server.queue.extend((tokens, group) for tokens in lengths)
        self._fill(server)
        self._changed(index)

    def _least_loaded(self) -> int:
        """Every change of a load left an entry; those that are no longer true are thrown away here."""
        while True:
            load, index = heapq.heappop(self._by_load)
            if load == self._servers[index].load:
                return index

    def _fill(self, server: _Server) -> None:
        while server.queue and len(server.rows) < self._cluster.slots:
            tokens, group = server.queue.popleft()
            heapq.heappush(server.rows, (server.clock + tokens, group))

    def _end_rows(self, index: int) -> None:
        server = self._servers[index]
        self._advance(server)
        server.clock = max(
            server.clock, server.rows[0][0]
        )  # Rounding must not leave it a hair before its end.
        while server.rows and server.rows[0][0] <= server.clock + 1e-9:
            _, group = heapq.heappop(server.rows)
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group]
                self._plan(self._costs.judge_s, "judged", group)
        self._fill(server)
        self._changed(index)

    def _train(self) -> None:
        size = self._run.batch_size
        if self._training_left is not None or self._num_scored[self._step] < size:
            return
        tokens = 0
        for group in range(self._step * size, (self._step + 1) * size):
            lengths = self._groups[group % len(self._groups)]
            tokens += sum(lengths) + self._run.prompt_tokens * len(lengths)
            self._staleness = max(self._staleness, self._step - self._began.pop(group))
        self._training_left = self._costs.train_s + tokens * self._costs.train_token_s / self._cluster.ranks
        self._training_at = self._now
        self._keep_pace()
        self._plan_commit()

    def _commit(self) -> None:
        self._train_more()
        self._training_left = None
        self._step += 1
        for server in self._servers:
            self._advance(server)
        self._commits.append(Span(self._now, self._row_s, self._base_s, self._train_s))
        self._control(self._costs.publish_s, "published", self._step)
        self._keep_pace()
        self._train()

    # Speed of each process: where cores are shared, one that begins or stops changes the speed of all others.

    def _changed(self, index: int) -> None:
        """A server has other rows than before."""
        heapq.heappush(self._by_load, (self._servers[index].load, index))
        if not self._keep_pace():
            self._plan_end(index)

    def _keep_pace(self) -> bool:
        """If the speed is another now: bring all processes up to now at the old one, and plan again."""
        if self._cluster.cores is None:
            return False
        runnable = sum(bool(server.rows) for server in self._servers)
        runnable += self._cluster.ranks if self._training_left is not None else 0
        runnable += bool(self._jobs)
        speed = min(1.0, self._cluster.cores / max(runnable, 1))
        if speed == self._speed:
            return False
        for server in self._servers:
            self._advance(server)
        if self._training_left is not None:
            self._train_more()
        if self._jobs:
            left_s, then, who = self._jobs[0]
            self._jobs[0] = left_s - (self._now - self._job_at) * self._speed, then, who
            self._job_at = self._now
        self._speed = speed
        for index in range(len(self._servers)):
            self._plan_end(index)
        if self._training_left is not None:
            self._plan_commit()
        if self._jobs:
            self._plan_job()
        return True

    def _advance(self, server: _Server) -> None:
        """Bring a server's clock up to now."""
        device_s, num_rows = (self._now - server.at) * self._speed, len(server.rows)
        server.at = self._now
        if num_rows:
            row_s = self._costs.decode_row_s * num_rows
            step_s = self._costs.decode_s + row_s
            server.clock += device_s / step_s
            self._row_s += device_s * row_s / step_s
            self._base_s += device_s * self._costs.decode_s / step_s

    def _train_more(self) -> None:
        """Bring the ranks up to now."""
        assert self._training_left is not None
        device_s = (self._now - self._training_at) * self._speed
        self._training_at = self._now
        self._training_left -= device_s
        self._train_s += device_s * self._cluster.ranks

    def _plan_end(self, index: int) -> None:
        server = self._servers[index]
        server.plan += 1
        if server.rows:
            step_s = self._costs.decode_s + self._costs.decode_row_s * len(server.rows)
            self._plan((server.rows[0][0] - server.clock) * step_s / self._speed, "end", index, server.plan)

    def _plan_job(self) -> None:
        self._job_plan += 1
        self._plan(self._jobs[0][0] / self._speed, "controlled", 0, self._job_plan)

    def _plan_commit(self) -> None:
        assert self._training_left is not None
        self._training_plan += 1
        self._plan(self._training_left / self._speed, "trained", 0, self._training_plan)


def simulate(costs: Costs, cluster: Cluster, run: Run, groups: Groups) -> Outcome:
    """A whole run, beginning with nothing in flight."""
    return _Simulation(costs, cluster, run, groups).run()
