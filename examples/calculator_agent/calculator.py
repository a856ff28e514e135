"""Agent that answers arithmetic problems with a calculator tool. It uses the OpenAI API only.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=… python calculator.py MODEL "12*34="

The model requests a calculation by writing it in brackets, receives the result, and continues. Text without brackets is
its answer.
"""

from __future__ import annotations

import asyncio
import operator
import re
import sys

from openai import AsyncOpenAI

MOST_CALCULATIONS = 3
OPERATORS = {"+": operator.add, "*": operator.mul}


async def answer(client: AsyncOpenAI, model: str, question: str) -> str:
    """Return the answer of the model; empty if it requests too many calculations."""
    text = question
    for _ in range(MOST_CALCULATIONS + 1):
        completion = await client.completions.create(
            model=model, prompt=text, stop=["]"], max_tokens=16, temperature=0.2
        )
        text_out = completion.choices[0].text
        _, bracket, sum_ = text_out.partition("[")
        if not bracket:
            return text_out
        text += f"{text_out}]{calculated(sum_)};"
    return ""


def calculated(sum_: str) -> str:
    """`calculated("12*34") == "408"`; invalid input gives a question mark."""
    found = re.fullmatch(r"(\d{1,6})([+*])(\d{1,6})", sum_)
    return "?" if found is None else str(OPERATORS[found[2]](int(found[1]), int(found[3])))


async def main(model: str, question: str) -> None:
    async with AsyncOpenAI() as client:
        sys.stdout.write(await answer(client, model, question) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
