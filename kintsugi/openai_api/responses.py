"""Responses of the API: choices that grow with their tokens, in the shapes of completions and of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kintsugi.model.tokenizer import Tokenizer
from kintsugi.openai_api.detokenize import Detokenizer, token_bytes
from kintsugi.openai_api.requests import ApiLimits
from kintsugi.openai_api.tools import ToolCall, ToolReader
from kintsugi.types import Completion, FinishReason, Fragment

CHAT_PREFIX = "chatcmpl-"
FINISH_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class SampledToken:
    """One token with its log-probability, the most likely alternatives, and the offset of its text."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    start: int


@dataclass(frozen=True)
class Delta:
    """New part of a choice."""

    text: str
    tokens: tuple[SampledToken, ...] = ()
    """Tokens that have begun to appear in the text; only if log-probabilities were requested."""
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """All tool calls, with the last delta."""


class ApiChoice:
    """One completion as it is sent to the client."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str],
        with_logprobs: bool,
        with_tools: bool = False,
    ) -> None:
        """With `with_tools`, tool calls are removed from the text."""
        self.num_tokens = 0
        """Number of sampled tokens, including an end token."""
        self.finish_reason: str | None = None
        self._writer = Detokenizer(tokenizer.decode, stops=stops)
        self._with_logprobs = with_logprobs
        self._unsent: list[SampledToken] = []
        self._tools = ToolReader() if with_tools else None

    def take(self, fragment: Fragment | Completion) -> Delta:
        """Add tokens and return what is new; known tokens, as those of a `Completion` after its fragments, are
        skipped."""
        if self.finish_reason is not None:
            return Delta("")
        ids = np.frombuffer(fragment.tokens, dtype="<i4")
        offset = fragment.offset if isinstance(fragment, Fragment) else 0
        known = self.num_tokens - offset
        assert known >= 0, f"tokens {self.num_tokens} to {offset - 1} are missing"
        self.num_tokens = max(self.num_tokens, offset + len(ids))
        # End and stop tokens are not part of the text.
        last = len(ids) - (fragment.finish is FinishReason.EOS)
        if last <= known:
            text = ""
        elif self._with_logprobs:
            text = self._take_each(fragment, ids, known, last)
        else:
            text = self._writer.push(ids[known:last].tolist())
        if fragment.finish is not None or self._writer.stopped:
            text += self._writer.end()
            end = FinishReason.STOP if self._writer.stopped or fragment.finish is None else fragment.finish
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
        return Delta(text, self._tokens_with_text(), self.finish_reason, calls)

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
            self._unsent.append(SampledToken(token, float(logprobs[place]), top, self._writer.decoded))
            texts.append(self._writer.push([token]))
        return "".join(texts)

    def _tokens_with_text(self) -> tuple[SampledToken, ...]:
        """Tokens are returned with their text; those that belong only to a stop string never are."""
        is_over = self.finish_reason is not None and not self._writer.stopped
        ready = [token for token in self._unsent if is_over or token.start < self._writer.length]
        self._unsent = self._unsent[len(ready) :]
        return tuple(ready)


@dataclass(frozen=True)
class ResponseShape:
    """Format of a response: `CompletionShape` or `ChatShape`."""

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
        """One event of a stream; if usage comes at the end, every earlier event has a null usage."""
        body = {**self._head(self.chunk_object), "choices": [self._choice(index, delta, is_chunk=True)]}
        return event({**body, "usage": None} if with_usage else body)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return event({**self._head(self.chunk_object), "choices": [], "usage": usage})

    def opening(self, index: int, *, with_usage: bool) -> bytes:
        """First event of a choice, before its text."""
        return b""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _text_of(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False)


class CompletionShape(ResponseShape):
    """Format of `/v1/completions`."""

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


class ChatShape(ResponseShape):
    """Format of `/v1/chat/completions`."""

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
) -> ResponseShape:
    return CompletionShape(
        f"cmpl-{number}", model, created, tokenizer, with_logprobs, "text_completion", "text_completion"
    )


def chat_shape(
    number: str, *, model: str, created: int, tokenizer: Tokenizer, with_logprobs: bool
) -> ResponseShape:
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


def model_object(limits: ApiLimits, *, created: int) -> dict[str, Any]:
    """The served model, as `/v1/models` lists it."""
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
