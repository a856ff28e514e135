from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from kintsugi.errors import DeviceError, DeviceOutOfMemory, IntegrityError, RefusedError, UserError
from kintsugi.generation.engine import Engine
from kintsugi.generation.server import Server
from kintsugi.messages import (
    Body,
    Generate,
    Generated,
    LoadWeights,
    Ping,
    WeightsLoaded,
)
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.transport import Delivery
from kintsugi.types import Finish, Peer, Sampling, WeightManifest, WeightSource
from kintsugi.wire import Envelope, MessageKind

_CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=14,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    qk_norm=True,
)
_PROMPT = np.array([1, 10, 2, 11], dtype="<i4").tobytes()


class _FakeShell:
    """Requests go in by `ask`; replies and errors are kept by the request's sequence number."""

    process = "server-0"

    def __init__(self) -> None:
        self._requests: deque[Delivery] = deque()
        self._num_requests = 0
        self.replies: dict[int, Body] = {}
        self.errors: dict[int, BaseException] = {}
        self.load = 0.0

    def ask(self, body: Body) -> int:
        self._num_requests += 1
        envelope = Envelope("job", 0, "manager-0", "a", self._num_requests, MessageKind.REQUEST)
        self._requests.append(Delivery(envelope, body, (), Peer("manager-0", "a", "host-0", "", b""), b""))
        return self._num_requests

    def next_request(self, timeout_s: float) -> Delivery | None:
        return self._requests.popleft() if self._requests else None

    def take_all(self) -> list[Delivery]:
        deliveries = list(self._requests)
        self._requests.clear()
        return deliveries

    def reply(self, delivery: Delivery, body: Body) -> None:
        assert delivery.envelope.sequence not in self.replies, "answered twice"
        self.replies[delivery.envelope.sequence] = body

    def fail(self, delivery: Delivery, error: BaseException) -> None:
        assert delivery.envelope.sequence not in self.errors, "answered twice"
        self.errors[delivery.envelope.sequence] = error

    def set_load(self, load: float) -> None:
        self.load = load


class _Setup:
    """A server over a small engine; versions are whatever `weights` gives for them."""

    def __init__(self, weights: Callable[[int], Mapping[str, Tensor]] | None = None) -> None:
        model = Transformer(_CONFIG)
        self.shell = _FakeShell()
        self.engine = Engine(model, slots=4, max_length=24, end_token_ids=[13])
        self._weights = weights or _weights
        self.server = Server(self.shell, self.engine, fetch=self._fetch)
        self.fetched: list[int] = []

    def _fetch(self, manifest: WeightManifest, sources: Sequence[WeightSource]) -> Mapping[str, Tensor]:
        self.fetched.append(manifest.version)
        return self._weights(manifest.version)

    def load(self, version: int) -> int:
        return self.shell.ask(LoadWeights(WeightManifest(version, version, (), 0, f"digest-{version}"), ()))

    def run(self) -> None:
        self.server.turn(0)
        while not self.engine.idle:
            self.server.turn(0)


def _weights(version: int) -> Mapping[str, Tensor]:
    model = Transformer(_CONFIG)
    initialize(model, version)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _generate(
    ticket: str, *, version: int = 1, samples: tuple[int, ...] = (), num_samples: int = 6
) -> Generate:
    sampling = Sampling(max_new_tokens=8, num_samples=num_samples, seed=5)
    return Generate(ticket, 0, _PROMPT, sampling, version, samples)


def test_a_request_is_answered_when_all_of_its_samples_are_done() -> None:
    setup = _Setup()
    setup.load(1)
    asked = setup.shell.ask(_generate("a"))
    setup.run()
    generated = setup.shell.replies[asked]
    assert isinstance(generated, Generated)
    assert (generated.ticket, generated.turn, generated.server) == ("a", 0, "server-0")
    assert [completion.sample for completion in generated.completions] == list(range(6))
    for completion in generated.completions:
        tokens = np.frombuffer(completion.tokens, dtype="<i4")
        assert len(completion.logprobs) == len(completion.versions) == len(completion.tokens)
        assert set(np.frombuffer(completion.versions, dtype="<i4")) == {1}
        assert (np.frombuffer(completion.logprobs, dtype="<f4") <= 0).all()
        assert (completion.finish is Finish.EOS) == (tokens[-1] == 13)
    assert len({completion.tokens for completion in generated.completions}) > 1
    assert setup.shell.load == 0


def test_a_subset_of_the_samples_has_the_bits_of_the_whole() -> None:
    setup = _Setup()
    setup.load(1)
    whole, part = setup.shell.ask(_generate("a")), setup.shell.ask(_generate("a", samples=(4, 2)))
    setup.run()
    all_of_it, some_of_it = setup.shell.replies[whole], setup.shell.replies[part]
    assert isinstance(all_of_it, Generated) and isinstance(some_of_it, Generated)
    assert some_of_it.completions == (all_of_it.completions[4], all_of_it.completions[2])


def test_a_request_for_a_version_that_is_not_there_is_refused() -> None:
    setup = _Setup()
    early = setup.shell.ask(_generate("a", version=0))
    setup.load(1)
    late = setup.shell.ask(_generate("a", version=2))
    setup.run()
    assert isinstance(setup.shell.errors[early], RefusedError)
    assert str(setup.shell.errors[late]) == "server at version 1, expected at least 2"


