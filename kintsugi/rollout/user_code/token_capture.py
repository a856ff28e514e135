"""Tokens of an agent program's requests: each request reuses exactly the tokens that were sampled before. Pure.

    request ─► CapturedRequest (its tokens) ─► the policy samples ─► CapturedReply, in TokenCapture ─► episode's turns

A program sends its whole conversation as text with every request. Re-encoding that text may give other tokens than the
policy sampled, which must not be trained. A request that repeats an earlier reply therefore begins with the tokens of
that reply, and only the text after it is encoded. The sampled tokens of a prompt are found by comparing tokens: they
are the prefix that it shares with an earlier reply.

Requests that continue the same reply differently, or start over, are branches. An episode is one sample, so one branch
is trained: the one with the most sampled tokens. The others are counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from kintsugi.errors import ModelError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.environments.protocol import Turn
from kintsugi.rollout.trajectory import int32
from kintsugi.rollout.user_code.observation_tokens import added_tokens
from kintsugi.types import Completion, FinishReason

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatMessages:
    """A conversation: a request, or a request followed by its reply."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any]
    """Other inputs of the chat template: `tools`."""

    def begins(self, other: ChatMessages) -> bool:
        """Whether the other conversation begins with this one."""
        theirs = other.messages[: len(self.messages)]
        return (
            self.variables == other.variables
            and len(theirs) == len(self.messages)
            and all(map(_are_alike, self.messages, theirs))
        )


@dataclass(frozen=True)
class PromptText:
    """A prompt of plain text, and its reply."""

    prompt: str
    returned: str = ""
    """Reply as the program received it: without the stop text."""
    written: str = ""
    """Complete reply."""


@dataclass(frozen=True, eq=False)
class CapturedReply:
    """One answered request."""

    prompt: tuple[int, ...]
    completion: Completion
    conversation: ChatMessages | PromptText | None
    """Request and reply, to recognise later requests that repeat them; None if the prompt was given as tokens."""
    before: CapturedReply | None
    """Reply that the prompt continues."""
    num_shared: int
    """Length of the prefix that the prompt shares with `before`: its prompt and at least one sampled token."""

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        return tuple(array("i", self.completion.tokens))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.sampled

    @cached_property
    def num_sampled(self) -> int:
        """Number of sampled tokens of the whole branch up to this reply."""
        shared = 0
        if self.before is not None:
            unshared = len(self.before.tokens) - self.num_shared
            shared = self.before.num_sampled - unshared
        return shared + len(self.sampled)

    def turns(self) -> tuple[Turn, ...]:
        """Turns of the branch that ends with this reply."""
        turns: list[Turn] = []
        reply: CapturedReply | None = self
        end = len(self.tokens)
        while reply is not None:
            completion = _cut(reply.completion, end - len(reply.prompt))
            turns.append(Turn(int32(reply.prompt[reply.num_shared :]), completion))
            end, reply = reply.num_shared, reply.before
        return tuple(reversed(turns))


