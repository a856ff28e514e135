"""Time for a version to reach a number of hosts, as a function of its bytes, the hosts and their links.

    python benchmarks/weight_sync_model.py measure --json FILE     network namespaces with limited links (root)
    python benchmarks/weight_sync_model.py show --json FILE        fit, check, and estimates for larger models

    seconds = fixed + wire · bytes / rate + (hosts - 1) · (hop + wire · slice / rate)

`rate` is that of the link, at most what a host can send and receive. `fixed`, `wire` and `hop` are fitted on `FITTED`
and checked on `UNSEEN`, which were measured in the same way and not used for the fit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.bulk.exports import SLICE_BYTES

ROUNDS = 3
GIGABIT = 1e9 / 8
HOST_RATE = 1.05e9
"""Bytes per second of one host, authenticated, on two shared cores (RESULTS.md)."""
BURST = "256kb"


class Case(NamedTuple):
    megabytes: int
    hosts: int
    gigabits: float


FITTED = (
    Case(48, 1, 1.0),
    Case(48, 3, 0.25),
    Case(160, 1, 0.25),
    Case(160, 3, 1.0),
    Case(160, 1, 1.0),
)
UNSEEN = (Case(48, 1, 0.5), Case(48, 2, 0.5), Case(160, 2, 0.5), Case(160, 3, 0.5))
MODELS = (("8 B", 16e9), ("32 B", 64e9), ("70 B", 140e9))
"""Bytes in bfloat16."""
LINKS = (10, 100, 400)


class Fit(NamedTuple):
    fixed_s: float
    wire: float
    hop_s: float

    def seconds(self, case_bytes: float, *, hosts: int, rate: float) -> float:
        hops = (hosts - 1) * (self.hop_s + self.wire * SLICE_BYTES / rate)
        return self.fixed_s + self.wire * case_bytes / rate + hops


def measure() -> dict[str, Any]:
    from benchmarks.weight_sync_hosts import TC, Between
    from kintsugi.lab.testbed.hosts import Hosts

    cases = [*FITTED, *UNSEEN]
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="weight_sync-") as folder:
        for megabytes in sorted({case.megabytes for case in cases}):
            place = Path(folder) / str(megabytes)
            place.mkdir()
            with closing(Hosts(max(case.hosts for case in cases) + 1, folder=place)) as hosts:
                networks = [
                    next(path for path in each.namespaces if path.endswith("/net")) for each in hosts.places
                ]
                with closing(Between(hosts.places, megabytes=megabytes, mode="authenticated")) as between:
                    between.measure()
                    for case in [each for each in cases if each.megabytes == megabytes]:
                        for network in networks:
                            limit = [*TC, "rate", f"{case.gigabits:g}gbit", "burst", BURST, "latency", "50ms"]
                            limit[2] = "replace"
                            subprocess.run(["nsenter", f"--net={network}", *limit], check=True)
                        found = [between.measure(hosts=case.hosts)["fetch"] for _ in range(ROUNDS)]
                        seconds[json.dumps(case)] = found
    return {"load": os.getloadavg(), "seconds": seconds}


def fit(measured: dict[Case, float], cases: Sequence[Case]) -> Fit:
    rows = [
        [
            1.0,
            (case.megabytes * 1e6 + (case.hosts - 1) * SLICE_BYTES) / (case.gigabits * GIGABIT),
            case.hosts - 1,
        ]
        for case in cases
    ]
    found, *_ = np.linalg.lstsq(np.array(rows), np.array([measured[case] for case in cases]), rcond=None)
    return Fit(*(float(value) for value in found))


def show(found: dict[str, Any]) -> None:
    measured = {
        Case(*json.loads(name)): statistics.median(values) for name, values in found["seconds"].items()
    }
    fitted = fit(measured, FITTED)
    print(f"fixed {fitted.fixed_s:.3f} s, wire {fitted.wire:.3f}, hop {fitted.hop_s:.3f} s")
    for name, cases in (("fitted", FITTED), ("unseen", UNSEEN)):
        for case in cases:
            estimate = fitted.seconds(case.megabytes * 1e6, hosts=case.hosts, rate=case.gigabits * GIGABIT)
            print(
                f"{name}: {case.megabytes} MB, {case.hosts} hosts, {case.gigabits:g} Gbit/s: measured "
                f"{measured[case]:.2f} s, model {estimate:.2f} s ({estimate / measured[case] - 1:+.0%})"
            )
    for model, size in MODELS:
        for link in LINKS:
            wire, host = (
                fitted.seconds(size, hosts=16, rate=min(link * GIGABIT, limit))
                for limit in (float("inf"), HOST_RATE)
            )
            print(
                f"{model} over {link} Gbit/s to 16 hosts: {wire:.1f} s at the rate of the link, {host:.1f} s "
                "by the hosts measured here"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("measure", "show"))
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.action == "measure":
        arguments.json.write_text(json.dumps(measure(), indent=2) + "\n")
    show(json.loads(arguments.json.read_text()))


if __name__ == "__main__":
    main()
