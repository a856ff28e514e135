"""The phases of a run, under the operator's words."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where the master stands; what begins and ends each phase is in `master.py`."""

    STARTING = "starting"
    PREPARING = "preparing"
    COLLECTING = "collecting"
    TRAINING = "training"
    COMMITTING = "committing"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    RECOVERING = "recovering"
    ENDING = "ending"
    ENDED = "ended"


ROLLING = frozenset(Phase) - {Phase.STARTING, Phase.PREPARING, Phase.ENDING, Phase.ENDED}
"""Phases in which groups are handed out."""
