"""What the API answers: choices that grow with their tokens, in the shapes of completions and of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kintsugi.model.tokenizer import Tokenizer
from kintsugi.serving.openai import Limits
from kintsugi.serving.text import Writer, token_bytes
from kintsugi.serving.tools import ToolCall, ToolReader
from kintsugi.types import Completion, Finish, Fragment

CHAT_PREFIX = "chatcmpl-"
FINISH_REASONS = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True)
class SampledToken:
    """One token with its log-probability, the most likely ones in its place, and where its text begins."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    start: int


@dataclass(frozen=True)
class Delta:
    """What is new of a choice."""

    text: str
    tokens: tuple[SampledToken, ...] = ()
    """Those whose text has begun to be given; only where log-probabilities are wanted."""
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """All of them, with the end."""


class Choice:
    """One completion as it is told to the client."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        with_logprobs: bool,
        with_tools: bool = False,
    ) -> None:
        """`with_tools`: calls of tools are no text."""
        self.num_tokens = 0
        """All that were sampled, an end token too."""
        self.finish_reason: str | None = None
        self._writer = Writer(tokenizer.decode, stops=stops)
        self._with_logprobs = with_logprobs
        self._untold: list[SampledToken] = []
        self._tools = ToolReader() if with_tools else None

    def take(self, fragment: Fragment | Completion) -> Delta:
        """More of it; what is known already, as of a `Completion` after its fragments, is left out."""
        if self.finish_reason is not None:
            return Delta("")
        ids = np.frombuffer(fragment.tokens, dtype="<i4")
        offset = fragment.offset if isinstance(fragment, Fragment) else 0
        known = self.num_tokens - offset
        assert known >= 0, f"tokens {self.num_tokens} to {offset - 1} are missing"
        self.num_tokens = max(self.num_tokens, offset + len(ids))
        # An end token, and a stop token, is no part of the text.
        last = len(ids) - (fragment.finish is Finish.EOS)
        if last <= known:
            text = ""
        elif self._with_logprobs:
            text = self._take_each(fragment, ids, known, last)
        else:
            text = self._writer.push(ids[known:last].tolist())
        if fragment.finish is not None or self._writer.stopped:
            text += self._writer.end()
            end = Finish.STOP if self._writer.stopped or fragment.finish is None else fragment.finish
            self.finish_reason = FINISH_REASONS[end]
        return self._delta(text)

    def _delta(self, text: str) -> Delta:
        calls: tuple[ToolCall, ...] = ()
        if self._tools is not None:
            text = self._tools.push(text)
            if self.finish_reason is not None:
                rest, calls = self._tools.end()
                text += rest
        if calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return Delta(text, self._tell(), self.finish_reason, calls)

    def _take_each(
        self, fragment: Fragment | Completion, ids: NDArray[np.int32], known: int, last: int
    ) -> str:
        logprobs = np.frombuffer(fragment.logprobs, dtype="<f4")
        top_ids = np.frombuffer(fragment.top_tokens, dtype="<i4").reshape(len(ids), -1)
        top_logprobs = np.frombuffer(fragment.top_logprobs, dtype="<f4").reshape(len(ids), -1)
        texts = []
        for place in range(known, last):
            top = tuple(zip(top_ids[place].tolist(), top_logprobs[place].tolist(), strict=True))
            token = int(ids[place])
            self._untold.append(SampledToken(token, float(logprobs[place]), top, self._writer.decoded))
            texts.append(self._writer.push([token]))
        return "".join(texts)

    def _tell(self) -> tuple[SampledToken, ...]:
        """Tokens go out with their text; those that are part of a stop text alone never do."""
        is_over = self.finish_reason is not None and not self._writer.stopped
        told = [token for token in self._untold if is_over or token.start < self._writer.length]
        self._untold = self._untold[len(told) :]
        return tuple(told)


@dataclass(frozen=True)
class Shape:
    """How a request's answer is written down: `CompletionShape` or `ChatShape`."""

    id: str
    model: str
    created: int
    tokenizer: Tokenizer
    with_logprobs: bool
    whole_object: str = ""
    chunk_object: str = ""

    def whole(self, choices: Sequence[tuple[int, Delta]], usage: dict[str, Any]) -> bytes:
        body = self._head(self.whole_object)
        body["choices"] = [self._choice(index, delta, is_chunk=False) for index, delta in choices]
        return msgspec.json.encode({**body, "usage": usage})

    def chunk(self, index: int, delta: Delta, *, with_usage: bool) -> bytes:
        """One event of a stream; where usage comes at its end, every event before has none."""
        body = {**self._head(self.chunk_object), "choices": [self._choice(index, delta, is_chunk=True)]}
        return event({**body, "usage": None} if with_usage else body)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return event({**self._head(self.chunk_object), "choices": [], "usage": usage})

    def opening(self, index: int, *, with_usage: bool) -> bytes:
        """What a stream says of a choice before its first text."""
        return b""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _text_of(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False)


