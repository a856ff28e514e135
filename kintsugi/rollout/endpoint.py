"""The OpenAI API on loopback, for agent programs whose model is being trained.

Every episode has a base URL and a key of its own: `http://127.0.0.1:PORT/episodes/7/v1`. What a program asks there is
sampled by the episode's policy and captured, token by token (`capture.py`). How is the recipe's business: the model's
name, temperature, seed and whatever else would bend the distribution are taken and ignored. A limit on the length of a
reply counts as far as it is below the recipe's. One reply per request.
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
from kintsugi.rollout.capture import Asking, Capture, Reply
from kintsugi.rollout.environment import Policy
from kintsugi.runtime import SYSTEM_CLOCK
from kintsugi.serving.answers import (
    DONE,
    Choice,
    Delta,
    Shape,
    chat_shape,
    completion_shape,
    model_object,
    usage,
)
from kintsugi.serving.http import (
    JSON,
    MAX_BODY_BYTES,
    as_json,
    check_key,
    of_http,
    read_body,
    refused,
    runner,
    write_last,
)
from kintsugi.serving.openai import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    Limits,
    Order,
    as_message,
    chat_order,
    completion_order,
    decode,
)
from kintsugi.serving.refusals import Refusal, broken, unavailable
from kintsugi.types import Completion

HOST = "127.0.0.1"
"""Programs that are trained run beside the model's rollout worker; nobody else has any business here."""
_BENDING = ("temperature", "top_p", "top_k", "min_p", "logit_bias", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_OURS: dict[str, Any] = dict.fromkeys((*_BENDING, *_PENALTIES))
"""Fields of a request that the recipe decides on."""

MAX_TURNS = "max_turns_reached"
CUT_OFF = frozenset({MAX_TURNS, "context_length_exceeded"})
"""Codes of refusals that are the end of an episode, not a mistake."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Bounds:
    """What an episode may ask for."""

    limits: Limits
    max_new_tokens: int
    """Of one reply."""
    max_requests: int


class Patience(Protocol):
    """How long an episode's program may be at work without asking for anything; told when that is."""

    def pause(self) -> None:
        """It waits for the model."""
        ...

    def resume(self) -> None:
        """It waits for nothing any more."""
        ...


@dataclass(eq=False)
class Session:
    """One episode at the endpoint, from when its program is started until it has ended."""

    id: int
    capture: Capture
    policy: Policy
    bounds: Bounds
    patience: Patience
    outcome: asyncio.Future[Any]
    """What its program returned; or why the episode can not go on, whatever its program thinks of that."""
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    last_refusal: Refusal | None = None
    """What the program was refused last; it may repeat itself for long, so only this one is kept."""
    num_refused: int = 0
    is_cut_off: bool = False
    """Something was refused because the context or the number of requests is used up."""
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)
    """Requests that wait for the policy."""
    num_asked: int = 0
    """Those that had to, answered or not."""

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """While a request waits for the policy."""
        task = asyncio.current_task()
        assert task is not None, "a request is handled by a task"
        self.num_asked += 1
        self.under_way.add(task)
        self.patience.pause()
        try:
            yield
        finally:
            self.under_way.discard(task)
            if not self.under_way:
                self.patience.resume()

    def refuse(self, refusal: Refusal) -> None:
        self.last_refusal = refusal
        self.num_refused += 1
        self.is_cut_off |= refusal.code in CUT_OFF

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(frozen=True)
class _Answer:
    """A reply on its way to the program."""

    reply: Reply
    delta: Delta
    order: Order
    shape: Shape

    @property
    def whole(self) -> bytes:
        return self.shape.whole([(0, self._echoed)], self._usage)

    @property
    def events(self) -> bytes:
        """All at once: whatever reads a stream reads this one too."""
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


