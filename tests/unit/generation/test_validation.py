"""Which requests an engine refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kintsugi.errors import DataError, UserError
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.requests import Tokens
from kintsugi.generation.engine.stop_strings import TextOf
from tests.unit.generation.fake_runner import END, FakeRunner, make_request, make_shape, text_of


def _engine(*, text_of: TextOf | None = text_of) -> Engine:
    return Engine(FakeRunner(make_shape()), end_token_ids=(END,), deterministic=True, text_of=text_of)


def _oddly(**sampling: Any) -> dict[str, Any]:
    return sampling


@pytest.mark.parametrize(
    ("sampling", "error", "message"),
    [
        (_oddly(prompt=[]), DataError, "at least one token"),
        (_oddly(prompt=[1] * 33), DataError, r"generation.max_length` 40, got 33 \+ 8 for 1/0"),
        (_oddly(prompt=[24]), DataError, "vocabulary of 24"),
        (_oddly(prompt=[-1]), DataError, "vocabulary of 24"),
        (_oddly(max_new_tokens=0), UserError, "max_new_tokens"),
        (_oddly(temperature=-1.0), UserError, "temperature"),
        (_oddly(temperature=float("nan")), UserError, "temperature"),
        (_oddly(temperature=float("inf")), UserError, "temperature"),
        (_oddly(top_k=-1), UserError, "top_k"),
        (_oddly(top_k=1 << 63), UserError, "top_k"),
        (_oddly(top_p=0.0), UserError, "top_p"),
        (_oddly(top_p=1.1), UserError, "top_p"),
        (_oddly(top_p=float("nan")), UserError, "top_p"),
        (_oddly(min_p=1.0), UserError, "min_p"),
        (_oddly(min_p=-0.1), UserError, "min_p"),
        (_oddly(repetition_penalty=0.0), UserError, "repetition_penalty"),
        (_oddly(repetition_penalty=float("inf")), UserError, "repetition_penalty"),
        (_oddly(repetition_penalty=float("nan")), UserError, "repetition_penalty"),
        (_oddly(repetition_penalty=1e-46), UserError, "repetition_penalty"),
        (_oddly(repetition_penalty=1e39), UserError, "repetition_penalty"),
        (_oddly(logit_bias=((24, 1.0),)), UserError, "logit_bias"),
        (_oddly(logit_bias=((2, float("inf")),)), UserError, "logit_bias"),
        (_oddly(logit_bias=((2, float("nan")),)), UserError, "logit_bias"),
        (_oddly(logit_bias=((2, 1e39),)), UserError, "logit_bias"),
        (_oddly(logit_bias=((2, 1.0), (2, 2.0))), UserError, "once"),
        (_oddly(top_logprobs=21), UserError, "top_logprobs"),
        (_oddly(top_logprobs=-1), UserError, "top_logprobs"),
        (_oddly(stop_token_ids=(1,) * 16), UserError, "at most 16 end and stop tokens"),
        (_oddly(stop_token_ids=(24,)), UserError, "vocabulary of 24"),
        (_oddly(stop=("a",) * 17), UserError, "at most 16 stop texts"),
        (_oddly(stop=("",)), UserError, "empty"),
        (_oddly(stop=("\ufffd",)), UserError, "FFFD"),
    ],
)
def test_an_impossible_request_is_refused_and_its_batch_with_it(
    sampling: dict[str, Any], error: type[Exception], message: str
) -> None:
    engine = _engine()
    with pytest.raises(error, match=message):
        engine.submit([make_request(0, prompt=[1, 2]), make_request(1, **{"prompt": [1], **sampling})])
    assert engine.idle


def test_stop_texts_are_refused_where_nobody_can_read() -> None:
    engine = _engine(text_of=None)
    with pytest.raises(UserError, match="tokenizer"):
        engine.submit([make_request(0, prompt=[1], stop=("a",))])


def test_produced_tokens_that_cannot_be_are_refused() -> None:
    engine = _engine()
    request = make_request(0, prompt=[1], max_new_tokens=2)
    for ids in ([1, 2], [24]):
        count = len(ids)
        produced = Tokens(
            np.array(ids, np.int32),
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            np.empty((count, 0), np.int32),
            np.empty((count, 0), np.float32),
        )
        with pytest.raises(DataError, match="produced tokens"):
            engine.submit([replace(request, produced=produced)])
