"""Time of a verdict in large runs: readings of a made-up run, looked at once a second as the watcher does.

    python benchmarks/diagnosis_scale.py [--ranks 32 512]

A run of so many ranks (eight a host), half as many generation servers and an eighth of rollout workers is healthy for
half a minute; then a rank is killed, or cut off from the network. Each link is read as often as the recorders read it,
which record 4,096 of them a second at most. A verdict is there when the watcher has read the second in which it can be
known, and its look is over: the seconds of both are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.diagnosis.diagnose import DiagnosisMemory
from kintsugi.diagnosis.evidence import MASTER
from kintsugi.telemetry.collect.links import RECORDED_A_SECOND
from tests.unit.diagnosis.healthy import HealthyRun

HEALTHY_S, LONGEST_S = 30, 20
RANKS_PER_HOST = 8
VICTIM = "model-9"


def made_up(num_ranks: int) -> HealthyRun:
    """Return a run of so many ranks, with as many of its links as are recorded."""
    num_hosts = num_ranks // RANKS_PER_HOST
    counts = {"model": num_ranks, "server": num_ranks // 2, "rollout": max(1, num_ranks // 8)}
    hosts = {
        f"host-{host}": (
            f"agent-{host}",
            *((MASTER, "manager-0") if host == 0 else ()),
            *(f"{role}-{n}" for role, count in counts.items() for n in range(host, count, num_hosts)),
        )
        for host in range(num_hosts)
    }
    ranks = [f"model-{n}" for n in range(num_ranks)]
    links = [(process, MASTER) for here in hosts.values() for process in here if process != MASTER]
    links += [(f"{role}-{n}", "manager-0") for role in ("rollout", "server") for n in range(counts[role])]
    pairs = [(rank, peer) for rank in ranks for peer in ranks if rank != peer]
    room = max(0, RECORDED_A_SECOND - len(links))
    links += pairs if len(pairs) <= room else random.Random(1).sample(pairs, room)
    return HealthyRun(hosts=hosts, links=tuple(links))


def kill(run: HealthyRun) -> None:
    run.kill(VICTIM)


def cut(run: HealthyRun) -> None:
    def silence(now: float, rates: dict[str, float]) -> None:
        rates.update(backoff=min(5.0, now - HEALTHY_S), out_bytes=0.0, retransmits=1.0)

    run.changes.update({link: silence for link in run.links if VICTIM in link})


FAULTS: dict[str, tuple[Callable[[HealthyRun], None], str]] = {
    "killed": (kill, "killed"),
    "cut off": (cut, "network_cut"),
}


def measure(num_ranks: int, fault: str) -> dict[str, object]:
    """Play a run with a fault up to its verdict."""
    run, memory = made_up(num_ranks).play(HEALTHY_S), DiagnosisMemory()
    looks = [look_s(run, memory)[0]]
    begin, kind = FAULTS[fault]
    begin(run)
    causes: list[tuple[str, str]] = []
    while not causes and len(looks) <= LONGEST_S:
        run.play(1)
        seconds, causes = look_s(run, memory)
        looks.append(seconds)
    return {
        "ranks": num_ranks,
        "processes": sum(map(len, run.hosts.values())),
        "links": len(run.links),
        "fault": fault,
        "causes": causes,
        "right": causes[:1] == [(VICTIM, kind)],
        "readings_s": len(looks) - 1,
        "look_s": round(looks[-1], 2),
        "longest_look_s": round(max(looks), 2),
        "verdict_s": round(len(looks) - 1 + looks[-1], 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def look_s(run: HealthyRun, memory: DiagnosisMemory) -> tuple[float, list[tuple[str, str]]]:
    """Look once; return the CPU seconds, which another machine's load does not lengthen, and the causes."""
    began = time.process_time()
    found = memory.look(run.bundle, now=run.time + 0.1)
    return time.process_time() - began, [(cause.process, cause.kind.value) for cause in found.causes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 512])
    for num_ranks in parser.parse_args().ranks:
        for fault in FAULTS:
            sys.stdout.write(json.dumps(measure(num_ranks, fault)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
