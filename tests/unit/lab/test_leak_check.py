from __future__ import annotations

import gc
import os
import subprocess

import pytest

from kintsugi.lab.soak import leak_check as growth_module
from kintsugi.lab.soak.leak_check import (
    MIN_SAMPLES,
    ResourceGrowth,
    ResourceReading,
    fd_growth_of,
    rss_growth_of,
)


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ResourceGrowth:
    """One that looks whenever it is asked to, at processes of any age."""
    monkeypatch.setattr(growth_module, "SAMPLE_S", 0.0)
    monkeypatch.setattr(growth_module, "SETTLED_S", 0.0)
    return ResourceGrowth()


def test_growth_is_from_the_first_quarter_to_the_last() -> None:
    samples = (
        [ResourceReading(10, 100.0)] * 10
        + [ResourceReading(14, 130.0)] * 20
        + [ResourceReading(12, 120.0)] * 10
    )
    assert fd_growth_of(samples) == 2
    assert rss_growth_of(samples) == 20.0


def test_nothing_is_said_of_a_process_that_was_there_for_a_moment(growth: ResourceGrowth) -> None:
    for _ in range(MIN_SAMPLES - 1):
        growth.sample({"server-0": os.getpid()})
    assert (growth.by_process, growth.num_processes) == ({}, 0)
    assert (growth.fd_growth, growth.rss_growth_mb) == (None, None)


def test_a_process_counts_over_its_own_life_however_long_the_others_lived(growth: ResourceGrowth) -> None:
    # A process of its own: this one may close sockets of earlier tests meanwhile.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as steady:
        assert steady.stdin is not None and steady.stdout is not None
        steady.stdin.write(b"is past its start, in which it opens libraries\n")
        steady.stdin.flush()
        steady.stdout.readline()
        for _ in range(5 * MIN_SAMPLES):
            growth.sample({"launcher": steady.pid})
        steady.kill()
    gc.collect()
    held = []
    for _ in range(MIN_SAMPLES):
        held.append(os.open(os.devnull, os.O_RDONLY))
        growth.sample({"server-0": os.getpid()})
    for descriptor in held:
        os.close(descriptor)
    assert growth.num_processes == 2
    assert growth.by_process["launcher"][0] == 0
    assert growth.fd_growth == growth.by_process["server-0"][0] == 15


def test_the_worst_of_those_that_had_a_name_is_told(growth: ResourceGrowth) -> None:
    steady, leaking = (
        [ResourceReading(5, 50.0)] * 20,
        [ResourceReading(5, 60.0)] * 10 + [ResourceReading(9, 50.0)] * 10,
    )
    growth._samples = {("server-0", 1, 1.0): leaking, ("server-0", 2, 2.0): steady}
    assert growth.by_process == {"server-0": (4, 0.0)}
    assert growth.num_processes == 2
