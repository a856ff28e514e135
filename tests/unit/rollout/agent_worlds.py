"""A tokenizer with a chat template as real models have it, and a policy that says what a test wants."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tokenizers
from openai import AsyncOpenAI
from tokenizers import decoders, models, pre_tokenizers, trainers

from kintsugi.model.tokenizer import Tokenizer
from kintsugi.openai_api.requests import ApiLimits
from kintsugi.rollout.environments.protocol import EpisodeFailed
from kintsugi.rollout.trajectory import int32
from kintsugi.rollout.user_code.openai_endpoint import AgentSession, EndpointLimits, OpenAIEndpoint
from kintsugi.rollout.user_code.token_capture import TokenCapture
from kintsugi.types import Completion, FinishReason

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Qwen's models have it."""
WITHOUT_THOUGHTS = CHATML.replace(
    "{{- '\\n' + message.content }}", "{{- '\\n' + message.content.split('</think>')[-1].lstrip() }}"
)
"""As those have it that think: earlier thoughts are not shown again."""

HEADERS = """\
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""As Llama's models have it, without trimming."""
MARKS = {
    CHATML: ("<|im_end|>", "<|im_start|>"),
    HEADERS: ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
}
"""A template's special tokens; the first ends a turn."""

_LETTERS = "the model says that twelve times thirty four is four hundred and eight, and the answer is right. "


@cache
def tokenizer(template: str = CHATML) -> Tokenizer:
    """Byte-level pairs, so that a text can be cut into tokens in many ways."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = MARKS.get(template, MARKS[CHATML])
    special = ["<pad>", *marks]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_LETTERS * 4, '0123456789+-*/=(){}":,'], trainer)
    names = {"pad_token": "<pad>", "eos_token": marks[0]}
    return Tokenizer(backend, special_tokens=names, chat_template=template)


def completed(
    ids: Sequence[int], *, finish: FinishReason = FinishReason.EOS, version: int = 0, end: int | None = None
) -> Completion:
    """Sampled tokens, each with a log-probability that tells it from its neighbours."""
    sampled = [*ids, end] if end is not None else list(ids)
    logprobs = array("f", [-0.01 * (place + 1) for place in range(len(sampled))])
    return Completion(0, int32(sampled), logprobs.tobytes(), int32([version] * len(sampled)), finish)


Says = Callable[[str], str]


@dataclass
class ScriptedPolicy:
    """Answers a prompt by a rule on its text, ends with the end token, and remembers what it was asked."""

    says: Says = lambda prompt: "right"
    tokens: Tokenizer = field(default_factory=tokenizer)
    asked: list[tuple[list[int], int, int, tuple[str, ...]]] = field(default_factory=list)
    """Prompt, turn, most new tokens, stop texts."""
    fails: bool = False
    holds: asyncio.Event | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def working(self) -> None:
        pass

    async def until_asked(self, count: int) -> None:
        while len(self.asked) < count:
            self.moved.clear()
            await self.moved.wait()

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        turn: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Completion:
        self.asked.append((list(prompt), turn, max_new_tokens, tuple(stop)))
        self.moved.set()
        assert temperature is None, "the recipe decides on it"
        if self.fails:
            raise EpisodeFailed("no server is left")
        if self.holds is not None:
            await self.holds.wait()
        text = self.says(self.tokens.decode(prompt, skip_special=False))
        ends = [text.find(each) + len(each) for each in stop if each in text]
        if ends:
            ids, finish = self.tokens.encode(text[: min(ends)]), FinishReason.STOP
        else:
            ids, finish = [*self.tokens.encode(text), self.tokens.eos_token_id], FinishReason.EOS
        if len(ids) > max_new_tokens:
            ids, finish = ids[:max_new_tokens], FinishReason.LENGTH
        return completed(ids, finish=finish)


class Unhurried:
    """Counts what a session tells it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


@dataclass
class Opened:
    """One episode at an endpoint that really listens."""

    endpoint: OpenAIEndpoint
    session: AgentSession
    base_url: str
    clients: list[AsyncOpenAI] = field(default_factory=list)

    def client(self, **options: Any) -> AsyncOpenAI:
        settings = {"base_url": self.base_url, "api_key": self.session.api_key, "max_retries": 0}
        self.clients.append(AsyncOpenAI(**{**settings, **options}))
        return self.clients[-1]


@asynccontextmanager
async def opened(
    policy: ScriptedPolicy, *, max_length: int = 512, max_new_tokens: int = 128, max_requests: int = 8
) -> AsyncIterator[Opened]:
    tokens = policy.tokens
    limits = ApiLimits("tiny", vocab_size=tokens.vocab_size, max_length=max_length)
    bounds = EndpointLimits(limits, max_new_tokens=max_new_tokens, max_requests=max_requests)
    outcome = asyncio.get_running_loop().create_future()
    session = AgentSession(7, TokenCapture(tokens), policy, bounds, Unhurried(), outcome)
    endpoint = OpenAIEndpoint(tokens)
    await endpoint.start()
    world = Opened(endpoint, session, endpoint.open(session))
    try:
        yield world
    finally:
        for client in world.clients:
            await client.close()
        await endpoint.close()
