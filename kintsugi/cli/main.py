"""The command line `kintsugi`. Commands import what they need themselves, so that `--help` is fast.

Exit codes: 0 success, or stopped on request with a checkpoint; 1 failure, or aborted by a second Ctrl-C; 2 user error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kintsugi.cli import access, hosts, lab, models, observe, page, reading
from kintsugi.cli.arguments import (
    Overrides,
    Recipe,
    Run,
    load_validated,
    loaded,
    validated,
)
from kintsugi.cli.hosts import Address, Image, Namespace, Nodes, On, Partition
from kintsugi.cli.output import counted, say
from kintsugi.run_folder.layout import RunFolder

if TYPE_CHECKING:
    from kintsugi.config.recipe import Resolved
    from kintsugi.config.schema import Config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(reading.app)
app.add_typer(observe.app)
app.add_typer(models.app)
app.add_typer(page.app)
app.add_typer(lab.app)
app.add_typer(access.app)
app.add_typer(hosts.app)


class Hangup(StrEnum):
    """Meaning of a terminal that is closed while it shows a run."""

    DETACH = "detach"
    STOP = "stop"


Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once the run has started; `kintsugi attach` shows it.")
]


def _print_version(value: bool) -> None:
    if value:
        import kintsugi

        say(f"kintsugi {kintsugi.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Fault-tolerant, distributed RL post-training of language models."""


def main() -> None:
    """Run the command line. Expected errors become one message and an exit code."""
    from kintsugi.cli.output import open_standard_streams
    from kintsugi.errors import KintsugiError

    open_standard_streams()
    try:
        app()
    except KintsugiError as error:
        from kintsugi.cli.session import print_error

        sys.exit(print_error(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _print_error(f"error: {error}")
        sys.exit(1)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("recipe.yaml"),
    algorithm: Annotated[str, typer.Option(help="Algorithm: sft, dpo, ppo, grpo, dapo, …")] = "grpo",
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Hugging Face folder or hub name; default: a small new model."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Data file or folder; default: generated arithmetic.")
    ] = None,
) -> None:
    """Write a commented recipe that is valid as it is."""
    from kintsugi.cli.local_models import model_folder
    from kintsugi.cli.recipe_template import write_starter

    folder = None if model is None else model_folder(model, field="--model")
    written = write_starter(file, algorithm=algorithm, model=folder, data=data)
    say(f"{', '.join(map(str, written))}: try `kintsugi check {file}`, then `kintsugi train {file}`")


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this recipe instead of the list.")
    ] = None,
    copy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recipe NAME to a file instead.")
    ] = None,
) -> None:
    """List the recipes of the package. Every command that takes a recipe accepts their names."""
    from kintsugi.cli.recipes import copy_recipe, recipe_list, recipe_text
    from kintsugi.errors import UserError

    if name is None and copy is not None:
        raise UserError(
            "--copy: expected the name of a recipe, got none: `kintsugi recipes NAME --copy FILE`"
        )
    if name is None:
        say(recipe_list())
    elif copy is None:
        say(recipe_text(name), nl=False, wrap=False)
    else:
        say(f"{copy_recipe(name, copy)}: try `kintsugi check {copy}`")


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    detach: Detach = False,
    on_hangup: Annotated[
        Hangup, typer.Option(help="Whether closing the terminal leaves the run going or stops it.")
    ] = Hangup.DETACH,
    with_page: Annotated[
        bool, typer.Option("--page", help="Show the run in a browser, as `kintsugi page` does.")
    ] = False,
    page_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free port.")] = 0,
    on: On = None,
    partition: Partition = None,
    nodes: Nodes = None,
    address: Address = None,
    namespace: Namespace = None,
    image: Image = None,
) -> None:
    """Train a model as described by a recipe, and show progress and results."""
    from kintsugi.errors import UserError

    if detach and with_page:
        raise UserError("--detach: expected no --page with it; `kintsugi page RUN` shows a detached run")
    engine = {
        "partition": partition,
        "nodes": nodes,
        "address": address,
        "namespace": namespace,
        "image": image,
    }
    resolved = loaded(recipe, hosts.with_engine(overrides, on=on, **engine))
    if hosts.needs_job(resolved.config):
        _train_in_job(resolved, detach=detach)
        return
    _train(
        hosts.placed(resolved),
        detach=detach,
        on_hangup=on_hangup,
        page_port=page_port if with_page else None,
    )


def _train(
    resolved: Resolved,
    *,
    detach: bool = False,
    on_hangup: Hangup = Hangup.DETACH,
    page_port: int | None = None,
) -> None:
    from kintsugi.errors import KintsugiError
    from kintsugi.run_folder.creation import make_run_folder, remove_unused

    config, run_dir = make_run_folder(validated(resolved))
    beside = None
    try:
        if page_port is not None:
            beside = page.PageBesideRun(
                run_dir, port=page_port, warn=lambda text: _print_error(f"warning: {text}")
            )
            if beside.address:
                say(f"page: {beside.address}")
        _launch(
            config,
            run_dir=run_dir,
            resume=False,
            detach=detach,
            on_hangup=on_hangup,
            on_tick=beside.check if beside is not None else None,
        )
    except KintsugiError:
        remove_unused(run_dir)
        raise
    finally:
        if beside is not None:
            beside.close()


