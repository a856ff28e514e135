from __future__ import annotations

import os

from kintsugi.lab.growth import Growth, Sample, fd_growth_of, rss_growth_of


def test_growth_is_from_the_first_quarter_to_the_last() -> None:
    samples = [Sample(10, 100.0)] * 10 + [Sample(14, 130.0)] * 20 + [Sample(12, 120.0)] * 10
    assert fd_growth_of(samples) == 2
    assert rss_growth_of(samples) == 20.0


def test_a_process_that_was_there_for_a_moment_does_not_count() -> None:
    growth = Growth()
    growth.sample({"server-0": os.getpid()})
    assert (growth.by_process, growth.fd_growth, growth.rss_growth_mb) == ({}, 0, 0.0)
