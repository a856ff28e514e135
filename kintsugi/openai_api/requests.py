"""Requests of the OpenAI API, decoded strictly, and their translation to generation requests.

A decoding error names the field; a field that the API does not have is refused as the API does. Fields without an
effect here (`user`, `metadata`, …) are accepted and ignored; fields that would change the response in an unsupported
way are refused, unless they have their default value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from kintsugi.errors import DataError, ModelError
from kintsugi.openai_api.api_errors import ApiError, too_long, unknown_model
from kintsugi.types import MIN_TEMPERATURE, SamplingParams

MAX_CHOICES = 128
"""Most choices of one request: prompts × n."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_BIASES = 1024
MAX_COMPLETION_LOGPROBS, MAX_CHAT_LOGPROBS = 5, 20
DEFAULT_COMPLETION_TOKENS = 16
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

Struct = TypeVar("Struct", bound=msgspec.Struct)
Count = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenCount = Annotated[int, Meta(ge=1, le=1 << 31)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored."""


class _CommonFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of requests."""

    model: str
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    max_tokens: TokenCount | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # As in vLLM's API.
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    # Without an effect here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(_CommonFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class ChatRequest(_CommonFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    # Without an effect here.
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None


class NewWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/admin/weights`."""

    path: str
    """A folder with the same architecture."""


class NewServers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/admin/servers`."""

    count: Annotated[int, Meta(ge=1, le=64)]


@dataclass(frozen=True)
class ApiLimits:
    """Capabilities of the served model."""

    model: str
    """Its name in the API."""
    vocab_size: int
    max_length: int
    """Longest prompt + completion, in tokens."""


@dataclass(frozen=True)
class GenerationOrder:
    """A request for generation: one `Generate` per prompt, `sampling.num_samples` choices of each."""

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    """One per prompt: the longest completion depends on it."""
    seeded: bool
    """Whether the same request gives the same response again."""
    stream: bool
    include_usage: bool
    with_logprobs: bool
    with_tools: bool = False
    """Whether tool calls are parsed out of the text."""
    echo: tuple[str, ...] = ()
    """Text before each prompt's completions: the prompts themselves, if echo was requested."""

    @property
    def num_choices(self) -> int:
        return sum(sampling.num_samples for sampling in self.samplings)


class Encoder(Protocol):
    """Converts text to tokens; `Tokenizer` implements it."""

    def encode_conversation(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any]
    ) -> Sequence[int]: ...

    def encode_prompt(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def decode(kind: type[Struct], body: bytes) -> Struct:
    """Decode a request, or raise `ApiError` that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"We could not parse the JSON body of your request: {error}") from error


def completion_order(
    request: CompletionRequest, *, encoder: Encoder, limits: ApiLimits, new_seed: Callable[[], int]
) -> GenerationOrder:
    """Order for `/v1/completions`. `new_seed` returns the seed of a request that has none."""
    _check_common(request, limits)
    n = request.n or 1
    if request.best_of not in (None, n):
        raise ApiError(f"expected `best_of` to be `n` ({n}), got {request.best_of}", param="best_of")
    if request.suffix:
        raise ApiError("`suffix` is not supported by this model", param="suffix")
    if request.echo and request.logprobs is not None:
        raise ApiError("`echo` together with `logprobs` is not supported", param="echo")
    texts, prompts = _prompts(request.prompt, encoder=encoder, limits=limits)
    sampling = _sampling(request, limits=limits, top_logprobs=request.logprobs or 0, new_seed=new_seed)
    max_new_tokens = request.max_tokens or DEFAULT_COMPLETION_TOKENS
    return _order(
        request,
        prompts=prompts,
        sampling=sampling,
        limits=limits,
        max_new_tokens=max_new_tokens,
        with_logprobs=request.logprobs is not None,
        echo=tuple(texts) if request.echo else (),
    )


def chat_order(
    request: ChatRequest, *, encoder: Encoder, limits: ApiLimits, new_seed: Callable[[], int]
) -> GenerationOrder:
    """Order for `/v1/chat/completions`: the conversation goes through the model's chat template."""
    _check_common(request, limits)
    if request.top_logprobs and not request.logprobs:
        raise ApiError("expected `logprobs` to be true where `top_logprobs` is set", param="top_logprobs")
    if request.response_format is not None and request.response_format.type != "text":
        raise ApiError(
            f"expected `response_format` of type text, got {request.response_format.type!r}",
            param="response_format",
        )
    if request.modalities not in (None, ["text"]):
        raise ApiError('expected `modalities` to be ["text"]', param="modalities")
    messages = [as_message(each, number) for number, each in enumerate(request.messages)]
    tools = request.tools if request.tools and request.tool_choice != "none" else None
    variables: dict[str, Any] = {} if tools is None else {"tools": tools, "tool_choice": request.tool_choice}
    try:
        prompt = encoder.encode_conversation(messages, variables=variables)
    except (ModelError, DataError) as error:
        raise ApiError(str(error), param="messages") from error
    sampling = _sampling(request, limits=limits, top_logprobs=request.top_logprobs or 0, new_seed=new_seed)
    return _order(
        request,
        prompts=[_checked(prompt, limits=limits, param="messages")],
        sampling=sampling,
        limits=limits,
        max_new_tokens=request.max_completion_tokens or request.max_tokens,
        with_logprobs=bool(request.logprobs),
        with_tools=tools is not None,
    )


def _order(
    request: _CommonFields,
    *,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    limits: ApiLimits,
    max_new_tokens: int | None,
    with_logprobs: bool,
    with_tools: bool = False,
    echo: tuple[str, ...] = (),
) -> GenerationOrder:
    """Build the order; without `max_new_tokens`, completions may fill the context."""
    samplings = []
    for prompt in prompts:
        room = limits.max_length - len(prompt)
        wanted = max_new_tokens or max(1, room)
        if wanted > room:
            raise too_long(len(prompt), wanted, max_length=limits.max_length)
        samplings.append(msgspec.structs.replace(sampling, max_new_tokens=wanted))
    order = GenerationOrder(
        tuple(prompts),
        tuple(samplings),
        seeded=request.seed is not None,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        with_logprobs=with_logprobs,
        with_tools=with_tools,
        echo=echo,
    )
    if order.num_choices > MAX_CHOICES:
        raise ApiError(
            f"expected at most {MAX_CHOICES} choices in all (prompts × n), got {order.num_choices}",
            param="n",
        )
    return order


def _check_common(request: _CommonFields, limits: ApiLimits) -> None:
    if request.model != limits.model:
        raise unknown_model(request.model, served=limits.model)
    if request.presence_penalty:
        raise ApiError(
            "`presence_penalty` is not supported; `repetition_penalty` is", param="presence_penalty"
        )
    if request.frequency_penalty:
        raise ApiError(
            "`frequency_penalty` is not supported; `repetition_penalty` is", param="frequency_penalty"
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError("`stream_options` is only allowed when `stream` is true", param="stream_options")


def _sampling(
    request: _CommonFields,
    *,
    limits: ApiLimits,
    top_logprobs: int,
    new_seed: Callable[[], int],
) -> SamplingParams:
    """All sampling parameters except `max_new_tokens`, which depends on the prompt."""
    temperature = 1.0 if request.temperature is None else request.temperature
    for token in request.stop_token_ids or ():
        _check_token(token, limits=limits, param="stop_token_ids")
    return SamplingParams(
        temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
        num_samples=request.n or 1,
        seed=new_seed() if request.seed is None else request.seed,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        stop=_stops(request.stop),
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=_biases(request.logit_bias or {}, limits=limits),
        ignore_end=bool(request.ignore_eos),
        top_logprobs=top_logprobs,
    )


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ApiError(
            f"expected at most {MAX_STOPS} stop texts of 1 to {MAX_STOP_CHARACTERS} characters", param="stop"
        )
    return tuple(stops)


def _biases(given: Mapping[str, float], *, limits: ApiLimits) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_BIASES:
        raise ApiError(f"expected at most {MAX_BIASES} entries, got {len(given)}", param="logit_bias")
    biases = []
    for key, bias in given.items():
        if not re.fullmatch(r"[0-9]{1,9}", key, re.ASCII):
            raise ApiError(f"expected token ids as keys, got {key!r}", param="logit_bias")
        biases.append((_check_token(int(key), limits=limits, param="logit_bias"), bias))
    if len({token for token, _ in biases}) < len(biases):
        raise ApiError("expected each token once", param="logit_bias")
    return tuple(biases)


def _prompts(
    given: str | list[Any], *, encoder: Encoder, limits: ApiLimits
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Each prompt as text and as tokens: the API takes one text, several, one list of tokens, or several."""
    if isinstance(given, str) or (given and all(type(each) is int for each in given)):
        given = [given]
    if not 0 < len(given) <= MAX_CHOICES:
        raise ApiError(f"expected 1 to {MAX_CHOICES} prompts, got {len(given)}", param="prompt")
    texts, prompts = [], []
    for each in given:
        if isinstance(each, str):
            try:
                ids: Sequence[Any] = encoder.encode_prompt(each)
            except DataError as error:
                raise ApiError(str(error), param="prompt") from error
            text = each
        elif isinstance(each, list):
            ids = _checked(each, limits=limits, param="prompt")
            text = encoder.decode(ids)
        else:
            raise ApiError(
                f"expected text, a list of texts, or lists of token ids, got {each!r:.40}", param="prompt"
            )
        prompts.append(_checked(ids, limits=limits, param="prompt"))
        texts.append(text)
    return texts, prompts


def _checked(ids: Sequence[Any], *, limits: ApiLimits, param: str) -> tuple[int, ...]:
    if not ids:
        raise ApiError("expected a prompt of at least one token", param=param)
    if len(ids) >= limits.max_length:
        raise too_long(len(ids), 1, max_length=limits.max_length)
    return tuple(_check_token(token, limits=limits, param=param) for token in ids)


def _check_token(token: Any, *, limits: ApiLimits, param: str) -> int:
    if type(token) is not int or not 0 <= token < limits.vocab_size:
        raise ApiError(
            f"expected token ids from 0 to {limits.vocab_size - 1}, got {token!r:.40}", param=param
        )
    return token


def as_message(given: dict[str, Any], number: int) -> dict[str, Any]:
    """A message as chat templates expect it: text as one string, arguments of tool calls as objects."""
    where = f"messages.[{number}]"
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(
            f"expected `role` to be one of {', '.join(sorted(ROLES))}, got {role!r:.40}", param=where
        )
    message = {**given, "role": "system" if role == "developer" else role}
    if "content" not in given and role != "assistant":
        raise ApiError("expected `content`", param=where)
    message["content"] = _content(given.get("content"), where=f"{where}.content")
    if (calls := given.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise ApiError(f"expected a list, got {calls!r:.40}", param=f"{where}.tool_calls")
        message["tool_calls"] = [_tool_call(call, where=f"{where}.tool_calls") for call in calls]
    return message


def _content(content: Any, *, where: str) -> str:
    """Text of a message; None, as in an assistant's message that only calls a tool, is the empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(f"expected text or a list of parts, got {content!r:.40}", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(f"expected parts of type text only, got {part!r:.80}", param=where)
    return "".join(part["text"] for part in content)


def _tool_call(call: Any, *, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            f"expected tool calls with a `function` that has a `name`, got {call!r:.80}", param=where
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            pass  # Text that a model wrote need not be JSON; the template gets it unchanged.
    return {**call, "function": {**function, "arguments": arguments}}


def _invalid(said: str) -> ApiError:
    """Error with msgspec's message, and the field in `param`."""
    if (unknown := re.match(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?$", said)) is not None:
        param = f"{unknown[2] or ''}.{unknown[1]}".lstrip(".")
        return ApiError(f"Unrecognized request argument supplied: {param}", param=param)
    if (missing := re.match(r"Object missing required field `(.*?)`", said)) is not None:
        return ApiError(f"you must provide a {missing[1]} parameter", param=missing[1])
    where = re.search(r" - at `(?:key in )?`?\$\.?(.*?)`$", said)
    return ApiError(said.replace("`$.", "`"), param=where[1] or None if where is not None else None)
