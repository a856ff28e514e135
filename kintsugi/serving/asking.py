"""One HTTP request while generation works on it: what was asked, what has come, what it makes of it."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import xxhash

from kintsugi.errors import KintsugiError, RemoteError, fault_of
from kintsugi.messages import Generate, Generated
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.serving.answers import Choice, Delta, usage
from kintsugi.serving.backstage import Outcome
from kintsugi.serving.openai import Order
from kintsugi.serving.refusals import of_fault

News = list[tuple[int, Delta]]
"""What is new, by the index of its choice."""


def generates(order: Order, *, name: str, timeout_s: float) -> Iterator[Generate]:
    """One per prompt. Noise is keyed by the ticket: with a seed, the same prompt gets the same noise whenever it comes;
    without, it is as good as new each time, because the seed is."""
    for number, (prompt, sampling) in enumerate(zip(order.prompts, order.samplings, strict=True)):
        content = array("i", prompt).tobytes()
        ticket = f"seeded:{xxhash.xxh3_128_hexdigest(content)}" if order.seeded else f"{name}:{number}"
        yield Generate(ticket, 0, content, sampling, version=0, timeout_s=timeout_s, stream=order.stream)


class Asked:
    """Consumes what listeners hear, gives it choice by choice; waits for the next outcome, and ends with the last one,
    with a `Refusal`, or when every choice has met a stop text."""

    def __init__(self, order: Order, tokenizer: Tokenizer) -> None:
        self._order = order
        self._first = [0]
        """Index of each prompt's first choice."""
        self._choices: list[Choice] = []
        for sampling in order.samplings:
            for _ in range(sampling.num_samples):
                choice = Choice(
                    tokenizer,
                    stops=sampling.stop,
                    with_logprobs=order.with_logprobs,
                    with_tools=order.with_tools,
                )
                self._choices.append(choice)
            self._first.append(len(self._choices))
        self._heard: deque[tuple[int, Outcome]] = deque()
        self._ended = [False] * len(order.prompts)
        self._woken: asyncio.Future[None] | None = None

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self._order.prompts))

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    def usage(self) -> dict[str, Any]:
        return usage(self.num_prompt_tokens, self.num_completion_tokens)

    def has_ended(self, prompt: int) -> bool:
        """Whether nothing is under way for this prompt any more."""
        return self._ended[prompt]

    def echo_of(self, choice: int) -> str:
        """What stands before a choice's text."""
        if not self._order.echo:
            return ""
        prompt = next(number for number, first in enumerate(self._first[1:]) if choice < first)
        return self._order.echo[prompt]

    def hear_of(self, prompt: int) -> Callable[[Outcome], None]:
        """To be called with what comes of a prompt."""

        def hear(outcome: Outcome) -> None:
            if not isinstance(outcome, tuple):
                self._ended[prompt] = True
            self._heard.append((prompt, outcome))
            if self._woken is not None and not self._woken.done():
                self._woken.set_result(None)

        return hear

    async def __aiter__(self) -> AsyncIterator[News]:
        while not self._is_over():
            if not self._heard:
                self._woken = asyncio.get_running_loop().create_future()
                await self._woken
            news: dict[int, list[Delta]] = {}
            # What came before a failure is given before it is raised.
            while self._heard and not (news and isinstance(self._heard[0][1], KintsugiError)):
                for index, delta in self._taken(*self._heard.popleft()):
                    news.setdefault(index, []).append(delta)
            if news:
                yield [(index, joined(deltas)) for index, deltas in news.items()]

    def _is_over(self) -> bool:
        """A completion that its client's stop text has ended is over, whatever the servers think."""
        if self._heard:
            return False
        return all(self._ended) or all(choice.finish_reason is not None for choice in self._choices)

    def _taken(self, prompt: int, outcome: Outcome) -> News:
        if isinstance(outcome, KintsugiError):
            cause = outcome.cause if isinstance(outcome, RemoteError) else None
            raise of_fault(cause or fault_of(outcome, process="gateway", time=0.0))
        parts = outcome.completions if isinstance(outcome, Generated) else outcome
        first = self._first[prompt]
        return [(first + part.sample, self._choices[first + part.sample].take(part)) for part in parts]


def joined(parts: Sequence[Delta], *, before: str = "") -> Delta:
    """Several deltas of one choice as one, after the text that stands before them."""
    text = before + "".join(part.text for part in parts)
    tokens = tuple(token for part in parts for token in part.tokens)
    reasons = [part.finish_reason for part in parts if part.finish_reason is not None]
    calls = tuple(call for part in parts for call in part.tool_calls)
    return Delta(text, tokens, reasons[0] if reasons else None, calls)
