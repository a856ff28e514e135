"""The OpenAI API on loopback, for agent programs that use the model in training.

Every episode has its own base URL and key: `http://127.0.0.1:PORT/episodes/7/v1`. Requests are sampled by the episode's
policy and captured token by token (`token_capture.py`). The recipe decides how to sample: model name, temperature, seed
and every other parameter that would change the distribution are accepted and ignored. A length limit of the request
applies if it is below the recipe's. Each request gets one reply.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from aiohttp import web

from kintsugi.errors import KintsugiError
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.openai_api.api_errors import ApiError, broken, unavailable
from kintsugi.openai_api.http import (
    JSON,
    MAX_BODY_BYTES,
    as_json,
    check_key,
    error_response,
    from_http_error,
    read_body,
    runner,
    write_last,
)
from kintsugi.openai_api.requests import (
    DEFAULT_COMPLETION_TOKENS,
    ApiLimits,
    ChatRequest,
    CompletionRequest,
    GenerationOrder,
    as_message,
    chat_order,
    completion_order,
    decode,
)
from kintsugi.openai_api.responses import (
    DONE,
    ApiChoice,
    Delta,
    ResponseShape,
    chat_shape,
    completion_shape,
    model_object,
    usage,
)
from kintsugi.rollout.environments.protocol import Policy
from kintsugi.rollout.user_code.token_capture import CapturedReply, CapturedRequest, TokenCapture
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.types import Completion

HOST = "127.0.0.1"
"""Loopback only: agent programs run on the host of their rollout worker."""
_BENDING = ("temperature", "top_p", "top_k", "min_p", "logit_bias", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_OURS: dict[str, Any] = dict.fromkeys((*_BENDING, *_PENALTIES))
"""Fields of a request that the recipe decides on."""

MAX_TURNS = "max_turns_reached"
CUT_OFF = frozenset({MAX_TURNS, "context_length_exceeded"})
"""Error codes that mark the end of an episode, not a mistake."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class EndpointLimits:
    """Limits of an episode's requests."""

    limits: ApiLimits
    max_new_tokens: int
    """Length limit of one reply."""
    max_requests: int


class EndpointTimeouts(Protocol):
    """Time limit of an episode's program between two requests."""

    def pause(self) -> None:
        """Stop the clock while the program waits for the model."""
        ...

    def resume(self) -> None:
        """Start the clock when no request is pending."""
        ...


@dataclass(eq=False)
class AgentSession:
    """One episode at the endpoint, from the start of its program to its end."""

    id: int
    capture: TokenCapture
    policy: Policy
    bounds: EndpointLimits
    timeouts: EndpointTimeouts
    outcome: asyncio.Future[Any]
    """Result of the program, or the error that ended the episode."""
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    last_refusal: ApiError | None = None
    """Last error sent to the program; only one is kept, because a program may repeat a request often."""
    num_refused: int = 0
    is_cut_off: bool = False
    """Whether a request was refused because the context or the number of requests is used up."""
    pending: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests that wait for the policy."""
    num_requests: int = 0
    """Requests that were sent to the policy, answered or not."""

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Register a request while it waits for the policy."""
        task = asyncio.current_task()
        assert task is not None, "a request is handled by a task"
        self.num_requests += 1
        self.pending.add(task)
        self.timeouts.pause()
        try:
            yield
        finally:
            self.pending.discard(task)
            if not self.pending:
                self.timeouts.resume()

    def refuse(self, api_error: ApiError) -> None:
        self.last_refusal = api_error
        self.num_refused += 1
        self.is_cut_off |= api_error.code in CUT_OFF

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(frozen=True)
class _Answer:
    """A reply to be sent to the program."""

    reply: CapturedReply
    delta: Delta
    order: GenerationOrder
    shape: ResponseShape

    @property
    def whole(self) -> bytes:
        return self.shape.whole([(0, self._echoed)], self._usage)

    @property
    def events(self) -> bytes:
        """Body of a streamed response, sent in one piece."""
        with_usage = self.order.include_usage
        spoken = replace(self._echoed, finish_reason=None, tool_calls=())
        ended = replace(self.delta, text="", tokens=())
        parts = [self.shape.opening(0, with_usage=with_usage)]
        if spoken.text or spoken.tokens:
            parts.append(self.shape.chunk(0, spoken, with_usage=with_usage))
        parts.append(self.shape.chunk(0, ended, with_usage=with_usage))
        if with_usage:
            parts.append(self.shape.usage_chunk(self._usage))
        return b"".join([*parts, DONE])

    @property
    def _echoed(self) -> Delta:
        return replace(self.delta, text="".join(self.order.echo) + self.delta.text)

    @property
    def _usage(self) -> dict[str, Any]:
        return usage(len(self.reply.prompt), len(self.reply.sampled))


