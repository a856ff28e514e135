"""The HTTP application of the page: routes of `schema.py`, static files, live changes, actions.

    browser ─► Guard (Host, token) ─► handler ─► thread pool: RunReader over the files of a run ─► JSON

Handlers never read files in the event loop. Equal requests of several viewers within a moment share one answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from kintsugi.errors import KintsugiError
from kintsugi.page.access import ACTIONS, VIEW, PageAccess
from kintsugi.page.catalog import RunCatalog
from kintsugi.page.feed import OverviewFeed, RunFeed, Viewer
from kintsugi.page.logs import LogFilter
from kintsugi.page.run_reader import RunReader
from kintsugi.page.samples import SampleFilter
from kintsugi.page.schema import (
    Change,
    CompareAnswer,
    ComparedRow,
    ConfigDifference,
    Done,
    LogPage,
    Order,
    PairedAnswer,
    RunList,
    Session,
)
from kintsugi.page.security import DECISION, JSON, TOKEN, Guard, refused, set_headers
from kintsugi.run_folder.comparison import Comparison, compare
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.telemetry.store.search import SearchQuery

STATIC = Path(__file__).parent / "static"
NUM_THREADS = 4
SHARED_S = 0.25
"""Time in which equal requests share one answer."""
MOST_SHARED = 128
BEAT_S = 15.0
"""Interval of comments on a silent connection, by which both ends find that the other is gone."""
WRITE_S = 20.0
"""A viewer that reads nothing for this long has left."""
SEARCH_S = 1.5
"""Time that a request waits for the search index; then its answer says that the index is being built."""
FIRST_INDEX_S = 0.3
"""Time that the first answer waits for the index of samples."""
MOST_BODY = 64 << 10
MOST_VIEWERS = 200
PIECE_BYTES = 256 << 10
SORTS = ("order", "worst", "longest", "surprising")

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Actions(Protocol):
    """Actions on runs; each blocks until it has been accepted and returns a sentence, or raises a KintsugiError."""

    def stop(self, run_dir: Path) -> str: ...

    def scale(self, run_dir: Path, *, servers: int) -> str: ...

    def resume(self, run_dir: Path) -> str: ...


class PageServer:
    """State of the server: readers, feeds and threads."""

    def __init__(
        self, catalog: RunCatalog, *, access: PageAccess, actions: Actions, host: str, demo: bool = False
    ) -> None:
        self._catalog, self._access, self._actions, self._demo = catalog, access, actions, demo
        self._guard = Guard(access, host=host)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="reader")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="background")
        self._acting = ThreadPoolExecutor(2, thread_name_prefix="action")
        self._feeds: dict[str, RunFeed] = {}
        self._overview = OverviewFeed(catalog, pool=self._pool)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._shared: dict[str, tuple[float, asyncio.Future[bytes]]] = {}
        self._viewers: set[Viewer] = set()
        self._closing = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guard.middleware()], client_max_size=MOST_BODY)
        app.on_response_prepare.append(set_headers)
        app.on_shutdown.append(self._shut_down)
        app.on_cleanup.append(self._clean_up)
        get, run = app.router.add_get, "/api/runs/{run}"
        get("/", self._index)
        get("/api/session", self._session)
        get("/api/runs", self._runs)
        get("/api/events", self._all_events)
        get("/api/compare", self._compare)
        get(run, self._of_run(lambda reader, _: reader.header()))
        get(f"{run}/metrics", self._of_run(_metrics, part="metrics"))
        get(f"{run}/learning", self._of_run(lambda reader, _: reader.learning()))
        get(f"{run}/samples", self._samples)
        get(f"{run}/samples/{{number}}", self._of_run(_sample))
        get(f"{run}/timeline", self._of_run(_timeline, part="timeline"))
        get(f"{run}/trace", self._trace)
        get(f"{run}/health", self._of_run(lambda reader, _: reader.health(), part="health"))
        get(f"{run}/incidents", self._of_run(lambda reader, _: reader.incidents()))
        get(f"{run}/incidents/{{number}}", self._incident)
        get(f"{run}/logs", self._logs)
        get(f"{run}/service_levels", self._of_run(lambda reader, _: reader.service_levels()))
        get(f"{run}/events", self._events)
        for action in ACTIONS:
            app.router.add_post(f"{run}/{action}", partial(self._act, action=action))
        if STATIC.is_dir():
            app.router.add_static("/static/", STATIC)
        return app

    def end(self) -> None:
        """End the open streams, so that the server can shut down at once."""
        self._closing.set()
        for viewer in self._viewers:
            viewer.add({"state"})

    async def _shut_down(self, _: web.Application) -> None:
        self.end()

    async def _clean_up(self, _: web.Application) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._catalog.close()
        for pool in (self._pool, self._background, self._acting):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, action)

    def _reader(self, request: web.Request) -> RunReader:
        name = request.match_info["run"]
        reader = self._catalog.reader(name)
        if reader is None:
            raise refused(404, f"there is no run {name!r} in {self._catalog.folder}")
        return reader

    # Answers.

    def _of_run(
        self, answer: Callable[[RunReader, web.Request], Any], *, part: str = ""
    ) -> Callable[[web.Request], Any]:
        """Return a handler that reads an answer about a run in a thread; None is a 404. `part`: what it is about, whose
        changes are reported the more rarely the longer the answer takes."""

        def read(reader: RunReader, request: web.Request) -> Any:
            began = SYSTEM_CLOCK.monotonic()
            found = answer(reader, request)
            if part:
                self._feed(reader).note_cost(part, SYSTEM_CLOCK.monotonic() - began)
            return found

        async def handler(request: web.Request) -> web.Response:
            reader = self._reader(request)
            response = await self._answer(request, lambda: read(reader, request))
            self._read_journal(reader)
            return response

        return handler

    async def _answer(
        self, request: web.Request, read: Callable[[], Any], *, viewer: str = ""
    ) -> web.Response:
        """Answer with JSON; an equal request of the last moment is answered with the same bytes. `viewer`: name of the
        only one that this answer is for."""
        loop, key = asyncio.get_running_loop(), f"{viewer} {request.path_qs}"
        known = self._shared.get(key)
        if known is None or loop.time() > known[0]:
            future = loop.run_in_executor(self._pool, lambda: _encoded(read()))
            self._shared[key] = known = (loop.time() + SHARED_S, future)
            future.add_done_callback(_seen)
            while len(self._shared) > MOST_SHARED:
                del self._shared[next(iter(self._shared))]
        body = await asyncio.shield(known[1])
        if body == b"null":
            raise refused(404, "there is nothing of that number in this run")
        return web.Response(body=body, content_type=JSON)

    async def _index(self, request: web.Request) -> web.StreamResponse:
        path = STATIC / "index.html"
        if not path.is_file():
            raise refused(404, "the page is not part of this installation; the interface is under /api/")
        return web.FileResponse(path, headers={"Cache-Control": "no-cache"})

    async def _session(self, request: web.Request) -> web.Response:
        decision, token = request[DECISION], request[TOKEN] or None
        may = () if self._demo else tuple(each for each in ACTIONS if self._may(request, each))
        session = Session(
            role=decision.role,
            may=may,
            version=version("kintsugi"),
            csrf=self._guard.csrf(token) if may else "",
            demo=self._demo,
        )
        return web.Response(body=msgspec.json.encode(session), content_type=JSON)

    def _may(self, request: web.Request, action: str) -> bool:
        run, origin = self._catalog.single, request.remote or ""
        return self._access.decide(request[TOKEN] or None, action, run=run, origin=origin).is_accepted

    def _sees(self, request: web.Request, run: str) -> bool:
        """Whether the token of a request is for this run."""
        decision = self._access.decide(request[TOKEN] or None, VIEW, run=run, origin=request.remote or "")
        return decision.is_accepted

    async def _runs(self, request: web.Request) -> web.Response:
        def visible() -> RunList:
            found = self._catalog.list_runs()
            rows = tuple(row for row in found.runs if self._sees(request, row.id))
            return msgspec.structs.replace(found, runs=rows)

        return await self._answer(request, visible, viewer=request[DECISION].name)

    async def _compare(self, request: web.Request) -> web.Response:
        names = [name for name in request.query.get("runs", "").split(",") if name]
        readers = [self._catalog.reader(name) for name in names]
        for name, reader in zip(names, readers, strict=True):
            if reader is None or not self._sees(request, name):
                raise refused(404, f"there is no run {name!r} in {self._catalog.folder} for this viewer")
        folders = [reader.folder for reader in readers if reader is not None]
        return await self._answer(request, lambda: _compared(folders))

    async def _samples(self, request: web.Request) -> web.Response:
        reader, wanted = self._reader(request), _sample_filter(request)
        if wanted.step is None:
            await self._attempt_index(reader)
        return await self._answer(request, lambda: reader.samples(wanted))

    async def _attempt_index(self, reader: RunReader) -> None:
        """Index samples; a short file is indexed before the first answer."""
        await asyncio.wait([self._index_samples(reader)], timeout=FIRST_INDEX_S)

    async def _incident(self, request: web.Request) -> web.Response:
        reader, number = (
            self._reader(request),
            _integer(request.match_info["number"], "the number of an incident"),
        )
        response = await self._answer(request, lambda: reader.incident(number))
        self._start(f"diagnosis of {number} of {reader.id}", lambda: self._diagnose(reader, number))
        return response

    async def _logs(self, request: web.Request) -> web.Response:
        reader, query = self._reader(request), request.query
        wanted = LogFilter(
            text=query.get("text", ""),
            process=query.get("process", ""),
            since=_number(query, "from"),
            until=_number(query, "to"),
            cursor=query.get("cursor") or None,
            follow=query.get("follow") or None,
            limit=int(_number(query, "limit") or 200),
        )
        if not query.get("request"):
            return await self._answer(request, lambda: reader.logs(wanted))
        page = await self._attempt_search(reader, wanted, query["request"])
        return web.Response(body=msgspec.json.encode(page), content_type=JSON)

    async def _attempt_search(self, reader: RunReader, wanted: LogFilter, subject: str) -> LogPage:
        """Search the index; a search that takes longer goes on, and the viewers are told when it has ended."""
        search = SearchQuery(
            request=subject,
            keyword=wanted.text or None,
            process=wanted.process or None,
            since=wanted.since,
            until=wanted.until,
        )
        future = asyncio.wrap_future(reader.records.records(search, limit=wanted.limit))
        done, _ = await asyncio.wait([future], timeout=SEARCH_S)
        if done:
            return future.result()

        def told(each: asyncio.Future[LogPage]) -> None:
            _seen(each)
            self._feed(reader).tell({"logs"})

        future.add_done_callback(told)
        return LogPage(lines=(), next=None, last=None, processes=(), indexed=False)

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        reader = self._reader(request)
        path = await asyncio.wrap_future(reader.records.trace())
        file = await self._in_thread(lambda: path.open("rb"))
        try:
            path.unlink(missing_ok=True)
            response = web.StreamResponse(
                headers={"Content-Disposition": f'attachment; filename="{_file_name(reader.id)}.trace.json"'}
            )
            response.content_type = JSON
            response.content_length = os.fstat(file.fileno()).st_size
            await response.prepare(request)
            while piece := await self._in_thread(lambda: file.read(PIECE_BYTES)):
                await _written(response, piece)
            await response.write_eof()
            return response
        finally:
            file.close()

    # Work in the background.

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start a task of this name unless it runs already."""
        if name not in self._tasks:
            task = asyncio.create_task(work(), name=name)
            self._tasks[name] = task
            task.add_done_callback(self._ended)
        return self._tasks[name]

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Forget a task that has ended; an error is recorded, and the page goes on without its work."""
        self._tasks.pop(task.get_name(), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)

    def _read_journal(self, reader: RunReader) -> None:
        """Read the rest of a long journal in the background."""
        if not reader.journal.is_complete:
            self._start(f"journal of {reader.id}", lambda: self._rest_of_journal(reader))

    async def _rest_of_journal(self, reader: RunReader) -> None:
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(self._background, reader.read_journal):
            pass
        self._feed(reader).tell({"incidents", "metrics", "state", "health"})

    def _index_samples(self, reader: RunReader) -> asyncio.Task[None]:
        return self._start(f"samples of {reader.id}", lambda: self._extend(reader))

    async def _extend(self, reader: RunReader) -> None:
        """Index samples piece by piece; viewers are told when all are indexed."""
        loop, index = asyncio.get_running_loop(), reader.sample_index
        before = len(index)
        while await loop.run_in_executor(self._background, index.extend):
            pass
        self._catalog.forget_samples(but=reader)
        if len(index) != before:
            self._feed(reader).tell({"samples"})

    def _follow_samples(self, reader: RunReader) -> None:
        """Extend an index that exists; a run whose samples are not looked at is not indexed."""
        if len(reader.sample_index):
            self._index_samples(reader)

    async def _diagnose(self, reader: RunReader, number: int) -> None:
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._background, reader.needs_diagnosis, number):
            await loop.run_in_executor(self._background, reader.compute_diagnosis, number)
            self._feed(reader).tell({"incidents"})

    # Live changes.

    def _feed(self, reader: RunReader) -> RunFeed:
        if reader.id not in self._feeds:
            self._feeds[reader.id] = RunFeed(reader, pool=self._pool, on_samples=self._follow_samples)
        return self._feeds[reader.id]

    async def _events(self, request: web.Request) -> web.StreamResponse:
        feed = self._feed(self._reader(request))
        viewer = feed.enter()
        try:
            return await self._attempt_stream(request, viewer)
        finally:
            feed.leave(viewer)

    async def _all_events(self, request: web.Request) -> web.StreamResponse:
        viewer = self._overview.enter()
        try:
            return await self._attempt_stream(request, viewer)
        finally:
            self._overview.leave(viewer)

    async def _attempt_stream(self, request: web.Request, viewer: Viewer) -> web.StreamResponse:
        """Send changes until the viewer leaves or the server ends.

        Consumes the viewer's changes, waits for them and for the connection; a change, or the end of the connection,
        unblocks it."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise refused(503, f"expected at most {MOST_VIEWERS} viewers at once")
        self._viewers.add(viewer)
        try:
            response = web.StreamResponse(headers={"X-Accel-Buffering": "no"})
            response.content_type = "text/event-stream"
            await response.prepare(request)
            await _written(response, b": connected\n\n")
            while not self._closing.is_set():
                what, runs, incidents = await viewer.attempt_take(BEAT_S)
                runs = {run for run in runs if self._sees(request, run)}
                pieces = [_event("incident", incident) for incident in incidents]
                if what:
                    # An answer from before this change would be shown until the next one.
                    self._shared.clear()
                    pieces.append(
                        _event("change", Change(what=tuple(sorted(what)), runs=tuple(sorted(runs))))
                    )
                await _written(response, b"".join(pieces) or b": alive\n\n")
            return response
        finally:
            self._viewers.discard(viewer)

    # Actions.

    async def _act(self, request: web.Request, *, action: str) -> web.Response:
        reader = self._reader(request)
        if self._demo:
            raise refused(403, "the runs of the demonstration are recorded; there is nothing to act on")
        decision = self._access.decide(
            request[TOKEN] or None, action, run=reader.id, origin=request.remote or ""
        )
        if not decision.is_accepted:
            raise refused(decision.status, decision.reason)
        try:
            order = msgspec.json.decode(await request.read(), type=Order)
        except msgspec.MsgspecError as error:
            raise refused(400, f'expected {{"csrf": …}}: {error}') from error
        self._guard.check_order(request, order.csrf)
        if action == "scale" and (order.servers is None or not 1 <= order.servers <= 1024):
            raise refused(400, f"servers: expected a number from 1 to 1024, got {order.servers}")
        detail = f"servers={order.servers}" if action == "scale" else ""
        record = partial(self._access.record, reader.folder, decision, action, detail=detail)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._acting, lambda: record(answer="accepted"))
        except (KintsugiError, OSError) as error:
            raise refused(503, f"refused, because the action could not be recorded: {error}") from error
        try:
            text = await loop.run_in_executor(self._acting, lambda: self._do(action, reader.folder, order))
        except KintsugiError as error:
            reason = str(error)
            await loop.run_in_executor(self._acting, lambda: record(answer=f"failed: {reason}"))
            raise
        self._feed(reader).tell({"state", "health"})
        return web.Response(body=msgspec.json.encode(Done(text=text)), content_type=JSON)

    def _do(self, action: str, folder: Path, order: Order) -> str:
        match action:
            case "stop":
                return self._actions.stop(folder)
            case "resume":
                return self._actions.resume(folder)
            case _:
                assert order.servers is not None
                return self._actions.scale(folder, servers=order.servers)


