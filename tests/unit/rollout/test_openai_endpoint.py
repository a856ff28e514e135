"""The endpoint as programs meet it: real `openai` clients, and whatever else can be sent to a port."""

from __future__ import annotations

import asyncio
import io
import logging
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from kintsugi.openai_api import http
from kintsugi.rollout.environments.protocol import EpisodeFailed
from kintsugi.rollout.user_code import openai_endpoint as endpoints
from kintsugi.rollout.user_code.token_capture import TokenCapture
from kintsugi.types import FinishReason
from tests.unit.rollout.agent_worlds import Opened, ScriptedPolicy, Unhurried, opened, tokenizer

CALL = '<tool_call>\n{"name": "times", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "times", "parameters": {"type": "object"}}}]


def at_endpoint(
    body: Callable[[Opened], Awaitable[None]], policy: ScriptedPolicy | None = None, **bounds: int
) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), opened(policy or ScriptedPolicy(), **bounds) as world:
            await body(world)

    asyncio.run(run())


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def ask(world: Opened, *texts: str, **fields: Any) -> Any:
    messages = [user(text) for text in texts]
    return await world.client().chat.completions.create(model="tiny", messages=messages, **fields)


def test_a_chat_is_answered_and_captured() -> None:
    async def body(world: Opened) -> None:
        answer = await ask(world, "12*34?")
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("right", "stop")
        (reply,) = world.session.capture.replies
        assert answer.usage.completion_tokens == len(reply.sampled)
        assert answer.usage.prompt_tokens == len(reply.prompt)
        assert reply.sampled[-1] == tokenizer().eos_token_id
        assert reply.prompt == tuple(tokenizer().encode_conversation([user("12*34?")]))

    at_endpoint(body)


def test_a_function_is_called_and_its_result_continues_the_same_tokens() -> None:
    policy = ScriptedPolicy(lambda prompt: "it is 408" if "tool_response" in prompt else CALL)

    async def body(world: Opened) -> None:
        messages = [user("12*34?")]
        client = world.client()
        first = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("times", '{"a":12,"b":34}')
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "408"}]
        second = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "it is 408"
        before, after = world.session.capture.replies
        assert after.before is before
        assert after.prompt[: len(before.tokens)] == before.tokens
        assert "<tool_response>\n408\n</tool_response>" in tokenizer().decode(after.prompt)

    at_endpoint(body, policy)


def test_the_ids_of_calls_do_not_depend_on_the_attempt() -> None:
    """A template may show them to the model, which is then asked the same again when an episode is played again."""

    async def body(world: Opened) -> None:
        first = await ask(world, "12*34?", tools=TOOLS)
        outcome = asyncio.get_running_loop().create_future()
        again = replace(world.session, id=8, capture=TokenCapture(tokenizer()), outcome=outcome)
        other = Opened(world.endpoint, again, world.endpoint.open(again), world.clients)
        await ask(other, "something else first", tools=TOOLS)
        second = await ask(other, "12*34?", tools=TOOLS)
        third = await ask(other, "12*34?", tools=TOOLS)
        ids = [answer.choices[0].message.tool_calls[0].id for answer in (first, second, third)]
        assert ids[0] == ids[1] != ids[2]

    at_endpoint(body, ScriptedPolicy(lambda prompt: CALL))


