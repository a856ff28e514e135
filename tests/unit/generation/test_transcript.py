from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kintsugi.errors import IntegrityError
from kintsugi.generation.transcript import Transcript, verify_answer
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.types import Completion, FinishReason, Fragment, SamplingParams

_LENGTH = 12
Columns = tuple[bytes, bytes, bytes, bytes, bytes]


def _columns(start: int, end: int, *, sample: int = 0, num_top: int = 0) -> Columns:
    ints = [100 * sample + index for index in range(start, end)]
    top = [each for index in ints for each in [index] * num_top]
    return (
        array("i", ints).tobytes(),
        array("f", [-index for index in ints]).tobytes(),
        array("i", [1] * len(ints)).tobytes(),
        array("i", top).tobytes(),
        array("f", top).tobytes(),
    )


def _fragment(
    start: int, end: int, *, sample: int = 0, num_top: int = 0, finish: FinishReason | None = None
) -> Fragment:
    return Fragment(sample, start, *_columns(start, end, sample=sample, num_top=num_top), finish)


def _completion(
    end: int, *, sample: int = 0, num_top: int = 0, finish: FinishReason | None = None
) -> Completion:
    tokens, logprobs, versions, *top = _columns(0, end, sample=sample, num_top=num_top)
    return Completion(sample, tokens, logprobs, versions, finish, *top)


def _request(*, num_samples: int = 1, num_top: int = 0, produced: tuple[Completion, ...] = ()) -> Generate:
    sampling = SamplingParams(max_new_tokens=_LENGTH, num_samples=num_samples, top_logprobs=num_top)
    return Generate("a", 0, b"", sampling, 1, produced=produced)


def _num_tokens(transcript: Transcript) -> int:
    return sum(len(part.tokens) // 4 for part in transcript.completions())


_CUTS = st.tuples(st.integers(0, _LENGTH), st.integers(0, _LENGTH)).map(sorted)


@given(st.lists(_CUTS, max_size=12), st.integers(0, 2), st.integers(0, _LENGTH))
def test_whatever_is_lost_repeated_or_reordered_every_token_is_given_once_and_in_order(
    cuts: list[list[int]], num_top: int, answered: int
) -> None:
    transcript = Transcript(_request(num_top=num_top))
    given_out: list[Fragment] = []
    for start, end in cuts:
        given_out += transcript.add([_fragment(start, end, num_top=num_top)])
    if answered >= _num_tokens(transcript):
        given_out += transcript.settle(_completion(answered, num_top=num_top))
    given_out += transcript.settle(_completion(_LENGTH, num_top=num_top, finish=FinishReason.LENGTH))
    for index, name in enumerate(("tokens", "logprobs", "versions", "top_tokens", "top_logprobs")):
        whole = b"".join(getattr(fragment, name) for fragment in given_out)
        assert whole == _columns(0, _LENGTH, num_top=num_top)[index]
    assert [fragment.offset for fragment in given_out] == sorted(fragment.offset for fragment in given_out)
    assert [fragment.finish for fragment in given_out if fragment.finish] == [FinishReason.LENGTH]
    assert transcript.completions() == (_completion(_LENGTH, num_top=num_top, finish=FinishReason.LENGTH),)


def test_what_another_server_begins_with_is_what_there_is_of_unfinished_samples() -> None:
    transcript = Transcript(_request(num_samples=3))
    transcript.add([_fragment(0, 4, sample=0), _fragment(0, 3, sample=1, finish=FinishReason.EOS)])
    assert transcript.unfinished == (0, 2)
    assert transcript.produced() == (_completion(4, sample=0),)


def test_it_begins_with_what_the_request_brings_and_gives_only_what_is_new() -> None:
    transcript = Transcript(_request(produced=(_completion(5),)))
    (new,) = transcript.add([_fragment(3, 7)])
    assert new == _fragment(5, 7)


def test_a_samples_end_may_come_without_a_token() -> None:
    transcript = Transcript(_request())
    transcript.add([_fragment(0, 5)])
    (end,) = transcript.settle(_completion(5, finish=FinishReason.EOS))
    assert end == _fragment(5, 5, finish=FinishReason.EOS)
    assert transcript.add([_fragment(2, 5, finish=FinishReason.EOS)]) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(_completion(3, finish=FinishReason.EOS), id="shorter than what was told"),
        pytest.param(_completion(5, sample=1, finish=FinishReason.EOS), id="a sample that was not requested"),
        pytest.param(Completion(0, b"123", b"123", b"123", None), id="no whole tokens"),
        pytest.param(replace(_completion(5), versions=b""), id="columns of different lengths"),
        pytest.param(_completion(_LENGTH + 1, finish=FinishReason.LENGTH), id="more than was asked for"),
        pytest.param(replace(_completion(5), tokens=_columns(1, 6)[0]), id="other tokens"),
        pytest.param(replace(_completion(5), versions=_columns(1, 6)[0]), id="other versions"),
    ],
)
def test_an_answer_that_does_not_go_on_from_what_is_known_is_refused(wrong: Completion) -> None:
    transcript = Transcript(_request())
    transcript.add([_fragment(0, 4)])
    with pytest.raises(IntegrityError, match=f"sample {wrong.sample} of a turn 0: expected"):
        transcript.settle(wrong)
    assert _num_tokens(transcript) == 4 and transcript.unfinished == (0,)


def test_a_finished_sample_does_not_grow() -> None:
    transcript = Transcript(_request())
    transcript.settle(_completion(4, finish=FinishReason.EOS))
    with pytest.raises(IntegrityError):
        transcript.settle(_completion(5, finish=FinishReason.EOS))


@pytest.mark.parametrize(
    "generated", [Generated("b", 0, (), "s"), Generated("a", 1, (), "s"), Generated("a", 0, (), "s")]
)
def test_an_answer_is_to_the_request_and_has_all_of_its_samples(generated: Generated) -> None:
    with pytest.raises(IntegrityError, match=r"s: expected samples \(0,\) of a turn 0"):
        verify_answer(generated, _request(), server="s")
