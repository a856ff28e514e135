"""What an agent program's requests come to in tokens, each continuing to the token what was sampled before it. Pure.

    request ─► Asking (makes its tokens) ─► the policy samples ─► Reply, kept in the Capture ─► turns of an episode

A program sends its conversation as text, with every request all of it. Encoding that text anew may give other tokens
than the policy sampled, on which it must not be trained. So a request that repeats an earlier reply begins with the
tokens of that reply, and only what stands after it is encoded. Which tokens of a prompt were sampled is then a matter
of comparing tokens: those that it has in common with an earlier reply, from the first one on.

Requests that continue the same reply differently, or begin anew, are branches. An episode is one sample, so one branch
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
from kintsugi.rollout.environment import Turn
from kintsugi.rollout.episode import int32
from kintsugi.rollout.turns import added_tokens
from kintsugi.types import Completion, Finish

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation: what was asked, or that with its reply at the end."""

    messages: tuple[Message, ...]
    variables: Mapping[str, Any]
    """What the template looks at beside it: `tools`."""

    def begins(self, other: Chat) -> bool:
        """Whether the other one repeats it, and possibly goes on."""
        theirs = other.messages[: len(self.messages)]
        return (
            self.variables == other.variables
            and len(theirs) == len(self.messages)
            and all(map(_are_alike, self.messages, theirs))
        )


@dataclass(frozen=True)
class Text:
    """A prompt that is plain text, and what was written after it."""

    prompt: str
    told: str = ""
    """The reply as the program got it: up to a stop text."""
    written: str = ""
    """All of it."""


@dataclass(frozen=True, eq=False)
class Reply:
    """One request that was answered."""

    prompt: tuple[int, ...]
    completion: Completion
    said: Chat | Text | None
    """The request with its reply, by which a later one is recognised; None where the prompt came as tokens."""
    before: Reply | None
    """The reply that the prompt continues."""
    num_shared: int
    """How many tokens of the prompt, from the first on, are those of `before`: its prompt and at least one sampled."""

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        return tuple(array("i", self.completion.tokens))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.sampled

    @cached_property
    def num_sampled(self) -> int:
        """Of the whole branch up to here."""
        shared = 0
        if self.before is not None:
            unshared = len(self.before.tokens) - self.num_shared
            shared = self.before.num_sampled - unshared
        return shared + len(self.sampled)

    def turns(self) -> tuple[Turn, ...]:
        """The branch that ends here: what was fed and what was sampled, one after the other."""
        turns: list[Turn] = []
        reply: Reply | None = self
        end = len(self.tokens)
        while reply is not None:
            completion = _cut(reply.completion, end - len(reply.prompt))
            turns.append(Turn(int32(reply.prompt[reply.num_shared :]), completion))
            end, reply = reply.num_shared, reply.before
        return tuple(reversed(turns))


