from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from kintsugi.errors import DeviceError, DeviceOutOfMemory, IntegrityError, RefusedError, UserError
from kintsugi.generation.server import PROGRESS_S, Server
from kintsugi.messages import (
    Body,
    Cancel,
    Generate,
    Generated,
    Interrupt,
    LoadWeights,
    Ok,
    Ping,
    Produced,
    WeightsLoaded,
)
from kintsugi.runtime import VirtualClock
from kintsugi.transport import Delivery
from kintsugi.types import Completion, Finish, Peer, Sampling, WeightManifest, WeightSource
from kintsugi.wire import Envelope, MessageKind
from tests.unit.generation.fake_backend import END, FakeBackend

Policy = Literal["keep", "recompute", "interrupt"]
_PROMPT = np.array([1, 10, 2, 11], dtype="<i4").tobytes()


class _FakeShell:
    """Requests go in by `ask`; replies and errors are kept by the request's sequence number."""

    process = "server-0"

    def __init__(self) -> None:
        self._requests: deque[Delivery] = deque()
        self._num_requests = 0
        self.replies: dict[int, Body] = {}
        self.errors: dict[int, BaseException] = {}
        self.sent: list[tuple[str, Produced]] = []
        self.load = 0.0
        self.gauges: dict[str, float] = {}

    def ask(self, body: Body, *, asker: str = "manager-0") -> int:
        self._num_requests += 1
        kind = MessageKind.ONE_WAY if isinstance(body, Cancel) else MessageKind.REQUEST
        envelope = Envelope("job", 0, asker, "a", self._num_requests, kind)
        self._requests.append(Delivery(envelope, body, (), Peer(asker, "a", "host-0", "", b""), b""))
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

    def send(self, process: str, body: Body) -> None:
        assert isinstance(body, Produced)
        self.sent.append((process, body))

    def report(self, *, load: float, gauges: dict[str, float]) -> None:
        self.load, self.gauges = load, gauges

    def generated(self, asked: int) -> Generated:
        answer = self.replies[asked]
        assert isinstance(answer, Generated)
        return answer

    def told(self, number: int, *, asker: str = "manager-0") -> dict[int, list[int]]:
        """What was said of a request, joined as it came; a repetition is told again."""
        samples: dict[int, list[int]] = {}
        for process, body in self.sent:
            for fragment in body.fragments.get(number, ()) if process == asker else ():
                known = samples.setdefault(fragment.sample, [])
                assert fragment.offset in (0, len(known)), "a token is missing"
                known[fragment.offset :] = array("i", fragment.tokens)
        return samples


