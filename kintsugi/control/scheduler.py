"""Which worker runs which task: a pure, central queue. Tasks here are groups of episodes.

Tasks wait in order of submission; a worker takes at most `capacity` at once. A lost worker's tasks go back to the
front in their old order, so nothing is overtaken because of a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec


class TaskStatus(StrEnum):
    """A finished or cancelled task is unknown again: its owner keeps results, the queue does not."""

    PENDING = "pending"
    RUNNING = "running"
    UNKNOWN = "unknown"


class Move(msgspec.Struct, frozen=True):
    """A running task changes its worker."""

    task: str
    source: str
    target: str


class TaskScheduler:
    """Submit, status, cancel, rebalance. Finished tasks are forgotten by `complete`, so memory stays bounded."""

    def __init__(self, *, capacity: int) -> None:
        self.capacity = capacity
        self.limit: int | None = None
        """Of all workers together."""
        self._pending: dict[str, None] = {}
        self._running: dict[str, str] = {}
        self._by_worker: dict[str, dict[str, None]] = {}

    def submit(self, task: str) -> None:
        assert self.status(task) is TaskStatus.UNKNOWN, f"task {task} submitted twice"
        self._pending[task] = None

    def submit_first(self, tasks: Iterable[str]) -> None:
        """Somebody waits for these: they go before everything that is pending."""
        first = dict.fromkeys(tasks)
        known = [task for task in first if self.status(task) is not TaskStatus.UNKNOWN]
        assert not known, f"tasks {known} submitted twice"
        self._pending = {**first, **self._pending}

    def adopt(self, task: str, worker: str) -> None:
        """The task runs on this worker already."""
        assert self.status(task) is TaskStatus.UNKNOWN, f"task {task} is known"
        self._start(task, worker)

    def clear(self) -> None:
        """Forget everything."""
        self._pending, self._running, self._by_worker = {}, {}, {}

    def status(self, task: str) -> TaskStatus:
        if task in self._pending:
            return TaskStatus.PENDING
        return TaskStatus.RUNNING if task in self._running else TaskStatus.UNKNOWN

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def load(self, worker: str) -> int:
        return len(self._by_worker.get(worker, ()))

    def assign(self, workers: Iterable[str]) -> list[tuple[str, str]]:
        """Give pending tasks to the least loaded workers, in order, until all are full."""
        available = list(workers)
        given: list[tuple[str, str]] = []
        while self._pending and available and (self.limit is None or len(self._running) < self.limit):
            worker = min(available, key=lambda name: (self.load(name), name))
            if self.load(worker) >= self.capacity:
                break
            task = next(iter(self._pending))
            del self._pending[task]
            self._start(task, worker)
            given.append((task, worker))
        return given

    def complete(self, task: str) -> bool:
        """The task is done; False if it was not running."""
        worker = self._running.pop(task, None)
        if worker is None:
            return False
        del self._by_worker[worker][task]
        return True

    def cancel(self, task: str) -> bool:
        """Forget the task wherever it is; False if it is not known."""
        if task in self._pending:
            del self._pending[task]
            return True
        return self.complete(task)

    def put_back(self, task: str) -> None:
        """A running task failed and is tried again, before anything younger."""
        if self.complete(task):
            self._pending = {task: None, **self._pending}

    def lost(self, worker: str) -> list[str]:
        """A worker is gone: its tasks are pending again, in front."""
        tasks = list(self._by_worker.pop(worker, ()))
        for task in tasks:
            del self._running[task]
        self._pending = {**dict.fromkeys(tasks), **self._pending}
        return tasks

    def rebalance(self, workers: Iterable[str], *, may_move: Callable[[str], bool]) -> list[Move]:
        """Move running tasks from the fullest to the emptiest worker until they differ by at most one."""
        names = sorted(workers)
        moves: list[Move] = []
        while names:
            fullest = max(names, key=lambda name: (self.load(name), name))
            emptiest = min(names, key=lambda name: (self.load(name), name))
            if self.load(fullest) - self.load(emptiest) <= 1:
                break
            task = next((task for task in reversed(self._by_worker[fullest]) if may_move(task)), None)
            if task is None:
                names.remove(fullest)
                continue
            self.complete(task)
            self._start(task, emptiest)
            moves.append(Move(task, fullest, emptiest))
        return moves

    def _start(self, task: str, worker: str) -> None:
        self._running[task] = worker
        self._by_worker.setdefault(worker, {})[task] = None
