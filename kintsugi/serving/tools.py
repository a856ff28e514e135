"""Calls of tools in what a model writes, as Hermes' and Qwen's templates teach it:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from kintsugi.serving.text import begun

OPENING = "<tool_call>"
_CALL = re.compile(rf"{OPENING}(.*?)(?:</tool_call>|\Z)\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """`ToolCall("get_weather", '{"city":"Paris"}')`."""

    name: str
    arguments: str
    """JSON, if the model did what it was told."""


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | str = {}


class ToolReader:
    """Keeps calls out of the text, and gives them at its end; what is no call after all is text.

    >>> reader = ToolReader()
    >>> reader.push("Wait. <tool"), reader.push('_call>{"name": "get"}</tool_call>'), reader.end()
    ('Wait.', '', ('', (ToolCall(name='get', arguments='{}'),)))
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Take more text; gives what is certain to be no call, nor the space before one."""
        held = self._held + text
        place = held.find(OPENING)
        certain = held[:place] if place >= 0 else held[: len(held) - begun(held, [OPENING])]
        certain = certain.rstrip()
        self._held = held[len(certain) :]
        return certain

    def end(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest of the text, and the calls; all of it is text where one of the calls can not be read."""
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
