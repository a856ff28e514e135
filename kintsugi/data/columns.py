"""From a record of a data set to a `Row`, or to the reason why it is none. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kintsugi.config import LEARN_PAIRS, Config, SourceSection
from kintsugi.stages import has_servers, stages
from kintsugi.types import Row

COMPLETION, CHOSEN, REJECTED = "completion", "chosen", "rejected"
_ARGUMENTS = frozenset({"completions", "prompts"})
"""What a reward function is given besides the columns."""

Message = dict[str, Any]


class Unusable(Exception):
    """A record is no row; says what was expected and what was there."""


class Needs(msgspec.Struct, frozen=True):
    """What the run's stages read of a row besides its prompt."""

    completion: bool = False
    pair: bool = False


def needs_of(config: Config) -> Needs:
    """SFT learns a completion; a reward model and DPO compare two."""
    names = {stage.algorithm.name for stage in stages(config)}
    return Needs(completion="sft" in names, pair=bool(names & LEARN_PAIRS))


def held_out_needs_of(config: Config) -> Needs:
    """Held-out rows are answered; only a reward model, which answers nothing, ranks pairs instead."""
    return Needs(pair=not has_servers(config))


def row_of(record: Mapping[str, Any], section: SourceSection, *, needs: Needs) -> Row:
    """The row that a record holds; `Unusable` says why it holds none.

    >>> row_of({"q": "1+1=", "answer": "2"}, SourceSection(prompt_column="q"), needs=Needs())
    Row(prompt='1+1=', columns={'answer': '2'}, messages=())
    """
    columns = {name: value for name, value in record.items() if name != section.prompt_column}
    if taken := sorted(_ARGUMENTS & columns.keys()):
        raise Unusable(f"column '{taken[0]}' has the name of an argument of reward functions: rename it")
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
        raise Unusable(f"expected text in column '{section.prompt_column}'{found}, columns there: {have}")
    if not prompt:
        raise Unusable("expected a prompt of at least one token, got an empty text")
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
        raise Unusable(
            "expected something to learn: text in the column that `data.completion_column` names, "
            "or a conversation that ends with an assistant's turn"
        )


def _take_pair(columns: dict[str, Any]) -> list[Message] | None:
    """Turn both answers into text, in place; gives the conversation before them where they carry it themselves."""
    before: list[list[Message]] = []
    for name in (CHOSEN, REJECTED):
        value = columns.get(name)
        if isinstance(value, list) and len(value) > 1:
            before.append(_checked(value, column=name)[:-1])
        columns[name] = _answer(value, column=name)
    if columns[CHOSEN] == columns[REJECTED]:
        raise Unusable("expected two different answers in the columns 'chosen' and 'rejected', got the same")
    if len(before) == 2 and before[0] != before[1]:
        raise Unusable("expected 'chosen' and 'rejected' to answer the same conversation")
    return before[0] if before else None


def _answer(value: Any, *, column: str) -> str:
    """An answer as text: given as such, or as the last turn of a conversation."""
    if isinstance(value, list) and value:
        last = _checked(value, column=column)[-1]
        if last["role"] != "assistant":
            raise Unusable(
                f"expected an assistant's turn at the end of column '{column}', got '{last['role']}'"
            )
        value = last["content"]
    if not isinstance(value, str):
        raise Unusable(f"expected text in column '{column}', got {_kind(value)}")
    return value


def _split(messages: Sequence[Any], *, column: str) -> tuple[list[Message], str | None]:
    """A conversation as what is asked and, if it ends with an assistant's turn, what was answered."""
    checked = _checked(messages, column=column)
    if checked and checked[-1]["role"] == "assistant":
        checked, answer = checked[:-1], str(checked[-1]["content"])
    else:
        answer = None
    if not checked:
        raise Unusable(f"expected a turn to answer in the conversation of column '{column}', found none")
    return checked, answer


def _checked(messages: Sequence[Any], *, column: str) -> list[Message]:
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise Unusable(
                f"expected text as `role` and `content` of turn {number} in column '{column}', got {_cut(message)}"
            )
    return list(messages)


def _shown(messages: Sequence[Message]) -> str:
    """A conversation as people read it; a single turn is just its text."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _kind(value: Any) -> str:
    """What a value is, in the words of JSON."""
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
