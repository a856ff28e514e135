"""Kintsugi: distributed RL post-training that mends itself.

    from kintsugi import Config, train
    result = train(Config(name="mine", …), reward=my_reward)

What is named here is imported when it is first asked for, so that `import kintsugi` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kintsugi.api import RunResult, read_run, train
    from kintsugi.config import (
        ActorSection,
        AlgorithmSection,
        AsynchronySection,
        CheckpointSection,
        ClusterSection,
        Config,
        CriticSection,
        DataSection,
        EvaluationSection,
        GenerationSection,
        LoggingSection,
        ModelSection,
        MonitoringSection,
        NewModel,
        ReferenceSection,
        RewardModelSection,
        RolloutSection,
        SamplingSection,
        WarmupSection,
        WeightsSection,
    )

__version__ = "0.1.0"

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "AsynchronySection",
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "CriticSection",
    "DataSection",
    "EvaluationSection",
    "GenerationSection",
    "LoggingSection",
    "ModelSection",
    "MonitoringSection",
    "NewModel",
    "ReferenceSection",
    "RewardModelSection",
    "RolloutSection",
    "RunResult",
    "SamplingSection",
    "WarmupSection",
    "WeightsSection",
    "read_run",
    "train",
]

_OF_THE_API = frozenset({"RunResult", "read_run", "train"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OF_THE_API:
        from kintsugi import api as home
    else:
        from kintsugi import config as home  # type: ignore[no-redef]
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