class CompletionShape(Shape):
    """Of `/v1/completions`."""

    def _choice(self, index: int, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        logprobs = self._logprobs(delta.tokens) if self.with_logprobs else None
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {
            "tokens": [self._text_of(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._text_of(token): logprob for token, logprob in (*each.top, (each.id, each.logprob))}
                for each in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }


class ChatShape(Shape):
    """Of `/v1/chat/completions`."""

    def opening(self, index: int, *, with_usage: bool) -> bytes:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        body = {
            **self._head(self.chunk_object),
            "choices": [{**choice, "logprobs": None, "finish_reason": None}],
        }
        return event({**body, "usage": None} if with_usage else body)

    def _choice(self, index: int, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        logprobs = {"content": [self._logprob(token) for token in delta.tokens], "refusal": None}
        said: dict[str, Any] = {"content": delta.text}
        if not delta.text and delta.tool_calls:
            said = {"content": None}
        elif not delta.text and delta.finish_reason is not None and is_chunk:
            said = {}
        if delta.tool_calls:
            calls = enumerate(delta.tool_calls)
            said["tool_calls"] = [self._tool_call(call, index, number, is_chunk) for number, call in calls]
        if not is_chunk:
            said = {"role": "assistant", **said, "refusal": None}
        return {
            "index": index,
            "delta" if is_chunk else "message": said,
            "logprobs": logprobs if self.with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _tool_call(self, call: ToolCall, choice: int, number: int, is_chunk: bool) -> dict[str, Any]:
        return {
            **({"index": number} if is_chunk else {}),
            "id": f"call_{self.id.removeprefix(CHAT_PREFIX)}_{choice}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _logprob(self, token: SampledToken) -> dict[str, Any]:
        return {
            **self._token(token.id, token.logprob),
            "top_logprobs": [self._token(*likely) for likely in token.top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(token)
        spelled = token_bytes(text, piece=self.tokenizer.piece(token))
        return {"token": text, "logprob": logprob, "bytes": spelled}


def completion_shape(
    number: str, *, model: str, created: int, tokenizer: Tokenizer, with_logprobs: bool
) -> Shape:
    return CompletionShape(
        f"cmpl-{number}", model, created, tokenizer, with_logprobs, "text_completion", "text_completion"
    )


def chat_shape(number: str, *, model: str, created: int, tokenizer: Tokenizer, with_logprobs: bool) -> Shape:
    return ChatShape(
        f"{CHAT_PREFIX}{number}",
        model,
        created,
        tokenizer,
        with_logprobs,
        "chat.completion",
        "chat.completion.chunk",
    )


def usage(num_prompt: int, num_completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def model_object(limits: Limits, *, created: int) -> dict[str, Any]:
    """The one model, as `/v1/models` lists it."""
    return {
        "id": limits.model,
        "object": "model",
        "created": created,
        "owned_by": "kintsugi",
        "max_model_len": limits.max_length,
    }


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event: `data: {…}` and an empty line."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
