"""What clients are answered, over real HTTP, by a gateway in front of a fake generation."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient

from kintsugi.errors import DeadlineExceeded
from kintsugi.protocol.generation import Generate
from kintsugi.serving.control_thread import ServerSnapshot
from kintsugi.serving.credentials import Credentials
from kintsugi.serving.metrics import ServerMetrics
from kintsugi.types import FinishReason
from tests.unit.serving.fakes import ALPHABET, FakeGeneration, tokenizer, user_error, with_client

Client = TestClient[Any, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "abc", "max_tokens": 6, **fields}


def chatted(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, **fields}


async def posted(client: Client, path: str, body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def events_of(client: Client, path: str, body: Any) -> list[Any]:
    """The stream's events, decoded; the last line must be the API's end."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else msgspec.json.decode(line[6:]) for line in lines]


def test_a_completion_has_the_apis_shape() -> None:
    async def body(client: Client) -> None:
        status, answer = await posted(client, COMPLETIONS, asked())
        assert status == 200
        assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
        assert answer["choices"] == [
            {"index": 0, "text": "abcabc", "logprobs": None, "finish_reason": "length"}
        ]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}

    with_client(body)


def test_a_conversation_goes_through_the_template_with_its_tools() -> None:
    generation = FakeGeneration()
    tools = [{"type": "function", "function": {"name": "get", "parameters": {}}}]

    async def body(client: Client) -> None:
        status, answer = await posted(client, CHAT, chatted(tools=tools, tool_choice="auto"))
        assert (status, answer["object"]) == (200, "chat.completion")
        message = {"role": "assistant", "content": "<user>", "refusal": None}
        assert answer["choices"][0]["message"] == message

    with_client(body, generation)
    prompt = tokenizer().decode(memoryview(generation.submitted[0].prompt).cast("i"))
    assert prompt == "<user>higetA:"


def test_several_prompts_and_samples_are_numbered_through() -> None:
    async def body(client: Client) -> None:
        prompts = ["ab", "x"]
        _, answer = await posted(client, COMPLETIONS, asked(prompt=prompts, n=2, max_tokens=2, echo=True))
        texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
        assert texts == [(0, "abab"), (1, "abbc"), (2, "xxx"), (3, "xyy")]
        _, answer = await posted(client, COMPLETIONS, asked(prompt=[[2, 3], [4]], max_tokens=1))
        assert [choice["text"] for choice in answer["choices"]] == ["a", "c"]
        assert answer["usage"]["prompt_tokens"] == 3

    with_client(body)


def test_a_stream_says_the_same_as_the_whole_answer() -> None:
    async def body(client: Client) -> None:
        *events, usage, done = await events_of(
            client, COMPLETIONS, asked(n=2, stream_options={"include_usage": True})
        )
        texts = {0: "", 1: ""}
        for event in events:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
            assert event["usage"] is None
        assert texts == {0: "abcabc", 1: "bcdbcd"}
        assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 12, "[DONE]")

    with_client(body)


