"""Commands that read runs: `status`, `incidents`, `runs`, `tag`, `prune`, `compare`, `samples`, `eval`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kintsugi.cli.arguments import Best, Json, Run, Step
from kintsugi.cli.output import console, say, say_json, text_width

if TYPE_CHECKING:
    from kintsugi.run_folder.reader import JournalStatus, RunStatus
    from kintsugi.telemetry.process_reports import ProcessReports

app = typer.Typer()

SAMPLES_SHOWN = 20
ALERTS_SHOWN = 5


@app.command()
def status(
    run: Run,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show the counters of every process.")
    ] = False,
    json: Json = False,
) -> None:
    """Show state, progress and processes of a run."""
    from kintsugi.cli import tables
    from kintsugi.cli.session import print_faults
    from kintsugi.learning_health.follower import learning_lines
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.ending import read_end
    from kintsugi.runtime.printable import printable
    from kintsugi.telemetry.process_reports import read_processes

    folder = reader.find_run(run)
    current, journal = reader.read_status(folder), reader.read_journal(folder)
    kept = tuple(reader.checkpoint_folders(folder))
    is_running = current.state is reader.RunState.RUNNING
    reports = read_processes(folder) if is_running else None
    if json:
        _say_status_json(current, journal, reports, kept=kept)
        return
    screen = console()
    screen.print(tables.status_table(current, journal, kept=kept, end=read_end(folder)))
    if reports is not None:
        for line in (tables.activity_line(reports, current), tables.recovery_line(reports)):
            if line is not None:
                screen.print(printable(line), highlight=False, markup=False)
        screen.print(tables.processes_table(reports, with_counters=everything))
    for line in learning_lines(folder):
        text = printable(f"learning: {line}; details: kintsugi diagnose {folder} --learning")
        screen.print(text, highlight=False, markup=False, soft_wrap=not screen.is_terminal)
    for alert in reader.read_alerts(folder, count=ALERTS_SHOWN):
        text = printable(tables.alert_line(alert))
        screen.print(text, highlight=False, markup=False, soft_wrap=not screen.is_terminal)
    if current.state is reader.RunState.FAILED and (summary := reader.read_summary(folder)) is not None:
        print_faults(summary.faults)


def _say_status_json(
    status: RunStatus, journal: JournalStatus, reports: ProcessReports | None, *, kept: tuple[int, ...]
) -> None:
    import msgspec

    values = {
        "folder": str(status.folder),
        "state": status.state,
        "pid": status.pid,
        "step": status.step,
        "total_steps": status.total_steps,
        "stage": status.stage,
        "metrics": status.metrics,
        "evaluations": status.evaluations,
        "checkpoints": kept,
        "servers": journal.num_servers(status.config),
        "open_incident": journal.incident,
        "processes": reports,
        "config": status.config,
    }
    _say_json(msgspec.to_builtins(values, enc_hook=str))


@app.command()
def incidents(run: Run, json: Json = False) -> None:
    """Show the incidents of a run: cause, recovery, duration and cost."""
    import msgspec

    from kintsugi.cli import tables
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.ending import read_end

    folder = reader.find_run(run)
    report, end = reader.read_incidents(folder), read_end(folder)
    if json:
        _say_json({**msgspec.to_builtins(report), "end": msgspec.to_builtins(end)})
        return
    running = any(each.is_open for each in report.incidents) and reader.is_running(folder)
    width = text_width(most=tables.WIDTH)
    say(tables.incidents_text(report, run=str(folder), running=running, end=end, width=width))


@app.command("runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that contains run folders.")] = Path(
        "runs"
    ),
    sort: Annotated[
        str, typer.Option(help="Order: started, name, state, step, reward or accuracy.")
    ] = "started",
    state: Annotated[list[str] | None, typer.Option(help="Only runs in this state; may be repeated.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only runs with this tag (`kintsugi tag`); may be repeated.")
    ] = None,
    name: Annotated[str, typer.Option(help="Only runs with this text in their name.")] = "",
    json: Json = False,
) -> None:
    """List runs, newest first."""
    from kintsugi.cli import tables
    from kintsugi.run_folder import listing

    found = listing.list_runs(folder, sort=sort, states=state or (), tags=tag or (), name=name)
    if json:
        _say_json(found)
    elif found:
        screen = console()
        screen.print(tables.runs_table(found, width=screen.width))
    else:
        say(f"no {'matching ' if state or tag or name else ''}runs in {folder}/")


@app.command()
def tag(
    run: Run,
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="TAG…", help="Tags to add; without any, print those it has.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Tag to remove; may be repeated.")
    ] = None,
) -> None:
    """Tag a run, so that `kintsugi runs --tag` finds it."""
    from kintsugi.run_folder import reader
    from kintsugi.run_folder.listing import change_tags, read_tags

    folder = reader.find_run(run)
    if tags or remove:
        has = change_tags(folder, add=tags or (), remove=remove or ())
    else:
        has = read_tags(folder)
    say(f"{folder}: {', '.join(has) or 'no tags'}")


@app.command()
def prune(
    run: Run,
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PART…", help="Parts to remove; without any, their sizes are shown."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what takes space in a run folder, and remove parts of it once the run has ended."""
    from kintsugi.cli import tables
    from kintsugi.run_folder import pruning, reader

    folder = reader.find_run(run)
    if parts:
        say(f"{folder}: {pruning.prune(folder, parts) / 1e6:,.1f} MB freed")
    elif json:
        _say_json(pruning.sizes(folder))
    else:
        console().print(tables.sizes_table(pruning.sizes(folder)))


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
    json: Json = False,
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
        _say_json({**msgspec.to_builtins(comparison), "started_by": [*starters.values()]})
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
    json: Json = False,
) -> None:
    """Show trained samples: prompt, completion, expected answer and other columns, rewards."""
    import msgspec

    from kintsugi.cli import tables
    from kintsugi.cli.prompt_lookup import RunRows
    from kintsugi.run_folder import reader

    folder = reader.find_run(run)
    last = None if worst else SAMPLES_SHOWN + 1
    chosen = reader.read_samples(folder, step=step, worst=worst, grep=grep, last=last)
    shown = chosen if worst else chosen[-SAMPLES_SHOWN:]
    if not shown:
        _refuse_no_samples(folder, step=step, worst=worst, grep=grep)
    rows = RunRows(folder)
    if json:
        _say_json([{**msgspec.to_builtins(each), "columns": rows.columns(each.ticket)} for each in shown])
        return
    if len(shown) < len(chosen):
        say(f"the last {len(shown)} samples (select others with --step, --worst and --grep)")
    if rows.note:
        say(rows.note)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
    for each in shown:
        say(tables.sample_text(each, columns=rows.columns(each.ticket), width=width))
    if rows.problem:
        say(f"columns are not shown where the data cannot be read: {rows.problem}", err=True)


