"""The command `kintsugi`. Imports are inside the commands, so that `--help` answers at once.

Exit codes: 0 done, or stopped by request with a checkpoint; 1 the run or the world failed, or it was ended at once (a
second Ctrl-C); 2 the user's mistake.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kintsugi import cli_lab, cli_observe
from kintsugi.cli_arguments import (
    Overrides,
    Recipe,
    Run,
    Step,
    allow_modules_of_this_folder,
    checked,
    validated,
)

if TYPE_CHECKING:
    from kintsugi.config import Config
    from kintsugi.recipe import Resolved

app = typer.Typer(
    help="Reinforcement learning of language models across real processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_observe.app)
app.add_typer(cli_lab.app)

SAMPLES_SHOWN = 20
ALERTS_SHOWN = 5


def main() -> None:
    """Run the command line; every error of ours becomes one message and an exit code."""
    from kintsugi.errors import KintsugiError

    try:
        app()
    except KintsugiError as error:
        from kintsugi.session import complain_error

        sys.exit(complain_error(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _complain(f"error: {error}")
        sys.exit(1)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write.")] = Path("recipe.yaml"),
    algorithm: Annotated[str, typer.Option(help="sft, dpo, ppo, grpo, dapo, …")] = "grpo",
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A Hugging Face folder; else a small model is built."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="A file, a folder, …; else sums are generated.")
    ] = None,
) -> None:
    """Write a first recipe, commented and valid as it stands."""
    from kintsugi.starter import write_starter

    written = write_starter(file, algorithm=algorithm, model=model, data=data)
    typer.echo(f"{', '.join(map(str, written))}: try `kintsugi check {file}`, then `kintsugi train {file}`")


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train by a recipe: check it, make the run folder, start the processes, show progress and the result."""
    from kintsugi.recipe import load

    _train(load(recipe, overrides or ()))


def _train(resolved: Resolved) -> None:
    from kintsugi import runs
    from kintsugi.errors import KintsugiError
    from kintsugi.session import make_run_folder

    config, run_dir = make_run_folder(validated(resolved))
    try:
        _launch(config, run_dir=run_dir, resume=False)
    except KintsugiError:
        runs.remove_unused(run_dir)
        raise


@app.command()
def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Batches to sample.")] = 1,
) -> None:
    """Sample and score without learning; RUN/rollouts keeps everything, as a data source to train on later."""
    from kintsugi.recipe import load, rollout_only

    _train(rollout_only(load(recipe, overrides or ()), steps=steps))


