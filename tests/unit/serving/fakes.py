"""A generation that continues every prompt by a rule, and a gateway in front of it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp.test_utils import TestClient, TestServer

from kintsugi.errors import Fault, KintsugiError, RemoteError
from kintsugi.model.tokenizer import Tokenizer, character_tokenizer
from kintsugi.openai_api.requests import ApiLimits
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.serving.control_thread import Outcome, ServerSnapshot, TokenListener
from kintsugi.serving.gateway import Gateway, GatewayLimits
from kintsugi.serving.metrics import ServerMetrics
from kintsugi.types import Completion, FinishReason, Fragment

ALPHABET = 'abcdefghijklmnopqrstuvwxyz .:?{}"ABC<>|_\n/'
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}A:"
)
LIMITS = ApiLimits("tiny", vocab_size=len(ALPHABET) + 2, max_length=128)
READY = ServerSnapshot((ServerMetrics("server-0", "running", "healthy", 0),), 0, 0)


def tokenizer() -> Tokenizer:
    made = character_tokenizer(ALPHABET)
    made.chat_template = TEMPLATE
    return made


def continued(request: Generate, sample: int) -> tuple[list[int], FinishReason]:
    """The prompt again from its first token on, shifted by the sample's number, for as long as is asked."""
    prompt = list(array("i", request.prompt))
    wanted = [
        2 + (prompt[place % len(prompt)] - 2 + sample) % len(ALPHABET)
        for place in range(request.sampling.max_new_tokens)
    ]
    return wanted, FinishReason.LENGTH


def columns(ids: list[int], *, num_top: int) -> dict[str, bytes]:
    top = np.repeat(np.asarray(ids, "<i4")[:, None], num_top, axis=1)
    return {
        "tokens": np.asarray(ids, "<i4").tobytes(),
        "logprobs": np.full(len(ids), -0.5, "<f4").tobytes(),
        "versions": np.zeros(len(ids), "<i4").tobytes(),
        "top_tokens": top.tobytes(),
        "top_logprobs": np.full(top.shape, -0.5, "<f4").tobytes(),
    }


@dataclass
class FakeGeneration:
    """Answers at once, token by token; or holds everything back until `release`."""

    snapshot: ServerSnapshot = READY
    rule: Callable[[Generate, int], tuple[list[int], FinishReason]] = continued
    holds: bool = False
    error: KintsugiError | None = None
    error_after: int = 0
    """Tokens that come before the error."""
    submitted: list[Generate] = field(default_factory=list)
    listeners: list[TokenListener] = field(default_factory=list)
    cancelled: list[TokenListener] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    _moved: asyncio.Event | None = None

    def submit(self, request: Generate, on_outcome: Callable[[Outcome], None]) -> TokenListener:
        listener = TokenListener(on_outcome, lambda _listener, _outcome: None)
        self.submitted.append(request)
        self.listeners.append(listener)
        self._move()
        if not self.holds:
            self._answer(request, listener)
        return listener

    def cancel(self, listener: TokenListener) -> None:
        listener.left = True
        self.cancelled.append(listener)
        self._move()

    def record(self, error: BaseException) -> None:
        self.faults.append(error)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what submissions and cancellations bring about."""
        async with asyncio.timeout(10):
            while not condition():
                self._moved = asyncio.Event()
                await self._moved.wait()

    def _move(self) -> None:
        if self._moved is not None:
            self._moved.set()

    def release(self) -> None:
        for request, listener in zip(self.submitted, self.listeners, strict=True):
            self._answer(request, listener)

    def _answer(self, request: Generate, listener: TokenListener) -> None:
        for outcome in self._outcomes(request):
            asyncio.get_running_loop().call_soon(_on_outcome, listener, outcome)

    def _outcomes(self, request: Generate) -> list[Outcome]:
        num_top = request.sampling.top_logprobs
        answers = {sample: self.rule(request, sample) for sample in request.wanted}
        fragments: list[Outcome] = []
        if request.stream:
            for sample, (ids, finish) in answers.items():
                for place, token in enumerate(ids):
                    last = finish if place == len(ids) - 1 else None
                    fragments.append(
                        (Fragment(sample, place, **columns([token], num_top=num_top), finish=last),)
                    )
        if self.error is not None:
            return [*fragments[: self.error_after], self.error]
        completions = tuple(
            Completion(sample, **columns(ids, num_top=num_top), finish=finish)
            for sample, (ids, finish) in answers.items()
        )
        return [*fragments, Generated(request.ticket, 0, completions, "server-0")]


def _on_outcome(listener: TokenListener, outcome: Outcome) -> None:
    if not listener.left:
        listener.on_outcome(outcome)


def user_error(message: str) -> RemoteError:
    return RemoteError(Fault("f", "DataError", "server-0", message, 0.0))


def with_client(
    body: Callable[[TestClient[Any, Any]], Awaitable[None]],
    generation: FakeGeneration | None = None,
    **rules: Any,
) -> None:
    """Run a test against a gateway that really listens."""

    async def run() -> None:
        gateway = Gateway(generation or FakeGeneration(), tokenizer(), GatewayLimits(LIMITS, **rules))
        server = TestServer(gateway.application(), handler_cancellation=True)
        async with TestClient(server) as client:
            await body(client)

    asyncio.run(run())
