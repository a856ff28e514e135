"""Metrics for Prometheus."""

from __future__ import annotations

from kintsugi.serving.control_thread import ServerSnapshot
from kintsugi.serving.metrics import GatewayMetrics, ServerMetrics


def test_a_metric_keeps_all_its_digits() -> None:
    server = ServerMetrics("server-0", "running", "healthy", gauges={"tokens_total": 123_456_789})
    lines = GatewayMetrics().text([server], num_unanswered=0).splitlines()
    assert 'kintsugi_server_tokens_total{server="server-0"} 123456789' in lines


def test_metrics_of_servers_are_described() -> None:
    server = ServerMetrics("server-0", "running", "healthy", gauges={"pages_free": 3, "unheard_of": 1.5})
    lines = GatewayMetrics().text([server], num_unanswered=0).splitlines()
    assert "# HELP kintsugi_server_pages_free KV blocks that hold nothing." in lines
    assert "# HELP kintsugi_server_unheard_of Server unheard of." in lines
    assert 'kintsugi_server_unheard_of{server="server-0"} 1.5' in lines


def test_a_server_that_starts_is_not_called_dead() -> None:
    servers = (ServerMetrics("server-0", "starting", "dead"), ServerMetrics("server-1", "running", "stale"))
    assert ServerSnapshot(servers).why_not == "server-0 is starting, server-1 is running (stale)"
