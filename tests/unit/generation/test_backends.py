"""Servers of other makes in the place of the engine: what they are asked, and what is believed of their answers."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kintsugi.config.schema import Config, GenerationSection, ModelSection, NewModel
from kintsugi.errors import ConfigError, DataError, IntegrityError, UserError, WorldError
from kintsugi.generation.backend import Running
from kintsugi.generation.backends import open_backend, remote
from kintsugi.generation.backends.dialect import Dialect
from kintsugi.generation.backends.http import HttpClient
from kintsugi.generation.backends.remote import RemoteBackend
from kintsugi.generation.backends.sglang import SGLang
from kintsugi.generation.backends.vllm import Vllm
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, Tokens
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.types import FinishReason, SamplingParams
from tests.unit.generation.fake_servers import (
    MAX_LENGTH,
    VOCAB_SIZE,
    FakeServer,
    FakeSGLang,
    FakeVllm,
    logprob,
    next_token,
)

ARCHITECTURE = ModelConfig(
    family="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=MAX_LENGTH,
    tie_embeddings=True,
)
END = 39
SECONDS = 20.0
"""For what should take milliseconds."""

Opened = Callable[..., RemoteBackend]


def weights(offset: int) -> dict[str, Tensor]:
    """Of a model whose next token is the sum of all tokens plus `offset`."""
    generator = torch.Generator().manual_seed(offset)
    tensors = {
        name: torch.randn(shape, generator=generator)
        for name, shape in parameter_shapes(ARCHITECTURE).items()
    }
    tensors["model.norm.weight"][0] = offset
    return tensors


def expected(tokens: list[int], count: int, *, offset: int) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens, offset=offset))
    return tokens[-count:]


def request(number: int = 0, prompt: tuple[int, ...] = (3, 5), **sampling: Any) -> GenerationRequest:
    sampling = {"max_new_tokens": 6, "ignore_end": True, **sampling}
    return GenerationRequest(
        (number, 0),
        prompt=np.array(prompt, np.int32),
        rng_key=7 + number,
        sampling=SamplingParams(**sampling),
    )


def finished(backend: RemoteBackend) -> list[GenerationOutput]:
    """All outputs, in the order of their requests."""
    outputs: list[GenerationOutput] = []
    while not backend.idle:
        outputs += backend.step()
    return sorted(outputs, key=lambda output: output.request.id)


def step_until(backend: RemoteBackend, is_so: Callable[[], bool]) -> None:
    for _ in range(int(SECONDS / remote.STEP_S)):
        if is_so():
            return
        assert backend.step() == []
    raise AssertionError("did not come about in time")


def has(backend: RemoteBackend, number: int, count: int) -> Callable[[], bool]:
    def is_so() -> bool:
        tokens = backend.produced((number, 0))
        return tokens is not None and len(tokens.ids) == count

    return is_so


def halfway(server: FakeServer, opened: Opened) -> RemoteBackend:
    """With two requests that have two tokens each and get no more."""
    backend = opened(server)
    server.release_after = 2
    backend.submit([request(), request(1, prompt=(1,))])
    for number in range(2):
        step_until(backend, has(backend, number, 2))
    return backend


@pytest.fixture(params=["vllm", "vllm 0.25", "vllm without plugin", "sglang", "sglang incremental"])
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    makes: dict[str, Callable[[], FakeServer]] = {
        "vllm": FakeVllm,
        "vllm 0.25": lambda: FakeVllm(labels=False),
        "vllm without plugin": lambda: FakeVllm(plugin=False),
        "sglang": FakeSGLang,
        "sglang incremental": lambda: FakeSGLang(incremental=True),
    }
    with makes[request.param]() as server:
        yield server


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with FakeVllm() as server:
        yield server


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    backends: list[RemoteBackend] = []

    def open_it(server: FakeServer, *, offset: int | None = 1, **options: Any) -> RemoteBackend:
        dialect: Dialect = Vllm() if isinstance(server, FakeVllm) else SGLang()
        client = HttpClient(server.url)
        settings: dict[str, Any] = {
            "architecture": ARCHITECTURE,
            "end_token_ids": (END,),
            "text_of": lambda tokens: "".join(chr(ord("A") + token) for token in tokens),
            "slots": 4,
            "max_length": MAX_LENGTH,
            "folder": tmp_path / "weights",
            "answer": lambda tensors: [logprob(token, 1.0) for token in range(VOCAB_SIZE)],
            **options,
        }
        try:
            backend = RemoteBackend(client, dialect=dialect, **settings)
        except Exception:
            client.close()
            raise
        backends.append(backend)
        if offset is not None:
            backend.load(offset, weights(offset))
        return backend

    yield open_it
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_tokens_come_with_logprobs_at_the_temperature_and_versions(
    server: FakeServer, opened: Opened, temperature: float
) -> None:
    backend = opened(server)
    backend.submit([request(temperature=temperature)])
    (output,) = finished(backend)
    tokens = expected([3, 5], 6, offset=1)
    assert output.finish is FinishReason.LENGTH
    assert output.tokens.ids.tolist() == tokens
    assert output.tokens.logprobs.tolist() == pytest.approx([logprob(token, temperature) for token in tokens])
    assert output.tokens.versions.tolist() == [1] * 6
    assert output.tokens.top_ids.shape == (6, 0)


def test_the_most_likely_tokens_come_along(server: FakeServer, opened: Opened) -> None:
    backend = opened(server)
    backend.submit([request(top_logprobs=3)])
    (output,) = finished(backend)
    assert output.tokens.top_ids.tolist() == [[0, 1, 2]] * 6
    assert output.tokens.top_logprobs.shape == (6, 3)


def test_what_was_produced_elsewhere_is_continued_not_sampled_again(
    server: FakeServer, opened: Opened
) -> None:
    backend = opened(server)
    before = Tokens.none()._replace(
        ids=np.array([9, 8], np.int32),
        logprobs=np.array([-1, -2], np.float32),
        versions=np.array([0, 0], np.int32),
        top_ids=np.empty((2, 0), np.int32),
        top_logprobs=np.empty((2, 0), np.float32),
    )
    backend.submit([GenerationRequest((0, 0), request().prompt, 7, request().sampling, before)])
    (output,) = finished(backend)
    assert server.orders[-1].tokens == [3, 5, 9, 8] and server.orders[-1].max_new_tokens == 4
    assert output.tokens.ids.tolist() == [9, 8, *expected([3, 5, 9, 8], 4, offset=1)]
    assert output.tokens.versions.tolist() == [0, 0, 1, 1, 1, 1]


def test_an_end_token_ends_and_a_stop_token_too(server: FakeServer, opened: Opened) -> None:
    tokens = expected([3, 5], 6, offset=1)
    backend = opened(server, end_token_ids=(tokens[3],))
    backend.submit(
        [request(ignore_end=False), request(1, stop_token_ids=(tokens[1],)), request(2, ignore_end=True)]
    )
    ended, stopped, ignored = finished(backend)
    assert (ended.tokens.ids.tolist(), ended.finish) == (tokens[:4], FinishReason.EOS)
    assert (stopped.tokens.ids.tolist(), stopped.finish) == (tokens[:2], FinishReason.EOS)
    assert (ignored.tokens.ids.tolist(), ignored.finish) == (tokens, FinishReason.LENGTH)


def test_a_stop_text_ends_what_the_server_would_go_on_with(server: FakeServer, opened: Opened) -> None:
    tokens = expected([3, 5], 6, offset=1)
    text = "".join(chr(ord("A") + token) for token in tokens)
    backend = opened(server)
    server.release_after = 4
    backend.submit([request(stop=(text[1:3],))])
    (output,) = finished(backend)
    assert (output.tokens.ids.tolist(), output.finish) == (tokens[:3], FinishReason.STOP)


def test_at_most_as_many_streams_are_open_as_there_are_slots(server: FakeServer, opened: Opened) -> None:
    backend = opened(server, slots=3)
    step_until(backend, lambda: server.num_running == 0)  # The probe has ended.
    server.most_running = 0
    backend.submit([request(number) for number in range(8)])
    assert backend.num_requests == 8
    assert len(finished(backend)) == 8 and server.most_running == 3


def test_an_interrupted_request_gives_what_it_has_and_leaves_the_server(
    server: FakeServer, opened: Opened
) -> None:
    backend = opened(server)
    server.release_after = 2
    backend.submit([request(), request(1)])
    step_until(backend, has(backend, 0, 2))
    output = backend.interrupt((0, 0))
    assert output is not None and output.finish is None
    assert output.tokens.ids.tolist() == expected([3, 5], 2, offset=1)
    assert backend.interrupt((0, 0)) is None and backend.produced((0, 0)) is None
    step_until(backend, lambda: server.num_running == 1)
    server.release()
    assert [other.request.id for other in finished(backend)] == [(1, 0)]


def test_a_waiting_request_can_be_interrupted(server: FakeServer, opened: Opened) -> None:
    backend = opened(server)
    backend.submit([request()])
    output = backend.interrupt((0, 0))
    assert output is not None and len(output.tokens.ids) == 0 and backend.idle


def test_new_weights_reach_running_requests_between_two_tokens(server: FakeServer, opened: Opened) -> None:
    backend = halfway(server, opened)
    backend.load(2, weights(2))
    server.release()
    first, last = finished(backend)
    old = expected([3, 5], 2, offset=1)
    assert first.tokens.ids.tolist() == [*old, *expected([3, 5, *old], 4, offset=2)]
    assert first.tokens.versions.tolist() == last.tokens.versions.tolist() == [1, 1, 2, 2, 2, 2]
    assert backend.version == 2


def num_in_memory() -> int:
    """Weight files in memory of this process."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("/memfd:model") for link in links)