def test_loaded_weights_are_acknowledged_by_version_and_digest() -> None:
    setup = _Setup()
    asked = setup.load(3)
    setup.run()
    assert setup.shell.replies[asked] == WeightsLoaded(3, "digest-3", ("server-0",))
    assert setup.engine.version == 3


def test_weights_that_it_holds_are_acknowledged_without_fetching_them_again() -> None:
    setup = _Setup()
    asked = [setup.load(version) for version in (3, 3, 4, 3)]
    setup.run()
    assert [setup.shell.replies[each] for each in asked] == [
        WeightsLoaded(version, f"digest-{version}", ("server-0",)) for version in (3, 3, 4, 3)
    ]
    assert setup.fetched == [3, 4, 3]


def test_a_request_that_is_asked_again_is_computed_once_and_both_are_answered() -> None:
    setup = _Setup()
    setup.load(1)
    first = setup.shell.ask(_generate("a"))
    setup.server.turn(0)
    num_requests = setup.engine.num_requests
    setup.load(1)
    again = setup.shell.ask(msgspec.structs.replace(_generate("a"), timeout_s=7.0))
    setup.server.turn(0)
    assert setup.engine.num_requests == num_requests
    setup.run()
    assert isinstance(setup.shell.replies[first], Generated)
    assert setup.shell.replies[again] == setup.shell.replies[first]


def test_a_request_that_is_asked_again_with_other_weights_starts_over() -> None:
    setup = _Setup()
    setup.load(1)
    first = setup.shell.ask(_generate("a"))
    for _ in range(len(_PROMPT) // 4 + 1):
        setup.server.turn(0)
    setup.load(2)
    again = setup.shell.ask(_generate("a"))
    setup.run()
    before, after = setup.shell.replies[first], setup.shell.replies[again]
    assert isinstance(before, Generated) and isinstance(after, Generated)
    assert any(np.frombuffer(each.versions, dtype="<i4")[0] == 1 for each in before.completions)
    assert all(set(np.frombuffer(each.versions, dtype="<i4")) == {2} for each in after.completions)


def test_weights_that_do_not_arrive_as_sent_leave_the_old_version_in_place() -> None:
    def weights(version: int) -> Mapping[str, Tensor]:
        if version == 2:
            raise IntegrityError("expected xxh3 00, got ff")
        return _weights(version)

    setup = _Setup(weights)
    setup.load(1)
    damaged = setup.load(2)
    asked = setup.shell.ask(_generate("a"))
    setup.run()
    assert isinstance(setup.shell.errors[damaged], IntegrityError)
    assert asked in setup.shell.replies


@pytest.mark.parametrize(
    "impossible",
    [
        Generate("a", 0, b"", Sampling(), 1),
        Generate("a", 0, b"\x00\x00\x00", Sampling(), 1),
        Generate("a", 0, _PROMPT, Sampling(num_samples=0), 1),
        Generate("a", 0, _PROMPT, Sampling(num_samples=-2), 1),
        Generate("a", 0, _PROMPT, Sampling(), 1, (2, 2)),
        Generate("a", 0, _PROMPT, Sampling(stop_token_ids=(1 << 63,)), 1),
    ],
)
def test_an_impossible_request_is_refused_and_the_next_one_served(impossible: Generate) -> None:
    setup = _Setup()
    setup.load(1)
    bad, good = setup.shell.ask(impossible), setup.shell.ask(_generate("b"))
    setup.run()
    assert isinstance(setup.shell.errors[bad], UserError)
    assert good in setup.shell.replies


def test_a_message_that_is_not_its_business_is_refused() -> None:
    setup = _Setup()
    asked = setup.shell.ask(Ping())
    setup.run()
    assert isinstance(setup.shell.errors[asked], RefusedError)


@pytest.mark.parametrize("num_samples", [1, 9])
def test_a_model_that_overflows_fails_the_request_and_not_the_server(num_samples: int) -> None:
    def weights(version: int) -> Mapping[str, Tensor]:
        good = _weights(1)
        broken = {"model.norm.weight": torch.full_like(good["model.norm.weight"], float("inf"))}
        return {**good, **broken} if version == 2 else good

    setup = _Setup(weights)
    setup.load(2)
    broken = setup.shell.ask(_generate("a", num_samples=num_samples))
    setup.run()
    assert isinstance(setup.shell.errors[broken], IntegrityError)
    setup.load(3)
    asked = setup.shell.ask(_generate("a", num_samples=num_samples))
    setup.run()
    assert asked in setup.shell.replies and setup.shell.load == 0


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), DeviceOutOfMemory),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceError),
        (RuntimeError("shapes do not match"), RuntimeError),
    ],
)
@pytest.mark.parametrize("moment", ["loading", "stepping"])
def test_a_device_that_fails_ends_the_server_by_its_own_name(
    raised: RuntimeError, kind: type[Exception], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise raised

    setup = _Setup()
    setup.load(1)
    if moment == "loading":
        monkeypatch.setattr(setup.engine, "load", fails)
    else:
        setup.server.turn(0)
        setup.shell.ask(_generate("t"))
        monkeypatch.setattr(setup.engine, "step", fails)
    with pytest.raises(kind) as caught:
        setup.server.turn(0)
    assert type(caught.value) is kind and str(caught.value) == str(raised)