@app.command()
def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Show what a recipe comes to: values and their origins, graph, processes, memory. Starts nothing."""
    from kintsugi.overview import overview

    resolved = checked(recipe, overrides)
    typer.echo(overview(resolved))


@app.command()
def resume(run: Run) -> None:
    """Continue a run that was stopped, failed or killed, from its last checkpoint."""
    import msgspec

    from kintsugi import runs
    from kintsugi.errors import UserError
    from kintsugi.validation import validate

    folder = runs.find_run(run)
    status = runs.read_status(folder)
    if status.state is runs.RunState.RUNNING:
        raise UserError(f"{folder} is running (process {status.pid}); there is nothing to resume")
    if status.state is runs.RunState.FINISHED:
        _complain(
            f"{folder} is finished ({status.step} of {status.total_steps} steps); there is nothing to resume"
        )
        raise typer.Exit(1)
    allow_modules_of_this_folder()
    validate(msgspec.structs.replace(status.config, run_dir=None), resumed=folder)
    (folder / runs.SUMMARY_FILE).unlink(missing_ok=True)
    _launch(status.config, run_dir=folder, resume=True)


@app.command()
def stop(
    run: Run,
    timeout_s: Annotated[
        float, typer.Option(min=0.0, help="How long to wait for the step and its checkpoint.")
    ] = 600,
) -> None:
    """Let a running run finish its step, save a checkpoint and end."""
    import signal

    from kintsugi import runs
    from kintsugi.errors import UserError
    from kintsugi.runtime import SystemProcesses

    folder = runs.find_run(run)
    record = runs.living_launcher(folder)
    if record is None:
        raise UserError(
            f"{folder} is not running (it is {runs.read_status(folder).state}); there is nothing to stop"
        )
    launcher = SystemProcesses().adopt(record.pid)
    try:
        launcher.send_signal(signal.SIGTERM)
        typer.echo(f"{folder}: asked process {launcher.pid} to stop after its step")
        launcher.wait_ended(whom=f"process {launcher.pid}", timeout_s=timeout_s)
    finally:
        launcher.close()
    status = runs.read_status(folder)
    typer.echo(f"{folder}: {status.state} at step {status.step} of {status.total_steps}")


@app.command()
def scale(
    run: Run,
    servers: Annotated[int, typer.Option(min=1, help="Generation servers that it shall have from now on.")],
    timeout_s: Annotated[float, typer.Option(min=0.0, help="How long to wait for the run's answer.")] = 60,
) -> None:
    """Give a running run more generation servers, or fewer; its result does not change by that."""
    from kintsugi import runs
    from kintsugi.scaling import scale_run

    folder = runs.find_run(run)
    scale_run(folder, servers=servers, timeout_s=timeout_s)
    typer.echo(f"{folder}: goes on with {servers} generation servers; see `kintsugi status`")


@app.command()
def status(run: Run) -> None:
    """Show where a run stands, living or dead."""
    from rich.console import Console

    from kintsugi import runs, tables
    from kintsugi.observe.processes import read_processes
    from kintsugi.session import complain_faults

    folder = runs.find_run(run)
    current = runs.read_status(folder)
    console = Console()
    console.print(tables.status_table(current, runs.read_journal(folder)))
    if current.state is runs.RunState.RUNNING and (reports := read_processes(folder)) is not None:
        if (recovery := tables.recovery_line(reports)) is not None:
            console.print(recovery, highlight=False, markup=False)
        console.print(tables.processes_table(reports))
    for alert in runs.read_alerts(folder, count=ALERTS_SHOWN):
        console.print(tables.alert_line(alert), highlight=False, markup=False, soft_wrap=True)
    if current.state is runs.RunState.FAILED and (summary := runs.read_summary(folder)) is not None:
        complain_faults(summary.faults)


@app.command()
def incidents(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON, with every word of it.")] = False,
) -> None:
    """Show what broke in a run, living or dead: why, what was done about it, how long it took, what it cost."""
    import msgspec

    from kintsugi import runs, tables

    folder = runs.find_run(run)
    report = runs.read_incidents(folder)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
        return
    running = any(each.is_open for each in report.incidents) and runs.living_launcher(folder) is not None
    typer.echo(tables.incidents_text(report, run=str(folder), running=running))


@app.command("runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where run folders are.")] = Path("runs"),
) -> None:
    """List runs, the newest first."""
    from rich.console import Console

    from kintsugi import runs, tables

    found = runs.list_runs(folder)
    if not found:
        typer.echo(f"no runs in {folder}/")
        return
    Console().print(tables.runs_table(found))


@app.command()
def compare(
    compared: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN…", help="Two run folders or more, or their names in runs/."),
    ],
    metric: Annotated[
        list[str] | None, typer.Option(help="A figure of metrics.jsonl to show instead; may be repeated.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the curves into a file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON, with every point.")] = False,
) -> None:
    """Compare runs: configuration, curves, and held-out answers problem by problem, with intervals."""
    import msgspec

    from kintsugi import runs
    from kintsugi.compare import compare as compare_runs
    from kintsugi.compare import comparison_text, plot

    comparison = compare_runs([runs.find_run(name) for name in compared], metrics=metric or ())
    if png is not None:
        plot(comparison, png)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(comparison), indent=2))
    else:
        typer.echo(comparison_text(comparison))


@app.command()
def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Only of this step.")] = None,
    worst: Annotated[int | None, typer.Option(min=1, help="So many with the lowest reward.")] = None,
    grep: Annotated[str | None, typer.Option(help="Only with this text in prompt or completion.")] = None,
) -> None:
    """Show what the model was trained on: prompts, completions, rewards."""
    from kintsugi import runs, tables

    chosen = runs.read_samples(runs.find_run(run), step=step, worst=worst, grep=grep)
    shown = chosen if worst else chosen[-SAMPLES_SHOWN:]
    if len(shown) < len(chosen):
        typer.echo(
            f"the last {len(shown)} of {len(chosen):,} samples (--step, --worst and --grep choose others)"
        )
    typer.echo("\n".join(map(tables.sample_line, shown)) if shown else "no such samples")


@app.command("eval")
def evaluate(run: Run, step: Step = None) -> None:
    """Evaluate a checkpoint of a run on its held-out problems."""
    from kintsugi import runs, tables
    from kintsugi.errors import UserError

    folder = runs.find_run(run)
    if (launcher := runs.living_launcher(folder)) is not None:
        raise UserError(
            f"{folder} is running (process {launcher.pid}) and evaluates by itself; see `kintsugi status`"
        )
    from kintsugi.evaluate import evaluate_checkpoint

    allow_modules_of_this_folder()
    metrics = evaluate_checkpoint(folder, step=step)
    typer.echo(tables.evaluation_text(metrics))


@app.command()
def export(
    run: Run,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where the model goes; must not exist. NAME-step-N here if not given."
        ),
    ] = None,
    step: Step = None,
) -> None:
    """Copy a checkpoint's Hugging Face files, after verifying them."""
    from kintsugi import runs
    from kintsugi.exporting import export_checkpoint

    written = export_checkpoint(runs.find_run(run), to=to, step=step)
    typer.echo(f"{written[0].parent}: {', '.join(sorted(path.name for path in written))}")