@pytest.mark.parametrize("sees_memory", [True, False])
def test_weights_stay_neither_in_memory_nor_on_disk(
    server: FakeServer, opened: Opened, tmp_path: Path, sees_memory: bool
) -> None:
    gc.collect()
    before = num_in_memory()  # What a failed request of an earlier test holds is not this test's.
    server.sees_memory = sees_memory
    backend = opened(server)
    staged = backend.stage(weights(2))
    assert (staged.folder / "model.safetensors").is_symlink() is sees_memory
    assert num_in_memory() - before == sees_memory
    backend.load(2, staged)
    assert list((tmp_path / "weights").iterdir()) == []
    assert num_in_memory() == before
    assert server.offset == 2 and backend.version == 2


def test_weights_that_are_not_wanted_any_more_are_freed(vllm: FakeVllm, opened: Opened) -> None:
    backend = opened(vllm)
    staged = backend.stage(weights(2))
    folder = staged.folder
    assert folder.exists()
    del staged
    gc.collect()
    assert not folder.exists()


def test_files_that_a_dead_process_left_are_removed(vllm: FakeVllm, opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "weights" / "weights-0").mkdir(parents=True)
    (tmp_path / "weights" / "weights-0" / "model.safetensors").symlink_to("/proc/1/fd/99")
    opened(vllm, offset=None)
    assert not (tmp_path / "weights" / "weights-0").exists()


