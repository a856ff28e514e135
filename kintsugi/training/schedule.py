"""The learning rate, as a function of how many updates the stage has made."""

from __future__ import annotations

import math

from kintsugi.config import ActorSection


def learning_rate(actor: ActorSection, *, update: int, num_updates: int) -> float:
    """Of update number `update` (from 0) of a stage that makes `num_updates`.

    Nothing but committed updates moves it: not wall time, not retries, not a restart.
    """
    if update < actor.warmup_steps:
        return actor.learning_rate * (update + 1) / actor.warmup_steps
    progress = min(1.0, (update - actor.warmup_steps) / max(1, num_updates - actor.warmup_steps))
    match actor.schedule:
        case "constant":
            return actor.learning_rate
        case "linear":
            return actor.learning_rate * (1 - progress)
        case "cosine":
            return actor.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