def _train_in_job(resolved: Resolved, *, detach: bool) -> None:
    from kintsugi.errors import KintsugiError
    from kintsugi.run_folder.creation import make_run_folder, remove_unused

    config, run_dir = make_run_folder(validated(resolved))
    try:
        _follow_job(config, run_dir=run_dir, detach=detach)
    except KintsugiError:
        remove_unused(run_dir)
        raise


def _follow_job(config: Config, *, run_dir: Path, detach: bool) -> None:
    """Submit the job of a run and show it to its end, or leave it; a failed run exits with its code."""
    from kintsugi.cli import slurm

    job = slurm.submit(config, run_dir=run_dir)
    say(f"job {job} submitted: {run_dir}; `kintsugi stop {run_dir}` stops it", err=True)
    if detach:
        return
    if (code := slurm.follow(job, run_dir=run_dir)) != 0:
        raise typer.Exit(code)


@app.command(hidden=True)
def slurm_job(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Start or resume a run in the allocation of this process. The script of `kintsugi train --on slurm` calls it."""
    from kintsugi.cli import slurm
    from kintsugi.config.recipe import dump, load_config
    from kintsugi.run_folder import reader

    folder = RunFolder(run)
    with slurm.requeued_when_warned(run):
        slurm.take_over_from_killed_job(run)
        if folder.journal_file.exists():
            status = reader.read_status(run)
            if status.state is not reader.RunState.FINISHED:
                resume(str(run))
            return
        config = load_config(folder.config_file)
        config = msgspec.structs.replace(config, cluster=hosts.placed_cluster(config.cluster))
        dump(config, folder.config_file)
        _launch(config, run_dir=run, resume=False)


@app.command()
def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of batches to sample.")] = 1,
) -> None:
    """Sample and score without training. The samples in RUN/rollouts can be used as a data source later."""
    from kintsugi.config.recipe import rollout_only

    _train(hosts.placed(rollout_only(loaded(recipe, overrides), steps=steps)))


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Also sample this many completions, and show what they earn.")
    ] = 0,
) -> None:
    """Validate a recipe and show its values with origins, data, graph, processes and memory. Starts nothing, unless
    completions are to be sampled.

    Refuses a run that does not fit the accelerators or the limits of this machine.
    """
    from kintsugi.cli.capacity import check_devices, check_limits
    from kintsugi.cli.check import overview

    resolved = load_validated(recipe, overrides)
    say(overview(resolved))
    check_limits(resolved.config)
    check_devices(resolved.config)
    if samples:
        from kintsugi.cli.sample_check import sample_before_training

        say("")
        say(sample_before_training(resolved, count=samples))


@app.command()
def resume(
    run: Run,
    overrides: Overrides = None,
    detach: Detach = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="Resume although config.yaml or other files were changed.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Resume a run of another host, which is gone.")
    ] = False,
) -> None:
    """Resume a run that was stopped, failed or killed, from its last checkpoint.

    Overrides may change the number of steps, learning rate and schedule, clipping, temperature, evaluations, time
    limits, `checkpoint.every`, logging, monitoring, the layout, and where it runs (`cluster.on`, `actor.workers`). With
    more steps, a finished run is extended, with its optimizer.
    """
    from kintsugi.cli.capacity import check_start
    from kintsugi.cli.run_actions import Finished, change_config, check_resumable
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.creation import replace_config
    from kintsugi.run_folder.started import record_start

    folder = reader.find_run(run)
    try:
        config, changes = change_config(folder, overrides or ())
        config, moves = hosts.moved(config)
        changes = [*changes, *moves]
        status = check_resumable(folder, config, take_over=take_over, accept_changes=accept)
    except Finished as error:
        _print_error(str(error))
        raise typer.Exit(1) from error
    in_job = hosts.needs_job(config)
    if config.cluster.on == "slurm" and not in_job:  # Another allocation than that of the start, as a rule.
        config = msgspec.structs.replace(config, cluster=hosts.placed_cluster(config.cluster))
    check_start(config, run_dir=folder, resume=True)  # Refuses before anything of the run is changed.
    for change in changes:
        say(change)
    replace_config(folder, config, step=status.step)
    if accept or changes or config.cluster.on == "slurm":
        record_start(folder, config)
    RunFolder(folder).summary_file.unlink(missing_ok=True)
    if in_job:
        _follow_job(config, run_dir=folder, detach=detach)
        return
    _take_back_checkpoints(config, folder)
    _launch(config, run_dir=folder, resume=True, detach=detach)


def _take_back_checkpoints(config: Config, folder: Path) -> None:
    """Fetch the newest copy of a run that has lost its checkpoints."""
    from kintsugi.run_folder import reader

    target = config.checkpoint.copy_to
    if not target or reader.checkpoint_folders(folder):
        return
    from kintsugi.checkpoint.copies import CheckpointCopies

    taken = CheckpointCopies(target, run_dir=folder).take_back(keep=config.checkpoint.keep)
    if taken is not None:
        say(f"the checkpoint of step {taken.step} was taken back from {target}")


@app.command()
def attach(run: Run) -> None:
    """Show a running run as `kintsugi train` does. Ctrl-C leaves it going. Of an ended run, show the results."""
    from kintsugi.cli.run_actions import find_started
    from kintsugi.cli.session import attach as attach_to
    from kintsugi.cli.session import show_results
    from kintsugi.errors import UserError
    from kintsugi.run_folder import reader

    folder = reader.find_run(run)
    if find_started(folder):
        code = attach_to(folder)
    elif reader.read_summary(folder) is not None:
        code = show_results(folder)
    else:
        raise UserError(
            f"{folder}: expected a run that is running, it was interrupted; try `kintsugi resume {run}`"
        )
    if code != 0:
        raise typer.Exit(code)


@app.command()
def stop(
    run: Run,
    timeout_s: Annotated[
        float, typer.Option(min=0.0, help="Timeout for the end of the step and its checkpoint, in seconds.")
    ] = 600,
) -> None:
    """Stop a run after its current step, with a checkpoint."""
    from kintsugi.access.roles import Action
    from kintsugi.cli import slurm
    from kintsugi.cli.run_actions import find_launcher, request_stop
    from kintsugi.run_folder import reader
    from kintsugi.runtime.processes import SystemProcesses

    folder = reader.find_run(run)
    if job := slurm.job_elsewhere(folder):
        access.record_locally(folder, Action.STOP)
        say(slurm.stop_job(job))
        return
    launcher = find_launcher(folder)
    try:
        answer = request_stop(folder, launcher)
        access.record_locally(folder, Action.STOP)
        say(answer)
        launcher.wait_ended(whom=f"process {launcher.pid}", timeout_s=timeout_s)
    finally:
        launcher.close()
    # The standby, if the launcher was killed meanwhile: it has the request.
    while (record := reader.living_launcher(folder)) is not None:
        standby = SystemProcesses().adopt(record.pid)
        try:
            standby.wait_ended(whom=f"process {standby.pid}", timeout_s=timeout_s)
        finally:
            standby.close()
    status = reader.read_status(folder)
    say(f"{folder}: {status.state} at step {status.step} of {status.total_steps}")


@app.command()
def scale(
    run: Run,
    servers: Annotated[int, typer.Option(min=1, help="New number of generation servers.")],
    timeout_s: Annotated[
        float, typer.Option(min=0.0, help="Timeout for the reply of the run, in seconds.")
    ] = 60,
) -> None:
    """Scale the generation servers of a running run. Results are unaffected."""
    from kintsugi.access.roles import Action
    from kintsugi.cli.scale import scale_run
    from kintsugi.errors import KintsugiError
    from kintsugi.run_folder import reader

    folder = reader.find_run(run)
    try:
        scale_run(folder, servers=servers, timeout_s=timeout_s)
    except KintsugiError as error:
        access.record_locally(folder, Action.SCALE, detail=f"servers={servers}", answer=f"refused: {error}")
        raise
    access.record_locally(folder, Action.SCALE, detail=f"servers={servers}")
    say(f"{folder}: scaled to {counted(servers, 'generation server')}; see `kintsugi status`")


def _launch(
    config: Config,
    *,
    run_dir: Path,
    resume: bool,
    detach: bool = False,
    on_hangup: Hangup = Hangup.DETACH,
    on_tick: Callable[[], None] | None = None,
) -> None:
    """Run to the end and show the outcome, or start a run and leave it; a failed run exits with its code."""
    from kintsugi.cli.session import run_session, start_detached
    from kintsugi.run_folder import reader
    from kintsugi.runtime.stacks import enable_stack_dumps

    enable_stack_dumps()
    if detach:
        code = start_detached(config, run_dir=run_dir, resume=resume)
        if reader.living_launcher(run_dir) is not None:
            say(
                f"{run_dir}: running; `kintsugi attach {run_dir}` shows it, `kintsugi stop {run_dir}` stops it"
            )
    else:
        code = run_session(
            config,
            run_dir=run_dir,
            resume=resume,
            on_tick=on_tick or (lambda: None),
            stops_on_hangup=on_hangup is Hangup.STOP,
        )
    if code != 0:
        raise typer.Exit(code)


def _print_error(message: str) -> None:
    say(message, err=True)
