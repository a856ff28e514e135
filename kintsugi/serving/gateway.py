"""The HTTP side: routes of the OpenAI API, and a few of our own.

| route                              | answer                                                            |
|------------------------------------|-------------------------------------------------------------------|
| POST /v1/completions, /v1/chat/completions | the API's objects, or its server-sent events              |
| GET  /v1/models, /v1/models/{id}   | the one model                                                     |
| GET  /health                       | 200 when a server can answer, else 503; every server's state      |
| GET  /metrics                      | Prometheus' text format                                           |
| GET  /openapi.json                 | this table for programs                                           |
| POST /admin/weights, /admin/servers | new weights from a folder, another number of servers; with a key |

Whatever a client sends is answered in the API's own shape. A client that leaves takes its request with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
from aiohttp import web

from kintsugi.messages import Generate
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.runtime import SYSTEM_CLOCK
from kintsugi.serving import metrics
from kintsugi.serving.answers import DONE, Delta, Shape, chat_shape, completion_shape, event, model_object
from kintsugi.serving.asking import Asked, generates, joined
from kintsugi.serving.backstage import Listener, Outcome, Picture
from kintsugi.serving.description import DESCRIPTION
from kintsugi.serving.http import (
    JSON,
    MAX_BODY_BYTES,
    as_json,
    check_key,
    of_http,
    read_body,
    refused,
    write,
    write_last,
)
from kintsugi.serving.openai import (
    ChatRequest,
    CompletionRequest,
    Limits,
    NewServers,
    NewWeights,
    Order,
    chat_order,
    completion_order,
    decode,
)
from kintsugi.serving.refusals import Refusal, broken, queue_full, unavailable, unknown_model

LONG_BODY_BYTES = 64 << 10
"""Longer ones are tokenised in another thread: the event loop has others to serve."""
CLOSED_REQUEST = 499
"""The status under which a request is counted whose client left."""
OPEN_PATHS = frozenset({"/health", "/metrics", "/openapi.json"})
"""For those who watch over the gateway; everything else needs the key, where there is one."""
Body = TypeVar("Body", CompletionRequest, ChatRequest)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Generation(Protocol):
    """What the gateway needs of `Backstage`."""

    picture: Picture

    def submit(self, request: Generate, hear: Callable[[Outcome], None]) -> Listener: ...

    def cancel(self, listener: Listener) -> None: ...

    def record(self, error: BaseException) -> None: ...


class Administration(Protocol):
    """What whoever has the key may change."""

    async def load_weights(self, path: str) -> dict[str, Any]: ...

    async def resize(self, num_servers: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Rules:
    """What the gateway lets in."""

    limits: Limits
    api_key: str | None = None
    queue: int = 1024
    """Completions that may be unanswered: each of a request's prompts counts `n` times."""
    timeout_s: float = 600.0


