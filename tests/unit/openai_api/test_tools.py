"""Calls of tools in what a model writes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.openai_api.tools import ToolCall, ToolReader
from kintsugi.protocol.generation import Generate
from kintsugi.types import FinishReason
from tests.unit.serving.fakes import FakeGeneration, tokenizer, with_client

GET = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {}}}]
CALL = ToolCall("get", '{"city":"Paris"}')


def read(text: str, cuts: list[int]) -> tuple[str, tuple[ToolCall, ...]]:
    reader = ToolReader()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    given = [reader.push(text[start:end]) for start, end in pairwise(places)]
    rest, calls = reader.end()
    return "".join([*given, rest]), calls


@pytest.mark.parametrize(
    ("written", "text", "calls"),
    [
        (GET, "", (CALL,)),
        (f"Let me look.\n\n{GET}\n{GET}\n", "Let me look.", (CALL, CALL)),
        (GET.removesuffix("</tool_call>"), "", (CALL,)),
        ('<tool_call>{"name": "get", "arguments": "{}"}</tool_call>', "", (ToolCall("get", "{}"),)),
        ("<tool_call>get it</tool_call>", "<tool_call>get it</tool_call>", ()),
        (GET[:30], GET[:30], ()),
        (f'{GET}<tool_call>{{"name": 3}}</tool_call>', f'{GET}<tool_call>{{"name": 3}}</tool_call>', ()),
        ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, ()),
        ("a < b, <tool> \n", "a < b, <tool> \n", ()),
    ],
)
def test_calls_are_read_and_what_is_none_stays_text(
    written: str, text: str, calls: tuple[ToolCall, ...]
) -> None:
    assert read(written, []) == (text, calls)


@given(
    st.lists(st.sampled_from([GET, "<tool_", "call>", " ", "\n", "x", "<", "</tool_call>"]), max_size=6),
    st.lists(st.integers(0, 300), max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_how_the_text_comes_changes_nothing(parts: list[str], cuts: list[int]) -> None:
    written = "".join(parts)
    assert read(written, cuts) == read(written, [])


def answered(
    fields: dict[str, Any], written: str, *, finish: FinishReason = FinishReason.EOS
) -> list[dict[str, Any]]:
    """The choices, or pieces of them, of a model that writes this."""
    ids = tokenizer().encode(written)
    end = [1] if finish is FinishReason.EOS else []

    def rule(request: Generate, sample: int) -> tuple[list[int], FinishReason]:
        return [*ids, *end], finish

    choices: list[dict[str, Any]] = []

    async def body(client: TestClient[Any, Any]) -> None:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        async with client.post("/v1/chat/completions", json=asked) as response:
            content = await response.read()
        lines = [line[6:] for line in content.splitlines() if line.startswith(b"data: {")] or [content]
        for line in lines:
            choices.extend(msgspec.json.decode(line)["choices"])

    with_client(body, FakeGeneration(rule=rule))
    return choices


SHORT = '<tool_call>{"name":"get"}</tool_call>'


def test_an_answer_that_calls_a_tool_has_the_apis_shape() -> None:
    (choice,) = answered({"tools": TOOLS}, f"see {SHORT}")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "see")
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "get", "arguments": "{}"}
    (choice,) = answered({"tools": TOOLS}, SHORT, finish=FinishReason.LENGTH)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)


def test_a_stream_gives_the_calls_with_its_end_and_nothing_of_them_before() -> None:
    *pieces, last = answered({"tools": TOOLS, "stream": True, "n": 1}, f"see {SHORT}{SHORT}")
    assert "".join(piece["delta"].get("content") or "" for piece in (*pieces, last)) == "see"
    assert last["finish_reason"] == "tool_calls"
    calls = last["delta"]["tool_calls"]
    assert [call["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_who_offers_no_tools_gets_text(fields: dict[str, Any]) -> None:
    (choice,) = answered(fields, SHORT)
    message = {"role": "assistant", "content": SHORT, "refusal": None}
    assert (choice["finish_reason"], choice["message"]) == ("stop", message)