def test_a_streamed_conversation_begins_with_its_role_and_ends_with_its_reason() -> None:
    async def body(client: Client) -> None:
        first, *middle, last, done = await events_of(client, CHAT, chatted())
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        texts = [event["choices"][0]["delta"].get("content", "") for event in (*middle, last)]
        assert "".join(texts) == "<user>"
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")

    with_client(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_is_not_in_it(stream: bool) -> None:
    generation = FakeGeneration()

    async def body(client: Client) -> None:
        fields = asked(prompt="hello.world", max_tokens=60, stop=["o.w", "never"])
        if stream:
            *events, _ = await events_of(client, COMPLETIONS, fields)
            choices = [event["choices"][0] for event in events]
        else:
            choices = (await posted(client, COMPLETIONS, fields))[1]["choices"]
        assert "".join(choice["text"] for choice in choices) == "hell"
        assert choices[-1]["finish_reason"] == "stop"

    with_client(body, generation)


def test_an_end_token_is_counted_but_not_shown() -> None:
    def rule(request: Generate, sample: int) -> tuple[list[int], FinishReason]:
        return [2, 3, 1], FinishReason.EOS

    async def body(client: Client) -> None:
        _, answer = await posted(client, COMPLETIONS, asked(logprobs=0))
        assert answer["choices"][0]["text"] == "ab"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
        assert answer["usage"]["completion_tokens"] == 3

    with_client(body, FakeGeneration(rule=rule))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_both_shapes(stream: bool) -> None:
    async def body(client: Client) -> None:
        fields = asked(logprobs=2, max_tokens=2, prompt="ab")
        if stream:
            *events, _ = await events_of(client, COMPLETIONS, fields)
            found = [event["choices"][0]["logprobs"] for event in events]
        else:
            found = [(await posted(client, COMPLETIONS, fields))[1]["choices"][0]["logprobs"]]
        assert [token for each in found for token in each["tokens"]] == ["a", "b"]
        assert [offset for each in found for offset in each["text_offset"]] == [0, 1]
        assert found[0]["token_logprobs"][0] == -0.5 and found[0]["top_logprobs"][0] == {"a": -0.5}
        _, answer = await posted(client, CHAT, chatted(logprobs=True, top_logprobs=2, max_tokens=1))
        (entry,) = answer["choices"][0]["logprobs"]["content"]
        assert (entry["token"], entry["bytes"], entry["logprob"]) == ("<", [60], -0.5)
        assert len(entry["top_logprobs"]) == 2

    with_client(body)


def test_logprobs_of_a_stop_text_are_left_out() -> None:
    async def body(client: Client) -> None:
        _, answer = await posted(client, COMPLETIONS, asked(logprobs=0, stop="c"))
        assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]

    with_client(body)


def test_a_seed_names_the_noise_by_what_is_asked() -> None:
    generation = FakeGeneration()

    async def body(client: Client) -> None:
        for fields in ({"seed": 7}, {"seed": 7}, {}, {}):
            await posted(client, COMPLETIONS, asked(**fields))
        await posted(client, COMPLETIONS, asked(prompt="abd", seed=7))

    with_client(body, generation)
    first, again, free, other_free, other = [
        (request.ticket, request.sampling.seed) for request in generation.submitted
    ]
    assert first == again
    assert len({first, free, other_free, other}) == 4


