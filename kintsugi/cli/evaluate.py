"""`kintsugi eval`: evaluate a checkpoint in a run without training steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kintsugi.cluster.launcher import launch
from kintsugi.config.recipe import anchored, anchored_path, dump, fields_of, given, load_config
from kintsugi.config.schema import Config, ModelSection
from kintsugi.config.validation import validate
from kintsugi.data.dataset import describe_data, pin_data
from kintsugi.errors import KintsugiError, UserError, WorldError
from kintsugi.process.exit_codes import EXIT_USER_ERROR
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.summary import FaultLine
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.owned_files import check_owner

EVALUATION_FIELDS = ("data", "sampling", "generation", "rollout", "eval", "algorithm.reward")
"""Sections and fields that an evaluation may have otherwise than its run."""


def evaluate_checkpoint(
    run_dir: Path, *, step: int | None, data: str | None = None, overrides: Sequence[str] = ()
) -> dict[str, float]:
    """Return the held-out metrics of the newest checkpoint, or of that of a step; on all rows of other `data` if given.

    The evaluation is a separate run in `<run>/evaluations/`, with its own journal and events; the run is not changed.
    """
    check_owner(run_dir, action="evaluate it")
    checkpoint = reader.chosen_checkpoint(run_dir, step=step).absolute()
    of_run = load_config(RunFolder(run_dir).config_file)
    config = own = _evaluation_only(of_run, checkpoint)
    if overrides:
        config = _with_overrides(own, overrides)
    if data is not None:
        config = _on_other_data(config, data)
    if config != own:
        # An evaluation has no steps, which no recipe may have.
        steps = of_run.algorithm.steps
        validate(
            msgspec.structs.replace(config, algorithm=msgspec.structs.replace(config.algorithm, steps=steps))
        )
    folder = _new_folder(RunFolder(run_dir).evaluations_folder, checkpoint.name)
    dump(config, RunFolder(folder).config_file)
    pin_data(config, run_dir=folder, like=run_dir if config.data == own.data else None)
    since = SYSTEM_CLOCK.wall()
    code = launch(config, run_dir=folder, on_tick=lambda: None)
    summary = reader.read_summary(folder)
    if code != 0 or summary is None or not summary.evaluations:
        raise _failure(code, reader.read_faults(folder, since=since), folder=folder)
    metrics = summary.evaluations[-1]
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


def _with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    changed = given(config, overrides).config
    before, after = fields_of(config), fields_of(changed)
    for name in [name for name in after if after[name] != before.get(name)]:
        if name not in EVALUATION_FIELDS and name.partition(".")[0] not in EVALUATION_FIELDS:
            raise UserError(
                f"--set: expected a field of {', '.join(EVALUATION_FIELDS)}, got `{name}`: the rest belongs to the run"
            )
    return anchored(changed)


def _on_other_data(config: Config, source: str) -> Config:
    """Evaluate on all rows of `source`. The run's own data stay the training data, of which no row is used."""
    section = msgspec.structs.replace(config.data, eval_source=anchored_path(source), num_eval=1)
    (name, count), *_ = _held_out_rows(msgspec.structs.replace(config, data=section))
    if count == 0:
        raise UserError(f"--data: expected rows in {name}, found none")
    return msgspec.structs.replace(config, data=msgspec.structs.replace(section, num_eval=count))


def _held_out_rows(config: Config) -> list[tuple[str, int]]:
    return [
        (each.source, each.num_rows)
        for each in describe_data(config).found
        if each.field.endswith("eval_source")
    ]


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
