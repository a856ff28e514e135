"""Readings of a running job in Prometheus' text format, and a small HTTP server for them.

A page is built on request, from the ends of the files that the run writes anyway: a run without requests has no cost.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import msgspec

from kintsugi.errors import UserError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.telemetry.export.metric_help import help_of
from kintsugi.telemetry.export.prometheus_text import (
    CONTENT_TYPE,
    Labels,
    default_help,
    metric_lines,
    text_of,
)
from kintsugi.telemetry.jsonl_log import lines_in
from kintsugi.telemetry.process_reports import read_processes
from kintsugi.telemetry.readings import (
    TOTALS,
    ClockOffsetReading,
    HostReading,
    LinkReading,
    ProcessReading,
    Sample,
    samples_in,
    time_of,
)
from kintsugi.types import kind_of

LAST_BYTES = 128 << 10
"""Bytes to read from the end of each file, at first."""
WHOLE_S = 10.0
"""Time of a readings file that contains every link and process: idle links are recorded in every fifth sample
(`links.RARELY`), and a busy host samples less often than once a second."""
MOST_BYTES = 16 << 20
"""Most bytes to read of one file: some samples of the connections of a hundred processes with each other."""
FRESH_S = 30.0
"""Age above which a reading is ignored: its process is gone or no longer recorded."""
ANSWER_S = 5.0

_OF_A_DEVICE = re.compile(r"device_(\d+)_(.+)")


class _Page:
    """Metrics by name, sorted."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}
        self._help: dict[str, str] = {}
        self._totals: set[str] = set()

    def add(self, name: str, value: float, *, is_total: bool = False, **labels: str) -> None:
        described, name = name, _named(name, is_total=is_total)
        if name not in self._help:
            self._help[name] = help_of(described) or default_help(name)
        if is_total:
            self._totals.add(name)
        self._values.setdefault(name, {})[tuple(sorted(labels.items()))] = float(value)

    def text(self) -> str:
        return text_of(self._lines())

    def _lines(self) -> Iterator[str]:
        for name, series in sorted(self._values.items()):
            yield from metric_lines(
                name,
                "counter" if name in self._totals else "gauge",
                help_text=self._help[name],
                series=sorted(series.items()),
            )


def render(run_dir: Path, *, now: float | None = None) -> str:
    """Return the page of the current state of the run. Metrics of missing or torn files are left out."""
    page = _Page()
    _add_processes(page, run_dir)
    _add_step(page, run_dir)
    _add_samples(page, run_dir, now=SYSTEM_CLOCK.wall() if now is None else now)
    _add_diagnosis(page, run_dir)
    return page.text()


def _add_processes(page: _Page, run_dir: Path) -> None:
    reports = read_processes(run_dir)
    if reports is None:
        return
    page.add("report_time_s", reports.time)
    page.add("phase", 1.0, phase=reports.phase, recovery=reports.recovery)
    for report in reports.processes:
        process = report.process
        page.add("process_live", float(report.status == "live"), process=process, host=report.host)
        page.add("process_load", report.load, process=process)
        page.add("process_waits", float(len(report.waits)), process=process)
        if report.silent_s is not None:
            page.add("process_silent_s", report.silent_s, process=process)
        for name, count in report.counters.items():
            page.add("process_progress", float(count), is_total=True, process=process, counter=name)
        for name, value in report.gauges.items():
            page.add("process_gauge", value, process=process, gauge=name)


def _add_step(page: _Page, run_dir: Path) -> None:
    """Add the last value of each step metric."""
    latest: dict[str, float] = {}
    for line in _last_lines(RunFolder(run_dir).metrics_file):
        with suppress(msgspec.MsgspecError):
            values = msgspec.json.decode(line, type=dict[str, float | None])
            latest |= {name: value for name, value in values.items() if value is not None}
    for name, value in latest.items():
        page.add("step" if name == "step" else f"step_{name}", value)


def _add_samples(page: _Page, run_dir: Path, *, now: float) -> None:
    latest: dict[tuple[str | int, ...], Sample] = {}
    for path in sorted(RunFolder(run_dir).readings_folder.glob("*.jsonl")):
        for record in samples_in(_newest(_recent_lines(path, since=now - FRESH_S))):
            if record.stamp.time >= now - FRESH_S:
                latest[_subject(record.sample)] = record.sample
    for sample in latest.values():
        _add_sample(page, sample)


def _newest(lines: list[bytes]) -> list[bytes]:
    """Return the last line of each subject, without decoding all lines, which would take far longer."""
    newest: dict[bytes, bytes] = {}
    for line in lines:
        head = line[line.find(b'"kind"') : line.find(b'"values"')]
        newest.pop(head, None)
        newest[head] = line
    return [*newest.values()]