def test_all_that_shapes_sampling_reaches_the_servers() -> None:
    generation = FakeGeneration()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5}

    async def body(client: Client) -> None:
        more = {"logit_bias": {"3": -100}, "ignore_eos": True, "stop_token_ids": [4], "stop": "zz"}
        status, _ = await posted(client, COMPLETIONS, asked(**fields, **more, logprobs=3))
        assert status == 200

    with_client(body, generation)
    sampling = generation.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == ((3, -100.0),) and sampling.ignore_end
    assert (sampling.stop_token_ids, sampling.stop, sampling.top_logprobs) == ((4,), ("zz",), 3)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, asked(temperature=3), "temperature"),
        (COMPLETIONS, asked(n=0), "n"),
        (COMPLETIONS, asked(n="two"), "n"),
        (COMPLETIONS, asked(prompt=[]), "prompt"),
        (COMPLETIONS, asked(prompt=""), "prompt"),
        (COMPLETIONS, asked(prompt=[["a"]]), "prompt"),
        (COMPLETIONS, asked(prompt=[2, 999]), "prompt"),
        (COMPLETIONS, asked(prompt=[2, -1]), "prompt"),
        (COMPLETIONS, asked(prompt=[True, 2]), "prompt"),
        (COMPLETIONS, asked(prompt="ß"), "prompt"),
        (COMPLETIONS, asked(best_of=3), "best_of"),
        (COMPLETIONS, asked(suffix="x"), "suffix"),
        (COMPLETIONS, asked(echo=True, logprobs=1), "echo"),
        (COMPLETIONS, asked(presence_penalty=1), "presence_penalty"),
        (COMPLETIONS, asked(frequency_penalty=-1), "frequency_penalty"),
        (COMPLETIONS, asked(logit_bias={"x": 1}), "logit_bias"),
        (COMPLETIONS, asked(logit_bias={"99999": 1}), "logit_bias"),
        (COMPLETIONS, asked(logit_bias={"3": 1, "03": 1}), "logit_bias"),
        (COMPLETIONS, asked(stop=[""]), "stop"),
        (COMPLETIONS, asked(stop=["x"] * 17), "stop"),
        (COMPLETIONS, asked(stop_token_ids=[1 << 40]), "stop_token_ids"),
        (COMPLETIONS, asked(seed=1 << 70), "seed"),
        (COMPLETIONS, asked(frobnicate=1), "frobnicate"),
        (COMPLETIONS, asked(stream_options={"include_usage": True}), "stream_options"),
        (COMPLETIONS, {"model": "tiny"}, "prompt"),
        (CHAT, chatted(messages=[]), "messages"),
        (CHAT, chatted(messages=[{"role": "king", "content": "x"}]), "messages.[0]"),
        (CHAT, chatted(messages=[{"role": "user"}]), "messages.[0]"),
        (
            CHAT,
            chatted(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages.[0].content",
        ),
        (CHAT, chatted(top_logprobs=2), "top_logprobs"),
        (CHAT, chatted(response_format={"type": "json_object"}), "response_format"),
        (CHAT, chatted(modalities=["audio"]), "modalities"),
        (CHAT, chatted(functions=[]), "functions"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_name(path: str, body: Any, param: str) -> None:
    generation = FakeGeneration()

    async def refused(client: Client) -> None:
        status, answer = await posted(client, path, body)
        assert status == 400, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)

    with_client(refused, generation)
    assert generation.submitted == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": "tiny", "prompt": "\\ud800"}', b"[" * 100_000],
)
def test_what_is_no_request_at_all_is_refused(content: bytes) -> None:
    async def body(client: Client) -> None:
        async with client.post(COMPLETIONS, data=content) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"

    with_client(body)


@pytest.mark.parametrize("fields", [asked(prompt="a" * 128), asked(max_tokens=126), asked(prompt=[2] * 5000)])
def test_what_does_not_fit_the_context_is_refused_with_its_code(fields: dict[str, Any]) -> None:
    async def body(client: Client) -> None:
        status, answer = await posted(client, COMPLETIONS, fields)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    with_client(body)


def test_a_conversation_without_a_limit_may_fill_the_context() -> None:
    async def body(client: Client) -> None:
        _, answer = await posted(client, CHAT, chatted(max_tokens=None))
        assert answer["usage"]["total_tokens"] == 128

    with_client(body)


def test_harmless_fields_are_ignored() -> None:
    async def body(client: Client) -> None:
        fields = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "seed": None}
        assert (await posted(client, COMPLETIONS, asked(**fields)))[0] == 200
        assert (await posted(client, CHAT, chatted(**fields, reasoning_effort="low")))[0] == 200

    with_client(body)


def test_only_the_right_key_opens() -> None:
    async def body(client: Client) -> None:
        for headers, code in (({}, None), ({"Authorization": "Bearer no"}, "invalid_api_key")):
            async with client.get("/v1/models", headers=headers) as response:
                assert response.status == 401 and (await response.json())["error"]["code"] == code
        async with client.get("/v1/models", headers={"Authorization": "Bearer right"}) as response:
            assert response.status == 200
        async with client.get("/health") as response:
            assert response.status == 200

    with_client(body, credentials=Credentials(api_key="right"))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/admin/servers", 403),
    ],
)
def test_routes_that_are_not_there_answer_in_the_apis_shape(method: str, path: str, status: int) -> None:
    async def body(client: Client) -> None:
        async with client.request(method, path) as response:
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}

    with_client(body)


def test_another_model_is_not_found_and_ours_is() -> None:
    async def body(client: Client) -> None:
        status, answer = await posted(client, COMPLETIONS, asked(model="gpt"))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        async with client.get("/v1/models/tiny") as response:
            assert (await response.json())["id"] == "tiny"

    with_client(body)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_it_says_is_refused(encoding: str) -> None:
    async def body(client: Client) -> None:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        async with client.post(COMPLETIONS, data=b"no such thing", headers=headers) as response:
            assert response.status == 400

    with_client(body)


