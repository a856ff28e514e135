from array import array

import msgspec
import pytest
import torch

from kintsugi.errors import DeviceError, DeviceOutOfMemory, IntegrityError, RefusedError, UserError
from kintsugi.generation.server import ORPHANED_S, PROGRESS_S
from kintsugi.generation.server_jobs import Incarnation, ServerJob
from kintsugi.protocol.generation import Cancel, Generate, Generated, Interrupt
from kintsugi.protocol.membership import Ok, Ping
from kintsugi.protocol.weights import WeightsLoaded
from kintsugi.transport import Delivery
from kintsugi.types import Completion, FinishReason, SamplingParams
from tests.unit.generation.driven_server import PROMPT, Policy, Setup, generate
from tests.unit.generation.fake_backend import END


@pytest.fixture
def setup() -> Setup:
    setup = Setup()
    setup.load(1)
    return setup


def _tokens(completion: Completion) -> list[int]:
    return array("i", completion.tokens).tolist()


def test_a_request_is_answered_when_all_of_its_samples_are_done(setup: Setup) -> None:
    requested = setup.shell.ask(generate("a"))
    setup.run()
    generated = setup.shell.generated(requested)
    assert (generated.ticket, generated.turn, generated.server) == ("a", 0, "server-0")
    assert [completion.sample for completion in generated.completions] == list(range(6))
    for completion in generated.completions:
        assert len(completion.logprobs) == len(completion.versions) == len(completion.tokens)
        assert len(completion.top_tokens) == len(completion.top_logprobs) == 2 * len(completion.tokens)
        assert set(array("i", completion.versions)) == {1}
        assert (completion.finish is FinishReason.EOS) == (_tokens(completion)[-1] == END)
    assert len({completion.tokens for completion in generated.completions}) > 1
    assert setup.shell.load == 0


def test_a_subset_of_the_samples_has_the_bits_of_the_whole(setup: Setup) -> None:
    whole, part = setup.shell.ask(generate("a")), setup.shell.ask(generate("a", samples=(4, 2)))
    setup.run()
    all_of_it, some_of_it = setup.shell.generated(whole), setup.shell.generated(part)
    assert some_of_it.completions == (all_of_it.completions[4], all_of_it.completions[2])


def test_a_request_for_a_version_that_is_not_there_is_refused() -> None:
    setup = Setup()
    early = setup.shell.ask(generate("a", version=0))
    setup.load(1)
    late = setup.shell.ask(generate("a", version=2))
    setup.run()
    assert isinstance(setup.shell.errors[early], RefusedError)
    assert str(setup.shell.errors[late]) == "server at version 1, expected at least 2"


def acknowledged(version: int) -> WeightsLoaded:
    measured = {"server-0": 0.0}
    return WeightsLoaded(version, f"digest-{version}", ("server-0",), pause_ms=measured, fetch_s=measured)


def test_loaded_weights_are_acknowledged_by_version_and_digest() -> None:
    setup = Setup()
    requested = setup.load(3)
    setup.run()
    assert setup.shell.replies[requested] == acknowledged(3)
    assert setup.backend.version == 3


def test_weights_that_it_holds_are_acknowledged_without_fetching_them_again() -> None:
    setup = Setup()
    requested = [setup.load(version) for version in (3, 3, 4, 3)]
    setup.run()
    assert [setup.shell.replies[each] for each in requested] == [
        acknowledged(3),
        WeightsLoaded(3, "digest-3", ("server-0",)),
        acknowledged(4),
        acknowledged(3),
    ]
    assert setup.fetched == [3, 4, 3]


def test_a_request_that_is_asked_again_is_computed_once_and_both_are_answered(setup: Setup) -> None:
    first = setup.shell.ask(generate("a", number=7))
    setup.turn()
    num_requests = setup.backend.num_requests
    setup.load(1)
    again = setup.shell.ask(
        msgspec.structs.replace(generate("a", number=1, stream=True), timeout_s=7.0), requester="manager-1"
    )
    setup.turn()
    assert setup.backend.num_requests <= num_requests
    setup.run()
    assert setup.shell.replies[again] == setup.shell.replies[first]


