"""With a runner that has no model but checks whatever it reads; `test_engine_cpu.py` has the same with a real one."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from kintsugi.errors import UserError
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, RequestId, Tokens
from kintsugi.types import FinishReason
from tests.unit.generation.fake_runner import (
    END,
    FakeRunner,
    draw,
    expected,
    make_request,
    make_shape,
    text_of,
)


def _make(
    *,
    deterministic: bool = True,
    steps_per_iteration: int = 1,
    overlap: bool = False,
    end_token_ids: Sequence[int] = (END,),
    **shape: int,
) -> tuple[Engine, FakeRunner]:
    runner = FakeRunner(make_shape(**shape), deterministic=deterministic)
    engine = Engine(
        runner,
        end_token_ids=end_token_ids,
        deterministic=deterministic,
        text_of=text_of,
        steps_per_iteration=steps_per_iteration,
        overlap=overlap,
    )
    engine.load(1, {})
    return engine, runner


def _drain(engine: Engine, *, max_visits: int = 2000) -> dict[RequestId, GenerationOutput]:
    outputs: dict[RequestId, GenerationOutput] = {}
    for _ in range(max_visits):
        if engine.idle:
            return outputs
        outputs |= {output.request.id: output for output in engine.step()}
    raise AssertionError(f"not idle after {max_visits} visits: {engine.stats()}")


def _generate(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[RequestId, GenerationOutput]:
    engine.submit(requests)
    return _drain(engine)


def _assert_undisturbed(output: GenerationOutput) -> None:
    ids, logprobs, finish = expected(output.request)
    assert output.tokens.ids.tolist() == ids
    assert output.tokens.logprobs.tolist() == logprobs
    assert output.finish is finish


def _assert_empty(engine: Engine, runner: FakeRunner) -> None:
    stats = engine.stats()
    assert stats["pages_used"] == stats["running"] == stats["waiting"] == runner.num_live == 0
    assert stats["pages_free"] + stats["pages_cached"] == runner.shape.num_pages


def _long(number: int, sample: int = 0, **sampling: Any) -> GenerationRequest:
    """One that uses all its tokens."""
    prompt = [(number * 7 + place * 3) % 20 for place in range(10)]
    return make_request(number, sample, prompt=prompt, ignore_end=True, **{"max_new_tokens": 20, **sampling})


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_samples", [1, 4])
def test_samples_of_one_prompt_that_come_together_compute_it_once(
    deterministic: bool, num_samples: int
) -> None:
    engine, runner = _make(deterministic=deterministic)
    prompt = list(range(19))
    requests = [make_request(0, sample, prompt=prompt) for sample in range(num_samples)]
    for output in _generate(engine, requests).values():
        _assert_undisturbed(output)
    assert runner.prefilled == [(0, 8), (8, 8), (16, 2)]
    assert len(runner.copied) == num_samples - 1
    assert engine.stats()["prefix_hit_tokens"] == 18 * (num_samples - 1)


def test_samples_that_wait_for_a_slot_copy_the_last_page_of_their_prompt_too() -> None:
    engine, runner = _make(num_slots=2)
    requests = [make_request(0, sample, prompt=range(11), max_new_tokens=3) for sample in range(7)]
    for output in _generate(engine, requests).values():
        _assert_undisturbed(output)
    assert runner.prefilled == [(0, 8), (8, 2)]


def test_only_a_partial_page_is_ever_copied() -> None:
    engine, runner = _make()
    outputs = _generate(engine, [make_request(0, sample, prompt=range(17)) for sample in range(4)])
    for output in outputs.values():
        _assert_undisturbed(output)
    assert runner.copied == [] and sum(count for _, count in runner.prefilled) == 16


def test_different_prompts_are_prefilled_in_one_call_beside_the_samples_of_the_first() -> None:
    engine, runner = _make(num_slots=6, max_chunks=4)
    engine.submit(
        make_request(number, sample, prompt=[number] * 6) for number in (1, 2) for sample in (0, 1, 2)
    )
    engine.step()
    assert runner.prefilled == [(0, 5), (0, 5)] and runner.num_live == 6


def test_a_prompt_of_one_token_has_nothing_to_prefill() -> None:
    engine, runner = _make()
    outputs = _generate(engine, [make_request(number, prompt=[number]) for number in range(6)])
    for output in outputs.values():
        _assert_undisturbed(output)
    assert runner.prefilled == [] and len(outputs) == 6


@pytest.mark.parametrize(("deterministic", "num_known"), [(True, 8), (False, 16)])
def test_the_next_turn_finds_what_decoding_filled_but_not_in_deterministic_mode(
    deterministic: bool, num_known: int
) -> None:
    """There a prefill would have given other bits. Chunks begin at multiples of eight."""
    engine, runner = _make(deterministic=deterministic)
    (first,) = _generate(engine, [_long(0, max_new_tokens=12)]).values()
    runner.prefilled.clear()
    prompt = [*first.request.prompt, *first.tokens.ids, 1, 2, 3]
    (second,) = _generate(engine, [make_request(1, prompt=prompt)]).values()
    _assert_undisturbed(second)
    assert sum(count for _, count in runner.prefilled) == len(prompt) - 1 - num_known


def test_requests_start_in_order_of_arrival_and_the_small_do_not_overtake() -> None:
    engine, runner = _make(num_pages=12, max_chunks=8)
    requests = [_long(0), _long(1), make_request(2, prompt=[1]), _long(3), make_request(4, prompt=[2])]
    _generate(engine, requests)
    arrivals = [row.request.id[0] for row in runner.started if row.request.num_produced == 0]
    assert arrivals == sorted(arrivals) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_youngest_gives_way_and_loses_nothing(overlap: bool) -> None:
    engine, runner = _make(num_pages=12, overlap=overlap)
    outputs = _generate(engine, [_long(number) for number in range(3)])
    for output in outputs.values():
        _assert_undisturbed(output)
    assert engine.stats()["preemptions"] > 0
    assert runner.num_sampled == 3 * 20
    resumed = {row.request.id[0] for row in runner.started if row.request.num_produced > 0}
    assert resumed and 0 not in resumed
    _assert_empty(engine, runner)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request_of_the_longest_kind_always_fits(overlap: bool) -> None:
    engine, runner = _make(num_pages=10, max_length=40, steps_per_iteration=8, overlap=overlap)
    outputs = _generate(engine, [_long(number, max_new_tokens=30) for number in range(5)])
    for output in outputs.values():
        _assert_undisturbed(output)
    _assert_empty(engine, runner)


def test_memory_for_less_than_one_request_is_refused() -> None:
    with pytest.raises(UserError, match="takes 10 pages, got 9"):
        _make(num_pages=9, max_length=40)


def test_rows_take_one_step_between_two_calls_while_prompts_are_prefilled() -> None:
    engine, runner = _make(steps_per_iteration=8, num_slots=2, max_chunks=1)
    engine.submit([_long(0)])
    engine.step()
    engine.step()
    assert engine.produced((0, 0)) is not None
    engine.submit([make_request(1, prompt=range(20))])
    before = engine.num_steps
    engine.step()
    engine.step()
    assert engine.num_steps == before + 2
    engine.step()
    assert engine.num_steps == before + 10 and len(runner.started) == 2


@pytest.mark.parametrize("steps_per_iteration", [1, 3, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_row_samples_after_its_end_is_not_reported(steps_per_iteration: int, overlap: bool) -> None:
    engine, _ = _make(steps_per_iteration=steps_per_iteration, overlap=overlap)
    outputs = _generate(
        engine, [make_request(number, prompt=[number % 20], max_new_tokens=30) for number in range(30)]
    )
    finishes = {output.finish for output in outputs.values()}
    for output in outputs.values():
        _assert_undisturbed(output)
    assert finishes == {FinishReason.EOS, FinishReason.LENGTH}


def test_end_tokens_are_ignored_on_request_but_stop_tokens_are_not() -> None:
    request = make_request(3, prompt=[1, 2], max_new_tokens=38, ignore_end=True)
    ids, _, _ = expected(request)
    assert END in ids
    stop = ids[ids.index(END) + 1]
    first = ids.index(stop)
    engine, _ = _make()
    stopping = make_request(3, 0, prompt=[1, 2], max_new_tokens=38, ignore_end=True, stop_token_ids=(stop,))
    (output,) = _generate(engine, [stopping]).values()
    assert output.tokens.ids.tolist() == ids[: first + 1] and output.finish is FinishReason.EOS


@pytest.mark.parametrize("steps_per_iteration", [1, 2, 5, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_text_ends_at_the_token_that_completes_it_however_long_a_visit_is(
    steps_per_iteration: int, overlap: bool
) -> None:
    engine, runner = _make(steps_per_iteration=steps_per_iteration, overlap=overlap, num_slots=8)
    stops = [("stop",), ("€",), ("é", "ij"), ("a", "b"), ("st", "op"), ("dc", "ca", " a"), ("y",)]
    requests = [
        make_request(number, prompt=[number % 20, 3], max_new_tokens=30, stop=stops[number % len(stops)])
        for number in range(40)
    ]
    outputs = _generate(engine, requests)
    for output in outputs.values():
        _assert_undisturbed(output)
    assert {output.finish for output in outputs.values()} == set(FinishReason)
    sampled = sum(len(output.tokens.ids) for output in outputs.values())
    assert engine.stats()["decoded_tokens"] == sampled
    _assert_empty(engine, runner)


def test_a_stop_text_may_begin_in_what_was_produced_elsewhere() -> None:
    request = make_request(3, prompt=[1, 2], max_new_tokens=30, ignore_end=True)
    text = text_of(expected(request)[0][:8])[-3:]
    stopping = make_request(3, prompt=[1, 2], max_new_tokens=30, ignore_end=True, stop=(text,))
    ids, _, finish = expected(stopping)
    assert finish is FinishReason.STOP and len(ids) > 2
    first, _ = _make()
    first.submit([stopping])
    while len(_produced(first, stopping)) < len(ids) - 1:
        first.step()
    interrupted = first.interrupt(stopping.id)
    assert interrupted is not None
    second, _ = _make(deterministic=False)
    (output,) = _generate(second, [interrupted.resume()]).values()
    assert output.tokens.ids.tolist() == ids and output.finish is FinishReason.STOP


def _produced(engine: Engine, request: GenerationRequest) -> list[int]:
    tokens = engine.produced(request.id)
    assert tokens is not None
    return tokens.ids.tolist()


def test_the_most_likely_tokens_are_reported_to_those_who_asked() -> None:
    engine, _ = _make(steps_per_iteration=3, num_pages=12)
    requests = [_long(number, top_logprobs=number, max_new_tokens=15) for number in range(4)]
    outputs = _generate(engine, requests)
    assert engine.stats()["preemptions"] > 0
    for number in range(4):
        tokens = outputs[number, 0].tokens
        assert tokens.top_ids.tolist() == [[token + k for k in range(number)] for token in tokens.ids]
        assert (tokens.top_logprobs == -tokens.top_ids.astype(np.float32)).all()
        assert tokens.top_ids.shape == (15, number)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_produced_grows_and_is_what_an_interruption_gives(overlap: bool) -> None:
    engine, runner = _make(overlap=overlap, steps_per_iteration=2)
    request = _long(0)
    engine.submit([request])
    seen: list[int] = []
    for _ in range(8):
        engine.step()
        now = _produced(engine, request)
        assert now[: len(seen)] == seen
        seen = now
    interrupted = engine.interrupt(request.id)
    assert interrupted is not None and interrupted.finish is None
    assert interrupted.tokens.ids.tolist() == seen == expected(request)[0][: len(seen)] and len(seen) >= 8
    assert engine.idle and engine.interrupt(request.id) is None and engine.produced(request.id) is None
    _assert_empty(engine, runner)


def test_an_interrupted_request_that_waits_has_what_it_came_with() -> None:
    engine, _ = _make(num_slots=1)
    produced = Tokens(np.ones(2, np.int32), np.zeros(2, np.float32), np.ones(2, np.int32), *_no_tops(2))
    waiting = GenerationRequest((1, 0), np.array([1], np.int32), 1, _long(0).sampling, produced)
    engine.submit([_long(0), waiting])
    engine.step()
    interrupted = engine.interrupt((1, 0))
    assert interrupted is not None and interrupted.tokens.ids.tolist() == [1, 1]
    assert len(_drain(engine)) == 1


def _no_tops(count: int) -> tuple[Any, Any]:
    return np.empty((count, 0), np.int32), np.empty((count, 0), np.float32)


def test_what_is_being_replayed_is_not_lost_by_another_interruption() -> None:
    engine, _ = _make()
    request = _long(0)
    engine.submit([request])
    for _ in range(9):
        engine.step()
    for num_visits in (1, 3, 6):
        interrupted = engine.interrupt(request.id)
        assert interrupted is not None and len(interrupted.tokens.ids) == 9
        engine.submit([interrupted.resume()])
        for _ in range(num_visits):
            engine.step()
    (output,) = _drain(engine).values()
    _assert_undisturbed(output)


def test_who_computes_a_prompt_for_others_can_be_interrupted() -> None:
    engine, runner = _make(max_chunks=1)
    requests = [make_request(0, sample, prompt=range(20)) for sample in range(3)]
    engine.submit(requests)
    engine.step()
    assert engine.stats()["running"] == 3 and runner.num_live == 0
    interrupted = engine.interrupt((0, 0))
    assert interrupted is not None and len(interrupted.tokens.ids) == 0
    outputs = _drain(engine)
    assert outputs.keys() == {(0, 1), (0, 2)}
    for output in outputs.values():
        _assert_undisturbed(output)
    _assert_empty(engine, runner)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_every_token_carries_the_version_of_the_weights_that_made_it(running: Any, overlap: bool) -> None:
    engine, runner = _make(overlap=overlap)
    engine.load(7, {})
    engine.submit([_long(0, max_new_tokens=5)])
    for _ in range(3):
        engine.step()
    engine.load(8, {}, running=running)
    (output,) = _drain(engine).values()
    _assert_undisturbed(output)
    assert output.tokens.versions.tolist() == [7, 7, 7, 8, 8]
    assert len(runner.started) == (2 if running == "recompute" else 1)


def test_nothing_computed_with_old_weights_is_found_after_the_new_ones_came() -> None:
    engine, runner = _make(deterministic=False)
    engine.submit([_long(0)])
    for _ in range(5):
        engine.step()
    engine.load(2, {})
    runner.prefilled.clear()
    engine.submit([_long(0, 1)])
    outputs = _drain(engine)
    assert sum(count for _, count in runner.prefilled) == 9
    runner.prefilled.clear()
    follow_up = [*outputs[0, 0].request.prompt, *outputs[0, 0].tokens.ids]
    _generate(engine, [make_request(9, prompt=follow_up)])
    # Of the row that ran through the change nothing is known, but the first chunk of its twin.
    assert sum(count for _, count in runner.prefilled) == 29 - 8


def test_a_prompt_that_is_being_prefilled_begins_again_with_new_weights() -> None:
    engine, runner = _make(max_chunks=1)
    engine.submit([make_request(0, prompt=range(20))])
    engine.step()
    engine.load(2, {})
    (output,) = _drain(engine).values()
    _assert_undisturbed(output)
    assert runner.prefilled == [(0, 8), (0, 8), (8, 8), (16, 3)] and set(output.tokens.versions) == {2}


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_overflowed_sample_is_marked_and_leaves_nothing_behind(deterministic: bool) -> None:
    engine, runner = _make(deterministic=deterministic, num_pages=24)
    broken, sibling, other = _long(0, 0), _long(0, 1), _long(1)
    runner.poison[broken.rng_key] = 13
    outputs = _generate(engine, [broken, sibling, other])
    assert [output.finite for _, output in sorted(outputs.items())] == [False, True, True]
    assert len(outputs[0, 0].tokens.ids) == 5
    runner.poison.clear()
    for output in (outputs[0, 1], outputs[1, 0], *_generate(engine, [_long(0, 3), _long(2)]).values()):
        _assert_undisturbed(output)
    _assert_empty(engine, runner)


@pytest.mark.parametrize("steps_per_iteration", [1, 8])
def test_a_stop_text_that_was_complete_before_the_logits_overflowed_counts(steps_per_iteration: int) -> None:
    engine, runner = _make(steps_per_iteration=steps_per_iteration)
    requests = (_long(number, stop=("a",)) for number in range(100))
    stopped = next(request for request in requests if 2 <= len(expected(request)[0]) <= 5)
    num_tokens = len(expected(stopped)[0])
    runner.poison[stopped.rng_key] = len(stopped.prompt) - 1 + num_tokens
    (output,) = _generate(engine, [stopped]).values()
    _assert_undisturbed(output)
    assert output.finite and engine.stats()["decoded_tokens"] == num_tokens
    _assert_empty(engine, runner)


def test_what_was_interrupted_while_it_waited_is_forgotten() -> None:
    """Also behind one that waits for long."""
    engine, _ = _make(num_slots=1)
    engine.submit([_long(0), _long(1)])
    engine.step()
    gone = []
    for number in range(2, 1002):
        request = _long(number)
        gone.append(ref(request))
        engine.submit([request])
        engine.interrupt(request.id)
    del request
    assert sum(each() is not None for each in gone) < 100
    assert len(_drain(engine)) == 2


def test_a_request_costs_the_same_however_many_are_held() -> None:
    class Id(tuple[int, int]):
        __slots__ = ()
        num_uses = 0

        def __hash__(self) -> int:
            Id.num_uses += 1
            return super().__hash__()

    engine, _ = _make()
    engine.submit(replace(_long(number), id=Id((number, 0))) for number in range(500))
    Id.num_uses = 0
    engine.submit([replace(_long(500), id=Id((500, 0)))])
    assert 0 < Id.num_uses < 10


def test_the_runner_without_a_model_notices_a_wrong_page() -> None:
    """The tests here are worth what its checks are worth."""
    engine, runner = _make(steps_per_iteration=2)
    engine.submit([_long(0), _long(1)])
    engine.step()
    engine.step()
    runner.damage()
    with pytest.raises(AssertionError, match="another's tokens"):
        _drain(engine)
    assert draw(np.zeros(1, np.int32), 0) != draw(np.zeros(1, np.int32), 1)