def _subject(sample: Sample) -> tuple[str | int, ...]:
    """Return the subject of a reading."""
    kind = kind_of(sample)
    match sample:
        case ProcessReading(of=of):
            return kind, of
        case LinkReading(of=of, peer=peer, port=port):
            return kind, of, peer, port
        case HostReading(host=host) | ClockOffsetReading(host=host):
            return kind, host
        case _:
            return (kind,)


def _add_sample(page: _Page, sample: Sample) -> None:
    match sample:
        case ProcessReading():
            _add_values(page, "process", sample.values, {"process": sample.of})
        case HostReading():
            _add_host(page, sample)
        case LinkReading():
            labels = {"process": sample.of, "peer": sample.peer, "port": str(sample.port)}
            _add_values(page, "link", sample.values, labels)
        case ClockOffsetReading():
            page.add("clock_offset_s", sample.offset_s, host=sample.host)
            page.add("clock_error_s", sample.error_s, host=sample.host)
        case _:  # What a process says of itself is in the master's reports.
            pass


def _add_host(page: _Page, sample: HostReading) -> None:
    """Return name and labels; accelerators get a label with their number, so that one query covers all of them."""
    values: dict[str, float] = {}
    for name, value in sample.values.items():
        if (match := _OF_A_DEVICE.fullmatch(name)) is None:
            values[name] = value
            continue
        figure = "temperature_celsius" if match[2] == "temperature" else match[2]
        page.add(f"host_device_{figure}", value, host=sample.host, device=match[1])
    _add_values(page, "host", values, {"host": sample.host})


def _add_values(page: _Page, prefix: str, values: Mapping[str, float], labels: dict[str, str]) -> None:
    for name, value in values.items():
        page.add(f"{prefix}_{name}", value, is_total=name in TOTALS, **labels)


def _add_diagnosis(page: _Page, run_dir: Path) -> None:
    """Add the causes of the last diagnosis, if any."""
    causes: list[dict[str, Any]] = []
    for line in _last_lines(RunFolder(run_dir).diagnoses_file)[-1:]:
        with suppress(msgspec.MsgspecError):
            causes = msgspec.json.decode(line, type=dict[str, Any]).get("causes", [])
    page.add("diagnosed_causes", float(len(causes)))
    for cause in causes:
        labels = {name: str(cause.get(name, "")) for name in ("process", "host", "kind")}
        page.add("diagnosed_confidence", float(cause.get("confidence", 0.0)), is_total=False, **labels)


def _recent_lines(path: Path, *, since: float) -> list[bytes]:
    """Return the end of a readings file that contains every subject at least once; nothing of an abandoned file."""
    size = LAST_BYTES
    try:
        if path.stat().st_mtime < since:
            return []
        while True:
            lines = _last_lines(path, size)
            times = [time for line in (*lines[:1], *lines[-1:]) if (time := time_of(line)) is not None]
            is_whole = len(times) > 1 and times[-1] - times[0] > WHOLE_S
            if is_whole or size >= min(MOST_BYTES, path.stat().st_size):
                return lines
            size *= 2
    except FileNotFoundError:
        return []


def _last_lines(path: Path, most: int = LAST_BYTES) -> list[bytes]:
    """Return the complete lines at the end of a file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most))
            content = file.read(most)
    except (FileNotFoundError, PermissionError):
        return []
    lines = lines_in(content)
    return [line for line in (lines if size <= most else lines[1:]) if line]


@lru_cache(maxsize=4096)
def _named(name: str, *, is_total: bool) -> str:
    """Return the Prometheus name of a value: `cpu_s` is `cpu_seconds_total`, with base units spelled out."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    name = re.sub(r"_per_s$", "_per_second", name)
    name = re.sub(r"_s$", "_seconds", name)
    return f"{name}_total" if is_total else name


MOST_ANSWERS = 16
"""Requests that are answered at the same time."""
CACHED_S = 1.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A page that is still being read when the next process takes the port over must not be in its way.
    allow_reuse_address = True
    page: _CachedPage

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(MOST_ANSWERS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; a request beyond `MOST_ANSWERS` at once is closed without an answer."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _CachedPage:
    """The page of a run, read from its files once per `CACHED_S` for however many requests."""

    def __init__(self, run_dir: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run_dir, self._clock = run_dir, clock
        self._lock = threading.Lock()
        self._body, self._until = b"", -math.inf

    def body(self) -> bytes:
        with self._lock:
            if self._clock.monotonic() >= self._until:
                self._body = render(self._run_dir).encode()
                self._until = self._clock.monotonic() + CACHED_S
            return self._body


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = ANSWER_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics")
            return
        body = self.server.page.body()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a scraper sends a request every few seconds."""


class MetricsServer:
    """Serves the metrics of a run over HTTP, from a thread of its own, until it is closed.

    with MetricsServer(run_dir, host="127.0.0.1", port=9400) as server: …
    """

    def __init__(self, run_dir: Path, *, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"{host}:{port}: expected an address to serve metrics at: {error}") from error
        self._server.page = _CachedPage(run_dir)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.1), name="figures", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
