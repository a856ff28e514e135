"""One HTTP request in flight: its order, the outcomes that have arrived, and the choices built from them."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import xxhash

from kintsugi.errors import KintsugiError, RemoteError, fault_of
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.openai_api.api_errors import from_fault
from kintsugi.openai_api.requests import GenerationOrder
from kintsugi.openai_api.responses import ApiChoice, Delta, usage
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.serving.control_thread import Outcome

Deltas = list[tuple[int, Delta]]
"""New deltas, by the index of their choice."""


def generates(order: GenerationOrder, *, name: str, timeout_s: float) -> Iterator[Generate]:
    """One `Generate` per prompt. Random numbers are keyed by the ticket: with a seed, the same prompt always gets the
    same numbers; without, the seed is fresh, and so are the numbers."""
    for number, (prompt, sampling) in enumerate(zip(order.prompts, order.samplings, strict=True)):
        content = array("i", prompt).tobytes()
        ticket = f"seeded:{xxhash.xxh3_128_hexdigest(content)}" if order.seeded else f"{name}:{number}"
        yield Generate(ticket, 0, content, sampling, version=0, timeout_s=timeout_s, stream=order.stream)


class InFlightRequest:
    """Consumes the outcomes of listeners and yields deltas by choice. Waits for the next outcome; ends with the last
    one, with an `ApiError`, or when every choice has met a stop string."""

    def __init__(self, order: GenerationOrder, tokenizer: Tokenizer) -> None:
        self._order = order
        self._first = [0]
        """Index of each prompt's first choice."""
        self._choices: list[ApiChoice] = []
        for sampling in order.samplings:
            for _ in range(sampling.num_samples):
                choice = ApiChoice(
                    tokenizer,
                    stops=sampling.stop,
                    with_logprobs=order.with_logprobs,
                    with_tools=order.with_tools,
                )
                self._choices.append(choice)
            self._first.append(len(self._choices))
        self._outcomes: deque[tuple[int, Outcome]] = deque()
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
        """Whether this prompt has its final outcome."""
        return self._ended[prompt]

    def echo_of(self, choice: int) -> str:
        """Text that precedes a choice's own: the prompt, if it is echoed."""
        if not self._order.echo:
            return ""
        prompt = next(number for number, first in enumerate(self._first[1:]) if choice < first)
        return self._order.echo[prompt]

    def callback_for(self, prompt: int) -> Callable[[Outcome], None]:
        """Callback that receives the outcomes of a prompt."""

        def on_outcome(outcome: Outcome) -> None:
            if not isinstance(outcome, tuple):
                self._ended[prompt] = True
            self._outcomes.append((prompt, outcome))
            if self._woken is not None and not self._woken.done():
                self._woken.set_result(None)

        return on_outcome

    async def __aiter__(self) -> AsyncIterator[Deltas]:
        while not self._is_over():
            if not self._outcomes:
                self._woken = asyncio.get_running_loop().create_future()
                await self._woken
            news: dict[int, list[Delta]] = {}
            # Outcomes before a failure are yielded before it is raised.
            while self._outcomes and not (news and isinstance(self._outcomes[0][1], KintsugiError)):
                for index, delta in self._taken(*self._outcomes.popleft()):
                    news.setdefault(index, []).append(delta)
            if news:
                yield [(index, joined(deltas)) for index, deltas in news.items()]

    def _is_over(self) -> bool:
        """Whether all choices have ended; a stop string of the client ends a choice before the servers do."""
        if self._outcomes:
            return False
        return all(self._ended) or all(choice.finish_reason is not None for choice in self._choices)

    def _taken(self, prompt: int, outcome: Outcome) -> Deltas:
        if isinstance(outcome, KintsugiError):
            cause = outcome.cause if isinstance(outcome, RemoteError) else None
            raise from_fault(cause or fault_of(outcome, process="gateway", time=0.0))
        parts = outcome.completions if isinstance(outcome, Generated) else outcome
        first = self._first[prompt]
        return [(first + part.sample, self._choices[first + part.sample].take(part)) for part in parts]


def joined(parts: Sequence[Delta], *, before: str = "") -> Delta:
    """Merge several deltas of one choice, with the text that precedes them."""
    text = before + "".join(part.text for part in parts)
    tokens = tuple(token for part in parts for token in part.tokens)
    reasons = [part.finish_reason for part in parts if part.finish_reason is not None]
    calls = tuple(call for part in parts for call in part.tool_calls)
    return Delta(text, tokens, reasons[0] if reasons else None, calls)