class _Setup:
    """A server over a back end without a model, on a clock that moves a second with each step."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.shell = _FakeShell()
        self.backend = FakeBackend()
        self.server = Server(self.shell, self.backend, fetch=self._fetch, clock=self.clock)
        self.fetched: list[int] = []
        self.damaged = 0

    def _fetch(self, manifest: WeightManifest, sources: Sequence[WeightSource]) -> Mapping[str, Tensor]:
        self.fetched.append(manifest.version)
        if manifest.version == self.damaged:
            raise IntegrityError("expected xxh3 00, got ff")
        return {}

    def load(self, version: int, *, running: Policy = "keep") -> int:
        manifest = WeightManifest(version, version, (), 0, f"digest-{version}")
        return self.shell.ask(LoadWeights(manifest, (), running))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.server.turn(0)
            self.clock.advance(1.0)

    def run(self) -> None:
        self.turn()
        while not self.backend.idle:
            self.turn()
        self.server.turn(0)


@pytest.fixture
def setup() -> _Setup:
    setup = _Setup()
    setup.load(1)
    return setup


def _generate(
    ticket: str,
    *,
    version: int = 1,
    samples: tuple[int, ...] = (),
    num_samples: int = 6,
    stream: bool = False,
    number: int = 0,
    max_new_tokens: int = 8,
    produced: tuple[Completion, ...] = (),
    endless: bool = False,
) -> Generate:
    sampling = Sampling(
        max_new_tokens=max_new_tokens, num_samples=num_samples, seed=5, top_logprobs=2, ignore_end=endless
    )
    return Generate(
        ticket, 0, _PROMPT, sampling, version, samples, stream=stream, number=number, produced=produced
    )


def _tokens(completion: Completion) -> list[int]:
    return array("i", completion.tokens).tolist()


def test_a_request_is_answered_when_all_of_its_samples_are_done(setup: _Setup) -> None:
    asked = setup.shell.ask(_generate("a"))
    setup.run()
    generated = setup.shell.generated(asked)
    assert (generated.ticket, generated.turn, generated.server) == ("a", 0, "server-0")
    assert [completion.sample for completion in generated.completions] == list(range(6))
    for completion in generated.completions:
        assert len(completion.logprobs) == len(completion.versions) == len(completion.tokens)
        assert len(completion.top_tokens) == len(completion.top_logprobs) == 2 * len(completion.tokens)
        assert set(array("i", completion.versions)) == {1}
        assert (completion.finish is Finish.EOS) == (_tokens(completion)[-1] == END)
    assert len({completion.tokens for completion in generated.completions}) > 1
    assert setup.shell.load == 0


def test_a_subset_of_the_samples_has_the_bits_of_the_whole(setup: _Setup) -> None:
    whole, part = setup.shell.ask(_generate("a")), setup.shell.ask(_generate("a", samples=(4, 2)))
    setup.run()
    all_of_it, some_of_it = setup.shell.generated(whole), setup.shell.generated(part)
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
    assert setup.backend.version == 3


def test_weights_that_it_holds_are_acknowledged_without_fetching_them_again() -> None:
    setup = _Setup()
    asked = [setup.load(version) for version in (3, 3, 4, 3)]
    setup.run()
    assert [setup.shell.replies[each] for each in asked] == [
        WeightsLoaded(version, f"digest-{version}", ("server-0",)) for version in (3, 3, 4, 3)
    ]
    assert setup.fetched == [3, 4, 3]


def test_a_request_that_is_asked_again_is_computed_once_and_both_are_answered(setup: _Setup) -> None:
    first = setup.shell.ask(_generate("a", number=7))
    setup.turn()
    num_requests = setup.backend.num_requests
    setup.load(1)
    again = setup.shell.ask(
        msgspec.structs.replace(_generate("a", number=1, stream=True), timeout_s=7.0), asker="manager-1"
    )
    setup.turn()
    assert setup.backend.num_requests <= num_requests
    setup.run()
    assert setup.shell.replies[again] == setup.shell.replies[first]


def test_who_asks_again_is_told_everything_from_the_first_token_on(setup: _Setup) -> None:
    setup.shell.ask(_generate("a", number=7, stream=True, num_samples=1, endless=True))
    setup.turn(3)
    again = setup.shell.ask(
        _generate("a", number=1, stream=True, num_samples=1, endless=True), asker="manager-1"
    )
    setup.turn(3)
    assert setup.shell.told(1, asker="manager-1") == setup.shell.told(7)
    setup.run()
    (completion,) = setup.shell.generated(again).completions
    assert _tokens(completion)[:6] == setup.shell.told(7)[0][:6]


def test_a_request_that_is_asked_again_with_other_weights_starts_over(setup: _Setup) -> None:
    first = setup.shell.ask(_generate("a", endless=True))
    setup.turn(2)
    setup.load(2)
    again = setup.shell.ask(_generate("a", endless=True))
    setup.run()
    before, after = setup.shell.generated(first), setup.shell.generated(again)
    assert any(array("i", each.versions)[0] == 1 for each in before.completions)
    assert all(set(array("i", each.versions)) == {2} for each in after.completions)


def test_weights_that_do_not_arrive_as_sent_leave_the_old_version_in_place(setup: _Setup) -> None:
    setup.damaged = 2
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
        _generate("a", produced=(Completion(9, b"", b"", b"", None),)),
        _generate("a", produced=(Completion(0, b"1234", b"", b"", None),)),
    ],
)
def test_an_impossible_request_is_refused_and_the_next_one_served(
    setup: _Setup, impossible: Generate
) -> None:
    bad, good = setup.shell.ask(impossible), setup.shell.ask(_generate("b"))
    setup.run()
    assert isinstance(setup.shell.errors[bad], UserError)
    assert good in setup.shell.replies


def test_a_message_that_is_not_its_business_is_refused(setup: _Setup) -> None:
    asked = setup.shell.ask(Ping())
    setup.run()
    assert isinstance(setup.shell.errors[asked], RefusedError)


@pytest.mark.parametrize("num_samples", [1, 9])
def test_a_model_that_overflows_fails_the_request_and_not_the_server(setup: _Setup, num_samples: int) -> None:
    setup.backend.overflows = True
    broken = setup.shell.ask(_generate("a", num_samples=num_samples))
    setup.run()
    assert isinstance(setup.shell.errors[broken], IntegrityError)
    setup.backend.overflows = False
    asked = setup.shell.ask(_generate("a", num_samples=num_samples))
    setup.run()
    assert asked in setup.shell.replies and setup.shell.load == 0


def test_a_streaming_request_is_told_of_every_token_as_it_comes(setup: _Setup) -> None:
    asked = setup.shell.ask(_generate("a", num_samples=2, stream=True, number=4, endless=True))
    for count in range(1, 8):
        setup.turn()
        assert {sample: len(tokens) for sample, tokens in setup.shell.told(4).items()} == {0: count, 1: count}
    setup.run()
    told = setup.shell.told(4)
    for completion in setup.shell.generated(asked).completions:
        assert _tokens(completion)[:7] == told[completion.sample]


def test_a_sample_that_ends_before_the_others_is_told_with_its_end(setup: _Setup) -> None:
    asked = setup.shell.ask(_generate("a", num_samples=4, stream=True, number=4, max_new_tokens=40))
    setup.run()
    ends = {
        fragment.sample: fragment.finish
        for _, body in setup.shell.sent
        for fragment in body.fragments[4]
        if fragment.finish is not None
    }
    completions = setup.shell.generated(asked).completions
    last = max(completions, key=lambda completion: len(completion.tokens))
    for completion in completions:
        if len(completion.tokens) < len(last.tokens):
            assert ends[completion.sample] is completion.finish
            assert setup.shell.told(4)[completion.sample] == _tokens(completion)


def test_requests_that_do_not_stream_are_told_of_now_and_then_in_one_message(setup: _Setup) -> None:
    setup.clock.advance(10.0)
    asked = [
        setup.shell.ask(_generate(name, num_samples=1, number=index, endless=True, max_new_tokens=40))
        for index, name in enumerate("ab")
    ]
    for _ in range(20):
        setup.server.turn(0)
        setup.clock.advance(PROGRESS_S / 4)
    assert len(setup.shell.sent) == 4
    assert all(set(body.fragments) == {0, 1} for _, body in setup.shell.sent)
    setup.run()
    assert _tokens(setup.shell.generated(asked[1]).completions[0])[:12] == setup.shell.told(1)[0][:12]


def test_requests_that_are_done_sooner_are_not_told_of_at_all(setup: _Setup) -> None:
    for index in range(50):
        setup.shell.ask(_generate(f"t{index}"))
    setup.server.turn(0)
    while not setup.backend.idle:
        setup.server.turn(0)
        setup.clock.advance(PROGRESS_S / 2000)
    assert setup.shell.sent == []


def test_a_request_goes_on_from_what_it_brings_and_samples_only_the_rest(setup: _Setup) -> None:
    whole = setup.shell.ask(_generate("a", num_samples=1, endless=True))
    setup.run()
    (completion,) = setup.shell.generated(whole).completions
    sampled = setup.backend.num_sampled
    part = Completion(
        0,
        completion.tokens[:20],
        completion.logprobs[:20],
        completion.versions[:20],
        None,
        completion.top_tokens[:40],
        completion.top_logprobs[:40],
    )
    asked = setup.shell.ask(
        _generate("a", num_samples=1, endless=True, produced=(part,), stream=True, number=3)
    )
    setup.run()
    assert setup.shell.generated(asked).completions == (completion,)
    assert setup.backend.num_sampled - sampled == 3
    assert all(fragment.offset >= 5 for _, body in setup.shell.sent for fragment in body.fragments.get(3, ()))


def test_who_leaves_frees_what_it_held_at_once(setup: _Setup) -> None:
    asked = setup.shell.ask(_generate("a", number=5, endless=True))
    other = setup.shell.ask(_generate("b", number=6))
    setup.turn(2)
    setup.shell.ask(Cancel(5))
    setup.server.turn(0)
    assert setup.backend.num_requests <= 6
    setup.run()
    assert isinstance(setup.shell.errors[asked], RefusedError)
    assert other in setup.shell.replies and setup.shell.load == 0


def test_a_request_that_two_wait_for_goes_on_when_one_leaves(setup: _Setup) -> None:
    first = setup.shell.ask(_generate("a", number=5))
    second = setup.shell.ask(_generate("a", number=5), asker="manager-1")
    setup.server.turn(0)
    setup.shell.ask(Cancel(5))
    setup.run()
    assert isinstance(setup.shell.errors[first], RefusedError)
    assert second in setup.shell.replies


def test_an_interrupt_answers_every_request_with_what_it_has(setup: _Setup) -> None:
    asked = setup.shell.ask(_generate("a", num_samples=5, endless=True))
    setup.turn(3)
    interrupted = setup.shell.ask(Interrupt())
    setup.server.turn(0)
    assert setup.shell.replies[interrupted] == Ok()
    completions = setup.shell.generated(asked).completions
    assert [len(completion.tokens) // 4 for completion in completions] == [3, 3, 3, 3, 0]
    assert all(completion.finish is None for completion in completions)
    assert setup.backend.idle


@pytest.mark.parametrize("running", ["keep", "recompute", "interrupt"])
def test_running_requests_go_on_with_new_weights_or_are_given_back(setup: _Setup, running: Policy) -> None:
    asked = setup.shell.ask(_generate("a", num_samples=2, endless=True))
    setup.turn(3)
    setup.load(2, running=running)
    setup.run()
    versions = [array("i", each.versions).tolist() for each in setup.shell.generated(asked).completions]
    assert versions == [[1, 1, 1] if running == "interrupt" else [1, 1, 1, 2, 2, 2, 2, 2]] * 2
    assert setup.backend.loaded[-1] == (2, "recompute" if running == "recompute" else "keep")


def test_it_reports_what_it_has_to_do_and_how_fast_it_goes(setup: _Setup) -> None:
    setup.shell.ask(_generate("a", num_samples=3, endless=True))
    setup.turn(5)
    assert setup.shell.load == 3 * (len(_PROMPT) // 4 + 8)
    assert setup.shell.gauges["running"] == 3.0
    assert setup.shell.gauges["tokens_per_s"] == 3.0


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
    def fails(*arguments: object, **named: object) -> None:
        raise raised

    setup = _Setup()
    setup.load(1)
    if moment == "loading":
        monkeypatch.setattr(setup.backend, "load", fails)
    else:
        setup.server.turn(0)
        setup.shell.ask(_generate("t"))
        monkeypatch.setattr(setup.backend, "step", fails)
    with pytest.raises(kind) as caught:
        setup.server.turn(0)
    assert type(caught.value) is kind and str(caught.value) == str(raised)
