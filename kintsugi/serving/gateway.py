"""The HTTP side of the gateway: routes of the OpenAI API, and a few additional ones.

| route                              | response                                                          |
|------------------------------------|-------------------------------------------------------------------|
| POST /v1/completions, /v1/chat/completions | the API's objects, or its server-sent events              |
| GET  /v1/models, /v1/models/{id}   | the one model                                                     |
| GET  /health                       | 200 when a server can answer, else 503; with a key every server's state |
| GET  /metrics                      | Prometheus' text format; without a key only whether a server can answer |
| GET  /openapi.json                 | this table for programs                                           |
| POST /admin/weights, /admin/servers | new weights from a folder, another number of servers; for admins |

Every response has the API's own shape, errors too. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
from aiohttp import web

from kintsugi.access.gate import Caller
from kintsugi.access.roles import AccessRole, Action
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.openai_api.api_errors import (
    ApiError,
    broken,
    queue_full,
    quota_exceeded,
    unavailable,
    unknown_model,
)
from kintsugi.openai_api.http import (
    JSON,
    MAX_BODY_BYTES,
    as_json,
    error_response,
    from_http_error,
    read_body,
    write,
    write_last,
)
from kintsugi.openai_api.openapi import DESCRIPTION
from kintsugi.openai_api.requests import (
    ApiLimits,
    ChatRequest,
    CompletionRequest,
    GenerationOrder,
    NewServers,
    NewWeights,
    chat_order,
    completion_order,
    decode,
)
from kintsugi.openai_api.responses import (
    DONE,
    Delta,
    ResponseShape,
    chat_shape,
    completion_shape,
    event,
    model_object,
)
from kintsugi.protocol.generation import Generate
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.serving.control_thread import Outcome, ServerSnapshot, TokenListener
from kintsugi.serving.credentials import Credentials, GatewayAccess
from kintsugi.serving.in_flight import InFlightRequest, generates, joined
from kintsugi.serving.metrics import GatewayMetrics, ready_text
from kintsugi.telemetry.export.prometheus_text import CONTENT_TYPE

LONG_BODY_BYTES = 64 << 10
"""Longer bodies are tokenised in another thread, so that the event loop is not blocked."""
CLOSED_REQUEST = 499
"""Status under which a request is counted if its client disconnected."""
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json"})
"""Routes for monitoring, which tell a stranger only whether the service works; all others require a key, if there is
one."""
ADMIN_PATHS = {"/admin/weights": Action.LOAD_WEIGHTS, "/admin/servers": Action.SCALE_SERVICE}
STRANGER = Caller("anonymous", AccessRole.VIEWER, origin="unknown")
CALLER: ContextVar[Caller] = ContextVar("caller")
"""Caller of the request that the current task answers."""
Body = TypeVar("Body", CompletionRequest, ChatRequest)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayGeneration(Protocol):
    """The part of `ControlThread` that the gateway uses."""

    snapshot: ServerSnapshot

    def submit(self, request: Generate, on_outcome: Callable[[Outcome], None]) -> TokenListener: ...

    def cancel(self, listener: TokenListener) -> None: ...

    def record(self, error: BaseException) -> None: ...


class GatewayAdministration(Protocol):
    """Operations of administrators."""

    async def load_weights(self, path: str) -> dict[str, Any]: ...

    async def resize(self, num_servers: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class GatewayLimits:
    """Limits of the gateway."""

    limits: ApiLimits
    credentials: Credentials = field(default_factory=Credentials)
    queue: int = 1024
    """Most unanswered completions: each of a request's prompts counts `n` times."""
    timeout_s: float = 600.0


