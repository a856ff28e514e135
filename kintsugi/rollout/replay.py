"""A group that was sampled and scored before, answered from what was saved. Pure.

Its log-probabilities are those of the policy that sampled it, so ratios are right however far the weights have moved
since. Its weight versions are of another run and mean nothing here: like a demonstration it has none.
"""

from __future__ import annotations

from array import array

from kintsugi.data.saved import saved_samples
from kintsugi.observe.rollouts import SavedSample
from kintsugi.rollout.episode import int32
from kintsugi.rollout.groups import Outcome, Sample
from kintsugi.types import Row, SampleText, Ticket, Trajectory, sample_key


def replay(ticket: Ticket, row: Row) -> Outcome:
    """What the group's episodes gave; samples that were not saved are missing, with the reason."""
    saved = {sample.sample: sample for sample in saved_samples(row)}
    wanted = [saved[number] for number in range(ticket.num_samples) if number in saved]
    return Outcome(
        [
            Sample(_trajectory(ticket.id, sample), SampleText(row.prompt, sample.completion), sample.rewards)
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
