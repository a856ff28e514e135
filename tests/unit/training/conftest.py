"""What tests of ranks share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is still there without the garbage collector is part of a cycle, and in a rank stays for hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
