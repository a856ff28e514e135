"""`kintsugi serve` as its users meet it: the unmodified `openai` client, processes that are killed, nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.cluster.serving import Served, make_model, serving, until
from tests.unit.serving.nonsense import nonsense

pytestmark = pytest.mark.cluster

KEY = "a-key"
ADMIN_KEY = "a-key-for-administration"
MODEL = "tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    admin = tmp_path_factory.mktemp("keys") / "admin"
    admin.touch(mode=0o600)
    admin.write_text(ADMIN_KEY)
    folder = str(tmp_path_factory.getbasetemp())
    keys = ("--api-key", KEY, "--admin-key-file", str(admin), "--weights-folder", folder)
    with serving(model, "--servers", "2", *keys, "--deterministic", "--queue", "64") as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def client_of(served: Served, *, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.address}/v1", api_key=key, max_retries=0, timeout=60)


def streamed(client: openai.OpenAI, number: int) -> str:
    stream = client.completions.create(
        model=MODEL,
        prompt=f"number {'abcdefghij'[number % 10]}",
        max_tokens=100,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


class Streams:
    """Answers to the same questions again and again until it is over: whenever a server is killed, it has work.

    `may_be_refused`: a question that is asked while no server is ready is refused, and asked again. A stream that has
    begun is never refused."""

    def __init__(self, client: openai.OpenAI, count: int, *, may_be_refused: bool = False) -> None:
        self._client = client
        self._may_be_refused = may_be_refused
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(count)
        self.expected = list(self._threads.map(partial(streamed, client), range(count)))
        self._pending = [self._threads.submit(self._repeat, number) for number in range(count)]

    def _repeat(self, number: int) -> set[str]:
        found: set[str] = set()
        while not self._over.is_set() or not found:
            try:
                found.add(streamed(self._client, number))
            except openai.InternalServerError as error:
                if error.status_code != HTTPStatus.SERVICE_UNAVAILABLE or not self._may_be_refused:
                    raise
                self._over.wait(0.1)  # As the answer says: "try again later".
        return found

    def finish(self) -> list[set[str]]:
        """All the different answers that each question had."""
        self._over.set()
        found = [each.result(timeout=60) for each in self._pending]
        self._threads.shutdown()
        return found


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions_of_several_prompts_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=8, logprobs=3, seed=5, temperature=0.8
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
        assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs or ())
    assert answer.usage is not None and answer.usage.prompt_tokens == 4


def test_a_conversation_with_logprobs_and_tools(client: openai.OpenAI) -> None:
    def asked(**fields: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=8,
            seed=3,
            **fields,
        )

    plain = asked(logprobs=True, top_logprobs=2)
    assert plain.choices[0].message.role == "assistant"
    entries = plain.choices[0].logprobs.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    tools = [{"type": "function", "function": {"name": "fetch", "parameters": {}}}]
    with_tools = asked(tools=tools, tool_choice="auto")
    assert with_tools.usage.prompt_tokens == plain.usage.prompt_tokens + len("fetch")


def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "tell"}],
        "max_tokens": 40,
        "seed": 11,
        "n": 2,
    }
    whole = client.chat.completions.create(**fields)
    texts = {0: "", 1: ""}
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert texts[0] != texts[1]
    assert usage == whole.usage


def test_a_seed_gives_the_same_answer_again_and_none_another(client: openai.OpenAI) -> None:
    def texts(**fields: Any) -> list[str]:
        return [
            client.completions.create(model=MODEL, prompt="abc", max_tokens=30, **fields).choices[0].text
            for _ in range(3)
        ]

    assert len(set(texts(seed=9))) == 1
    assert len(set(texts())) > 1


def test_a_stop_text_is_cut_off(client: openai.OpenAI) -> None:
    def asked(stop: list[str] | None) -> Any:
        return client.completions.create(
            model=MODEL, prompt="abc", max_tokens=60, seed=2, stop=stop, extra_body={"ignore_eos": True}
        ).choices[0]

    whole = asked(None).text
    stop = whole[20:23]
    stopped = asked([stop])
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_errors_are_the_clients_own_classes(served: Served, client: openai.OpenAI) -> None:
    with client_of(served, key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="abc")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="abc", max_tokens=100_000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="abc", temperature=9)


def test_beyond_the_queue_a_client_is_told_to_come_again(served: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError, match="unanswered"):
        client.completions.create(model=MODEL, prompt=["abc"] * 65, max_tokens=1)


def test_a_client_that_leaves_frees_its_pages(served: Served, client: openai.OpenAI) -> None:
    until(served.is_at_rest, "rest")
    before = served.figure("cancelled_requests_total")[""]
    with client.completions.create(
        model=MODEL, prompt="abc", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    until(served.is_at_rest, "its pages")
    assert served.figure("cancelled_requests_total")[""] == before + 1


def test_streams_go_on_when_their_server_is_killed(served: Served, client: openai.OpenAI) -> None:
    until(served.is_at_rest, "rest")
    restarts = sum(served.figure("server_restarts_total").values())
    resent = served.figure("resent_requests_total")[""]
    streams = Streams(client, 12)
    descriptors = served.num_descriptors()
    until(lambda: served.figure("server_tokens_in_flight").get("server-0"), "work on server-0")
    (killed,) = served.kill_servers(0)
    until(lambda: served.figure("resent_requests_total")[""] > resent, "streams at the other server")
    assert streams.finish() == [{answer} for answer in streams.expected]
    until(lambda: sum(served.figure("server_restarts_total").values()) > restarts, "the new server")
    until(served.is_at_rest, "rest")
    assert sum(served.figure("server_restarts_total").values()) == restarts + 1
    assert killed not in [server["pid"] for server in served.servers()]
    until(lambda: served.num_descriptors() <= descriptors, "its descriptors back")


@pytest.mark.slow
def test_streams_go_on_when_all_servers_are_killed_at_once(served: Served, client: openai.OpenAI) -> None:
    until(served.is_at_rest, "rest")
    resent = served.figure("resent_requests_total")[""]
    streams = Streams(client, 8, may_be_refused=True)
    until(lambda: all(served.figure("server_tokens_in_flight").values()), "work on both servers")
    served.kill_servers(0, 1)
    until(lambda: served.figure("resent_requests_total")[""] > resent, "streams at new servers")
    assert streams.finish() == [{answer} for answer in streams.expected]
    until(served.is_at_rest, "two new servers at rest")


def has_servers(served: Served, count: int) -> bool:
    return len(served.servers()) == count


@pytest.mark.slow
def test_servers_come_and_go_while_streams_run(served: Served, client: openai.OpenAI) -> None:
    until(served.is_at_rest, "rest")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    streams = Streams(client, 8)
    for count in (1, 2):
        answer = httpx2.post(f"{served.address}/admin/servers", json={"count": count}, headers=headers)
        assert answer.status_code == 200
        until(partial(has_servers, served, count), f"{count} servers")
    assert streams.finish() == [{answer} for answer in streams.expected]
    until(served.is_at_rest, "two servers at rest")
    assert len(served.servers()) == 2


@pytest.mark.slow
def test_new_weights_are_loaded_by_every_server(
    served: Served, client: openai.OpenAI, model: Path, tmp_path: Path
) -> None:
    until(served.is_at_rest, "rest")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    before = streamed(client, 0)

    def load(path: Path) -> Any:
        url = f"{served.address}/admin/weights"
        return httpx2.post(url, json={"path": str(path)}, headers=headers, timeout=60)

    assert load(tmp_path / "nowhere").status_code == 400
    assert load(Path("/etc")).status_code == 403
    loaded = load(make_model(tmp_path / "other", seed=1))
    assert loaded.status_code == 200 and len(loaded.json()["servers"]) == 2
    assert streamed(client, 0) != before
    assert load(model).status_code == 200
    assert streamed(client, 0) == before


@given(nonsense())
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nonsense_is_never_our_fault(served: Served, asked: tuple[str, bytes]) -> None:
    path, content = asked
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx2.post(f"{served.address}{path}", content=content, headers=headers, timeout=60)
    assert answer.status_code in (200, 400, 404, 429), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_after_all_the_nonsense_nothing_is_left(served: Served) -> None:
    until(served.is_at_rest, "rest")
    with client_of(served) as client:
        assert client.completions.create(model=MODEL, prompt="abc", seed=1).choices


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_ends_everything(model: Path, number: signal.Signals) -> None:
    with serving(model) as served, ThreadPoolExecutor(1) as threads, client_of(served) as client:
        family = served.descendants()
        servers = [int(server["pid"]) for server in served.servers()]
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)  # The request is under way until they go on.
        pending = threads.submit(streamed, client, 1)
        until(lambda: served.figure("queue_depth")[""] == 1, "the request")
        served.process.send_signal(number)
        for pid in servers:
            os.kill(pid, signal.SIGCONT)
        assert len(pending.result(timeout=30)) > 0
        assert served.process.wait(timeout=30) == 0
        until(lambda: not any(map(is_alive, family)), "the end of its processes", timeout_s=10)


@pytest.mark.slow
def test_a_gateway_that_is_killed_takes_its_servers_with_it(model: Path) -> None:
    with serving(model) as served:
        family = served.descendants()
        assert len(family) >= 2
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait(timeout=10)
        until(lambda: not any(map(is_alive, family)), "the end of its processes", timeout_s=20)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def refused(*arguments: str) -> str:
    """What the command says to a mistake of its user."""
    command = [sys.executable, "-m", "kintsugi", "serve", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert all(line.startswith("starting ") for line in result.stdout.splitlines()), result.stdout
    return result.stderr


def test_a_folder_that_is_no_model_is_the_users_mistake(tmp_path: Path) -> None:
    assert refused(str(tmp_path), "--port", "0").startswith("error: expected the file config.json")


@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "int8"), ("--max-length", "1000"), ("--strategy", "best")]
)
def test_an_option_that_is_not_there_is_named(model: Path, option: str, value: str) -> None:
    assert refused(str(model), option, value).startswith(f"error: expected `{option}`")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_a_model_that_no_server_can_serve_ends_the_gateway_with_the_reason(model: Path) -> None:
    command = [sys.executable, "-m", "kintsugi", "serve", str(model), "--port", "0", "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "expected an accelerator for `--device cuda`" in result.stderr


@pytest.mark.slow
def test_weights_that_give_no_numbers_end_the_gateway_with_the_reason(tmp_path: Path) -> None:
    damaged = make_model(tmp_path / "damaged")
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-400, os.SEEK_END)
        file.write(b"\xff" * 400)
    command = [sys.executable, "-m", "kintsugi", "serve", str(damaged), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert result.returncode not in (0, 2)
    assert "no generation server took the model's weights" in result.stderr
    assert "the servers' logs are in" in result.stdout


@pytest.mark.slow
def test_a_port_that_is_taken_is_the_users_mistake(served: Served, model: Path) -> None:
    port = served.address.rpartition(":")[2]
    assert refused(str(model), "--port", port).startswith(f"error: can not listen on 127.0.0.1:{port}")
