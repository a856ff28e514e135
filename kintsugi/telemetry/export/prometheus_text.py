"""Prometheus' text format 0.0.4: the one writer that the page of a run and the page of the gateway share."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "kintsugi_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bucket bounds of a histogram of durations."""

Labels = tuple[tuple[str, str], ...]
Kind = Literal["counter", "gauge", "histogram"]


class Histogram:
    """Counts by upper bounds, and the sum of all values."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, *, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, name: str, *, help_text: str) -> Iterator[str]:
        yield from _head(name, "histogram", help_text)
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield _line(f"{name}_bucket", (("le", str(bound)),), total)
        yield _line(f"{name}_sum", (), self._sum)
        yield _line(f"{name}_count", (), total)


def metric_lines(
    name: str, kind: Kind, *, help_text: str, series: Iterable[tuple[Labels, float]]
) -> Iterator[str]:
    """All series of one metric, which the format wants together under one head.

    >>> series = [((("route", "/"),), 3)]
    >>> for line in metric_lines("requests_total", "counter", help_text="Requests.", series=series):
    ...     print(line)
    # HELP kintsugi_requests_total Requests.
    # TYPE kintsugi_requests_total counter
    kintsugi_requests_total{route="/"} 3
    """
    yield from _head(name, kind, help_text)
    for labels, value in series:
        yield _line(name, labels, value)


def text_of(lines: Iterable[str]) -> str:
    """The whole page."""
    return "\n".join([*lines, ""])


def default_help(name: str) -> str:
    """Help text of a metric without a description: `Server tokens in flight.`"""
    return name.replace("_", " ").capitalize() + "."


def _head(name: str, kind: Kind, help_text: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{PREFIX}{name}{{{inner}}} {_number(value)}" if inner else f"{PREFIX}{name} {_number(value)}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """All digits of a number; an int stays an int."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
