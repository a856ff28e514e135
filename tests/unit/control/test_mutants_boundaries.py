"""The exact edges of what the master's state and agenda count: one off, and a run would repeat or skip something."""

from __future__ import annotations

from kintsugi.control.agenda import commit_record
from kintsugi.errors import Fault
from kintsugi.facts import CheckpointFailed, RolledBack
from kintsugi.messages import CallDone
from kintsugi.types import Ticket
from tests.unit.control.driven import scored
from tests.unit.control.test_state import fold, run_to

FAULT = Fault("a", "StorageError", "model-0", "disk full", 0.0)


def test_a_save_that_failed_at_the_step_that_a_rollback_leads_to_is_not_tried_again() -> None:
    assert fold(*run_to(3), CheckpointFailed(2, FAULT), RolledBack(2, "lost")).failed_save_step == 2
    assert fold(*run_to(3), CheckpointFailed(3, FAULT), RolledBack(2, "lost")).failed_save_step == -1


def test_tokens_of_the_first_version_count_as_generated() -> None:
    batch = scored(Ticket("grpo:0:0:0", "grpo", 0, 0, 0, 2), version=0).samples
    record = commit_record(batch, {"model-0": CallDone(1, "a", {})}, {})
    assert record["tokens_generated"] == sum(meta.num_loss_tokens for meta in batch) > 0