def test_who_asks_again_is_told_everything_from_the_first_token_on(setup: Setup) -> None:
    setup.shell.ask(generate("a", number=7, stream=True, num_samples=1, endless=True))
    setup.turn(3)
    again = setup.shell.ask(
        generate("a", number=1, stream=True, num_samples=1, endless=True), requester="manager-1"
    )
    setup.turn(3)
    assert setup.shell.told(1, requester="manager-1") == setup.shell.told(7)
    setup.run()
    (completion,) = setup.shell.generated(again).completions
    assert _tokens(completion)[:6] == setup.shell.told(7)[0][:6]


def test_a_request_that_is_asked_again_with_other_weights_starts_over(setup: Setup) -> None:
    first = setup.shell.ask(generate("a", endless=True))
    setup.turn(2)
    setup.load(2)
    again = setup.shell.ask(generate("a", endless=True))
    setup.run()
    before, after = setup.shell.generated(first), setup.shell.generated(again)
    assert any(array("i", each.versions)[0] == 1 for each in before.completions)
    assert all(set(array("i", each.versions)) == {2} for each in after.completions)


def test_weights_that_do_not_arrive_as_sent_leave_the_old_version_in_place(setup: Setup) -> None:
    setup.damaged = 2
    damaged = setup.load(2)
    requested = setup.shell.ask(generate("a"))
    setup.run()
    assert isinstance(setup.shell.errors[damaged], IntegrityError)
    assert requested in setup.shell.replies


def test_weights_that_were_overwritten_before_the_swap_leave_the_old_version_in_place(setup: Setup) -> None:
    setup.run()
    setup.checks = iter([False])
    overwritten = setup.load(2)
    requested = setup.shell.ask(generate("a"))
    setup.run()
    assert next(setup.checks, None) is None, "nothing was checked"
    assert isinstance(setup.shell.errors[overwritten], IntegrityError)
    assert [version for version, _ in setup.backend.loaded] == [1]
    assert requested in setup.shell.replies


def test_weights_that_were_overwritten_during_the_swap_end_the_server(setup: Setup) -> None:
    setup.run()
    setup.checks = iter([True, False])
    loading = setup.load(2)
    with pytest.raises(IntegrityError, match="overwritten while it was copied"):
        setup.run()
    assert [version for version, _ in setup.backend.loaded] == [1, 2]
    assert loading not in setup.shell.replies