class Gateway:
    """The application. All of it runs in one event loop."""

    def __init__(
        self,
        generation: GatewayGeneration,
        tokenizer: Tokenizer,
        rules: GatewayLimits,
        *,
        administration: GatewayAdministration | None = None,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._rules = rules
        self._administration = administration
        self._access = GatewayAccess(rules.credentials)
        self._num_unanswered = 0
        self._random = random.SystemRandom()
        self._created = int(SYSTEM_CLOCK.wall())
        self.metrics = GatewayMetrics()
        self.num_active = 0
        """Number of requests that are being answered."""
        self.closing = False
        """Whether new requests are refused."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer_in_shape])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/openapi.json", self._openapi),
                web.post("/admin/weights", self._admin_weights),
                web.post("/admin/servers", self._admin_servers),
            ]
        )
        return app

    # Common to all routes.

    @web.middleware
    async def _answer_in_shape(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return errors in the API's shape, and count every response."""
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "unknown"
        since = SYSTEM_CLOCK.monotonic()
        status = CLOSED_REQUEST
        self.num_active += 1
        try:
            self._check_access(request)
            response = await handler(request)
            status = response.status
        except ApiError as api_error:
            status = api_error.status.value
            return error_response(api_error)
        except web.HTTPException as error:
            status = error.status
            return error_response(from_http_error(error, request))
        except web.RequestPayloadError as error:
            status = HTTPStatus.BAD_REQUEST.value
            return error_response(ApiError(f"We could not read the body of your request: {error}"))
        except asyncio.CancelledError:
            self.metrics.cancelled += 1
            raise
        except ConnectionResetError:
            self.metrics.cancelled += 1
            # The client has disconnected: closing normally would wait for it to read what is buffered.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001 - the outermost boundary of a request: others continue.
            self._generation.record(error)
            status = HTTPStatus.INTERNAL_SERVER_ERROR.value
            return error_response(broken())
        else:
            return response
        finally:
            self.num_active -= 1
            self.metrics.requests[name, status] += 1
            if request.method == "POST":
                self.metrics.request_s.observe(SYSTEM_CLOCK.monotonic() - since)

    def _check_access(self, request: web.Request) -> None:
        self._access.check_host(request)
        if request.path not in OPEN_PATHS:
            action = ADMIN_PATHS.get(request.path, Action.GENERATE)
            CALLER.set(self._access.demand(request, action))

    # Generation.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        order = await self._ordered(request, CompletionRequest, completion_order)
        return await self._answered(request, order, completion_shape)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        order = await self._ordered(request, ChatRequest, chat_order)
        return await self._answered(request, order, chat_shape)

    async def _ordered(
        self, request: web.Request, kind: type[Body], translate: Callable[..., GenerationOrder]
    ) -> GenerationOrder:
        body = await read_body(request)

        def translated() -> GenerationOrder:
            return translate(
                decode(kind, body),
                encoder=self._tokenizer,
                limits=self._rules.limits,
                new_seed=lambda: self._random.getrandbits(63),
            )

        if len(body) > LONG_BODY_BYTES:
            return await asyncio.to_thread(translated)
        return translated()

    async def _answered(
        self, request: web.Request, order: GenerationOrder, make_shape: Callable[..., ResponseShape]
    ) -> web.StreamResponse:
        self._admit(order)
        with self._quota(CALLER.get(STRANGER), order):
            return await self._generated(request, order, make_shape)

    @contextmanager
    def _quota(self, caller: Caller, order: GenerationOrder) -> Iterator[None]:
        """Count the completions of a request against the quota of its token while they are in flight."""
        if caller.quota is None:
            yield
            return
        reason = self._access.quotas.refusal(caller.quota, count=order.num_choices)
        if reason is not None:
            raise quota_exceeded(reason)
        try:
            yield
        finally:
            self._access.quotas.release(caller.quota, count=order.num_choices)

    async def _generated(
        self, request: web.Request, order: GenerationOrder, make_shape: Callable[..., ResponseShape]
    ) -> web.StreamResponse:
        shape = make_shape(
            uuid4().hex,
            model=self._rules.limits.model,
            created=int(SYSTEM_CLOCK.wall()),
            tokenizer=self._tokenizer,
            with_logprobs=order.with_logprobs,
        )
        async with self._in_flight(order, name=shape.id) as in_flight:
            if order.stream:
                return await self._streamed(request, order, shape, in_flight)
            deltas: list[list[Delta]] = [[] for _ in range(in_flight.num_choices)]
            async for news in in_flight:
                for index, delta in news:
                    deltas[index].append(delta)
            choices = [
                (index, joined(parts, before=in_flight.echo_of(index))) for index, parts in enumerate(deltas)
            ]
            response = web.StreamResponse(headers={"Content-Type": f"{JSON}; charset=utf-8"})
            body = shape.whole(choices, in_flight.usage())
            response.content_length = len(body)
            await response.prepare(request)
            await write_last(request, response, body)
        return response

    def _admit(self, order: GenerationOrder) -> None:
        snapshot = self._generation.snapshot
        if self.closing:
            raise unavailable("it is shutting down")
        if not snapshot.is_ready:
            raise unavailable(snapshot.why_not or "they are being started")
        if self._num_unanswered + order.num_choices > self._rules.queue:
            raise queue_full(self._num_unanswered, limit=self._rules.queue)

    async def _streamed(
        self, request: web.Request, order: GenerationOrder, shape: ResponseShape, in_flight: InFlightRequest
    ) -> web.StreamResponse:
        """Respond with server-sent events. The first deltas decide between a stream and an error with its own
        status."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        opened: set[int] = set()
        stopwatch = _Stopwatch(self.metrics)
        try:
            async for news in in_flight:
                stopwatch.lap(in_flight.num_completion_tokens)
                if not response.prepared:
                    await response.prepare(request)
                events = []
                for index, delta in news:
                    if index not in opened:
                        opened.add(index)
                        events.append(shape.opening(index, with_usage=order.include_usage))
                        delta = joined([delta], before=in_flight.echo_of(index))
                    if delta.text or delta.tokens or delta.finish_reason is not None:
                        events.append(shape.chunk(index, delta, with_usage=order.include_usage))
                await write(response, b"".join(events))
        except ConnectionResetError:
            raise
        except Exception as error:
            # If the status has been sent, this is the outermost boundary of the request.
            if not response.prepared:
                raise
            if not isinstance(error, ApiError):
                self._generation.record(error)
            api_error = error if isinstance(error, ApiError) else broken()
            last = event(msgspec.json.decode(api_error.body))
        else:
            last = (shape.usage_chunk(in_flight.usage()) if order.include_usage else b"") + DONE
        await write_last(request, response, last)
        return response

    @asynccontextmanager
    async def _in_flight(self, order: GenerationOrder, *, name: str) -> AsyncIterator[InFlightRequest]:
        """Submit the requests of an order; unanswered ones are cancelled at the end, for whatever reason it ends."""
        in_flight = InFlightRequest(order, self._tokenizer)
        self._num_unanswered += order.num_choices
        self.metrics.prompt_tokens += in_flight.num_prompt_tokens
        listeners: list[TokenListener] = []
        try:
            for number, generate in enumerate(generates(order, name=name, timeout_s=self._rules.timeout_s)):
                listeners.append(self._generation.submit(generate, in_flight.callback_for(number)))
            yield in_flight
        finally:
            self._num_unanswered -= order.num_choices
            self.metrics.completion_tokens += in_flight.num_completion_tokens
            for number, listener in enumerate(listeners):
                if not in_flight.has_ended(number):
                    self._generation.cancel(listener)

    # The other routes.

    async def _models(self, request: web.Request) -> web.Response:
        return as_json({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._rules.limits.model:
            raise unknown_model(name, served=self._rules.limits.model)
        return as_json(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        return model_object(self._rules.limits, created=self._created)

    async def _health(self, request: web.Request) -> web.Response:
        snapshot = self._generation.snapshot
        is_ready = snapshot.is_ready and not self.closing
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        word = "ok" if is_ready else "unavailable"
        if not self._access.sees_details(request):
            return as_json({"status": word}, status=status)
        servers = [
            {
                "server": each.process,
                "state": each.state,
                "health": each.health,
                "version": each.version,
                "restarts": each.num_restarts,
                "pid": each.pid,
                "last_error": each.last_error or None,
            }
            for each in snapshot.servers
        ]
        body = {"status": word, "servers": servers}
        return as_json({**body, "version": snapshot.version}, status=status)

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self._access.sees_details(request):
            is_ready = self._generation.snapshot.is_ready and not self.closing
            return web.Response(text=ready_text(is_ready=is_ready), headers={"Content-Type": CONTENT_TYPE})
        text = self.metrics.text(self._generation.snapshot.servers, num_unanswered=self._num_unanswered)
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: web.Request) -> web.Response:
        return as_json(DESCRIPTION)

    async def _admin_weights(self, request: web.Request) -> web.Response:
        administration = self._administrator()
        asked = decode(NewWeights, await read_body(request))
        await self._access.record(CALLER.get(STRANGER), Action.LOAD_WEIGHTS, detail=asked.path)
        return as_json(await administration.load_weights(asked.path))

    async def _admin_servers(self, request: web.Request) -> web.Response:
        administration = self._administrator()
        asked = decode(NewServers, await read_body(request))
        await self._access.record(CALLER.get(STRANGER), Action.SCALE_SERVICE, detail=f"servers={asked.count}")
        return as_json(await administration.resize(asked.count))

    def _administrator(self) -> GatewayAdministration:
        if self._administration is None:
            raise ApiError("This server has no administration.", status=HTTPStatus.FORBIDDEN)
        return self._administration


class _Stopwatch:
    """Measures the latency of a stream's first token, and the time between later ones."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._since = SYSTEM_CLOCK.monotonic()
        self._num_tokens = 0

    def lap(self, num_tokens: int) -> None:
        """Record that `num_tokens` have arrived in total."""
        now = SYSTEM_CLOCK.monotonic()
        num_new = num_tokens - self._num_tokens
        if not self._num_tokens:
            self._metrics.first_token_s.observe(now - self._since)
        elif num_new:
            self._metrics.per_token_s.observe((now - self._since) / num_new, count=num_new)
        self._since = now
        self._num_tokens = num_tokens
