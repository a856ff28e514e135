"""Tokens between two turns of the model: an observation as plain text, or in the model's chat template.

The model's own tokens are never re-encoded: new tokens are appended to them. Environments (`env_runner.py`) and agent
programs (`token_capture.py`) share this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kintsugi.errors import ModelError
from kintsugi.model.tokenizer import Tokenizer

_MARKER = "KINTSUGI-SAID-4d1f"
"""Placeholder for the model's text in the template, to find what the template puts after it."""


def observation_tokens(text: str, tokenizer: Tokenizer, *, chat: bool, ended_by: int | None) -> list[int]:
    """Tokens to append to the model's text so that it reads `text` and continues: a user turn in a chat, or plain text.

    `ended_by` is the end token that the model sampled, or None: a turn that has its end token does not get a second.
    """
    if not chat:
        return tokenizer.encode(text)
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": text},
    ]
    added = added_tokens(talk, tokenizer, place=1, ended_by=ended_by)
    if added is None:
        raise ModelError("the chat template does not show what was said earlier: no turn can be added to it")
    return added


def added_tokens(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    place: int,
    ended_by: int | None,
    variables: Mapping[str, Any] | None = None,
) -> list[int] | None:
    """Tokens that the template puts after the model's text in the message at `place`: the end of the turn, the later
    messages, the beginning of the next turn. None if the template does not show that text exactly once.
    """
    shown = [*messages[:place], {"role": "assistant", "content": _MARKER}, *messages[place + 1 :]]
    rendered = tokenizer.apply_chat_template(shown, variables=variables)
    if rendered.count(_MARKER) != 1:
        return None
    added = tokenizer.encode(rendered.partition(_MARKER)[2])
    return added[1:] if added[:1] == [ended_by] else added