def _encoded(answer: Any) -> bytes:
    return msgspec.json.encode(answer)


def _seen(future: Any) -> None:
    """Take the error of a future that nothing awaits any more."""
    if not future.cancelled():
        future.exception()


def _event(name: str, content: msgspec.Struct) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


async def _written(response: web.StreamResponse, content: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(content)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)


def _integer(text: str, what: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise refused(400, f"expected {what}, got {text[:60]!r}")
    return int(text)


def _number(query: Any, name: str) -> float | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise refused(400, f"{name}: expected a number, got {text[:60]!r}") from None
    if value != value or abs(value) > 1e18:
        raise refused(400, f"{name}: expected a number, got {text[:60]!r}")
    return value


def _whole(query: Any, name: str, *, default: int) -> int:
    value = _number(query, name)
    return default if value is None else int(value)


def _sample_filter(request: web.Request) -> SampleFilter:
    query = request.query
    sort = query.get("sort") or "order"
    if sort not in SORTS:
        raise refused(400, f"sort: expected one of {', '.join(SORTS)}, got {sort[:60]!r}")
    step = _number(query, "step")
    return SampleFilter(
        step=None if step is None else int(step),
        group=query.get("group") or None,
        sort=sort,
        text=query.get("text", "")[:1000],
        min=_number(query, "min"),
        max=_number(query, "max"),
        outcome=query.get("outcome") or None,
        cursor=query.get("cursor") or None,
        limit=_whole(query, "limit", default=50),
    )


def _metrics(reader: RunReader, request: web.Request) -> Any:
    keys = [key for key in request.query.get("keys", "").split(",") if key]
    return reader.metrics(keys=keys or None, points=_whole(request.query, "points", default=2000))


def _sample(reader: RunReader, request: web.Request) -> Any:
    return reader.sample(_integer(request.match_info["number"], "the number of a sample"))


def _timeline(reader: RunReader, request: web.Request) -> Any:
    since, until = _number(request.query, "from"), _number(request.query, "to")
    if since is not None and until is not None and since >= until:
        raise refused(400, f"from: expected a time before {until}, got {since}")
    return reader.timeline(since=since, until=until, points=_whole(request.query, "points", default=1000))


def _compared(folders: list[Path]) -> CompareAnswer:
    """Compare runs as `kintsugi compare` does."""
    found: Comparison = compare(folders)
    return CompareAnswer(
        runs=tuple(
            ComparedRow(
                id=Path(run.folder).name,
                label=run.label,
                state=run.state,
                step=run.step,
                steps=run.total_steps,
                seed=run.seed,
                accuracy=run.accuracy,
            )
            for run in found.runs
        ),
        differences=tuple(
            ConfigDifference(key=each.field, values=each.values, origins=each.origins)
            for each in found.differences
        ),
        paired=tuple(
            PairedAnswer(**{name: getattr(each, name) for name in each.__struct_fields__})
            for each in found.judgements
        ),
        remarks=found.remarks,
    )
