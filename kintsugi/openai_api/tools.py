"""Parses tool calls in the text of a model, in the format of the Hermes and Qwen templates:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from kintsugi.openai_api.detokenize import begun

OPENING = "<tool_call>"
_CALL = re.compile(rf"{OPENING}(.*?)(?:</tool_call>|\Z)\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """`ToolCall("get_weather", '{"city":"Paris"}')`."""

    name: str
    arguments: str
    """JSON, if the model followed the format."""


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | str = {}


class ToolReader:
    """Removes calls from the text, and returns them at its end; text that turns out to be no call is returned as text.

    >>> reader = ToolReader()
    >>> reader.push("Wait. <tool"), reader.push('_call>{"name": "get"}</tool_call>'), reader.end()
    ('Wait.', '', ('', (ToolCall(name='get', arguments='{}'),)))
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return the part that is certainly not a call, nor the space before one."""
        held = self._held + text
        place = held.find(OPENING)
        certain = held[:place] if place >= 0 else held[: len(held) - begun(held, [OPENING])]
        certain = certain.rstrip()
        self._held = held[len(certain) :]
        return certain

    def end(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the rest of the text, and the calls; all of it is text if one of the calls is malformed."""
        held, self._held = self._held, ""
        try:
            calls = tuple(_call(written) for written in _CALL.findall(held))
        except (msgspec.DecodeError, RecursionError):
            return held, ()
        return (_CALL.sub("", held).strip(), calls) if calls else (held, ())


def _call(written: str) -> ToolCall:
    call = msgspec.json.decode(written, type=_Written)
    given = call.arguments
    return ToolCall(call.name, given if isinstance(given, str) else msgspec.json.encode(given).decode())
