"""`kintsugi eval`: evaluate a checkpoint in a run without training steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kintsugi.cluster.launcher import launch
from kintsugi.config.recipe import dump, load_config
from kintsugi.config.schema import Config, ModelSection
from kintsugi.data.dataset import pin_data
from kintsugi.errors import KintsugiError, UserError, WorldError
from kintsugi.process.exit_codes import EXIT_USER_ERROR
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.summary import FaultLine
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.owned_files import check_owner


def evaluate_checkpoint(run_dir: Path, *, step: int | None) -> dict[str, float]:
    """Return the held-out metrics of the newest checkpoint, or of that of a step.

    The evaluation is a separate run in `<run>/evaluations/`, with its own journal and events; the run is not changed.
    """
    check_owner(run_dir, deed="evaluate it")
    checkpoint = reader.chosen_checkpoint(run_dir, step=step).absolute()
    config = _evaluation_only(load_config(RunFolder(run_dir).config_file), checkpoint)
    folder = _new_folder(RunFolder(run_dir).evaluations_folder, checkpoint.name)
    dump(config, RunFolder(folder).config_file)
    pin_data(config, run_dir=folder, like=run_dir)
    since = SYSTEM_CLOCK.wall()
    code = launch(config, run_dir=folder, on_tick=lambda: None)
    summary = reader.read_summary(folder)
    if code != 0 or summary is None or not summary.evaluations:
        raise _failure(code, reader.read_faults(folder, since=since), folder=folder)
    metrics = summary.evaluations[-1]
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


def _failure(code: int, faults: Sequence[FaultLine], *, folder: Path) -> KintsugiError:
    """Error of an evaluation without a result, the first cause first."""
    if code == EXIT_USER_ERROR and faults:
        return UserError(faults[-1].message)
    causes = "; then ".join(f"{fault.process}: {fault.kind}: {fault.message}" for fault in faults)
    return WorldError(f"the evaluation failed: {causes or 'no cause was recorded'}; its folder is {folder}")


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
