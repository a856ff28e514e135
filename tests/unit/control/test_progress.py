"""Progress inside a phase, as the live view shows it."""

from __future__ import annotations

from kintsugi.control.phases.save import best_steps
from kintsugi.control.phases.table import Phase
from kintsugi.journal.facts import EvaluationDone
from kintsugi.protocol.rollout import RunEpisodes
from kintsugi.protocol.training import Save
from tests.unit.control.driven import CONFIG, Driven


def test_the_start_counts_processes_and_the_collection_counts_groups() -> None:
    driven = Driven()
    driven.begin()
    done, total, unit = driven.master.progress
    assert (driven.master.phase, unit) == (Phase.STARTING, "processes") and done < total
    driven.until(lambda: driven.master.phase is Phase.COLLECTING and bool(driven.asked(RunEpisodes)))
    size = CONFIG.algorithm.batch_size
    assert driven.master.progress == (0, size, "groups")
    driven.answer(driven.asked(RunEpisodes)[0])
    assert driven.master.progress == (1, size, "groups")
    driven.until(lambda: driven.master.phase is Phase.TRAINING)
    assert driven.master.progress == (0, 0, "")


def test_a_save_that_is_under_way_is_named_with_its_step_in_any_phase() -> None:
    driven = Driven()
    driven.begin()
    assert driven.master.saving_step == 0
    driven.until(lambda: bool(driven.asked(Save)))
    assert driven.master.saving_step == 1


def test_evaluated_steps_are_ranked_by_accuracy_then_by_age() -> None:
    done = [
        EvaluationDone(step, step, "grpo", {"eval/accuracy": accuracy})
        for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.9), (40, 0.1))
    ]
    assert best_steps(done) == (30, 20, 10, 40)
