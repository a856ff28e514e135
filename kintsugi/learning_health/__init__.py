"""Watch over learning: from recorded metrics and samples to what keeps a run of healthy processes from learning.

    metrics.jsonl, samples.jsonl ─► `follower.py` ─► `history.py` ─► `detectors/` ─► `judge.py` ─► findings

Detectors are pure functions of the history of one stage. The watcher process evaluates them after every step,
outside the step itself; `kintsugi diagnose RUN --learning` evaluates them for any run.
"""

from kintsugi.learning_health.finding import (
    LearningEvidence,
    LearningFinding,
    LearningKind,
    LearningReport,
)
from kintsugi.learning_health.follower import (
    LearningFollower,
    assess_learning,
    learning_lines,
    recorded_findings,
)

__all__ = [
    "LearningEvidence",
    "LearningFinding",
    "LearningFollower",
    "LearningKind",
    "LearningReport",
    "assess_learning",
    "learning_lines",
    "recorded_findings",
]