def test_weights_that_the_back_end_did_not_take_whole_are_not_there_nor_are_the_old_ones(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.run()

    def fails(*arguments: object, **named: object) -> None:
        raise IntegrityError("only half of it came")

    with monkeypatch.context() as patched:
        patched.setattr(setup.backend, "load", fails)
        failed = setup.load(2)
        setup.run()
    assert isinstance(setup.shell.errors[failed], IntegrityError)
    setup.load(1)
    setup.run()
    assert setup.fetched == [1, 2, 1] and [version for version, _ in setup.backend.loaded] == [1, 1]


@pytest.mark.parametrize(
    "impossible",
    [
        Generate("a", 0, b"", SamplingParams(), 1),
        Generate("a", 0, b"\x00\x00\x00", SamplingParams(), 1),
        Generate("a", 0, PROMPT, SamplingParams(num_samples=0), 1),
        Generate("a", 0, PROMPT, SamplingParams(num_samples=-2), 1),
        Generate("a", 0, PROMPT, SamplingParams(), 1, (2, 2)),
        generate("a", produced=(Completion(9, b"", b"", b"", None),)),
        generate("a", produced=(Completion(0, b"1234", b"", b"", None),)),
    ],
)
def test_an_impossible_request_is_refused_and_the_next_one_served(setup: Setup, impossible: Generate) -> None:
    bad, good = setup.shell.ask(impossible), setup.shell.ask(generate("b"))
    setup.run()
    assert isinstance(setup.shell.errors[bad], UserError)
    assert good in setup.shell.replies


def test_a_message_that_is_not_its_business_is_refused(setup: Setup) -> None:
    requested = setup.shell.ask(Ping())
    setup.run()
    assert isinstance(setup.shell.errors[requested], RefusedError)


def test_a_request_that_the_back_end_refuses_later_fails_alone(setup: Setup) -> None:
    refused, good = setup.shell.ask(generate("a", number=1)), setup.shell.ask(generate("b", number=2))
    setup.turn()
    setup.backend.refuse((0, 3), UserError("too clever"))
    setup.run()
    assert str(setup.shell.errors[refused]) == "too clever"
    assert good in setup.shell.replies and refused not in setup.shell.replies and setup.shell.load == 0


@pytest.mark.parametrize("num_samples", [1, 9])
def test_a_model_that_overflows_fails_the_request_and_not_the_server(setup: Setup, num_samples: int) -> None:
    setup.backend.overflows = True
    broken = setup.shell.ask(generate("a", num_samples=num_samples))
    setup.run()
    assert isinstance(setup.shell.errors[broken], IntegrityError)
    setup.backend.overflows = False
    requested = setup.shell.ask(generate("a", num_samples=num_samples))
    setup.run()
    assert requested in setup.shell.replies and setup.shell.load == 0


def test_a_streaming_request_is_told_of_every_token_as_it_comes(setup: Setup) -> None:
    requested = setup.shell.ask(generate("a", num_samples=2, stream=True, number=4, endless=True))
    for count in range(1, 8):
        setup.turn()
        assert {sample: len(tokens) for sample, tokens in setup.shell.told(4).items()} == {0: count, 1: count}
    setup.run()
    told = setup.shell.told(4)
    for completion in setup.shell.generated(requested).completions:
        assert _tokens(completion)[:7] == told[completion.sample]


def test_a_sample_that_ends_before_the_others_is_told_with_its_end(setup: Setup) -> None:
    requested = setup.shell.ask(generate("a", num_samples=4, stream=True, number=4, max_new_tokens=40))
    setup.run()
    ends = {
        fragment.sample: fragment.finish
        for _, body in setup.shell.sent
        for fragment in body.fragments[4]
        if fragment.finish is not None
    }
    completions = setup.shell.generated(requested).completions
    last = max(completions, key=lambda completion: len(completion.tokens))
    for completion in completions:
        if len(completion.tokens) < len(last.tokens):
            assert ends[completion.sample] is completion.finish
            assert setup.shell.told(4)[completion.sample] == _tokens(completion)


def test_requests_that_do_not_stream_are_told_of_now_and_then_in_one_message(setup: Setup) -> None:
    setup.clock.advance(10.0)
    requested = [
        setup.shell.ask(generate(name, num_samples=1, number=index, endless=True, max_new_tokens=40))
        for index, name in enumerate("ab")
    ]
    for _ in range(20):
        setup.server.turn(0)
        setup.clock.advance(PROGRESS_S / 4)
    assert len(setup.shell.sent) == 4
    assert all(set(body.fragments) == {0, 1} for _, body in setup.shell.sent)
    setup.run()
    assert _tokens(setup.shell.generated(requested[1]).completions[0])[:12] == setup.shell.told(1)[0][:12]


def test_requests_that_are_done_sooner_are_not_told_of_at_all(setup: Setup) -> None:
    for index in range(50):
        setup.shell.ask(generate(f"t{index}"))
    setup.server.turn(0)
    while not setup.backend.idle:
        setup.server.turn(0)
        setup.clock.advance(PROGRESS_S / 2000)
    assert setup.shell.sent == []


def test_a_request_goes_on_from_what_it_brings_and_samples_only_the_rest(setup: Setup) -> None:
    whole = setup.shell.ask(generate("a", num_samples=1, endless=True))
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
    requested = setup.shell.ask(
        generate("a", num_samples=1, endless=True, produced=(part,), stream=True, number=3)
    )
    setup.run()
    assert setup.shell.generated(requested).completions == (completion,)
    assert setup.backend.num_sampled - sampled == 3
    assert all(fragment.offset >= 5 for _, body in setup.shell.sent for fragment in body.fragments.get(3, ()))


def test_who_leaves_frees_what_it_held_at_once(setup: Setup) -> None:
    requested = setup.shell.ask(generate("a", number=5, endless=True))
    other = setup.shell.ask(generate("b", number=6))
    setup.turn(2)
    setup.shell.ask(Cancel(5))
    setup.server.turn(0)
    assert setup.backend.num_requests <= 6
    setup.run()
    assert setup.shell.replies[requested] == Ok() and not setup.shell.errors
    assert isinstance(setup.shell.replies[other], Generated) and setup.shell.load == 0


def test_a_request_that_two_wait_for_goes_on_when_one_leaves(setup: Setup) -> None:
    first = setup.shell.ask(generate("a", number=5))
    second = setup.shell.ask(generate("a", number=5), requester="manager-1")
    setup.server.turn(0)
    setup.shell.ask(Cancel(5))
    setup.run()
    assert setup.shell.replies[first] == Ok()
    assert isinstance(setup.shell.replies[second], Generated)


def test_a_cancelled_request_costs_the_same_however_many_others_there_are(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        setup.shell.ask(generate(f"t{number}", number=number, num_samples=1))
    setup.server.turn(0)
    looked_at: list[str] = []
    leave = ServerJob.leave

    def counted(job: ServerJob, requester: Incarnation, number: int | None = None) -> list[Delivery]:
        looked_at.append(job.request.ticket)
        return leave(job, requester, number)

    monkeypatch.setattr(ServerJob, "leave", counted)
    for number in range(50):
        setup.shell.ask(Cancel(number))
    setup.server.turn(0)
    assert looked_at == [f"t{number}" for number in range(50)]


def test_a_cancel_takes_nothing_from_a_successor_that_uses_the_same_number(setup: Setup) -> None:
    setup.shell.ask(generate("a", number=5, endless=True))
    cancel = setup.shell.ask(Cancel(5))
    late = setup.shell._requests.pop()
    assert late.envelope.sequence == cancel
    setup.shell.incarnations["manager-0"] = "b"
    requested = setup.shell.ask(generate("b", number=5, endless=True))
    setup.shell._requests.append(late)
    setup.run()
    assert isinstance(setup.shell.replies[requested], Generated)


def test_what_nobody_waits_for_any_more_ends_though_nobody_says_so(setup: Setup) -> None:
    """A manager that was killed; its successor joins what it asks for again."""
    setup.shell.ask(generate("lost", number=5, endless=True, max_new_tokens=50))
    setup.shell.ask(generate("wanted", number=6, endless=True, max_new_tokens=50))
    setup.turn(2)
    setup.shell.incarnations["manager-0"] = "b"
    again = setup.shell.ask(generate("wanted", number=1, endless=True, max_new_tokens=50))
    setup.turn(int(ORPHANED_S) - 1)
    assert setup.backend.num_requests == 12
    setup.turn(3)
    assert setup.backend.num_requests == 6
    setup.run()
    assert setup.shell.generated(again).ticket == "wanted" and not setup.shell.errors


def test_an_interrupt_answers_every_request_with_what_it_has(setup: Setup) -> None:
    requested = setup.shell.ask(generate("a", num_samples=5, endless=True))
    setup.turn(3)
    interrupted = setup.shell.ask(Interrupt())
    setup.server.turn(0)
    assert setup.shell.replies[interrupted] == Ok()
    completions = setup.shell.generated(requested).completions
    assert [len(completion.tokens) // 4 for completion in completions] == [3, 3, 3, 3, 0]
    assert all(completion.finish is None for completion in completions)
    assert setup.backend.idle


@pytest.mark.parametrize("running", ["keep", "recompute", "interrupt"])
def test_running_requests_go_on_with_new_weights_or_are_given_back(setup: Setup, running: Policy) -> None:
    requested = setup.shell.ask(generate("a", num_samples=2, endless=True))
    setup.turn(3)
    setup.load(2, running=running)
    setup.run()
    versions = [array("i", each.versions).tolist() for each in setup.shell.generated(requested).completions]
    assert versions == [[1, 1, 1] if running == "interrupt" else [1, 1, 1, 2, 2, 2, 2, 2]] * 2
    assert setup.backend.loaded[-1] == (2, "recompute" if running == "recompute" else "keep")


def test_it_reports_what_it_has_to_do_and_how_fast_it_goes(setup: Setup) -> None:
    setup.shell.ask(generate("a", num_samples=3, endless=True))
    setup.turn(5)
    assert setup.shell.load == 3 * (len(PROMPT) // 4 + 8)
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

    setup = Setup()
    setup.load(1)
    if moment == "loading":
        monkeypatch.setattr(setup.backend, "load", fails)
    else:
        setup.server.turn(0)
        setup.shell.ask(generate("t"))
        monkeypatch.setattr(setup.backend, "step", fails)
    with pytest.raises(kind) as caught:
        setup.server.turn(0)
    assert type(caught.value) is kind and str(caught.value) == str(raised)


def test_what_a_device_that_can_not_be_trusted_computed_is_not_given_out(setup: Setup) -> None:
    requested = setup.shell.ask(generate("a"))
    setup.turn()
    setup.trusted = False
    with pytest.raises(DeviceError, match="does not compute"):
        setup.run()
    assert requested not in setup.shell.replies
