"""Records of one request, and the trace of the whole run, by the run's search index, which is built when it is needed.

One thread owns the index (a database connection belongs to its thread); requests for it queue there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

from kintsugi.page.schema import LogLine, LogPage
from kintsugi.telemetry.export.chrome_trace import write_chrome_trace
from kintsugi.telemetry.store.index import RunStore
from kintsugi.telemetry.store.search import SearchQuery, search
from kintsugi.telemetry.store.tracing import whole_run

MOST_FOUND = 2000

T = TypeVar("T")


class RecordSearch:
    """Queue of searches in one run's index."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="index")
        self._store: RunStore | None = None
        self._is_built = False

    def _submit(self, action: Callable[[RunStore], T]) -> Future[T]:
        def work() -> T:
            if self._store is None:
                self._store = RunStore(self._run_dir)
            self._store.refresh()
            self._is_built = True
            return action(self._store)

        return self._thread.submit(work)

    def records(self, query: SearchQuery, *, limit: int) -> Future[LogPage]:
        """Search; the result has the oldest records first."""
        return self._submit(lambda store: _found(store, query, limit=min(limit, MOST_FOUND)))

    def trace(self) -> Future[Path]:
        """Write the trace of the run to a temporary file, which the caller removes."""

        def write(store: RunStore) -> Path:
            with tempfile.NamedTemporaryFile(prefix="kintsugi-trace-", suffix=".json", delete=False) as file:
                path = Path(file.name)
            write_chrome_trace(path, whole_run(store))
            return path

        return self._submit(write)

    def close(self) -> None:
        """Close the index after the searches that have begun."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def _found(store: RunStore, query: SearchQuery, *, limit: int) -> LogPage:
    found = list(islice(search(store, query), limit + 1))
    lines = tuple(
        LogLine(
            time=line.time,
            process=line.process,
            text=line.text,
            kind=line.kind,
            line=line.source,
            exact=line.exact,
        )
        for line in found[:limit]
    )
    processes = tuple(sorted({line.process for line in lines}))
    problems = (f"only the first {limit} records are shown",) if len(found) > limit else ()
    return LogPage(lines=lines, next=None, last=None, processes=processes, problems=problems)
