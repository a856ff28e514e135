"""Whatever happens to requests on their way, they become what they would have become without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, RequestId
from tests.unit.generation.fake_runner import (
    END,
    FakeRunner,
    expected,
    make_request,
    make_shape,
    text_of,
)

_MAX_LENGTH = 32


@dataclass(frozen=True)
class Setup:
    """One engine, in a world too small for what is asked of it."""

    num_slots: int
    num_pages: int
    page_size: int
    pages_per_chunk: int
    max_chunks: int
    steps_per_iteration: int
    overlap: bool

    def build(self, *, deterministic: bool) -> tuple[Engine, FakeRunner]:
        shape = make_shape(
            num_slots=self.num_slots,
            max_length=_MAX_LENGTH,
            page_size=self.page_size,
            num_pages=max(self.num_pages, -(-_MAX_LENGTH // self.page_size)),
            chunk_size=self.page_size * self.pages_per_chunk,
            max_chunks=self.max_chunks,
        )
        runner = FakeRunner(shape, deterministic=deterministic)
        engine = Engine(
            runner,
            end_token_ids=(END,),
            deterministic=deterministic,
            text_of=text_of,
            steps_per_iteration=self.steps_per_iteration,
            overlap=self.overlap,
        )
        engine.load(1, {})
        return engine, runner


@dataclass(frozen=True)
class Ask:
    prompt: int
    """Which one; some begin like others, some are others' whole beginning."""
    num_samples: int
    max_new_tokens: int
    stop: tuple[str, ...]
    num_top: int


@dataclass(frozen=True)
class Step:
    count: int


@dataclass(frozen=True)
class Interrupt:
    victim: int
    moves: bool
    """It is resumed on the other engine."""


@dataclass(frozen=True)
class Load:
    running: Literal["keep", "recompute"]


Event = Ask | Step | Interrupt | Load

_LONG = [(place * 5) % 20 for place in range(24)]
_PROMPTS = [[7], _LONG[:4], _LONG[:9], _LONG[:13], _LONG[:20], _LONG, [*_LONG[:8], 1, 2, 3], [3] * 17]

_setups = st.builds(
    Setup,
    num_slots=st.integers(1, 6),
    num_pages=st.integers(1, 40),
    page_size=st.sampled_from([1, 2, 4, 5]),
    pages_per_chunk=st.integers(1, 3),
    max_chunks=st.integers(1, 4),
    steps_per_iteration=st.integers(1, 8),
    overlap=st.booleans(),
)
_events = st.lists(
    st.one_of(
        st.builds(
            Ask,
            st.integers(0, len(_PROMPTS) - 1),
            st.integers(1, 4),
            st.integers(1, 8),
            st.sampled_from([(), ("stop", "€"), ("a",)]),
            st.sampled_from([0, 0, 2]),
        ),
        st.builds(Step, st.integers(1, 6)),
        st.builds(Interrupt, st.integers(0, 20), st.booleans()),
        st.builds(Load, st.sampled_from(["keep", "recompute"])),
    ),
    min_size=1,
    max_size=25,
)


