"""What Kintsugi runs: the unchanged program, asked a row's question, and what its answer is worth."""

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
        return 0.0  # It wrote until there was no room left.


@functools.cache
def shared_client() -> openai.AsyncOpenAI:
    """One for all episodes: making a client takes longer than a short answer."""
    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of each episode", max_retries=0)
