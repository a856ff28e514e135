"""The commands that break runs on purpose, in earnest and in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kintsugi.cli_arguments import Overrides, Recipe, checked

app = typer.Typer()
lab = typer.Typer(no_args_is_help=True, help="Break runs on purpose, and see who finds the cause.")
app.add_typer(lab, name="lab")

Folder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where everything goes; must not exist. Default: a new one in runs/."),
]
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the result here.")]
LabFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a `kintsugi lab run`.")]


@app.command()
def soak(
    recipe: Recipe,
    overrides: Overrides = None,
    faults: Annotated[int, typer.Option(min=1, help="How many must strike.")] = 20,
    seed: Annotated[int, typer.Option(help="Of whom they strike, and when.")] = 0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Without the processes that workers are forked from.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where every fault and the totals go.")
    ] = None,
) -> None:
    """Run a recipe twice, once with processes killed and stopped all the time, and compare the two."""
    import signal

    from rich.console import Console

    from kintsugi import runs
    from kintsugi.lab import soak_report as reports
    from kintsugi.lab.soak import Soak
    from kintsugi.recipe import anchored

    config = anchored(checked(recipe, overrides).config)
    folder = Path(config.run_dir) if config.run_dir else runs.next_run_dir(config.name).resolve()
    runs.create_run_dir(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    campaign = Soak(config, folder=folder, num_faults=faults, seed=seed, cold=cold, say=typer.echo)
    report = campaign.run()
    if json is not None:
        reports.write(report, json)
    console.print(reports.shown(report))
    if report.totals.wrong:
        raise typer.Exit(1)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many runs, each with its own faults.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    workers: Annotated[int, typer.Option(min=6, help="Simulated ranks, rollout workers and servers.")] = 6,
    processes: Annotated[
        int, typer.Option(min=0, help="Processes to spread the runs over; 0: all cores.")
    ] = 0,
    replay: Annotated[int | None, typer.Option(metavar="SEED", help="Run this one seed again.")] = None,
    trace: Annotated[bool, typer.Option(help="With --replay: show everything that happened.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the report goes.")] = None,
) -> None:
    """Run the control plane on simulated processes, network, disk and time, with faults, and check its promises."""
    import msgspec

    from kintsugi.simulation.campaign import Runner, run_campaign, summary_of

    if replay is not None:
        outcome = Runner(num_workers=workers).run(replay, keep_trace=trace)
        for line in outcome.trace:
            typer.echo(line)
        typer.echo(summary_of(replay, outcome))
        raise typer.Exit(1 if outcome.violations else 0)
    report = run_campaign(first=first, count=seeds, num_workers=workers, num_processes=processes)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if json is not None:
        json.write_bytes(encoded + b"\n")
        violating = report.pop("violating")
        report.pop("coverage")
        encoded = msgspec.json.format(msgspec.json.encode({**report, "violating": violating}), indent=2)
    typer.echo(encoded.decode())
    raise typer.Exit(1 if report["violations"] else 0)


@lab.command("list")
def list_experiments() -> None:
    """List the experiments: what is done to which workload, and what it shows."""
    from kintsugi.lab import experiments

    for name in experiments.names():
        experiment = experiments.find(name).experiment
        faults = ", ".join(f"{fault.ability} on {fault.target}" for fault in experiment.faults)
        typer.echo(
            f"{name:8} {experiment.title} [{'/'.join(experiment.challenges)}; {', '.join(experiment.profiles)}]"
        )
        typer.echo(f"{'':8} {faults}")


@lab.command("run")
def run_experiments(
    experiments: Annotated[
        list[str], typer.Argument(metavar="NAME…", help="S1, S2, …, or the path of a file of yours.")
    ],
    profile: Annotated[str, typer.Option(help="ours, fragile or both.")] = "both",
    folder: Folder = None,
    json: JsonFile = None,
) -> None:
    """Carry out experiments, ours and the fragile system side by side, and say what surfaced and what was diagnosed."""
    from kintsugi.lab.commands import run_experiments as run_them

    if not run_them(experiments, profile=profile, folder=folder, json=json, say=typer.echo):
        raise typer.Exit(1)


@lab.command("campaign")
def run_campaign(
    cases: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    seed: Annotated[int, typer.Option(help="Of what is done to whom, and when.")] = 0,
    folder: Folder = None,
    json: JsonFile = None,
) -> None:
    """Random faults, also none, on a run that goes on; every one diagnosed blind, and scored."""
    from kintsugi.lab.commands import run_campaign as run_it

    run_it(cases, seed=seed, folder=folder, json=json, say=typer.echo)


@lab.command()
def report(folder: LabFolder) -> None:
    """Write the report of a `lab run` and a campaign: one HTML page, Markdown, figures, raw data."""
    from kintsugi.lab.commands import write_report

    write_report(folder, say=typer.echo)


@lab.command()
def kit(folder: LabFolder) -> None:
    """Write a kit to time people on: of every run the master's log only, a sheet, and the answers beside it."""
    from kintsugi.lab.kit import ANSWERS_FILE, write_kit

    typer.echo(f"{write_kit(folder)}: hand this out; the answers are in {folder / ANSWERS_FILE}")


@lab.command()
def abilities() -> None:
    """Say which faults can be injected on this machine, by which mechanism, and what keeps the others from it."""
    from kintsugi.lab.commands import tell_abilities

    tell_abilities(say=typer.echo)


@lab.command()
def residue(
    injections: Annotated[int, typer.Option(min=1, help="How many.")] = 200,
    seed: Annotated[int, typer.Option(help="Of what is injected, and who is killed.")] = 0,
    folder: Folder = None,
    json: JsonFile = None,
) -> None:
    """Inject at random, kill injector, target and laboratory at random, and look whether the host is as it was."""
    from kintsugi.lab.commands import run_residue

    if not run_residue(injections, seed=seed, folder=folder, json=json, say=typer.echo):
        raise typer.Exit(1)
