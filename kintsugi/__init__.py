"""Kintsugi: fault-tolerant, distributed RL post-training of language models.

    from kintsugi import Config, train
    result = train(Config(name="mine", …), reward=my_reward)

Names are imported on first access, so that `import kintsugi` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kintsugi.api import RunResult, read_run, train
    from kintsugi.config.custom_algorithm import CustomAlgorithm
    from kintsugi.config.schema import (
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
    from kintsugi.notebook import RecordedRun, Table, load

__version__ = "0.1.0"

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "AsynchronySection",
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "CriticSection",
    "CustomAlgorithm",
    "DataSection",
    "EvaluationSection",
    "GenerationSection",
    "LoggingSection",
    "ModelSection",
    "MonitoringSection",
    "NewModel",
    "RecordedRun",
    "ReferenceSection",
    "RewardModelSection",
    "RolloutSection",
    "RunResult",
    "SamplingSection",
    "Table",
    "WarmupSection",
    "WeightsSection",
    "load",
    "read_run",
    "train",
]

_API = frozenset({"RunResult", "read_run", "train"})
_NOTEBOOK = frozenset({"RecordedRun", "Table", "load"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _API:
        from kintsugi import api as home
    elif name in _NOTEBOOK:
        from kintsugi import notebook as home  # type: ignore[no-redef]
    elif name == "CustomAlgorithm":
        from kintsugi.config import custom_algorithm as home  # type: ignore[no-redef]
    else:
        from kintsugi.config import schema as home  # type: ignore[no-redef]
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
