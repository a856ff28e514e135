"""What tests of ranks share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.unit.training.fakes import OPENED


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is still there without the garbage collector is part of a cycle, and in a rank stays for hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def bulk_endpoints_are_closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()
