"""Central queue of tasks (groups of episodes), assigned to workers. Pure.

Tasks wait in order of submission; a worker runs at most `capacity` at once. The tasks of a lost worker return to the
front in their old order, so a fault lets no task overtake another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec


class TaskStatus(StrEnum):
    """Status of a task. A finished or cancelled task is unknown again: its owner keeps the result, not the queue."""

    PENDING = "pending"
    RUNNING = "running"
    UNKNOWN = "unknown"


class TaskMove(msgspec.Struct, frozen=True):
    """Move of a running task to another worker."""

    task: str
    source: str
    target: str


class TaskScheduler:
    """Queue of tasks. Finished tasks are forgotten by `complete`, so memory stays bounded."""

    def __init__(self, *, capacity: int) -> None:
        self.capacity = capacity
        self.limit: int | None = None
        """Most tasks that run on all workers together."""
        self._pending: dict[str, None] = {}
        self._running: dict[str, str] = {}
        self._by_worker: dict[str, dict[str, None]] = {}

    def submit(self, task: str) -> None:
        assert self.status(task) is TaskStatus.UNKNOWN, f"task {task} submitted twice"
        self._pending[task] = None

    def submit_first(self, tasks: Iterable[str]) -> None:
        """Submit tasks that the run waits for: they precede everything that is pending."""
        first = dict.fromkeys(tasks)
        known = [task for task in first if self.status(task) is not TaskStatus.UNKNOWN]
        assert not known, f"tasks {known} submitted twice"
        self._pending = {**first, **self._pending}

    def adopt(self, task: str, worker: str) -> None:
        """Add a task that already runs on this worker."""
        assert self.status(task) is TaskStatus.UNKNOWN, f"task {task} is known"
        self._start(task, worker)

    def clear(self) -> None:
        """Forget all tasks."""
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
        """Assign pending tasks to the least loaded workers, in order, until all are full."""
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
        """Remove a task that is done; False if it was not running."""
        worker = self._running.pop(task, None)
        if worker is None:
            return False
        del self._by_worker[worker][task]
        return True

    def cancel(self, task: str) -> bool:
        """Remove a task; False if it is not known."""
        if task in self._pending:
            del self._pending[task]
            return True
        return self.complete(task)

    def put_back(self, task: str) -> None:
        """Return a running task that failed to the queue, before all younger ones."""
        if self.complete(task):
            self._pending = {task: None, **self._pending}

    def lost(self, worker: str) -> list[str]:
        """Return the tasks of a lost worker to the front of the queue."""
        tasks = list(self._by_worker.pop(worker, ()))
        for task in tasks:
            del self._running[task]
        self._pending = {**dict.fromkeys(tasks), **self._pending}
        return tasks

    def rebalance(self, workers: Iterable[str], *, may_move: Callable[[str], bool]) -> list[TaskMove]:
        """Move running tasks from the fullest to the emptiest worker until they differ by at most one."""
        names = sorted(workers)
        moves: list[TaskMove] = []
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
            moves.append(TaskMove(task, fullest, emptiest))
        return moves

    def _start(self, task: str, worker: str) -> None:
        self._running[task] = worker
        self._by_worker.setdefault(worker, {})[task] = None
