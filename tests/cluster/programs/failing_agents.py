"""An agent program that fails in the way that its row names; without one, it asks once and is done."""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any

import openai


async def solve(row: Any, *, base_url: str, api_key: str, model: str) -> float:
    client = shared_client().with_options(base_url=base_url, api_key=api_key)
    way = row.columns.get("way")
    if way == "asks nothing":
        return 1.0
    if way == "sends nonsense":
        await client.completions.create(model=model, prompt=["1", "2"])
    reply = await client.completions.create(model=model, prompt=row.prompt)
    if way == "raises":
        raise ValueError("on purpose")
    if way == "hangs":
        await asyncio.get_running_loop().create_future()
    if way == "returns nan":
        return math.nan
    return float(len(reply.choices[0].text) % 2)


@functools.cache
def shared_client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each episode", max_retries=0)
