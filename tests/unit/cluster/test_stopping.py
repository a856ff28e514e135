from __future__ import annotations

import signal
from typing import Any

from kintsugi.cluster.agent import PendingStop

HEARS: dict[str, Any] = {"term": 3, "registered": True}


def test_the_first_request_is_passed_on_once_and_the_second_means_at_once() -> None:
    stop = PendingStop(requested=False)
    assert not stop.was_requested and not stop.is_due(**HEARS)
    assert not stop.signalled(signal.SIGTERM)
    assert stop.is_due(**HEARS) and not stop.is_due(**HEARS)
    assert stop.signalled(signal.SIGTERM)


def test_an_interrupt_means_at_once() -> None:
    assert PendingStop(requested=False).signalled(signal.SIGINT)


def test_a_new_master_is_asked_when_it_speaks_in_its_own_term() -> None:
    stop = PendingStop(requested=True)
    assert stop.is_due(**HEARS)
    stop.expect_master(after_term=3)
    assert not stop.is_due(term=3, registered=True)
    assert not stop.is_due(term=4, registered=False)
    assert stop.is_due(term=4, registered=True)


def test_a_new_master_is_asked_nothing_that_nobody_requested() -> None:
    stop = PendingStop(requested=False)
    stop.expect_master(after_term=3)
    assert not stop.is_due(term=4, registered=True)
