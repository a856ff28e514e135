"""The figures of a run that goes on, in Prometheus' text format, and the small server that hands them out.

A page is made when it is asked for, from the ends of the files that the run writes anyway: it costs a run nothing
that nobody looks at.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import msgspec

from kintsugi.errors import UserError
from kintsugi.observe.figures import (
    TOTALS,
    ClockSample,
    HostSample,
    LinkSample,
    ProcessSample,
    Sample,
    samples_in,
    time_of,
)
from kintsugi.observe.lines import lines_in
from kintsugi.observe.metrics import METRICS_FILE
from kintsugi.observe.processes import read_processes
from kintsugi.observe.verdicts import DIAGNOSES_FILE
from kintsugi.runtime import SYSTEM_CLOCK

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAST_BYTES = 128 << 10
"""Of each file, at first."""
WHOLE_S = 10.0
"""So much of a file of figures has everything in it: links that are not used are told of in every fifth look
(`links.RARELY`), and a host that has much to do looks less often than once a second."""
MOST_BYTES = 16 << 20
"""No more is read of one: some looks at the connections of a hundred processes, all with all others."""
FRESH_S = 30.0
"""Older samples are of somebody who is gone, or not recorded any more."""
ANSWER_S = 5.0
PREFIX = "kintsugi_"

_Labels = tuple[tuple[str, str], ...]
_OF_A_DEVICE = re.compile(r"device_(\d+)_(.+)")


class _Page:
    """Figures by name; all of one name stand together, as the format wants it."""

    def __init__(self) -> None:
        self._values: dict[str, dict[_Labels, float]] = {}
        self._totals: set[str] = set()

    def add(self, name: str, value: float, *, is_total: bool = False, **labels: str) -> None:
        name = _named(name, is_total=is_total)
        if is_total:
            self._totals.add(name)
        self._values.setdefault(name, {})[tuple(sorted(labels.items()))] = value

    def text(self) -> str:
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        for name, series in sorted(self._values.items()):
            yield f"# HELP {name} {_sentence(name)}"
            yield f"# TYPE {name} {'counter' if name in self._totals else 'gauge'}"
            for labels, value in sorted(series.items()):
                inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
                yield f"{name}{{{inner}}} {_number(value)}" if inner else f"{name} {_number(value)}"


def render(run_dir: Path, *, now: float | None = None) -> str:
    """Everything that is known of the run at this moment. Files that are missing or torn leave their figures out."""
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
    """The last figures of each name."""
    latest: dict[str, float] = {}
    for line in _last_lines(run_dir / METRICS_FILE):
        with suppress(msgspec.MsgspecError):
            values = msgspec.json.decode(line, type=dict[str, float | None])
            latest |= {name: value for name, value in values.items() if value is not None}
    for name, value in latest.items():
        page.add("step" if name == "step" else f"step_{name}", value)


def _add_samples(page: _Page, run_dir: Path, *, now: float) -> None:
    latest: dict[tuple[str | int, ...], Sample] = {}
    for path in sorted((run_dir / "figures").glob("*.jsonl")):
        for record in samples_in(_newest(_recent_lines(path, since=now - FRESH_S))):
            if record.stamp.time >= now - FRESH_S:
                latest[_subject(record.sample)] = record.sample
    for sample in latest.values():
        _add_sample(page, sample)


def _newest(lines: list[bytes]) -> list[bytes]:
    """The last ones of those that are alike up to their values: it takes far longer to decode them all."""
    newest: dict[bytes, bytes] = {}
    for line in lines:
        head = line[line.find(b'"kind"') : line.find(b'"values"')]
        newest.pop(head, None)
        newest[head] = line
    return [*newest.values()]


def _subject(sample: Sample) -> tuple[str | int, ...]:
    """What it is a sample of."""
    kind = type(sample).__name__
    match sample:
        case ProcessSample(of=of):
            return kind, of
        case LinkSample(of=of, peer=peer, port=port):
            return kind, of, peer, port
        case HostSample(host=host) | ClockSample(host=host):
            return kind, host
        case _:
            return (kind,)


def _add_sample(page: _Page, sample: Sample) -> None:
    match sample:
        case ProcessSample():
            _add_values(page, "process", sample.values, {"process": sample.of})
        case HostSample():
            _add_host(page, sample)
        case LinkSample():
            labels = {"process": sample.of, "peer": sample.peer, "port": str(sample.port)}
            _add_values(page, "link", sample.values, labels)
        case ClockSample():
            page.add("clock_offset_s", sample.offset_s, host=sample.host)
            page.add("clock_error_s", sample.error_s, host=sample.host)
        case _:  # What a process says of itself is in the master's reports.
            pass


def _add_host(page: _Page, sample: HostSample) -> None:
    """Figures of accelerators have a label for which one it is, so that they can be asked for together."""
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
    """What the last diagnosis says is wrong, if anything is."""
    causes: list[dict[str, Any]] = []
    for line in _last_lines(run_dir / DIAGNOSES_FILE)[-1:]:
        with suppress(msgspec.MsgspecError):
            causes = msgspec.json.decode(line, type=dict[str, Any]).get("causes", [])
    page.add("diagnosed_causes", float(len(causes)))
    for cause in causes:
        labels = {name: str(cause.get(name, "")) for name in ("process", "host", "kind")}
        page.add("diagnosed_confidence", float(cause.get("confidence", 0.0)), is_total=False, **labels)


def _recent_lines(path: Path, *, since: float) -> list[bytes]:
    """The end of a file of figures in which everything is told of at least once; nothing of one that nobody writes."""
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
    """The whole lines at the end of a file."""
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
    """`cpu_s` is `kintsugi_…cpu_seconds_total`: base units, spelled out, as Prometheus names them."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    name = re.sub(r"_per_s$", "_per_second", name)
    name = re.sub(r"_s$", "_seconds", name)
    return f"{PREFIX}{name}_total" if is_total else f"{PREFIX}{name}"


def _sentence(name: str) -> str:
    return name.removeprefix(PREFIX).replace("_", " ").capitalize() + "."


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A page that is still being read when the next process takes the port over must not be in its way.
    allow_reuse_address = True
    render: Callable[[], str]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = ANSWER_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND, "the figures are at /metrics")
            return
        body = self.server.render().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Somebody looks every few seconds: nothing that a log should tell."""


class FiguresServer:
    """Hands the figures of a run out over HTTP, from a thread of its own, until it is closed.

    with FiguresServer(run_dir, host="127.0.0.1", port=9400) as server: …
    """

    def __init__(self, run_dir: Path, *, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"{host}:{port}: expected an address to hand figures out at: {error}") from error
        self._server.render = lambda: render(run_dir)
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