class OpenAIEndpoint:
    """HTTP endpoint for the programs of all episodes of this process; runs in one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sessions: dict[str, AgentSession] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer_in_shape])
        app.add_routes(
            [
                web.post("/episodes/{episode}/v1/completions", self._completions),
                web.post("/episodes/{episode}/v1/chat/completions", self._chat),
                web.get("/episodes/{episode}/v1/models", self._models),
                web.get("/episodes/{episode}/v1/models/{model:.+}", self._model),
            ]
        )
        self._runner = runner(app, shutdown_timeout_s=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self._port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: AgentSession) -> str:
        """Register an episode; return its base URL."""
        assert str(session.id) not in self._sessions, f"episode {session.id} is being played"
        self._sessions[str(session.id)] = session
        return f"http://{HOST}:{self._port}/episodes/{session.id}/v1"

    def end(self, session: AgentSession) -> None:
        """Unregister an episode and cancel its pending requests; later requests of abandoned threads are refused.
        Ending it again does nothing."""
        self._sessions.pop(str(session.id), None)
        session.outcome.cancel()
        for task in list(session.pending):
            task.cancel()

    # What is common to all routes.

    @web.middleware
    async def _answer_in_shape(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Turn every error into one of the API; an unexpected one also ends the episode."""
        session = self._sessions.get(request.match_info.get("episode", ""))
        try:
            if session is None and "episode" in request.match_info:
                raise _over()
            if session is not None:
                check_key(request, session.api_key)
            return await handler(request)
        except ApiError as error:
            api_error = error
        except web.HTTPException as error:
            api_error = from_http_error(error, request)
        except web.RequestPayloadError as error:
            api_error = ApiError(f"We could not read the body of your request: {error}")
        except ConnectionResetError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        except Exception as error:  # noqa: BLE001 - raised where the episode is awaited
            assert session is not None, "without an episode nothing is done"
            session.fail(error)
            api_error = unavailable(str(error)) if isinstance(error, KintsugiError) else broken()
        if session is not None:
            session.refuse(api_error)
        return error_response(api_error)

    def _session(self, request: web.Request) -> AgentSession:
        return self._sessions[request.match_info["episode"]]

    # Sampling.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = decode(CompletionRequest, await read_body(request))
        encoder = CapturedRequest(session.capture)
        order = completion_order(
            _without_sampling(body, session.bounds.limits),
            encoder=encoder,
            limits=session.bounds.limits,
            new_seed=lambda: 0,
        )
        wanted = body.max_tokens or DEFAULT_COMPLETION_TOKENS
        return await self._answered(request, session, order, encoder, wanted=wanted, shape=completion_shape)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = decode(ChatRequest, await read_body(request))
        encoder = CapturedRequest(session.capture)
        plain = msgspec.structs.replace(
            _without_sampling(body, session.bounds.limits), max_completion_tokens=None
        )
        order = chat_order(plain, encoder=encoder, limits=session.bounds.limits, new_seed=lambda: 0)
        wanted = body.max_completion_tokens or body.max_tokens
        return await self._answered(request, session, order, encoder, wanted=wanted, shape=chat_shape)

    async def _answered(
        self,
        request: web.Request,
        session: AgentSession,
        order: GenerationOrder,
        encoder: CapturedRequest,
        *,
        wanted: int | None,
        shape: Callable[..., ResponseShape],
    ) -> web.StreamResponse:
        _check(order, session)
        (prompt,) = order.prompts
        bounds = session.bounds
        room = bounds.limits.max_length - len(prompt)
        max_new_tokens, stop = min(wanted or room, bounds.max_new_tokens, room), order.samplings[0].stop
        with session.capture.numbered(prompt, max_new_tokens=max_new_tokens, stop=stop) as number:
            with session.sampling():
                completion = await session.policy.complete(
                    prompt, turn=number, max_new_tokens=max_new_tokens, stop=stop
                )
            answer = self._kept(session, order, encoder, completion, name=f"{number:x}", make_shape=shape)
            try:
                return await _send(request, answer)
            except (ConnectionResetError, asyncio.CancelledError):
                session.capture.forget(answer.reply)
                raise

    def _kept(
        self,
        session: AgentSession,
        order: GenerationOrder,
        encoder: CapturedRequest,
        completion: Completion,
        *,
        name: str,
        make_shape: Callable[..., ResponseShape],
    ) -> _Answer:
        """Store the reply and build the response. `name` is part of the ids of calls, which templates may show to the
        model; it does not depend on the order of requests, and is the same in a retry of the episode."""
        choice = ApiChoice(
            self._tokenizer,
            stops=order.samplings[0].stop,
            with_logprobs=order.with_logprobs,
            with_tools=order.with_tools,
        )
        delta = choice.take(completion)
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in delta.tool_calls]
        message = as_message({"role": "assistant", "content": delta.text, "tool_calls": calls}, 0)
        conversation = encoder.answered(delta.text, completion, message=message)
        reply = session.capture.keep(conversation, order.prompts[0], completion)
        shape = make_shape(
            name,
            model=session.bounds.limits.model,
            created=int(SYSTEM_CLOCK.wall()),
            tokenizer=self._tokenizer,
            with_logprobs=order.with_logprobs,
        )
        return _Answer(reply, delta, order, shape)

    # The other routes.

    async def _models(self, request: web.Request) -> web.Response:
        return as_json({"object": "list", "data": [self._model_object(request)]})

    async def _model(self, request: web.Request) -> web.Response:
        return as_json(self._model_object(request))

    def _model_object(self, request: web.Request) -> dict[str, Any]:
        return model_object(self._session(request).bounds.limits, created=0)