@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_vllm_freezes_streams_and_keeps_their_cache_as_asked(
    vllm: FakeVllm, opened: Opened, running: Running
) -> None:
    backend = halfway(vllm, opened)
    num_orders = len(vllm.orders)
    backend.load(2, weights(2), running=running)
    vllm.release()
    assert [output.tokens.versions.tolist() for output in finished(backend)] == [[1, 1, 2, 2, 2, 2]] * 2
    probes = [order for order in vllm.orders[num_orders:] if order.max_new_tokens == 1]
    assert vllm.cleared[-1] is (running == "recompute") and len(vllm.orders) == num_orders + len(probes)


def test_requests_share_no_cache_entries_with_those_of_other_weights(vllm: FakeVllm, opened: Opened) -> None:
    backend = opened(vllm)
    backend.submit([request()])
    finished(backend)
    backend.load(2, weights(2))
    backend.submit([request(1)])
    finished(backend)
    old, new = vllm.salts[-3], vllm.salts[-1]
    assert old.endswith(":1") and new.endswith(":2")


def test_a_withheld_update_is_found_though_the_server_reports_the_new_version(
    vllm: FakeVllm, opened: Opened
) -> None:
    backend = halfway(vllm, opened)
    vllm.fault = "withholds weights"
    with pytest.raises(IntegrityError, match=r"expected .*:2 in worker 0, got an unfinished update"):
        backend.load(2, weights(2))
    assert vllm.label.endswith(":2") and vllm.offset == 1, "the fault fired"
    assert backend.version == 1 and backend.num_requests == 2
    with pytest.raises(WorldError, match="did not take new weights"):
        backend.step()
    assert [
        produced.versions.tolist() for number in range(2) if (produced := backend.produced((number, 0)))
    ] == [[1, 1]] * 2
    vllm.fault = None
    backend.load(2, weights(2))
    vllm.release()
    for output in finished(backend):
        assert output.tokens.versions.tolist() == [1, 1, 2, 2, 2, 2]