@app.command("import")
def import_model(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A Hugging Face folder or a GGUF file.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write; must not exist.")],
) -> None:
    """Bring a model in, so that `model.path` can name it."""
    from kintsugi.model.importing import import_model

    written = import_model(source, destination)
    typer.echo(f"{destination}: {', '.join(sorted(path.name for path in written))}")


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder, e.g. of an export.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Who may connect: 0.0.0.0 for everybody.")] = "127.0.0.1",
    servers: Annotated[int, typer.Option(min=1, max=64, help="Processes that generate.")] = 1,
    api_key: Annotated[
        str | None, typer.Option(envvar="KINTSUGI_API_KEY", help="What clients must send; else anybody may.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences that a server works on at once.")] = 64,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt + completion; at most 4096 if not given.")
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="Memory of a server for its cache.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    queue: Annotated[
        int, typer.Option(min=1, max=65536, help="Unanswered completions; more are refused with 429.")
    ] = 1024,
    strategy: Annotated[
        str, typer.Option(help="Who answers: least_loaded, round_robin or prefix_affine.")
    ] = "least_loaded",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same request, the same bits; slower.")
    ] = False,
) -> None:
    """Serve a model by the OpenAI API: completions and chat, streamed or not."""
    from kintsugi.serving.session import ServeOptions
    from kintsugi.serving.session import serve as serve_model

    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        num_servers=servers,
        queue=queue,
        api_key=api_key,
        max_length=max_length,
    )
    plan = {
        "slots": slots,
        "kv_cache_gib": kv_cache_gib,
        "dtype": dtype,
        "device": device,
        "strategy": strategy,
        "deterministic": deterministic,
    }
    raise typer.Exit(serve_model(options, plan, say=typer.echo))


def _launch(config: Config, *, run_dir: Path, resume: bool) -> None:
    """Run to the end and show how it ended; a failed run exits with 1, its first cause first."""
    from kintsugi.session import run_session

    code = run_session(config, run_dir=run_dir, resume=resume)
    if code != 0:
        raise typer.Exit(code)


def _complain(message: str) -> None:
    typer.echo(message, err=True)