def _refuse_no_samples(folder: Path, *, step: int | None, worst: int | None, grep: str | None) -> None:
    """Say why no sample was found, and exit with 1."""
    from kintsugi.run_folder import reader

    last = reader.read_samples(folder, last=1)
    if not last:
        say(f"{folder}: no samples yet; expected some after the first step", err=True)
    elif step is not None and not reader.read_samples(folder, step=step, last=1):
        say(f"--step: expected a step with samples, from 1 to {last[-1].step}, got {step}", err=True)
    elif worst is not None and grep is None:
        say(f"{folder}: no sample has a reward: this run learns from its data; leave out --worst", err=True)
    else:
        say(f"{folder}: no sample has {grep!r} in its prompt or completion", err=True)
    raise typer.Exit(1)


@app.command("eval")
def evaluate(
    run: Run,
    step: Step = None,
    best: Best = False,
    data: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Data to evaluate on instead; all its rows.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Other value, e.g. data.prompt_column=question."),
    ] = None,
    json: Json = False,
) -> None:
    """Evaluate a checkpoint of a run on its held-out problems, or on other data."""
    from kintsugi.cli import tables
    from kintsugi.errors import UserError
    from kintsugi.run_folder import reader

    folder = reader.find_run(run)
    if (launcher := reader.living_launcher(folder)) is not None:
        raise UserError(
            f"{folder} is running (process {launcher.pid}) and evaluates its own weights; see `kintsugi status`"
        )
    from kintsugi.cli.evaluate import evaluate_checkpoint

    metrics = evaluate_checkpoint(
        folder, step=reader.best_step(folder) if best else step, data=data, overrides=overrides or ()
    )
    if json:
        _say_json(metrics)
    else:
        say(tables.evaluation_text(metrics))


def _say_json(value: object) -> None:
    import msgspec

    say_json(msgspec.json.format(msgspec.json.encode(value), indent=2))
