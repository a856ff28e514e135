"""The record of a step contains that step alone, with the seconds that workers and ranks reported."""

from __future__ import annotations

import msgspec

from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import RecordStep
from kintsugi.journal.facts import StageStarted, StepCommitted
from kintsugi.protocol.rollout import EpisodesDone, RunEpisodes
from kintsugi.types import SampleText
from tests.unit.control.driven import CONFIG, Driven
from tests.unit.control.outcomes import begun


def test_seconds_of_the_episodes_are_added_up_per_step_and_begin_anew_with_the_next() -> None:
    driven = Driven()
    driven.begin()
    for _ in range(2):
        driven.until(Phase.COLLECTING)
        for request in driven.asked(RunEpisodes):
            done = driven.serve(request)
            assert isinstance(done, EpisodesDone)
            driven.answer(request, msgspec.structs.replace(done, timing={"generate": 1.5}))
        driven.until(Phase.PUBLISHING)
    spent_s = 1.5 * CONFIG.algorithm.batch_size
    records = [effect.timing for effect in driven.effects if isinstance(effect, RecordStep)]
    assert [timing["episode_generate"] for timing in records] == [spent_s, spent_s]
    commits = [fact.metrics for fact in driven.facts if isinstance(fact, StepCommitted)]
    assert [metrics["timing/episode_generate"] for metrics in commits] == [spent_s, spent_s]


def test_what_the_samples_of_a_step_say_is_recorded_with_it() -> None:
    driven = Driven()
    driven.begin()
    driven.until(Phase.COLLECTING)
    said: dict[str, SampleText] = {}
    for request in driven.asked(RunEpisodes):
        done = driven.serve(request)
        assert isinstance(done, EpisodesDone)
        texts = {meta.key: SampleText("question", f"answer {meta.key}") for meta in done.samples}
        said |= texts
        driven.answer(request, msgspec.structs.replace(done, texts=texts))
    driven.until(Phase.PUBLISHING)
    (record,) = [effect for effect in driven.effects if isinstance(effect, RecordStep)]
    assert record.texts == said != {}


def test_a_stage_is_known_by_its_first_step() -> None:
    driven = begun()
    driven.until(Phase.ENDED)
    started = [(fact.stage, fact.step) for fact in driven.facts if isinstance(fact, StageStarted)]
    assert started == [("warmup", 1), ("grpo", 2)]
