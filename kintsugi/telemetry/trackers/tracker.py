"""Names, tables and parameters that all trackers get, and the calls that each of them implements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from kintsugi.config.schema import Config

PROJECT = "kintsugi"
"""Project, or experiment, that runs belong to."""
DEMONSTRATIONS = frozenset({"warmup", "sft"})
"""Stages that learn from rows of the data."""
SYSTEM = "system/"
"""Prefix of the figures of hosts and accelerators, which belong to no stage."""
NO_PARAMETERS = frozenset({"run_dir", "logging", "monitoring"})


def tracker_tag(name: str, *, stage: str = "") -> str:
    """Return the tag of a metric in the trackers, which group by what is before the first slash. Figures of
    demonstrations are apart from those of RL: their losses and lengths are not comparable.

    >>> tracker_tag("loss", stage="grpo"), tracker_tag("reward/mean", stage="grpo"), tracker_tag("loss", stage="warmup")
    ('train/loss', 'reward/mean', 'sft/loss')
    """
    if stage in DEMONSTRATIONS:
        return f"sft/{name}"
    return name if "/" in name else f"train/{name}"


class TrackerTable(NamedTuple):
    """`TrackerTable(("prompt", "reward"), [("1+1=", 1.0)])`."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]

    def markdown(self) -> str:
        """The table as TensorBoard shows it; text of a model cannot end a cell or begin a tag."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(value))
    for mark in "&<>|`*_[]":
        shown = shown.replace(mark, f"&#{ord(mark)};")
    return shown


class TrackedRun(NamedTuple):
    """A run as the trackers know it: `TrackedRun(Path("runs/demo-1"), "a1b2", {"algorithm": {"steps": 100}})`."""

    run_dir: Path
    id: str
    """The same for a resumed run, which continues under the same name."""
    parameters: Mapping[str, Any]
    """The configuration as nested sections (`parameters_of`)."""

    @property
    def flat_parameters(self) -> dict[str, Any]:
        """Parameters by field: `{"algorithm.steps": 100}`."""
        return dict(_flattened(self.parameters, prefix=""))


def parameters_of(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, without what says where a run is and to which addresses it reports."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return {name: value for name, value in values.items() if name not in NO_PARAMETERS}


def _flattened(values: Mapping[str, Any], *, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Tracker(Protocol):
    """What is called for one run. An exception of it is reported, and the run goes on."""

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None: ...

    def write_table(self, name: str, step: int, table: TrackerTable, *, time: float) -> None: ...

    def truncate_after(self, step: int, *, time: float) -> None: ...

    def close(self) -> None: ...
