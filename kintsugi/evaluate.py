"""`kintsugi eval`: a run of no steps that starts from a checkpoint, evaluates it and ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kintsugi import runs
from kintsugi.cluster.launcher import launch
from kintsugi.config import Config, ModelSection
from kintsugi.data.source import pin_data
from kintsugi.errors import KintsugiError, UserError, WorldError
from kintsugi.recipe import dump, load_config
from kintsugi.runtime import SYSTEM_CLOCK
from kintsugi.summaries import FaultLine
from kintsugi.worker import EXIT_USER_ERROR

FOLDER = "evaluations"


def evaluate_checkpoint(run_dir: Path, *, step: int | None) -> dict[str, float]:
    """Held-out figures of the newest checkpoint, or of a step's; the run itself is left as it is.

    The evaluation is a small run of its own under `<run>/evaluations/`, with its own journal and events.
    """
    checkpoint = runs.chosen_checkpoint(run_dir, step=step).absolute()
    config = _evaluation_only(load_config(run_dir / "config.yaml"), checkpoint)
    folder = _new_folder(run_dir / FOLDER, checkpoint.name)
    dump(config, folder / "config.yaml")
    pin_data(config, run_dir=folder, like=run_dir)
    since = SYSTEM_CLOCK.wall()
    code = launch(config, run_dir=folder, on_tick=lambda: None)
    summary = runs.read_summary(folder)
    if code != 0 or summary is None or not summary.evaluations:
        raise _failure(code, runs.read_faults(folder, since=since), folder=folder)
    figures = summary.evaluations[-1]
    return {name: value for name, value in figures.items() if name.startswith("eval/")}


def _failure(code: int, faults: Sequence[FaultLine], *, folder: Path) -> KintsugiError:
    """What an evaluation that gave no figures ended in, the first cause first."""
    if code == EXIT_USER_ERROR and faults:
        return UserError(faults[-1].message)
    told = "; then ".join(f"{fault.process}: {fault.kind}: {fault.message}" for fault in faults)
    return WorldError(f"the evaluation failed: {told or 'it left no word why'}; its folder is {folder}")


def _evaluation_only(config: Config, checkpoint: Path) -> Config:
    return msgspec.structs.replace(
        config,
        run_dir=None,
        model=ModelSection(path=str(checkpoint)),
        warmup=None,
        algorithm=msgspec.structs.replace(config.algorithm, steps=0),
    )


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(exist_ok=True)
    number = sum(path.name.startswith(name) for path in parent.iterdir()) + 1
    folder = parent / f"{name}-{number}"
    folder.mkdir()
    return folder
