"""Whatever is sent, the fault is the sender's."""

from __future__ import annotations

from typing import Any

from aiohttp.test_utils import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.serving.fakes import FakeGeneration, with_client
from tests.unit.serving.nonsense import nonsense


@given(st.lists(nonsense(), min_size=15, max_size=15))
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nonsense_is_refused_in_the_apis_shape(bodies: list[tuple[str, bytes]]) -> None:
    generation = FakeGeneration()

    async def body(client: TestClient[Any, Any]) -> None:
        for path, content in bodies:
            async with client.post(path, data=content) as response:
                assert response.status in (200, 400, 404), (content, generation.faults)
                if response.status != 200:
                    assert set((await response.json())["error"]) == {"message", "type", "param", "code"}

    with_client(body, generation)
    assert generation.faults == []