class Endpoint:
    """Listens for the programs of all episodes of this process. Everything here runs in one event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sessions: dict[str, Session] = {}
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

    def open(self, session: Session) -> str:
        """Let an episode's program in; gives its base URL."""
        assert str(session.id) not in self._sessions, f"episode {session.id} is being played"
        self._sessions[str(session.id)] = session
        return f"http://{HOST}:{self._port}/episodes/{session.id}/v1"

    def end(self, session: Session) -> None:
        """Nothing is answered any more, also not what is under way; threads that were left behind find out here. To end
        it again changes nothing."""
        self._sessions.pop(str(session.id), None)
        session.outcome.cancel()
        for task in list(session.under_way):
            task.cancel()

    # What is common to all routes.

    @web.middleware
    async def _answer_in_shape(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Errors in the API's shape, whoever found them; one of ours is the end of the episode."""
        session = self._sessions.get(request.match_info.get("episode", ""))
        try:
            if session is None and "episode" in request.match_info:
                raise _over()
            if session is not None:
                check_key(request, session.api_key)
            return await handler(request)
        except Refusal as error:
            refusal = error
        except web.HTTPException as error:
            refusal = of_http(error, request)
        except web.RequestPayloadError as error:
            refusal = Refusal(f"We could not read the body of your request: {error}")
        except ConnectionResetError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        except Exception as error:  # noqa: BLE001 - raised by whoever plays the episode
            assert session is not None, "without an episode nothing is done"
            session.fail(error)
            refusal = unavailable(str(error)) if isinstance(error, KintsugiError) else broken()
        if session is not None:
            session.refuse(refusal)
        return refused(refusal)

    def _session(self, request: web.Request) -> Session:
        return self._sessions[request.match_info["episode"]]

    # Sampling.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = decode(CompletionRequest, await read_body(request))
        asking = Asking(session.capture)
        order = completion_order(
            _plain(asked, session.bounds.limits),
            encoder=asking,
            limits=session.bounds.limits,
            new_seed=lambda: 0,
        )
        wanted = asked.max_tokens or DEFAULT_COMPLETION_TOKENS
        return await self._answered(request, session, order, asking, wanted=wanted, shape=completion_shape)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = decode(ChatRequest, await read_body(request))
        asking = Asking(session.capture)
        plain = msgspec.structs.replace(_plain(asked, session.bounds.limits), max_completion_tokens=None)
        order = chat_order(plain, encoder=asking, limits=session.bounds.limits, new_seed=lambda: 0)
        wanted = asked.max_completion_tokens or asked.max_tokens
        return await self._answered(request, session, order, asking, wanted=wanted, shape=chat_shape)

    async def _answered(
        self,
        request: web.Request,
        session: Session,
        order: Order,
        asking: Asking,
        *,
        wanted: int | None,
        shape: Callable[..., Shape],
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
            answer = self._kept(session, order, asking, completion, name=f"{number:x}", make_shape=shape)
            try:
                return await _told(request, answer)
            except (ConnectionResetError, asyncio.CancelledError):
                session.capture.forget(answer.reply)
                raise

    def _kept(
        self,
        session: Session,
        order: Order,
        asking: Asking,
        completion: Completion,
        *,
        name: str,
        make_shape: Callable[..., Shape],
    ) -> _Answer:
        """`name` is part of the ids of calls, which templates may show to the model: it is the same whoever asks first,
        and when the episode is played again."""
        choice = Choice(
            self._tokenizer,
            stops=order.samplings[0].stop,
            with_logprobs=order.with_logprobs,
            with_tools=order.with_tools,
        )
        delta = choice.take(completion)
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in delta.tool_calls]
        message = as_message({"role": "assistant", "content": delta.text, "tool_calls": calls}, 0)
        said = asking.answered(delta.text, completion, message=message)
        reply = session.capture.keep(said, order.prompts[0], completion)
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


async def _told(request: web.Request, answer: _Answer) -> web.StreamResponse:
    is_stream = answer.order.stream
    content_type = "text/event-stream" if is_stream else JSON
    response = web.StreamResponse(headers={"Content-Type": f"{content_type}; charset=utf-8"})
    body = answer.events if is_stream else answer.whole
    if not is_stream:
        response.content_length = len(body)
    await response.prepare(request)
    await write_last(request, response, body)
    return response


def _plain(asked: Any, limits: Limits) -> Any:
    """The request without what the recipe decides on. One token is asked for, so that only the context is checked."""
    return msgspec.structs.replace(asked, model=limits.model, max_tokens=1, **_OURS)


def _check(order: Order, session: Session) -> None:
    """What the API has and training does not, and what an episode may not exceed."""
    if session.outcome.done():
        raise _over()
    (sampling, *others) = order.samplings
    if order.num_choices != 1 or others:
        raise Refusal(
            f"expected one reply per request in training, got {order.num_choices}; ask again for another",
            param="n",
        )
    if sampling.top_logprobs:
        raise Refusal(
            "only the chosen tokens' log-probabilities are known in training: `logprobs` (0 at `/completions`)",
            param="top_logprobs",
        )
    if sampling.stop_token_ids or sampling.ignore_end:
        raise Refusal(
            "`stop_token_ids` and `ignore_eos` are not supported in training; `stop` is",
            param="stop_token_ids" if sampling.stop_token_ids else "ignore_eos",
        )
    if session.num_asked >= session.bounds.max_requests:
        raise Refusal(
            f"This episode has had its {session.bounds.max_requests} requests (`rollout.max_turns`).",
            code=MAX_TURNS,
        )


def _over() -> Refusal:
    return Refusal("This episode is over.", status=HTTPStatus.NOT_FOUND, code="episode_over")