@pytest.mark.parametrize("tools", [TOOLS, openai.NOT_GIVEN])
def test_a_stream_says_the_same_as_the_whole(tools: Any) -> None:
    policy = ScriptedPolicy(lambda prompt: f"wait {CALL}" if tools else "the answer is right")

    async def body(world: Opened) -> None:
        whole = (await ask(world, "12*34?", tools=tools)).choices[0]
        stream = await ask(world, "12*34?", tools=tools, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(each.delta.content or "" for each in deltas) == whole.message.content
        assert deltas[-1].finish_reason == whole.finish_reason
        calls = [call.function for each in deltas for call in each.delta.tool_calls or ()]
        assert [call.arguments for call in calls] == [
            call.function.arguments for call in whole.message.tool_calls or ()
        ]
        assert chunks[-1].usage.completion_tokens == len(world.session.capture.replies[-1].sampled)

    at_endpoint(body, policy)


def test_an_ordinary_client_completes_text_in_a_thread() -> None:
    policy = ScriptedPolicy(lambda prompt: "408" if prompt.endswith("408;") else "[12*34]")

    def program(base_url: str, api_key: str) -> list[str]:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        text = "12*34="
        first = client.completions.create(model="any", prompt=text, stop=["]"]).choices[0]
        text += f"{first.text}]408;"
        second = client.completions.create(model="any", prompt=text, stop="]", stream=True)
        last = "".join(chunk.choices[0].text for chunk in second)
        echoed = client.completions.create(model="any", prompt="12*34=", echo=True, logprobs=None)
        client.close()
        return [first.text, last, echoed.choices[0].text]

    async def body(world: Opened) -> None:
        said = await asyncio.to_thread(program, world.base_url, world.session.api_key)
        assert said == ["[12*34", "408", "12*34=[12*34]"]
        call, answer, _ = world.session.capture.replies
        assert (call.completion.finish, answer.before) == (FinishReason.STOP, call)
        fed = array("i", answer.turns()[-1].fed)
        assert tokenizer().decode(list(fed)) == "408;"

    at_endpoint(body, policy)


def test_log_probabilities_are_those_that_were_sampled() -> None:
    async def body(world: Opened) -> None:
        answer = await ask(world, "12*34?", logprobs=True)
        told = answer.choices[0].logprobs.content
        sampled = array("f", world.session.capture.replies[0].completion.logprobs)
        assert [each.logprob for each in told] == pytest.approx(sampled[:-1])

    at_endpoint(body)


def test_what_would_bend_the_distribution_is_the_recipes_business() -> None:
    async def body(world: Opened) -> None:
        client = world.client()
        await client.chat.completions.create(
            model="gpt-of-another",
            messages=[user("12*34?")],
            temperature=0.0,
            top_p=0.5,
            seed=3,
            presence_penalty=1.0,
            frequency_penalty=1.0,
            logit_bias={"5": 10},
            extra_body={"top_k": 3, "min_p": 0.2, "repetition_penalty": 1.2},
        )

    at_endpoint(body)


def test_the_shortest_of_all_limits_counts() -> None:
    policy = ScriptedPolicy()

    async def body(world: Opened) -> None:
        client = world.client()
        for limits in ({"max_tokens": 5}, {"max_completion_tokens": 6}, {}, {"max_tokens": 4000}):
            await client.chat.completions.create(model="tiny", messages=[user("a")], **limits)  # type: ignore[call-overload]
        await client.completions.create(model="tiny", prompt="a")
        await client.completions.create(model="tiny", prompt="a" * 200, max_tokens=50)
        room = 256 - len(policy.asked[-1][0])
        assert [most for _, _, most, _ in policy.asked] == [5, 6, 128, 128, 16, min(50, room)]

    at_endpoint(body, policy, max_length=256)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"extra_body": {"stop_token_ids": [5]}}, "stop_token_ids"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"messages": [{"role": "user"}]}}, "messages.[0]"),
        ({"extra_body": {"messages": [{"role": "user", "content": "a", "tool_calls": 3}]}}, None),
    ],
)
def test_what_training_can_not_do_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    async def body(world: Opened) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(world, "12*34?", **fields)
        assert param is None or caught.value.param == param
        last = world.session.last_refusal
        assert last is not None and last.param == caught.value.param
        assert world.session.num_refused == 1
        assert not world.session.is_cut_off and not world.session.capture.replies

    at_endpoint(body)


def test_a_context_that_is_used_up_is_told_as_the_api_tells_it() -> None:
    async def body(world: Opened) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(world, "is this too long? " * 20)
        assert caught.value.code == "context_length_exceeded"
        assert world.session.is_cut_off

    at_endpoint(body, max_length=64)


def test_an_episode_has_so_many_requests() -> None:
    async def body(world: Opened) -> None:
        await ask(world, "one")
        await ask(world, "two")
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(world, "three")
        assert caught.value.code == endpoints.MAX_TURNS
        assert world.session.is_cut_off and len(world.session.capture.replies) == 2

    at_endpoint(body, max_requests=2)


def test_only_the_episodes_own_key_is_let_in() -> None:
    async def body(world: Opened) -> None:
        with pytest.raises(openai.AuthenticationError):
            await world.client(api_key="another").models.list()
        (model,) = (await world.client().models.list()).data
        assert model.id == "tiny"
        assert (await world.client().models.retrieve("anything")).id == "tiny"

    at_endpoint(body)


def test_an_episode_that_is_over_is_told_so() -> None:
    async def body(world: Opened) -> None:
        world.endpoint.end(world.session)
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(world, "12*34?")
        assert caught.value.code == "episode_over"

    at_endpoint(body)


