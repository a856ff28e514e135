"""Conversion of a data record into a `Row`, or into the reason why it cannot be used. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kintsugi.config.schema import LEARN_PAIRS, Config, SourceSection
from kintsugi.config.stages import has_servers, stages
from kintsugi.types import Row

COMPLETION, CHOSEN, REJECTED = "completion", "chosen", "rejected"
_ARGUMENTS = frozenset({"completions", "prompts"})
"""Arguments of reward functions besides the columns."""

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "messages", "input")
"""Names that prompts have in other data sets, the likeliest first."""

Message = dict[str, Any]


class UnusableRow(Exception):
    """A record cannot be used; the message says what was expected and found."""


class RequiredColumns(msgspec.Struct, frozen=True):
    """Columns that the stages of a run read besides the prompt."""

    completion: bool = False
    pair: bool = False


def needs_of(config: Config) -> RequiredColumns:
    """Required columns of training rows: SFT needs a completion; a reward model and DPO need a pair."""
    names = {stage.algorithm.name for stage in stages(config)}
    return RequiredColumns(completion="sft" in names, pair=bool(names & LEARN_PAIRS))


def held_out_needs_of(config: Config) -> RequiredColumns:
    """Required columns of held-out rows: a pair for a reward model, which generates nothing; otherwise none."""
    return RequiredColumns(pair=not has_servers(config))


def row_of(record: Mapping[str, Any], section: SourceSection, *, needs: RequiredColumns) -> Row:
    """Convert a record into a row; `UnusableRow` says why it cannot be.

    >>> row_of({"q": "1+1=", "answer": "2"}, SourceSection(prompt_column="q"), needs=RequiredColumns())
    Row(prompt='1+1=', columns={'answer': '2'}, messages=())
    """
    columns = {name: value for name, value in record.items() if name != section.prompt_column}
    if taken := sorted(_ARGUMENTS & columns.keys()):
        raise UnusableRow(f"column '{taken[0]}' has the name of an argument of reward functions: rename it")
    asked = record.get(section.prompt_column)
    messages: list[Message] = []
    if needs.pair:
        earlier = _take_pair(columns)
        if asked is None and earlier is not None:
            asked = earlier
    if isinstance(asked, str):
        prompt, answer = asked, None
    elif isinstance(asked, list):
        messages, answer = _split(asked, column=section.prompt_column)
        prompt = _shown(messages)
    else:
        have = ", ".join(sorted(record)) or "none"
        found = "" if asked is None else f" (which has {_kind(asked)})"
        likely = next((name for name in PROMPT_COLUMNS if isinstance(record.get(name), str | list)), None)
        hint = f"; try `data.prompt_column={likely}`" if likely is not None and asked is None else ""
        raise UnusableRow(
            f"expected text in column '{section.prompt_column}'{found}, columns there: {have}{hint}"
        )
    if not prompt:
        raise UnusableRow("expected a prompt of at least one token, got an empty text")
    _take_completion(columns, record, section, answer=answer, needed=needs.completion)
    return Row(prompt=prompt, columns=columns, messages=tuple(messages))


def _take_completion(
    columns: dict[str, Any],
    record: Mapping[str, Any],
    section: SourceSection,
    *,
    answer: str | None,
    needed: bool,
) -> None:
    name = section.completion_column
    if name is not None and (needed or record.get(name) is not None):
        columns[COMPLETION] = _answer(record.get(name), column=name)
    elif answer is not None:
        columns[COMPLETION] = answer
    elif needed:
        raise UnusableRow(
            "expected something to learn: text in the column that `data.completion_column` names, "
            "or a conversation that ends with an assistant's turn"
        )


def _take_pair(columns: dict[str, Any]) -> list[Message] | None:
    """Convert both answers into text, in place; return the conversation before them if they contain it."""
    before: list[list[Message]] = []
    for name in (CHOSEN, REJECTED):
        value = columns.get(name)
        if isinstance(value, list) and len(value) > 1:
            before.append(_checked(value, column=name)[:-1])
        columns[name] = _answer(value, column=name)
    if columns[CHOSEN] == columns[REJECTED]:
        raise UnusableRow(
            "expected two different answers in the columns 'chosen' and 'rejected', got the same"
        )
    if len(before) == 2 and before[0] != before[1]:
        raise UnusableRow("expected 'chosen' and 'rejected' to answer the same conversation")
    return before[0] if before else None


def _answer(value: Any, *, column: str) -> str:
    """Text of an answer, which is given as text or as the last turn of a conversation."""
    if isinstance(value, list) and value:
        last = _checked(value, column=column)[-1]
        if last["role"] != "assistant":
            raise UnusableRow(
                f"expected an assistant's turn at the end of column '{column}', got '{last['role']}'"
            )
        value = last["content"]
    if not isinstance(value, str):
        raise UnusableRow(f"expected text in column '{column}', got {_kind(value)}")
    return value


def _split(messages: Sequence[Any], *, column: str) -> tuple[list[Message], str | None]:
    """Split a conversation into its prompt and, if it ends with an assistant's turn, its answer."""
    checked = _checked(messages, column=column)
    if checked and checked[-1]["role"] == "assistant":
        checked, answer = checked[:-1], str(checked[-1]["content"])
    else:
        answer = None
    if not checked:
        raise UnusableRow(f"expected a turn to answer in the conversation of column '{column}', found none")
    return checked, answer


def _checked(messages: Sequence[Any], *, column: str) -> list[Message]:
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise UnusableRow(
                f"expected text as `role` and `content` of turn {number} in column '{column}', got {_cut(message)}"
            )
    return list(messages)


def _shown(messages: Sequence[Message]) -> str:
    """Format a conversation for display; a single turn is just its text."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _kind(value: Any) -> str:
    """Describe the JSON type of a value, for messages."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return f"the number {value}"
        case list():
            return "a list"
        case dict():
            return "an object"
    return type(value).__name__


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