class World:
    """Two engines; requests may move from one to the other."""

    def __init__(self, setups: tuple[Setup, Setup], *, deterministic: bool) -> None:
        self.engines, self.runners = zip(
            *(setup.build(deterministic=deterministic) for setup in setups), strict=True
        )
        self.held: list[tuple[Engine, GenerationRequest]] = []
        self.outputs: dict[RequestId, GenerationOutput] = {}
        self.num_asked = 0
        self.version = 1

    def apply(self, event: Event) -> None:
        match event:
            case Ask():
                self._ask(event)
            case Step(count):
                for _ in range(count):
                    self.step()
            case Interrupt(victim, moves):
                self._interrupt(victim, moves=moves)
            case Load(running):
                self.version += 1
                for engine in self.engines:
                    engine.load(self.version, {}, running=running)

    def _ask(self, ask: Ask) -> None:
        engine = self.engines[self.num_asked % 2]
        requests = [
            make_request(
                self.num_asked,
                sample,
                prompt=_PROMPTS[ask.prompt],
                max_new_tokens=ask.max_new_tokens,
                stop=ask.stop,
                top_logprobs=ask.num_top,
            )
            for sample in range(ask.num_samples)
        ]
        self.num_asked += 1
        self.held += [(engine, request) for request in requests]
        engine.submit(requests)

    def _interrupt(self, victim: int, *, moves: bool) -> None:
        if not self.held:
            return
        index = victim % len(self.held)
        engine, request = self.held[index]
        interrupted = engine.interrupt(request.id)
        if interrupted is None:
            return  # It has ended, and the next step says so.
        if moves:
            engine = next(other for other in self.engines if other is not engine)
        resumed = interrupted.resume()
        engine.submit([resumed])
        self.held[index] = (engine, resumed)

    def step(self) -> None:
        for engine in self.engines:
            before = engine.stats()
            for output in engine.step():
                assert output.request.id not in self.outputs
                self.outputs[output.request.id] = output
                self.held = [(where, each) for where, each in self.held if each.id != output.request.id]
            engine._pool.check()
            assert engine.stats()["running"] <= before["running"] + before["waiting"]

    def drain(self) -> None:
        for _ in range(5000):
            if all(engine.idle for engine in self.engines):
                return
            self.step()
        raise AssertionError(f"nothing ends: {[engine.stats() for engine in self.engines]}")


def _check(world: World) -> None:
    assert not world.held
    for output in world.outputs.values():
        ids, logprobs, finish = expected(output.request)
        tokens = output.tokens
        assert tokens.ids.tolist() == ids and tokens.logprobs.tolist() == logprobs
        assert output.finish is finish
        assert (np.diff(tokens.versions) >= 0).all() and tokens.versions.max() <= world.version
        tops = np.arange(output.request.sampling.top_logprobs) + tokens.ids[:, None]
        assert np.array_equal(tokens.top_ids, tops)
    for engine, runner in zip(world.engines, world.runners, strict=True):
        assert engine.stats()["pages_used"] == runner.num_live == 0


def _run(
    setups: tuple[Setup, Setup],
    events: list[Event],
    *,
    deterministic: bool,
    after_each: Callable[[World], None] = lambda world: None,
) -> World:
    world = World(setups, deterministic=deterministic)
    for event in events:
        world.apply(event)
        after_each(world)
    world.drain()
    _check(world)
    return world


@settings(max_examples=120, deadline=None)
@given(st.tuples(_setups, _setups), _events, st.booleans())
def test_requests_become_the_same_whatever_disturbs_them(
    setups: tuple[Setup, Setup], events: list[Event], deterministic: bool
) -> None:
    _run(setups, events, deterministic=deterministic)


@settings(max_examples=30, deadline=None)
@given(_setups, st.lists(st.integers(0, len(_PROMPTS) - 1), min_size=1, max_size=8), st.booleans())
def test_what_is_said_to_be_produced_is_always_a_beginning_of_the_end_result(
    setup: Setup, prompts: list[int], deterministic: bool
) -> None:
    def check(world: World) -> None:
        for engine, request in world.held:
            tokens = engine.produced(request.id)
            ids = expected(request)[0]
            assert tokens is None or tokens.ids.tolist() == ids[: len(tokens.ids)]

    events: list[Event] = []
    for prompt in prompts:
        events += [Ask(prompt, 2, 6, ("a",), 0), Step(1)]
    _run((setup, setup), events, deterministic=deterministic, after_each=check)


def test_the_disturbances_happen() -> None:
    """A world this small puts requests back, moves them, shares prompts and copies pages."""
    setup = Setup(6, 8, 4, 2, 2, 3, True)
    events: list[Event] = []
    for prompt in range(len(_PROMPTS)):
        events += [Ask(prompt, 4, 8, (), 0), Step(2), Interrupt(prompt, True), Load("recompute")]
    world = _run((setup, setup), events, deterministic=True)
    totals = [
        sum(engine.stats()[name] for engine in world.engines) for name in ("preemptions", "prefix_hit_tokens")
    ]
    assert all(total > 0 for total in totals)
    assert any(runner.copied for runner in world.runners)
    assert any(row.request.num_produced > 0 for runner in world.runners for row in runner.started)
