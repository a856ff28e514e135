"""Figures for Prometheus."""

from __future__ import annotations

from kintsugi.serving.metrics import Metrics, ServerFigures


def test_a_figure_keeps_all_its_digits() -> None:
    server = ServerFigures("server-0", "running", "healthy", figures={"tokens_total": 123_456_789})
    lines = Metrics().text([server], num_unanswered=0).splitlines()
    assert 'kintsugi_server_tokens_total{server="server-0"} 123456789' in lines