def test_a_request_that_arrives_while_its_episode_ends_is_told_so() -> None:
    async def body(world: Opened) -> None:
        where = urlsplit(world.base_url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        content = b'{"model": "tiny", "prompt": "a"}'
        head = (
            f"POST {where.path}/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            f"Authorization: Bearer {world.session.api_key}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode())
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        world.endpoint.end(world.session)
        writer.write(content)
        assert b"404 Not Found" in await reader.readuntil(b"\r\n\r\n")
        assert not world.session.capture.replies
        writer.close()

    at_endpoint(body)


def test_the_end_of_an_episode_ends_what_it_is_waiting_for() -> None:
    policy = ScriptedPolicy(holds=asyncio.Event())

    async def body(world: Opened) -> None:
        waiting = asyncio.create_task(ask(world, "12*34?"))
        await policy.until_asked(1)
        world.endpoint.end(world.session)
        with pytest.raises(openai.APIConnectionError):
            await waiting
        assert not world.session.pending

    at_endpoint(body, policy)


NO_HTTP = (
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /episodes/7/v1/chat/completions",
)
NONSENSE = (
    ("POST", "/chat/completions", b"{", 400),
    ("POST", "/chat/completions", b"\xff\xfe", 400),
    ("POST", "/chat/completions", b'{"model": "tiny", "messages": []}', 400),
    ("POST", "/chat/completions", b'{"model": "tiny", "messages": [3]}', 400),
    ("POST", "/completions", b'{"model": "tiny", "prompt": []}', 400),
    ("POST", "/completions", b'{"model": "tiny", "prompt": [1, 2, 99999999]}', 400),
    ("POST", "/completions", b'{"model": "tiny", "prompt": ["a", "b"]}', 400),
    ("POST", "/completions", b'{"model": "tiny", "prompt": "a", "spelled_wrong": 1}', 400),
    ("POST", "/completions", b" " * (9 << 20), 413),
    ("GET", "/chat/completions", b"", 405),
    ("POST", "/embeddings", b"{}", 404),
)


def test_what_is_no_http_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def body(world: Opened) -> None:
        where = urlsplit(world.base_url)
        for sent in NO_HTTP:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(sent)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await ask(world, "12*34?")).choices[0].message.content == "right"
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    at_endpoint(body)


def test_nonsense_is_refused_in_the_apis_shape() -> None:
    async def body(world: Opened) -> None:
        headers = {"Authorization": f"Bearer {world.session.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for method, path, content, status in NONSENSE:
                async with client.request(method, world.base_url + path, data=io.BytesIO(content)) as answer:
                    assert answer.status == status, (path, content[:80])
                    assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
        # The last two have no route, and belong to no episode.
        assert world.session.num_refused == len(NONSENSE) - 2
        assert (await ask(world, "12*34?")).choices[0].message.content == "right"

    at_endpoint(body)


def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    policy = ScriptedPolicy(holds=asyncio.Event())

    async def body(world: Opened) -> None:
        with pytest.raises(openai.APITimeoutError):
            await ask(world, "12*34?", timeout=0.05)
        if world.session.pending:
            await asyncio.wait(world.session.pending)
        policy.holds = None
        await ask(world, "12*34?")
        assert len(world.session.capture.replies) == 1
        assert policy.asked[0][1] == policy.asked[1][1], "asked again, it has the same noise"

    at_endpoint(body, policy)


def test_a_reply_that_nobody_took_is_forgotten_and_sampled_again_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = ScriptedPolicy()

    async def nobody(*_: Any) -> None:
        raise ConnectionResetError

    async def body(world: Opened) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(endpoints, "write_last", nobody)
            with pytest.raises(openai.APIConnectionError):
                await ask(world, "12*34?")
        assert world.session.capture.replies == []
        await ask(world, "12*34?")
        assert policy.asked[0][1] == policy.asked[1][1], "the same noise"

    at_endpoint(body, policy)


def test_a_connection_on_which_nothing_is_asked_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEPALIVE_S", 0.01)

    async def body(world: Opened) -> None:
        where = urlsplit(world.base_url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        key = world.session.api_key
        writer.write(
            f"GET {where.path}/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
        )
        async with asyncio.timeout(5):
            assert b"200 OK" in await reader.read(), "which ends with the connection"
        writer.close()

    at_endpoint(body)


def test_a_policy_that_gives_up_is_the_end_of_the_episode() -> None:
    async def body(world: Opened) -> None:
        with pytest.raises(openai.InternalServerError):
            await ask(world, "12*34?")
        with pytest.raises(EpisodeFailed, match="no server is left"):
            await world.session.outcome
        with pytest.raises(openai.NotFoundError):
            await ask(world, "once more")

    at_endpoint(body, ScriptedPolicy(fails=True))


def test_a_mistake_of_ours_is_raised_where_the_episode_is_played() -> None:
    def breaks(prompt: str) -> str:
        raise RuntimeError("ours")

    async def body(world: Opened) -> None:
        with pytest.raises(openai.InternalServerError):
            await ask(world, "12*34?")
        with pytest.raises(RuntimeError, match="ours"):
            await world.session.outcome

    at_endpoint(body, ScriptedPolicy(breaks))


def test_a_programs_time_stands_still_while_it_waits_for_the_model() -> None:
    policy = ScriptedPolicy(holds=asyncio.Event())

    async def body(world: Opened) -> None:
        patience = world.session.timeouts
        assert isinstance(patience, Unhurried)
        both = [asyncio.create_task(ask(world, text)) for text in ("one", "two")]
        await policy.until_asked(2)
        assert patience.told == ["pause", "pause"]
        assert policy.holds is not None
        policy.holds.set()
        await asyncio.gather(*both)
        assert patience.told == ["pause", "pause", "resume"]

    at_endpoint(body, policy)