class Gateway:
    """The application. Everything here runs in one event loop."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        rules: Rules,
        *,
        administration: Administration | None = None,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._rules = rules
        self._administration = administration
        self._num_unanswered = 0
        self._random = random.SystemRandom()
        self._created = int(SYSTEM_CLOCK.wall())
        self.metrics = metrics.Metrics()
        self.num_active = 0
        """Requests that are being answered."""
        self.closing = False
        """No more are let in."""

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

    # What is common to all routes.

    @web.middleware
    async def _answer_in_shape(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in the API's shape, whoever found them; every answer is counted."""
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "unknown"
        since = SYSTEM_CLOCK.monotonic()
        status = CLOSED_REQUEST
        self.num_active += 1
        try:
            self._check_key(request)
            response = await handler(request)
            status = response.status
        except Refusal as refusal:
            status = refusal.status.value
            return refused(refusal)
        except web.HTTPException as error:
            status = error.status
            return refused(of_http(error, request))
        except web.RequestPayloadError as error:
            status = HTTPStatus.BAD_REQUEST.value
            return refused(Refusal(f"We could not read the body of your request: {error}"))
        except asyncio.CancelledError:
            self.metrics.cancelled += 1
            raise
        except ConnectionResetError:
            self.metrics.cancelled += 1
            # Closing would wait until the client has taken what is buffered. Nobody gets the answer.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001 - the outermost boundary of a request: others go on.
            self._generation.record(error)
            status = HTTPStatus.INTERNAL_SERVER_ERROR.value
            return refused(broken())
        else:
            return response
        finally:
            self.num_active -= 1
            self.metrics.requests[name, status] += 1
            if request.method == "POST":
                self.metrics.request_s.observe(SYSTEM_CLOCK.monotonic() - since)

    def _check_key(self, request: web.Request) -> None:
        if self._rules.api_key is None or request.path in OPEN_PATHS:
            return
        check_key(request, self._rules.api_key)

    # Generation.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        order = await self._ordered(request, CompletionRequest, completion_order)
        return await self._answered(request, order, completion_shape)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        order = await self._ordered(request, ChatRequest, chat_order)
        return await self._answered(request, order, chat_shape)

    async def _ordered(
        self, request: web.Request, kind: type[Body], translate: Callable[..., Order]
    ) -> Order:
        body = await read_body(request)

        def translated() -> Order:
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
        self, request: web.Request, order: Order, make_shape: Callable[..., Shape]
    ) -> web.StreamResponse:
        self._admit(order)
        shape = make_shape(
            uuid4().hex,
            model=self._rules.limits.model,
            created=int(SYSTEM_CLOCK.wall()),
            tokenizer=self._tokenizer,
            with_logprobs=order.with_logprobs,
        )
        async with self._under_way(order, name=shape.id) as asked:
            if order.stream:
                return await self._streamed(request, order, shape, asked)
            deltas: list[list[Delta]] = [[] for _ in range(asked.num_choices)]
            async for news in asked:
                for index, delta in news:
                    deltas[index].append(delta)
            choices = [
                (index, joined(parts, before=asked.echo_of(index))) for index, parts in enumerate(deltas)
            ]
            response = web.StreamResponse(headers={"Content-Type": f"{JSON}; charset=utf-8"})
            body = shape.whole(choices, asked.usage())
            response.content_length = len(body)
            await response.prepare(request)
            await write_last(request, response, body)
        return response

    def _admit(self, order: Order) -> None:
        picture = self._generation.picture
        if self.closing:
            raise unavailable("it is shutting down")
        if not picture.is_ready:
            raise unavailable(picture.why_not or "they are being started")
        if self._num_unanswered + order.num_choices > self._rules.queue:
            raise queue_full(self._num_unanswered, limit=self._rules.queue)

    async def _streamed(
        self, request: web.Request, order: Order, shape: Shape, asked: Asked
    ) -> web.StreamResponse:
        """Server-sent events. The first news decide whether it becomes a stream or an error with its own status."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        opened: set[int] = set()
        stopwatch = _Stopwatch(self.metrics)
        try:
            async for news in asked:
                stopwatch.lap(asked.num_completion_tokens)
                if not response.prepared:
                    await response.prepare(request)
                events = []
                for index, delta in news:
                    if index not in opened:
                        opened.add(index)
                        events.append(shape.opening(index, with_usage=order.include_usage))
                        delta = joined([delta], before=asked.echo_of(index))
                    if delta.text or delta.tokens or delta.finish_reason is not None:
                        events.append(shape.chunk(index, delta, with_usage=order.include_usage))
                await write(response, b"".join(events))
        except ConnectionResetError:
            raise
        except Exception as error:
            # Where the status is told already, this is the outermost boundary of the request.
            if not response.prepared:
                raise
            if not isinstance(error, Refusal):
                self._generation.record(error)
            refusal = error if isinstance(error, Refusal) else broken()
            last = event(msgspec.json.decode(refusal.body))
        else:
            last = (shape.usage_chunk(asked.usage()) if order.include_usage else b"") + DONE
        await write_last(request, response, last)
        return response

    @asynccontextmanager
    async def _under_way(self, order: Order, *, name: str) -> AsyncIterator[Asked]:
        """The order's requests under way; whatever is unanswered at the end is cancelled, whyever it ends."""
        asked = Asked(order, self._tokenizer)
        self._num_unanswered += order.num_choices
        self.metrics.prompt_tokens += asked.num_prompt_tokens
        listeners: list[Listener] = []
        try:
            for number, generate in enumerate(generates(order, name=name, timeout_s=self._rules.timeout_s)):
                listeners.append(self._generation.submit(generate, asked.hear_of(number)))
            yield asked
        finally:
            self._num_unanswered -= order.num_choices
            self.metrics.completion_tokens += asked.num_completion_tokens
            for number, listener in enumerate(listeners):
                if not asked.has_ended(number):
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
        picture = self._generation.picture
        is_ready = picture.is_ready and not self.closing
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
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
            for each in picture.servers
        ]
        body = {"status": "ok" if is_ready else "unavailable", "servers": servers}
        return as_json({**body, "version": picture.version}, status=status)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self.metrics.text(self._generation.picture.servers, num_unanswered=self._num_unanswered)
        return web.Response(text=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _openapi(self, request: web.Request) -> web.Response:
        return as_json(DESCRIPTION)

    async def _admin_weights(self, request: web.Request) -> web.Response:
        administration = self._administrator()
        asked = decode(NewWeights, await read_body(request))
        return as_json(await administration.load_weights(asked.path))

    async def _admin_servers(self, request: web.Request) -> web.Response:
        administration = self._administrator()
        asked = decode(NewServers, await read_body(request))
        return as_json(await administration.resize(asked.count))

    def _administrator(self) -> Administration:
        if self._administration is None or self._rules.api_key is None:
            raise Refusal(
                "Administration needs an API key: start with `--api-key`.", status=HTTPStatus.FORBIDDEN
            )
        return self._administration


class _Stopwatch:
    """Measures how long a stream's tokens take: the first one, then the others."""

    def __init__(self, figures: metrics.Metrics) -> None:
        self._figures = figures
        self._since = SYSTEM_CLOCK.monotonic()
        self._num_tokens = 0

    def lap(self, num_tokens: int) -> None:
        """So many have come in all."""
        now = SYSTEM_CLOCK.monotonic()
        num_new = num_tokens - self._num_tokens
        if not self._num_tokens:
            self._figures.first_token_s.observe(now - self._since)
        elif num_new:
            self._figures.per_token_s.observe((now - self._since) / num_new, count=num_new)
        self._since, self._num_tokens = now, num_tokens
