"""Figures of the gateway in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kintsugi.generation.router import Health
from kintsugi.runtime import COUNTERS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PREFIX = "kintsugi_"


class Histogram:
    """Counts by upper bounds, and their sum."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, *, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


@dataclass(frozen=True)
class ServerFigures:
    """One server as `/metrics` and `/health` show it."""

    process: str
    state: str
    """Of its process: starting, running, failed, …"""
    health: str
    """Of its answers, as the router sees it."""
    version: int = -1
    tokens_in_flight: int = 0
    num_restarts: int = 0
    pid: int = 0
    figures: Mapping[str, float] | None = None
    """What its engine says of itself: pages, running, waiting."""
    last_error: str = ""
    """How the one before it in its place ended."""


class Metrics:
    """What the HTTP side counts. One thread's."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        self.cancelled = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.first_token_s = Histogram()
        self.per_token_s = Histogram()
        self.request_s = Histogram()

    def text(self, servers: Sequence[ServerFigures], *, num_unanswered: int) -> str:
        """All figures as one page."""
        return "\n".join([*self._own_lines(num_unanswered), *_server_lines(servers), ""])

    def _own_lines(self, num_unanswered: int) -> Iterator[str]:
        resent = COUNTERS.snapshot().counters.get("resent", 0)
        yield from _head("requests_total", "counter", "Answered requests by route and status.")
        for (route, status), count in sorted(self.requests.items()):
            yield f'{PREFIX}requests_total{{route="{_escaped(route)}",status="{status}"}} {count}'
        for name, kind, help_text, value in (
            (
                "cancelled_requests_total",
                "counter",
                "Requests whose client left before the answer.",
                self.cancelled,
            ),
            ("resent_requests_total", "counter", "Requests that went on at another server.", resent),
            ("prompt_tokens_total", "counter", "Tokens of accepted prompts.", self.prompt_tokens),
            ("completion_tokens_total", "counter", "Tokens sampled for clients.", self.completion_tokens),
            ("queue_depth", "gauge", "Completions that are not answered yet.", num_unanswered),
        ):
            yield from _head(name, kind, help_text)
            yield f"{PREFIX}{name} {value}"
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From request to first token of a stream.", self.first_token_s),
            ("time_per_token_seconds", "Between later tokens of a stream.", self.per_token_s),
            ("request_seconds", "From request to the end of its answer.", self.request_s),
        ):
            yield from _head(name, "histogram", help_text)
            yield from histogram.lines(f"{PREFIX}{name}")


def _server_lines(servers: Sequence[ServerFigures]) -> Iterator[str]:
    yield from _head("server_health", "gauge", "1 for the health that a server has.")
    for server in servers:
        for health in Health:
            current = int(server.health == health.value)
            yield f'{PREFIX}server_health{{server="{server.process}",health="{health.value}"}} {current}'
    columns: dict[str, dict[str, float]] = {
        "server_restarts_total": {server.process: server.num_restarts for server in servers},
        "server_tokens_in_flight": {server.process: server.tokens_in_flight for server in servers},
        "server_weight_version": {server.process: server.version for server in servers},
    }
    for server in servers:
        for name, value in (server.figures or {}).items():
            columns.setdefault(f"server_{_escaped(name)}", {})[server.process] = value
    for name, values in columns.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        yield from _head(name, kind, name.replace("_", " ").capitalize() + ".")
        for process, value in values.items():
            yield f'{PREFIX}{name}{{server="{process}"}} {value}'


def _head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} {kind}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
