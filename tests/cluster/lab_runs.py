"""Experiments of the laboratory on other machines: what their results say, and what they have left on the machines."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.lab.injector.undo_log import group_mounts
from kintsugi.lab.testbed import tools

GROUP = re.compile(r"g[0-9a-f]{10}")
FAULTS: dict[str, list[tuple[str, str]]] = {
    "S1": [("network_delay", "model-1")],
    "S1_loss": [("network_loss", "model-1")],
    "S2": [("cpu", "rollout-1"), ("memory", "rollout-1")],
    "S3": [("device_memory", "model-1"), ("network_delay", "master-0")],
    "S4": [("network_delay", "server-0")],
    "S5": [("disk_load", "agent-0"), ("disk_fill", "agent-0")],
}
"""Faults of each experiment on other machines: kind and target."""
COUNTERS = {
    "network_delay": ("packets", 1),
    "network_loss": ("dropped", 1),
    "cpu": ("quota_us", 1),
    "memory": ("grown_bytes", 1),
    "device_memory": ("limit_bytes", 1),
    "disk_load": ("written_bytes", 1),
    "disk_fill": ("filled_bytes", 1),
}
"""What the mechanism of a fault counts, and the least that proves an effect."""


def state_of(places: Sequence[HostNamespaces]) -> dict[str, str]:
    """Return what faults change: packet filters and queues of each host, and of this machine control groups, mounts
    and the folders of journals."""
    found = {}
    for place in places:
        network = next(path for path in place.namespaces if path.endswith("/net"))
        there = ("nsenter", f"--net={network}")
        found[f"{place.name} nft"] = tools.call(*there, "nft", "list", "ruleset")
        queues = tools.call(*there, "tc", "qdisc", "show").splitlines()
        # Handle 0 is the kernel's own queue of a device, which may be new.
        found[f"{place.name} tc"] = "\n".join(line for line in queues if line.split()[2] != "0:")
    groups = [
        path for mount in group_mounts() for path in mount.path.rglob("g*") if GROUP.fullmatch(path.name)
    ]
    found["groups"] = "\n".join(sorted(map(str, groups)))
    journals = [*Path(tempfile.gettempdir()).glob("kintsugi-faults-*")]
    found["journals"] = "\n".join(sorted(map(str, journals)))
    return found


def markers_of(folder: Path) -> list[dict[str, Any]]:
    """Return the markers of an experiment, by the time of the fault."""
    found = [json.loads(path.read_text()) for path in folder.glob("lab/*/markers/*.json")]
    return sorted(found, key=lambda marker: str(marker["start"]))


def assert_faults_fired(folder: Path, name: str) -> list[dict[str, Any]]:
    """Check that every fault of an experiment had an effect on its target, and was undone; return their markers."""
    markers = markers_of(folder / f"{name}-ours")
    found = [(marker["injection"]["ability"], marker["process"]) for marker in markers]
    assert sorted(found) == sorted(FAULTS[name]), found
    for marker in markers:
        counter, least = COUNTERS[marker["injection"]["ability"]]
        assert marker["measured"][counter] >= least, marker
        assert marker["end"] is not None and marker["end"] > marker["start"], marker
    return markers


def assert_diagnosed(result: Path) -> None:
    """Check that the cause was named, and that the run went on to its end without a lost step."""
    run = assert_went_on(result)
    assert run["correct"], (run["diagnosed"], run["verdicts"])


def assert_went_on(result: Path) -> dict[str, Any]:
    """Check that the run went on to its end without a lost step; return its record."""
    run: dict[str, Any]
    (run,) = json.loads(result.read_text())["runs"]
    assert not run["problem"], run["problem"]
    assert run["recovered"] and run["steps_lost"] == 0, run
    return run