def test_a_body_that_is_too_large_is_refused() -> None:
    async def body(client: Client) -> None:
        async with client.post(COMPLETIONS, data=io.BytesIO(b"x" * (9 << 20))) as response:
            assert response.status == 413 and "error" in await response.json()

    with_client(body)


def test_beyond_the_queue_requests_are_refused_and_let_in_again_later() -> None:
    generation = FakeGeneration(holds=True)

    async def body(client: Client) -> None:
        held = [asyncio.ensure_future(posted(client, COMPLETIONS, asked())) for _ in range(2)]
        await generation.until(lambda: len(generation.submitted) == 2)
        async with client.post(COMPLETIONS, json=asked()) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["code"] == "queue_full"
        generation.release()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        generation.holds = False
        assert (await posted(client, COMPLETIONS, asked()))[0] == 200

    with_client(body, generation, queue=2)


def test_without_a_ready_server_requests_are_refused_with_503() -> None:
    snapshot = ServerSnapshot((ServerMetrics("server-0", "starting", "stale"),))

    async def body(client: Client) -> None:
        status, answer = await posted(client, COMPLETIONS, asked())
        assert (status, answer["error"]["code"]) == (503, "no_server_ready")
        async with client.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["servers"][0]["state"] == "starting"

    with_client(body, FakeGeneration(snapshot=snapshot))


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_server_refuses_or_does_not_finish_has_its_status(stream: bool) -> None:
    late = DeadlineExceeded(whom="server", what="tokens", waited_s=1.0)
    for error, status in ((user_error("expected other tokens"), 400), (late, 504)):

        async def body(client: Client, status: int = status) -> None:
            assert (await posted(client, COMPLETIONS, asked(stream=stream)))[0] == status

        with_client(body, FakeGeneration(error=error))


def test_a_stream_that_breaks_says_so_before_it_ends() -> None:
    late = DeadlineExceeded(whom="server", what="tokens", waited_s=1.0)

    async def body(client: Client) -> None:
        events = await events_of(client, COMPLETIONS, asked())
        assert events[0]["choices"][0]["text"] and events[-1]["error"]["code"] == "timeout"

    with_client(body, FakeGeneration(error=late, error_after=2))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_requests(stream: bool) -> None:
    generation = FakeGeneration(holds=True)

    async def body(client: Client) -> None:
        request = asyncio.ensure_future(posted(client, COMPLETIONS, asked(stream=stream, prompt=["a", "b"])))
        await generation.until(lambda: len(generation.submitted) == 2)
        request.cancel()
        await generation.until(lambda: len(generation.cancelled) == 2)

    with_client(body, generation, queue=2)


def test_a_mistake_of_ours_is_written_down_and_told_in_the_apis_shape() -> None:
    def broken(request: Generate, sample: int) -> tuple[list[int], FinishReason]:
        raise ZeroDivisionError

    generation = FakeGeneration(rule=broken)

    async def body(client: Client) -> None:
        status, answer = await posted(client, COMPLETIONS, asked())
        assert (status, answer["error"]["type"]) == (500, "server_error")

    with_client(body, generation)
    assert [type(fault) for fault in generation.faults] == [ZeroDivisionError]


def test_figures_show_what_was_answered() -> None:
    async def body(client: Client) -> None:
        await posted(client, COMPLETIONS, asked())
        await events_of(client, COMPLETIONS, asked())
        await posted(client, COMPLETIONS, asked(n=0))
        async with client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        assert 'kintsugi_requests_total{route="/v1/completions",status="200"} 2' in lines
        assert 'kintsugi_requests_total{route="/v1/completions",status="400"} 1' in lines
        assert "kintsugi_completion_tokens_total 12" in lines
        assert "kintsugi_time_to_first_token_seconds_count 1" in lines
        assert 'kintsugi_server_health{server="server-0",health="healthy"} 1' in lines

    with_client(body)


def test_the_description_names_every_field() -> None:
    async def body(client: Client) -> None:
        async with client.get("/openapi.json") as response:
            described = await response.json()
        assert "prompt" in described["components"]["schemas"]["CompletionRequest"]["properties"]

    with_client(body)


def test_the_alphabet_of_the_fake_has_what_its_template_needs() -> None:
    assert set("<user>hiA:") <= set(ALPHABET)