def test_a_server_that_computes_something_else_is_found_and_nothing_of_it_is_used(
    server: FakeServer, opened: Opened
) -> None:
    answers = {1: 0.0, 2: 3.0}

    def answer(tensors: Mapping[str, Tensor]) -> list[float]:
        shift = answers[int(tensors["model.norm.weight"][0])]
        return [logprob(token, 1.0) + shift for token in range(VOCAB_SIZE)]

    backend = opened(server, answer=answer)
    backend.submit([request()])
    server.release_after = 2
    step_until(backend, has(backend, 0, 2))
    with pytest.raises(IntegrityError, match=r"does not compute with .*:2: log-probabilities .* differ by 3"):
        backend.load(2, weights(2))
    produced = backend.produced((0, 0))
    assert backend.version == 1 and produced is not None and produced.versions.tolist() == [1, 1]


def test_an_update_that_a_dead_process_left_unfinished_does_not_stand_in_the_way(
    vllm: FakeVllm, opened: Opened
) -> None:
    vllm.is_updating = True
    assert opened(vllm).version == 1 and vllm.offset == 1
    assert vllm.calls.count("/start_weight_update") == 2


def test_a_worker_that_read_other_bytes_is_found(vllm: FakeVllm, opened: Opened) -> None:
    backend = opened(vllm)
    staged = backend.stage(weights(2))
    (path,) = staged.digests
    with Path(path).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(IntegrityError, match="has read other weights than it was given"):
        backend.load(2, staged)


def test_a_continued_stream_draws_other_noise(vllm: FakeVllm, opened: Opened) -> None:
    seeds = {remote._seed(request()), remote._seed(request(1))}
    backend = opened(vllm)
    vllm.release_after = 2
    backend.submit([request()])
    step_until(backend, has(backend, 0, 2))
    output = backend.interrupt((0, 0))
    assert output is not None
    seeds.add(remote._seed(output.resume()))
    assert len(seeds) == 3 and all(0 <= seed < 1 << 31 for seed in seeds)


def test_a_server_that_is_not_there_is_named(server: FakeServer, opened: Opened) -> None:
    server.close()
    with pytest.raises(WorldError, match=rf"{server.url} does not answer.*"):
        opened(server)


def test_a_server_that_dies_in_the_middle_of_an_answer_is_named(server: FakeServer, opened: Opened) -> None:
    backend = opened(server)
    server.fault = "dies"
    backend.submit([request()])
    with pytest.raises(WorldError, match=server.url):
        finished(backend)
    assert server.orders


def test_a_server_that_is_gone_when_weights_come_is_named(server: FakeServer, opened: Opened) -> None:
    backend = opened(server)
    server.close()
    with pytest.raises(WorldError, match=rf"{server.url} does not answer"):
        backend.load(2, weights(2))


