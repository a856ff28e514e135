"""Replay of a group from saved rollouts, instead of sampling it. Pure functions.

Its log-probabilities are those of the policy that sampled it, so importance ratios are correct for any later weights.
Its weight versions belong to another run; like a demonstration it has version -1.
"""

from __future__ import annotations

from array import array

from kintsugi.data.saved_rollouts import saved_samples
from kintsugi.rollout.group import GroupOutcome, GroupSample, sample_text
from kintsugi.rollout.trajectory import int32
from kintsugi.telemetry.saved_rollouts import SavedSample
from kintsugi.types import Row, Ticket, Trajectory, sample_key


def replay(ticket: Ticket, row: Row) -> GroupOutcome:
    """Build the group's result from the saved samples; samples that were not saved are quarantined, with the reason."""
    saved = {sample.sample: sample for sample in saved_samples(row)}
    wanted = [saved[number] for number in range(ticket.num_samples) if number in saved]
    return GroupOutcome(
        [
            GroupSample(_trajectory(ticket.id, sample), sample_text(row, sample.completion), sample.rewards)
            for sample in wanted
        ],
        {
            sample_key(ticket.id, number): "it is not among the saved rollouts"
            for number in range(ticket.num_samples)
            if number not in saved
        },
    )


def _trajectory(ticket: str, sample: SavedSample) -> Trajectory:
    return Trajectory(
        key=sample_key(ticket, sample.sample),
        tokens=int32(sample.tokens),
        loss_mask=bytes(sample.loss_mask),
        logprobs=array("f", sample.logprobs).tobytes(),
        versions=int32([-1] * len(sample.tokens)),
        finish=sample.finish,
    )
