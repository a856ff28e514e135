"""The command line `kintsugi`. Commands import what they need themselves, so that `--help` is fast.

Exit codes: 0 success, or stopped on request with a checkpoint; 1 failure, or aborted by a second Ctrl-C; 2 user error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kintsugi.cli import access, lab, observe, page
from kintsugi.cli.arguments import (
    Overrides,
    Recipe,
    Run,
    Step,
    load_validated,
    loaded,
    validated,
)
from kintsugi.cli.output import say, say_json
from kintsugi.run_folder.layout import RunFolder

if TYPE_CHECKING:
    from kintsugi.config.recipe import Resolved
    from kintsugi.config.schema import Config

app = typer.Typer(
    help="Fault-tolerant, distributed RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(observe.app)
app.add_typer(page.app)
app.add_typer(lab.app)
app.add_typer(access.app)

SAMPLES_SHOWN = 20
ALERTS_SHOWN = 5


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
        typer.Option(metavar="FOLDER", help="Hugging Face folder; default: a small new model."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Data file or folder; default: generated arithmetic.")
    ] = None,
) -> None:
    """Write a commented recipe that is valid as it is."""
    from kintsugi.cli.recipe_template import write_starter

    written = write_starter(file, algorithm=algorithm, model=model, data=data)
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
        say(recipe_text(name), nl=False)
    else:
        say(f"{copy_recipe(name, copy)}: try `kintsugi check {copy}`")


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    with_page: Annotated[
        bool, typer.Option("--page", help="Show the run in a browser, as `kintsugi page` does.")
    ] = False,
    page_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free port.")] = 0,
) -> None:
    """Train a model as described by a recipe, and show progress and results."""
    _train(loaded(recipe, overrides), page_port=page_port if with_page else None)


def _train(resolved: Resolved, *, page_port: int | None = None) -> None:
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
        _launch(config, run_dir=run_dir, resume=False, on_tick=beside.check if beside is not None else None)
    except KintsugiError:
        remove_unused(run_dir)
        raise
    finally:
        if beside is not None:
            beside.close()


@app.command()
def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of batches to sample.")] = 1,
) -> None:
    """Sample and score without training. The samples in RUN/rollouts can be used as a data source later."""
    from kintsugi.config.recipe import rollout_only

    _train(rollout_only(loaded(recipe, overrides), steps=steps))


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
    accept: Annotated[
        bool, typer.Option("--accept", help="Resume although config.yaml or other files were changed.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Resume a run of another host, which is gone.")
    ] = False,
) -> None:
    """Resume a run that was stopped, failed or killed, from its last checkpoint."""
    from kintsugi.cli.run_actions import Finished, check_resumable
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.started import record_start

    folder = reader.find_run(run)
    try:
        status = check_resumable(folder, take_over=take_over, accept_changes=accept)
    except Finished as error:
        _print_error(str(error))
        raise typer.Exit(1) from error
    RunFolder(folder).summary_file.unlink(missing_ok=True)
    if accept:
        record_start(folder, status.config)
    _launch(status.config, run_dir=folder, resume=True)


@app.command()
def stop(
    run: Run,
    timeout_s: Annotated[
        float, typer.Option(min=0.0, help="Timeout for the end of the step and its checkpoint, in seconds.")
    ] = 600,
) -> None:
    """Stop a run after its current step, with a checkpoint."""
    from kintsugi.access.roles import Action
    from kintsugi.cli.run_actions import find_launcher, request_stop
    from kintsugi.run_folder import reader
    from kintsugi.runtime.processes import SystemProcesses

    folder = reader.find_run(run)
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
    say(f"{folder}: scaled to {servers} generation servers; see `kintsugi status`")


@app.command()
def status(run: Run) -> None:
    """Show state, progress and processes of a run."""
    from rich.console import Console

    from kintsugi.cli import tables
    from kintsugi.cli.session import print_faults
    from kintsugi.learning_health.follower import learning_lines
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.ending import read_end
    from kintsugi.runtime.printable import printable
    from kintsugi.telemetry.process_reports import read_processes

    folder = reader.find_run(run)
    current = reader.read_status(folder)
    console = Console()
    console.print(tables.status_table(current, reader.read_journal(folder), end=read_end(folder)))
    if current.state is reader.RunState.RUNNING and (reports := read_processes(folder)) is not None:
        if (recovery := tables.recovery_line(reports)) is not None:
            console.print(printable(recovery), highlight=False, markup=False)
        console.print(tables.processes_table(reports))
    for line in learning_lines(folder):
        text = printable(f"learning: {line}; details: kintsugi diagnose {folder} --learning")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for alert in reader.read_alerts(folder, count=ALERTS_SHOWN):
        text = printable(tables.alert_line(alert))
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if current.state is reader.RunState.FAILED and (summary := reader.read_summary(folder)) is not None:
        print_faults(summary.faults)


@app.command()
def incidents(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with all fields.")] = False,
) -> None:
    """Show the incidents of a run: cause, recovery, duration and cost."""
    import msgspec

    from kintsugi.cli import tables
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.ending import read_end

    folder = reader.find_run(run)
    report, end = reader.read_incidents(folder), read_end(folder)
    if json:
        values = {**msgspec.to_builtins(report), "end": msgspec.to_builtins(end)}
        say_json(msgspec.json.format(msgspec.json.encode(values), indent=2))
        return
    running = any(each.is_open for each in report.incidents) and reader.is_running(folder)
    say(tables.incidents_text(report, run=str(folder), running=running, end=end))


@app.command("runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that contains run folders.")] = Path(
        "runs"
    ),
) -> None:
    """List runs, newest first."""
    from rich.console import Console

    from kintsugi.cli import tables
    from kintsugi.run_folder import reader

    found = reader.list_runs(folder)
    if not found:
        say(f"no runs in {folder}/")
        return
    Console().print(tables.runs_table(found))


@app.command()
def compare(
    compared: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN…", help="Two or more run folders, or their names in runs/."),
    ],
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric of metrics.jsonl to show instead; may be repeated.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also plot the curves to this file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with all points.")] = False,
) -> None:
    """Compare runs: configuration, metric curves, and held-out accuracy with confidence intervals."""
    import msgspec

    from kintsugi.access.audit import started_by
    from kintsugi.cli.compare import comparison_text, plot
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.comparison import compare as compare_runs

    comparison = compare_runs([reader.find_run(name) for name in compared], metrics=metric or ())
    starters = {run.folder: started_by(Path(run.folder)) for run in comparison.runs}
    if png is not None:
        plot(comparison, png)
    if json:
        values = {**msgspec.to_builtins(comparison), "started_by": [*starters.values()]}
        say_json(msgspec.json.format(msgspec.json.encode(values), indent=2))
    else:
        say(comparison_text(comparison, starters=starters))


@app.command()
def samples(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Only samples of this step.")] = None,
    worst: Annotated[
        int | None, typer.Option(min=1, help="Show this many samples with the lowest reward.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only samples with this text in prompt or completion.")
    ] = None,
) -> None:
    """Show trained samples: prompts, completions, rewards."""
    from kintsugi.cli import tables
    from kintsugi.run_folder import reader

    last = None if worst else SAMPLES_SHOWN + 1
    chosen = reader.read_samples(reader.find_run(run), step=step, worst=worst, grep=grep, last=last)
    shown = chosen if worst else chosen[-SAMPLES_SHOWN:]
    if len(shown) < len(chosen):
        say(f"the last {len(shown)} samples (select others with --step, --worst and --grep)")
    say("\n".join(map(tables.sample_line, shown)) if shown else "no matching samples")


@app.command("eval")
def evaluate(run: Run, step: Step = None) -> None:
    """Evaluate a checkpoint of a run on its held-out problems."""
    from kintsugi.cli import tables
    from kintsugi.errors import UserError
    from kintsugi.run_folder import reader

    folder = reader.find_run(run)
    if (launcher := reader.living_launcher(folder)) is not None:
        raise UserError(
            f"{folder} is running (process {launcher.pid}) and evaluates its own weights; see `kintsugi status`"
        )
    from kintsugi.cli.evaluate import evaluate_checkpoint

    metrics = evaluate_checkpoint(folder, step=step)
    say(tables.evaluation_text(metrics))


@app.command()
def export(
    run: Run,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder to write; must not exist. Default: NAME-step-N in the current folder.",
        ),
    ] = None,
    step: Step = None,
) -> None:
    """Verify a checkpoint and export it as a Hugging Face folder."""
    from kintsugi.cli.export import export_checkpoint
    from kintsugi.run_folder import reader

    written = export_checkpoint(reader.find_run(run), to=to, step=step)
    say(f"{written[0].parent}: {', '.join(sorted(path.name for path in written))}")


@app.command("import")
def import_model(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Hugging Face folder or GGUF file.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="Folder to write; must not exist.")],
) -> None:
    """Convert a model to a folder that `model.path` accepts."""
    from kintsugi.cli.import_progress import import_bar
    from kintsugi.model.import_gguf import import_model

    with import_bar() as progress:
        written = import_model(source, destination, progress=progress)
    say(f"{destination}: {', '.join(sorted(path.name for path in written))}")


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder, e.g. of an export.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other hosts.")
    ] = "127.0.0.1",
    servers: Annotated[int, typer.Option(min=1, max=64, help="Number of generation servers.")] = 1,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KINTSUGI_API_KEY",
            help="API key that clients must send; default: none. Arguments are visible in `ps`: prefer the file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the API key, readable by you alone.")
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the key for /admin: weights and number of servers."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of named keys with roles and quotas (`kintsugi token add`); admins may use /admin.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept connections from other hosts without any key.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Further host name of this service, e.g. of a proxy; may be repeated."
        ),
    ] = None,
    weights_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Folder that /admin/weights may load from; default: the one with the model."
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences that a server decodes concurrently.")] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Maximum prompt + completion in tokens; default: that of the model, at most 4096."
        ),
    ] = None,
    kv_cache_gib: Annotated[float | None, typer.Option(help="KV cache size of one server, in GiB.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    queue: Annotated[
        int,
        typer.Option(
            min=1,
            max=65536,
            help="Maximum number of completions in flight; further ones are refused with 429.",
        ),
    ] = 1024,
    strategy: Annotated[
        str, typer.Option(help="Routing: least_loaded, round_robin or prefix_affine.")
    ] = "least_loaded",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bitwise reproducible completions; slower.")
    ] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API: completions and chat, with streaming."""
    from kintsugi.errors import UserError
    from kintsugi.serving.credentials import Credentials, read_key
    from kintsugi.serving.session import ServeOptions
    from kintsugi.serving.session import serve as serve_model

    if api_key is not None and api_key_file is not None:
        raise UserError("expected either --api-key or --api-key-file, got both")
    credentials = Credentials(
        api_key=api_key if api_key_file is None else read_key(api_key_file),
        admin_key=None if admin_key_file is None else read_key(admin_key_file),
        token_file=tokens,
        host=host,
        allowed_hosts=tuple(allowed_host or ()),
    )
    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        num_servers=servers,
        queue=queue,
        credentials=credentials,
        insecure=insecure,
        weights_folders=tuple(weights_folder or ()),
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
    raise typer.Exit(serve_model(options, plan, print_line=say))


def _launch(
    config: Config, *, run_dir: Path, resume: bool, on_tick: Callable[[], None] | None = None
) -> None:
    """Run to the end and show the outcome; a failed run exits with its code."""
    from kintsugi.cli.session import run_session
    from kintsugi.runtime.stacks import enable_stack_dumps

    enable_stack_dumps()
    code = run_session(config, run_dir=run_dir, resume=resume, on_tick=on_tick or (lambda: None))
    if code != 0:
        raise typer.Exit(code)


def _print_error(message: str) -> None:
    say(message, err=True)
