"""Agent function for Kintsugi: run the unchanged program on the prompt of a row and score its answer."""

from __future__ import annotations

import functools
from typing import Any

import openai
from calculator import answer


async def solve(row: Any, *, base_url: str, api_key: str, model: str) -> float:
    client = shared_client().with_options(base_url=base_url, api_key=api_key)
    try:
        return float(await answer(client, model, row.prompt) == row.columns["answer"])
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return 0.0  # The conversation became too long.


@functools.cache
def shared_client() -> openai.AsyncOpenAI:
    """Client that all episodes share: creating one takes longer than a short episode."""
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="set per episode", max_retries=0)