def test_a_server_that_hangs_is_asked_for_its_health_and_given_up(
    server: FakeServer, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    backend = opened(server, clock=clock)
    server.release_after = 1
    backend.submit([request()])
    step_until(backend, has(backend, 0, 1))
    num_calls = len(server.calls)
    clock.advance(remote.CHECK_EVERY_S + 1)
    backend.step()
    assert server.calls[num_calls:] in (["/health"], ["/health_generate"])
    module = "kintsugi.generation.backends." + ("vllm" if isinstance(server, FakeVllm) else "sglang")
    monkeypatch.setattr(f"{module}.HEALTH_TIMEOUT_S", 0.05)
    server.fault = "hangs"
    clock.advance(remote.CHECK_EVERY_S + 1)
    with pytest.raises(WorldError, match=rf"waited .* for {server.url}: its health"):
        backend.step()


def test_a_server_that_is_well_and_produces_nothing_is_given_up(server: FakeServer, opened: Opened) -> None:
    clock = VirtualClock()
    backend = opened(server, clock=clock)
    server.release_after = 1
    backend.submit([request()])
    step_until(backend, has(backend, 0, 1))
    clock.advance(remote.LONGEST_SILENCE_S + 1)
    with pytest.raises(WorldError, match=rf"{server.url} has produced nothing for 121 s, with 1 requests"):
        backend.step()


def test_tokens_without_logprobs_are_not_believed(server: FakeServer, opened: Opened) -> None:
    backend = opened(server)
    server.fault = "drops logprobs"
    backend.submit([request()])
    with pytest.raises(IntegrityError, match=r"expected a log-probability for each of"):
        finished(backend)


def test_a_server_that_was_restarted_in_between_is_found_before_its_first_token(
    server: FakeServer, opened: Opened
) -> None:
    backend = opened(server)
    server.forget()
    num_orders = len(server.orders)
    backend.submit([request()])
    with pytest.raises(
        WorldError, match=r"has weights (default|without a label), expected .*:1: it was restarted"
    ):
        backend.step()
    assert len(server.orders) == num_orders


def test_weights_that_a_server_did_not_take_are_found(server: FakeServer, opened: Opened) -> None:
    backend = opened(server)
    server.fault = "forgets weights"
    with pytest.raises(IntegrityError, match=r"does not have the weights that it was given: .* differs"):
        backend.load(2, weights(2))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("plugin", [True, False])
def test_one_matrix_that_vllm_did_not_take_is_found(opened: Opened, name: str, plugin: bool) -> None:
    with FakeVllm(plugin=plugin) as vllm:
        backend = opened(vllm)
        vllm.keeps = name
        with pytest.raises(
            IntegrityError, match=r"(lm_head|model.layers.1.mlp.(gate_)?up_proj).weight differs"
        ):
            backend.load(2, weights(2))


def test_logprobs_that_are_not_at_the_temperature_are_refused_at_the_start(
    server: FakeServer, opened: Opened
) -> None:
    server.scales = False
    with pytest.raises(ConfigError, match=r"expected log-probabilities at the temperature .*: start it with"):
        opened(server)


def test_a_sequence_longer_than_the_server_takes_is_refused_at_the_start(
    server: FakeServer, opened: Opened
) -> None:
    with pytest.raises(ConfigError, match=r"`generation.max_length`: expected at most 64 tokens.*got 65"):
        opened(server, max_length=65)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"plugin": False, "labels": False}, "--worker-extension-cls kintsugi_vllm.WeightReceipts"),
    ],
)
def test_a_vllm_that_was_started_otherwise_is_refused_with_the_option_it_needs(
    opened: Opened, options: dict[str, bool], hint: str
) -> None:
    with FakeVllm(**options) as server, pytest.raises(ConfigError, match=hint):
        opened(server)


def test_what_the_server_refuses_is_the_users_mistake_and_no_concern_of_others(
    server: FakeServer, opened: Opened
) -> None:
    backend = opened(server)
    server.release_after = 1
    backend.submit([request()])
    step_until(backend, has(backend, 0, 1))
    server.fault = "refuses"
    backend.submit([request(1)])
    while not (refused := backend.step()):
        pass
    assert [output.request.id for output in refused] == [(1, 0)]
    assert isinstance(refused[0].user_error, UserError) and "too clever" in str(refused[0].user_error)
    server.release()
    (output,) = finished(backend)
    assert output.user_error is None and output.tokens.ids.tolist() == expected([3, 5], 6, offset=1)