class TokenCapture:
    """All replies of one episode. Results do not depend on the order of concurrent requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.replies: list[CapturedReply] = []
        self._numbered: set[tuple[bytes, int]] = set()

    def keep(
        self, conversation: ChatMessages | PromptText | None, prompt: Sequence[int], completion: Completion
    ) -> CapturedReply:
        """Store a reply; `conversation` is the request with its reply."""
        prompt = tuple(prompt)
        before, num_shared = self._origin(prompt)
        reply = CapturedReply(prompt, completion, conversation, before, num_shared)
        self.replies.append(reply)
        return reply

    def forget(self, reply: CapturedReply) -> None:
        """Drop a reply that the program did not receive."""
        self.replies.remove(reply)

    def longest(self) -> CapturedReply | None:
        """Last reply of the branch with the most sampled tokens; None if nothing was sampled."""
        found = max(self.replies, key=_rank, default=None)
        return found if found is not None and found.num_sampled else None

    @property
    def num_branches(self) -> int:
        """Number of replies that no other reply continues completely."""
        continued = {
            id(reply.before)
            for reply in self.replies
            if reply.before is not None and reply.num_shared == len(reply.before.tokens)
        }
        return sum(id(reply) not in continued for reply in self.replies)

    @property
    def num_sampled(self) -> int:
        return sum(len(reply.sampled) for reply in self.replies)

    @contextmanager
    def numbered(self, prompt: Sequence[int], *, max_new_tokens: int, stop: Sequence[str]) -> Iterator[int]:
        """Reserve the number of a request, which keys its sampling noise: derived from its content and from how often
        the same content was requested before. A failed request frees its number for the retry."""
        content = msgspec.msgpack.encode((int32(prompt), max_new_tokens, stop))
        repetition = 0
        while (content, repetition) in self._numbered:
            repetition += 1
        self._numbered.add((content, repetition))
        try:
            yield xxhash.xxh3_64_intdigest(content, seed=repetition) >> 1
        except BaseException:
            self._numbered.discard((content, repetition))
            raise

    def _origin(self, prompt: tuple[int, ...]) -> tuple[CapturedReply | None, int]:
        """Find the reply with which the prompt shares the longest prefix, and the length of that prefix."""
        best: CapturedReply | None = None
        most = 0
        for reply in self.replies:
            if prompt[: len(reply.prompt)] != reply.prompt:
                continue
            theirs = prompt[len(reply.prompt) :]
            same = _num_alike(theirs, reply.sampled)
            shared = len(reply.prompt) + same
            if same and (shared, reply.completion.versions) > (
                most,
                b"" if best is None else best.completion.versions,
            ):
                best, most = reply, shared
        return best, most


class CapturedRequest:
    """Encoder of one request, for `openai_api.requests`."""

    def __init__(self, capture: TokenCapture) -> None:
        self._capture = capture
        self._tokenizer = capture.tokenizer
        self._request: ChatMessages | PromptText | None = None

    def encode_conversation(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any]
    ) -> Sequence[int]:
        """Return the tokens of the longest reply that the conversation repeats, and of the messages after it; if it
        repeats none, encode all of it."""
        request = self._request = ChatMessages(tuple(messages), self._looked_at(variables))
        repeated = [
            (len(reply.conversation.messages), reply.tokens, reply)
            for reply in self._capture.replies
            if isinstance(reply.conversation, ChatMessages) and reply.conversation.begins(request)
        ]
        for count, tokens, reply in sorted(repeated, key=lambda each: each[:2], reverse=True):
            added = self._added(request, reply, place=count - 1)
            if added is not None:
                return (*tokens, *added)
        return self._tokenizer.encode_conversation(messages, variables=variables)

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Encode a plain text in the same way. An empty reply is not recognised: every prompt would repeat it."""
        self._request = PromptText(text)
        best: tuple[int, tuple[int, ...], str] | None = None
        for reply in self._capture.replies:
            if isinstance(reply.conversation, PromptText) and reply.conversation.returned:
                found = self._continued(text, reply, reply.conversation)
                if found is not None and (best is None or found > best):
                    best = found
        if best is None:
            return self._tokenizer.encode_prompt(text)
        return (*best[1], *self._tokenizer.encode(best[2]))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def answered(
        self, returned: str, completion: Completion, *, message: Message
    ) -> ChatMessages | PromptText | None:
        """Return the request with its reply, as a later request would repeat it."""
        if isinstance(self._request, ChatMessages):
            return ChatMessages((*self._request.messages, message), self._request.variables)
        if self._request is None:
            return None
        return PromptText(self._request.prompt, returned, self._tokenizer.decode(_without_end(completion)))

    def _looked_at(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Variables that the template uses. Few use `tool_choice`, which programs change between requests."""
        template = self._tokenizer.chat_template or ""
        return {name: value for name, value in variables.items() if name in template}

    def _added(self, request: ChatMessages, reply: CapturedReply, *, place: int) -> list[int] | None:
        """Tokens after the reply, which is at `place` in the request; None if the template cannot render them."""
        ended_by = reply.sampled[-1] if reply.completion.finish is FinishReason.EOS else None
        try:
            return added_tokens(
                request.messages,
                self._tokenizer,
                place=place,
                ended_by=ended_by,
                variables=request.variables,
            )
        except ModelError:
            return None

    def _continued(
        self, text: str, reply: CapturedReply, said: PromptText
    ) -> tuple[int, tuple[int, ...], str] | None:
        """Number of characters of the text that a reply covers, its tokens, and the text after them.

        If the program continues from before the stop text, only the sampled tokens within its text are reused.
        """
        whole, returned = said.prompt + said.written, said.prompt + said.returned
        if text.startswith(whole):
            return len(whole), reply.tokens, text[len(whole) :]
        if not text.startswith(returned):
            return None
        sampled = reply.sampled
        for count in range(len(sampled) - 1, 0, -1):
            covered = said.prompt + self._tokenizer.decode(sampled[:count])
            if text.startswith(covered):
                return len(covered), reply.prompt + sampled[:count], text[len(covered) :]
        return None


def _rank(reply: CapturedReply) -> tuple[int, tuple[int, ...], bytes]:
    """Order by length, then by content: independent of the order of arrival."""
    return reply.num_sampled, reply.tokens, reply.completion.versions


def _without_end(completion: Completion) -> Sequence[int]:
    sampled = array("i", completion.tokens)
    return sampled[:-1] if completion.finish is FinishReason.EOS else sampled


def _cut(completion: Completion, count: int) -> Completion:
    """Cut a completion to its first tokens; a shortened one has no finish reason."""
    size = 4 * count
    if size == len(completion.tokens):
        return completion
    return msgspec.structs.replace(
        completion,
        tokens=completion.tokens[:size],
        logprobs=completion.logprobs[:size],
        versions=completion.versions[:size],
        finish=None,
    )


def _num_alike(these: Sequence[int], those: Sequence[int]) -> int:
    """`_num_alike([1, 2, 3], [1, 2, 4]) == 2`."""
    pairs = enumerate(zip(these, those, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(these), len(those)))


def _are_alike(one: Message, other: Message) -> bool:
    """Whether the second message repeats the first: fields without a value are ignored and, in messages of the model,
    space around the text and the ids of calls."""
    if one["role"] == other["role"] == "assistant":
        return _gist(one) == _gist(other)
    return _given(one) == _given(other)


def _given(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _gist(message: Message) -> tuple[str, list[tuple[Any, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"].strip(), [(each["name"], each.get("arguments")) for each in functions]
