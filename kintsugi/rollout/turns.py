"""What is fed between two turns of the model: the tokens of an observation, plain or in the model's chat template.

What the model said is never encoded anew: new tokens are put behind its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kintsugi.errors import ModelError
from kintsugi.model.tokenizer import Tokenizer

_SAID = "KINTSUGI-SAID-4d1f"
"""Stands for the model's words in the template, to see what comes after them."""


def observation_tokens(text: str, tokenizer: Tokenizer, *, chat: bool, ended_by: int | None) -> list[int]:
    """Ids that follow the model's words so that it has read `text` and goes on: a user's turn in a chat, or the text.

    `ended_by` is the end token that the model sampled, or None: a turn that it has ended itself is not ended twice.
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
    """Ids of what the template puts after the model's words in the message at `place`: the end of the turn, the
    messages after it, the beginning of the next turn. None where the template does not show those words once and whole.
    """
    shown = [*messages[:place], {"role": "assistant", "content": _SAID}, *messages[place + 1 :]]
    rendered = tokenizer.apply_chat_template(shown, variables=variables)
    if rendered.count(_SAID) != 1:
        return None
    added = tokenizer.encode(rendered.partition(_SAID)[2])
    return added[1:] if added[:1] == [ended_by] else added