def test_a_request_that_ends_by_an_error_in_its_stream_is_refused_alone(
    server: FakeServer, opened: Opened
) -> None:
    backend = opened(server)
    server.fault = "refuses late"
    backend.submit([request()])
    (output,) = finished(backend)
    assert isinstance(output.user_error, UserError) and "too late" in str(output.user_error)


def test_what_waits_is_found_without_a_search(vllm: FakeVllm, opened: Opened) -> None:
    """A run hands over thousands of samples, and each is asked for again and again while it waits."""
    backend = opened(vllm, slots=1)
    backend.submit([request(number) for number in range(20_000)])
    start = time.process_time()
    for number in range(20_000):
        assert backend.produced((number, 0)) is not None
    for number in reversed(range(20_000)):
        assert backend.interrupt((number, 0)) is not None
    assert time.process_time() - start < 2.0 and backend.idle


@pytest.mark.parametrize("is_deaf", [False, True])
def test_no_request_is_lost_where_weights_do_not_come_and_none_goes_on_before_they_do(
    server: FakeServer, opened: Opened, monkeypatch: pytest.MonkeyPatch, is_deaf: bool
) -> None:
    if is_deaf and isinstance(server, FakeVllm):
        pytest.skip("streams of vLLM are frozen, not ended")
    backend = halfway(server, opened)
    server.fault, server.num_deaf = None if is_deaf else "takes no weights", int(is_deaf)
    monkeypatch.setattr(remote, "CALL_TIMEOUT_S", 0.2)
    with pytest.raises(WorldError):
        backend.load(2, weights(2))
    monkeypatch.undo()
    assert backend.num_requests == 2 and all(has(backend, number, 2)() for number in range(2))
    with pytest.raises(WorldError, match="did not take new weights"):
        backend.step()
    server.fault, server.num_deaf = None, 0
    backend.load(2, weights(2))
    server.release()
    assert [output.tokens.versions.tolist() for output in finished(backend)] == [[1, 1, 2, 2, 2, 2]] * 2


def test_one_request_that_is_refused_refuses_all(server: FakeServer, opened: Opened) -> None:
    backend = opened(server)
    with pytest.raises(DataError, match="max_length"):
        backend.submit([request(), request(1, max_new_tokens=MAX_LENGTH)])
    assert backend.idle


@pytest.mark.parametrize(
    "sampling", [{"repetition_penalty": 1.5}, {"logit_bias": ((3, 1.0),)}, {"top_p": 0.5}, {"top_k": 3}]
)
def test_what_would_bend_the_reported_logprobs_is_refused(
    server: FakeServer, opened: Opened, sampling: dict[str, Any]
) -> None:
    backend = opened(server)
    (name,) = sampling
    if isinstance(server, FakeSGLang) and name in ("top_p", "top_k"):
        backend.submit([request(**sampling)])
        assert len(finished(backend)) == 1
    else:
        with pytest.raises(UserError, match=rf"expected no `{name}`"):
            backend.submit([request(**sampling)])


def test_a_run_opens_the_server_that_its_configuration_names(tmp_path: Path) -> None:
    with FakeVllm() as first, FakeVllm() as second:
        config = Config(
            name="run",
            model=ModelSection(new=NewModel(alphabet="0123456789")),
            generation=GenerationSection(backend="vllm", urls=(first.url, second.url), max_length=MAX_LENGTH),
        )
        backend = open_backend(config, 1, folder=tmp_path)
        backend.close()
        assert second.orders and not first.orders and backend.version == -1


def test_a_server_that_does_not_answer_leaves_no_connection_open(tmp_path: Path) -> None:
    config = Config(
        name="run",
        model=ModelSection(new=NewModel()),
        generation=GenerationSection(backend="sglang", urls=("http://127.0.0.1:1",)),
    )
    with pytest.raises(WorldError, match=r"http://127\.0\.0\.1:1 does not answer"):
        open_backend(config, 0, folder=tmp_path)