class Capture:
    """All replies of one episode.

    Nothing here depends on which of several requests at once comes first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.replies: list[Reply] = []
        self._numbered: set[tuple[bytes, int]] = set()

    def keep(self, said: Chat | Text | None, prompt: Sequence[int], completion: Completion) -> Reply:
        """`said` is the request with its reply."""
        prompt = tuple(prompt)
        before, num_shared = self._origin(prompt)
        reply = Reply(prompt, completion, said, before, num_shared)
        self.replies.append(reply)
        return reply

    def forget(self, reply: Reply) -> None:
        """The program did not get it, so nothing that it did came of it."""
        self.replies.remove(reply)

    def longest(self) -> Reply | None:
        """The end of the branch with the most sampled tokens; None where nothing was sampled."""
        found = max(self.replies, key=_rank, default=None)
        return found if found is not None and found.num_sampled else None

    @property
    def num_branches(self) -> int:
        """Replies that no other continues whole."""
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
        """The number of a request, which keys its noise: made of what is asked, and of how often that was asked before.
        A request that comes to nothing leaves its number to the one that asks again."""
        asked = msgspec.msgpack.encode((int32(prompt), max_new_tokens, stop))
        repetition = 0
        while (asked, repetition) in self._numbered:
            repetition += 1
        self._numbered.add((asked, repetition))
        try:
            yield xxhash.xxh3_64_intdigest(asked, seed=repetition) >> 1
        except BaseException:
            self._numbered.discard((asked, repetition))
            raise

    def _origin(self, prompt: tuple[int, ...]) -> tuple[Reply | None, int]:
        """The reply of which the prompt has the most, and how much."""
        best: Reply | None = None
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


class Asking:
    """One request's way to its tokens; an encoder for `serving.openai`."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._tokenizer = capture, capture.tokenizer
        self._asked: Chat | Text | None = None

    def encode_conversation(
        self, messages: Sequence[Message], *, variables: Mapping[str, Any]
    ) -> Sequence[int]:
        """The tokens of the longest reply that it repeats and of what follows; else the whole of it, encoded."""
        asked = self._asked = Chat(tuple(messages), self._looked_at(variables))
        repeated = [
            (len(reply.said.messages), reply.tokens, reply)
            for reply in self._capture.replies
            if isinstance(reply.said, Chat) and reply.said.begins(asked)
        ]
        for count, tokens, reply in sorted(repeated, key=lambda each: each[:2], reverse=True):
            added = self._added(asked, reply, place=count - 1)
            if added is not None:
                return (*tokens, *added)
        return self._tokenizer.encode_conversation(messages, variables=variables)

    def encode_prompt(self, text: str) -> Sequence[int]:
        """The same for plain text. A reply of no text is not recognised: every prompt would repeat it."""
        self._asked = Text(text)
        best: tuple[int, tuple[int, ...], str] | None = None
        for reply in self._capture.replies:
            if isinstance(reply.said, Text) and reply.said.told:
                found = self._continued(text, reply, reply.said)
                if found is not None and (best is None or found > best):
                    best = found
        if best is None:
            return self._tokenizer.encode_prompt(text)
        return (*best[1], *self._tokenizer.encode(best[2]))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def answered(self, told: str, completion: Completion, *, message: Message) -> Chat | Text | None:
        """What was asked together with what was answered, as a later request would repeat it."""
        if isinstance(self._asked, Chat):
            return Chat((*self._asked.messages, message), self._asked.variables)
        if self._asked is None:
            return None
        return Text(self._asked.prompt, told, self._tokenizer.decode(_without_end(completion)))

    def _looked_at(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Hardly a template knows `tool_choice`, which programs change from one request to the next."""
        template = self._tokenizer.chat_template or ""
        return {name: value for name, value in variables.items() if name in template}

    def _added(self, asked: Chat, reply: Reply, *, place: int) -> list[int] | None:
        """What follows the reply, which the request has at `place`; None where the template can not say."""
        ended_by = reply.sampled[-1] if reply.completion.finish is Finish.EOS else None
        try:
            return added_tokens(
                asked.messages, self._tokenizer, place=place, ended_by=ended_by, variables=asked.variables
            )
        except ModelError:
            return None

    def _continued(self, text: str, reply: Reply, said: Text) -> tuple[int, tuple[int, ...], str] | None:
        """How many characters of the text a reply covers, its tokens, and the text after them.

        Where the program goes on from before the stop text, sampled tokens are kept as far as they are in its text.
        """
        whole, told = said.prompt + said.written, said.prompt + said.told
        if text.startswith(whole):
            return len(whole), reply.tokens, text[len(whole) :]
        if not text.startswith(told):
            return None
        sampled = reply.sampled
        for count in range(len(sampled) - 1, 0, -1):
            covered = said.prompt + self._tokenizer.decode(sampled[:count])
            if text.startswith(covered):
                return len(covered), reply.prompt + sampled[:count], text[len(covered) :]
        return None


def _rank(reply: Reply) -> tuple[int, tuple[int, ...], bytes]:
    """By length, then by content: an order in which nobody came."""
    return reply.num_sampled, reply.tokens, reply.completion.versions


def _without_end(completion: Completion) -> Sequence[int]:
    sampled = array("i", completion.tokens)
    return sampled[:-1] if completion.finish is Finish.EOS else sampled


def _cut(completion: Completion, count: int) -> Completion:
    """Its first tokens only; cut, it has no end of its own."""
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
    """Whether a program that repeats the first message may have written the second: fields without a value do not
    count, nor, in what the model said, space around the text and the ids of calls."""
    if one["role"] == other["role"] == "assistant":
        return _gist(one) == _gist(other)
    return _given(one) == _given(other)


def _given(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _gist(message: Message) -> tuple[str, list[tuple[Any, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"].strip(), [(each["name"], each.get("arguments")) for each in functions]
