"""An agent program that fails in another way at every few problems; the others it solves by asking once."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai

WAYS = ("raises", "hangs", "returns nan", "asks nothing", "sends nonsense")


async def solve(row: Any, *, base_url: str, api_key: str, model: str) -> float:
    way = dict(enumerate(WAYS)).get(sum(map(ord, row.prompt)) % 16)
    if way == "asks nothing":
        return 1.0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        if way == "sends nonsense":
            await client.completions.create(model=model, prompt=[[]], n=2)
        reply = await client.completions.create(model=model, prompt=row.prompt)
    if way == "raises":
        raise ValueError("on purpose")
    if way == "hangs":
        await asyncio.get_running_loop().create_future()
    if way == "returns nan":
        return math.nan
    return float(len(reply.choices[0].text) % 2)
