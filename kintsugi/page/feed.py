"""Live changes for viewers: one poller per run that is looked at, however many viewers there are.

A poller consumes the states of the run's files, produces names of parts that changed, and waits for the next look; it
ends with its last viewer. A viewer that reads slowly gets its changes merged, so nothing queues up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from pathlib import Path

from kintsugi.page.catalog import RunCatalog
from kintsugi.page.changes import ChangeDetector
from kintsugi.page.line_files import file_id
from kintsugi.page.run_reader import RunReader
from kintsugi.page.schema import IncidentRow
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock

POLL_S = 0.6
OVERVIEW_POLL_S = 1.0
OVERVIEW_RUN_S = 0.01
"""Additional time between two looks at a folder, per run in it."""
LEAST_INTERVAL_S = {"metrics": 2.0, "health": 2.5, "logs": 2.0, "timeline": 3.0, "samples": 2.5}
"""Parts that change all the time are reported at most this often …"""
COST_FACTOR = 120.0
"""… and so that answers to one viewer take at most this part of the time: a run must not notice that it is watched."""
MOST_INCIDENTS = 20


class Viewer:
    """Changes that one viewer has not been sent yet."""

    def __init__(self) -> None:
        self._what: set[str] = set()
        self._runs: set[str] = set()
        self._incidents: dict[int, IncidentRow] = {}
        self._news = asyncio.Event()

    def add(
        self, what: Collection[str], *, runs: Collection[str] = (), incidents: Sequence[IncidentRow] = ()
    ) -> None:
        self._what.update(what)
        self._runs.update(runs)
        for incident in incidents[-MOST_INCIDENTS:]:
            self._incidents[incident.id] = incident
        if what or incidents:
            self._news.set()

    async def attempt_take(self, timeout_s: float) -> tuple[set[str], set[str], list[IncidentRow]]:
        """Return the changes since the last call; nothing after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return set(), set(), []
        self._news.clear()
        taken = (self._what, self._runs, list(self._incidents.values()))
        self._what, self._runs, self._incidents = set(), set(), {}
        return taken


class _Poller:
    """A task that looks regularly as long as there are viewers."""

    def __init__(
        self, look: Callable[[], Awaitable[None]], *, name: str, interval_s: Callable[[], float]
    ) -> None:
        self.viewers: set[Viewer] = set()
        self._look, self._interval_s = look, interval_s
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._attempt_run(), name=name)

    async def _attempt_run(self) -> None:
        while not self._ended.is_set():
            try:
                async with asyncio.timeout(self._interval_s()):
                    await self._ended.wait()
            except TimeoutError:
                await self._look()

    def end(self) -> None:
        self._ended.set()
        self._task.cancel()


class RunFeed:
    """Changes of one run."""

    def __init__(
        self,
        reader: RunReader,
        *,
        pool: Executor,
        on_samples: Callable[[RunReader], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._reader, self._pool, self._clock = reader, pool, clock
        self._on_samples = on_samples
        self._detector: ChangeDetector | None = None
        self._reported: dict[str, float] = {}
        self._costs: dict[str, float] = {}
        """Seconds that the last answer about each part took."""
        self._waiting: set[str] = set()
        """Changes that were seen and not reported yet."""
        self._known: dict[int, tuple[str, int]] | None = None
        self._poller: _Poller | None = None

    def enter(self) -> Viewer:
        viewer = Viewer()
        if self._poller is None:
            self._poller = _Poller(
                self._look, name=f"changes of {self._reader.id}", interval_s=lambda: POLL_S
            )
        self._poller.viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        if self._poller is None:
            return
        self._poller.viewers.discard(viewer)
        if not self._poller.viewers:
            self._poller.end()
            self._poller = self._detector = self._known = None

    def note_cost(self, what: str, seconds: float) -> None:
        """Take the time that an answer about a part took."""
        self._costs[what] = seconds

    def least_interval_s(self, what: str) -> float:
        """Return the time between two reports of a part."""
        return max(LEAST_INTERVAL_S.get(what, 0.0), COST_FACTOR * self._costs.get(what, 0.0))

    def tell(self, what: set[str]) -> None:
        """Report a change that is not in the run's files: an index is complete, a diagnosis was made."""
        if self._poller is not None:
            for viewer in self._poller.viewers:
                viewer.add(what)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        changed, incidents = await loop.run_in_executor(self._pool, self._changes)
        self._waiting |= changed
        now = self._clock.monotonic()
        due = {
            what
            for what in self._waiting
            if now - self._reported.get(what, -1e9) >= self.least_interval_s(what)
        }
        self._waiting -= due
        self._reported |= dict.fromkeys(due, now)
        if "samples" in due:
            self._on_samples(self._reader)
        if self._poller is not None and (due or incidents):
            for viewer in self._poller.viewers:
                viewer.add(due, incidents=incidents)

    def _changes(self) -> tuple[set[str], list[IncidentRow]]:
        """Look at the files; the journal changes with every prompt, so its incidents are compared."""
        if self._detector is None:
            self._detector = ChangeDetector(self._reader.folder)
        changed = self._detector.changes()
        if "incidents" not in changed and self._known is not None:
            return changed, []
        rows = self._reader.incidents().incidents
        now = {row.id: (row.state, len(row.title)) for row in rows}
        before, self._known = self._known, now
        fresh = [row for row in rows if before is not None and before.get(row.id) != now[row.id]]
        changed.discard("incidents")
        if fresh or (before is None and rows):
            # At the first look one may have begun after the viewer read them.
            changed.add("incidents")
        return changed, fresh


class OverviewFeed:
    """Changes of the runs of a folder."""

    def __init__(self, catalog: RunCatalog, *, pool: Executor) -> None:
        self._catalog, self._pool = catalog, pool
        self._seen: dict[str, object] | None = None
        self._poller: _Poller | None = None

    def enter(self) -> Viewer:
        viewer = Viewer()
        if self._poller is None:
            self._poller = _Poller(self._look, name="changes of the overview", interval_s=self._interval_s)
        self._poller.viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        if self._poller is None:
            return
        self._poller.viewers.discard(viewer)
        if not self._poller.viewers:
            self._poller.end()
            self._poller = self._seen = None

    def _interval_s(self) -> float:
        return OVERVIEW_POLL_S + OVERVIEW_RUN_S * len(self._seen or ())

    async def _look(self) -> None:
        changed = await asyncio.get_running_loop().run_in_executor(self._pool, self._changes)
        if changed and self._poller is not None:
            for viewer in self._poller.viewers:
                viewer.add({"runs"}, runs=changed)

    def _changes(self) -> set[str]:
        now: dict[str, object] = {name: _state(self._catalog.folder / name) for name in self._catalog.names()}
        before, self._seen = self._seen, now
        if before is None:
            return set()
        return {name for name in now.keys() | before.keys() if now.get(name) != before.get(name)}


def _state(run_dir: Path) -> tuple[object, ...]:
    run = RunFolder(run_dir)
    return tuple(map(file_id, (run.config_file, run.launcher_file, run.summary_file, run.metrics_file)))
