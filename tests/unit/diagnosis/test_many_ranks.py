"""A run of 32 ranks on eight hosts, all of which have connections with each other."""

from __future__ import annotations

import time

import pytest

from kintsugi.diagnosis.diagnose import DiagnosisMemory
from kintsugi.diagnosis.evidence import MASTER
from tests.unit.diagnosis.healthy import HealthyRun

NUM_RANKS, NUM_HOSTS, NUM_OTHERS = 32, 8, 16
VERDICT_S = 5


def many() -> HealthyRun:
    hosts = {
        f"host-{host}": (
            f"agent-{host}",
            *((MASTER, "manager-0") if host == 0 else ()),
            *(f"model-{index}" for index in range(host, NUM_RANKS, NUM_HOSTS)),
            *(f"rollout-{index}" for index in range(host, NUM_OTHERS, NUM_HOSTS)),
            *(f"server-{index}" for index in range(host, NUM_OTHERS, NUM_HOSTS)),
        )
        for host in range(NUM_HOSTS)
    }
    ranks = [f"model-{index}" for index in range(NUM_RANKS)]
    links = [(rank, peer) for rank in ranks for peer in ranks if rank != peer]
    links += [(process, MASTER) for here in hosts.values() for process in here if process != MASTER]
    links += [
        (f"{role}-{index}", "manager-0") for role in ("rollout", "server") for index in range(NUM_OTHERS)
    ]
    return HealthyRun(hosts=hosts, links=tuple(links))


@pytest.mark.slow
def test_faults_among_32_ranks_are_named_within_five_seconds_and_a_look_is_cheaper_than_that() -> None:
    run, memory = many().play(30), DiagnosisMemory()
    assert memory.look(run.bundle, now=run.time + 0.1).causes == ()
    run.kill("model-17")
    run.play(1)
    found = memory.look(run.bundle, now=run.time + 0.1)
    assert [(cause.process, cause.kind.value) for cause in found.causes] == [("model-17", "killed")]

    run = many().play(30)
    run.changes.update(
        {
            link: lambda now, rates: rates.update(backoff=min(5.0, now - 30), out_bytes=0.0, retransmits=1.0)
            for link in run.links
            if "model-9" in link
        }
    )
    run.play(VERDICT_S)
    began_s = time.process_time()
    found = DiagnosisMemory().look(run.bundle, now=run.time + 0.1)
    assert time.process_time() - began_s < VERDICT_S
    assert [(cause.process, cause.kind.value) for cause in found.causes] == [("model-9", "network_cut")]