async def _send(request: web.Request, answer: _Answer) -> web.StreamResponse:
    is_stream = answer.order.stream
    content_type = "text/event-stream" if is_stream else JSON
    response = web.StreamResponse(headers={"Content-Type": f"{content_type}; charset=utf-8"})
    body = answer.events if is_stream else answer.whole
    if not is_stream:
        response.content_length = len(body)
    await response.prepare(request)
    await write_last(request, response, body)
    return response


def _without_sampling(body: Any, limits: ApiLimits) -> Any:
    """Remove the fields that the recipe decides. `max_tokens` is 1, so that only the prompt's length is checked."""
    return msgspec.structs.replace(body, model=limits.model, max_tokens=1, **_OURS)


def _check(order: GenerationOrder, session: AgentSession) -> None:
    """Refuse features of the API that training does not support, and requests beyond the episode's limits."""
    if session.outcome.done():
        raise _over()
    (sampling, *others) = order.samplings
    if order.num_choices != 1 or others:
        raise ApiError(
            f"expected one reply per request in training, got {order.num_choices}; ask again for another",
            param="n",
        )
    if sampling.top_logprobs:
        raise ApiError(
            "only the chosen tokens' log-probabilities are known in training: `logprobs` (0 at `/completions`)",
            param="top_logprobs",
        )
    if sampling.stop_token_ids or sampling.ignore_end:
        raise ApiError(
            "`stop_token_ids` and `ignore_eos` are not supported in training; `stop` is",
            param="stop_token_ids" if sampling.stop_token_ids else "ignore_eos",
        )
    if session.num_requests >= session.bounds.max_requests:
        raise ApiError(
            f"This episode has had its {session.bounds.max_requests} requests (`rollout.max_turns`).",
            code=MAX_TURNS,
        )


def _over() -> ApiError:
    return ApiError("This episode is over.", status=HTTPStatus.NOT_FOUND, code="episode_over")
