from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kintsugi.transport import Endpoint
from tests.unit.transport.harness import make_endpoint


@pytest.fixture
def make() -> Iterator[Callable[..., Endpoint]]:
    """Makes endpoints that are closed after the test."""
    with ExitStack() as stack:

        def make_and_close(process: str, **options: Any) -> Endpoint:
            endpoint = make_endpoint(process, **options)
            stack.callback(endpoint.close)
            return endpoint

        yield make_and_close
