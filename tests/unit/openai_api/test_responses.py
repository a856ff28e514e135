"""Choices that grow with their tokens."""

from __future__ import annotations

import pytest

from kintsugi.openai_api.responses import ApiChoice
from kintsugi.types import Completion, FinishReason, Fragment
from tests.unit.serving.fakes import columns, tokenizer

IDS = tokenizer().encode("abcdef")


def choice(*, stops: tuple[str, ...] = (), with_logprobs: bool = False) -> ApiChoice:
    return ApiChoice(tokenizer(), stops=stops, with_logprobs=with_logprobs)


def fragment(start: int, end: int, finish: FinishReason | None = None) -> Fragment:
    return Fragment(0, start, **columns(IDS[start:end], num_top=1), finish=finish)


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_what_was_told_before_is_not_told_again(with_logprobs: bool) -> None:
    grows = choice(with_logprobs=with_logprobs)
    told = [grows.take(fragment(0, 2)), grows.take(fragment(1, 4))]
    told.append(grows.take(Completion(0, **columns(IDS, num_top=1), finish=FinishReason.LENGTH)))
    assert [delta.text for delta in told] == ["ab", "cd", "ef"]
    assert (grows.num_tokens, grows.finish_reason) == (6, "length")


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_an_end_that_brings_no_tokens_is_an_end(with_logprobs: bool) -> None:
    grows = choice(with_logprobs=with_logprobs)
    grows.take(fragment(0, 6))
    last = grows.take(fragment(6, 6, FinishReason.LENGTH))
    assert (last.text, last.finish_reason, grows.num_tokens) == ("", "length", 6)


def test_after_a_stop_text_nothing_more_is_told() -> None:
    grows = choice(stops=("cd",))
    assert grows.take(fragment(0, 3)).text == "ab"
    stopped = grows.take(fragment(3, 5))
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    assert grows.take(fragment(5, 6, FinishReason.LENGTH)).text == ""
    assert grows.finish_reason == "stop"


def test_a_tokens_logprob_comes_with_its_text() -> None:
    grows = choice(stops=("cx",), with_logprobs=True)
    assert [token.id for token in grows.take(fragment(0, 3)).tokens] == IDS[:2]
    assert [token.id for token in grows.take(fragment(3, 4)).tokens] == IDS[2:4]
