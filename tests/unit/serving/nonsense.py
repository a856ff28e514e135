"""Requests that nobody in his right mind sends, and some that are nearly right."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

MODEL = "tiny"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIELDS = [
    *("prompt", "messages", "n", "stream", "stop", "seed", "temperature", "top_p", "max_tokens", "logprobs"),
    *(
        "max_completion_tokens",
        "top_logprobs",
        "logit_bias",
        "top_k",
        "min_p",
        "echo",
        "tools",
        "tool_choice",
    ),
    *("stop_token_ids", "stream_options", "response_format", "user", "best_of", "suffix", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "modalities", "metadata", "unknown"),
]

_scalars: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.integers(0, 5)
)
_values: st.SearchStrategy[Any] = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_roles: st.SearchStrategy[Any] = st.sampled_from(["user", "assistant", "tool", "developer"]) | _values
_parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": _scalars}), max_size=2
)
_calls = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": _scalars, "arguments": _values})}),
    max_size=2,
)
_message = st.fixed_dictionaries(
    {"role": _roles},
    optional={"content": st.text("abc", max_size=5) | _parts | _values, "tool_calls": _calls | _values},
)
_prompts: st.SearchStrategy[Any] = (
    st.text("abc ", max_size=5)
    | st.lists(st.integers(-2, 60), max_size=4)
    | st.lists(_values, max_size=3)
    | _values
)


@st.composite
def nonsense(draw: st.DrawFn) -> tuple[str, bytes]:
    """(path, body)."""
    path = draw(st.sampled_from([COMPLETIONS, CHAT]))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=20))
    body: dict[str, Any] = {"model": draw(st.sampled_from([MODEL, MODEL, MODEL, "x"])), "max_tokens": 3}
    if path == CHAT:
        body["messages"] = draw(st.lists(_message, max_size=3) | _values)
    else:
        body["prompt"] = draw(_prompts)
    body |= draw(st.dictionaries(st.sampled_from(FIELDS), _values, max_size=3))
    return path, json.dumps(body).encode()
