"""Metrics of the gateway, as its Prometheus page shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kintsugi.generation.router import ServerHealth
from kintsugi.runtime.counters import COUNTERS
from kintsugi.telemetry.export.prometheus_text import Histogram, Labels, default_help, metric_lines, text_of

SERVER_HELP: Mapping[str, str] = {
    "server_restarts_total": "Restarts of the server's process.",
    "server_tokens_in_flight": "Tokens that the server still has to sample for requests routed to it.",
    "server_weight_version": "Version of the weights that the server decodes with; -1 before the first.",
    "server_pages_free": "KV blocks that hold nothing.",
    "server_pages_used": "KV blocks that running sequences hold.",
    "server_pages_cached": "KV blocks of finished prompts that later requests may reuse.",
    "server_running": "Sequences that prefill or decode.",
    "server_waiting": "Sequences that wait to be admitted.",
    "server_decoded_tokens": "Tokens decoded since the server started.",
    "server_tokens_per_s": "Tokens decoded per second since the previous report.",
    "server_weight_pause_ms": "Milliseconds that the last weight update kept the server from decoding.",
    "server_weight_fetch_s": "Seconds that fetching the last weights took.",
    "server_steps_total": "Decode steps of the server.",
    "server_requests_total": "Requests that the server accepted.",
    "server_tokens_total": "Tokens of finished samples.",
    "server_cancelled_total": "Requests cancelled before they finished.",
    "server_interrupted_total": "Requests answered early with the tokens they had.",
}
"""Descriptions of what a server reports with its heartbeats; other names describe themselves."""


@dataclass(frozen=True)
class ServerMetrics:
    """One server as `/metrics` and `/health` show it."""

    process: str
    state: str
    """State of its process: starting, running, failed, …"""
    health: str
    """Health of its responses, as the router sees it."""
    version: int = -1
    tokens_in_flight: int = 0
    num_restarts: int = 0
    pid: int = 0
    gauges: Mapping[str, float] | None = None
    """Metrics of its engine: KV blocks, running and waiting sequences, …"""
    last_error: str = ""
    """Reason why the previous process of this server ended."""


class GatewayMetrics:
    """Counters and latencies of the HTTP side. Used by the event loop's thread only."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        self.cancelled = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.first_token_s = Histogram()
        self.per_token_s = Histogram()
        self.request_s = Histogram()

    def text(self, servers: Sequence[ServerMetrics], *, num_unanswered: int) -> str:
        """All metrics as one page."""
        return text_of([*self._gateway_lines(num_unanswered), *_server_lines(servers)])

    def _gateway_lines(self, num_unanswered: int) -> Iterator[str]:
        by_route: list[tuple[Labels, float]] = [
            ((("route", route), ("status", str(status))), count)
            for (route, status), count in sorted(self.requests.items())
        ]
        yield from metric_lines(
            "requests_total",
            "counter",
            help_text="Answered requests by route and status.",
            series=by_route,
        )
        resent = COUNTERS.snapshot().counters.get("resent", 0)
        for name, help_text, value in (
            (
                "cancelled_requests_total",
                "Requests that their client closed before the response was complete.",
                self.cancelled,
            ),
            ("resent_requests_total", "Requests that continued at another server.", resent),
            ("prompt_tokens_total", "Tokens of accepted prompts.", self.prompt_tokens),
            ("completion_tokens_total", "Tokens sampled for clients.", self.completion_tokens),
        ):
            yield from metric_lines(name, "counter", help_text=help_text, series=[((), value)])
        yield from metric_lines(
            "queue_depth",
            "gauge",
            help_text="Completions that are not answered yet.",
            series=[((), num_unanswered)],
        )
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From request to first token of a stream.", self.first_token_s),
            ("time_per_token_seconds", "Between later tokens of a stream.", self.per_token_s),
            ("request_seconds", "From request to the end of its response.", self.request_s),
        ):
            yield from histogram.lines(name, help_text=help_text)


def ready_text(*, is_ready: bool) -> str:
    """The one metric that a stranger sees: whether a server can answer."""
    lines = metric_lines(
        "ready", "gauge", help_text="1 if a server can answer.", series=[((), int(is_ready))]
    )
    return text_of(list(lines))


def _server_lines(servers: Sequence[ServerMetrics]) -> Iterator[str]:
    yield from metric_lines(
        "server_health",
        "gauge",
        help_text="1 for the health that a server has.",
        series=[
            ((("server", server.process), ("health", health.value)), int(server.health == health.value))
            for server in servers
            for health in ServerHealth
        ],
    )
    columns: dict[str, dict[str, float]] = {
        "server_restarts_total": {server.process: server.num_restarts for server in servers},
        "server_tokens_in_flight": {server.process: server.tokens_in_flight for server in servers},
        "server_weight_version": {server.process: server.version for server in servers},
    }
    for server in servers:
        for name, value in (server.gauges or {}).items():
            columns.setdefault(f"server_{name}", {})[server.process] = value
    for name, values in columns.items():
        yield from metric_lines(
            name,
            "counter" if name.endswith("_total") else "gauge",
            help_text=SERVER_HELP.get(name) or default_help(name),
            series=[((("server", process),), value) for process, value in values.items()],
        )
