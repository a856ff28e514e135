"""Commands that inject faults into runs, real and simulated: `soak`, `simulate` and `lab`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kintsugi.cli.arguments import Overrides, Recipe, loaded, validated
from kintsugi.cli.hosts import On
from kintsugi.cli.output import console, counted, say
from kintsugi.lab.soak.plan import FaultRole
from kintsugi.lab.testbed.outputs import Output

app = typer.Typer()
lab = typer.Typer(no_args_is_help=True, help="Inject faults into runs, and compare diagnosis methods.")
app.add_typer(lab, name="lab")

Folder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder for all results; must not exist. Default: a new one in runs/."),
]
JsonFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the result to this file.")]
LabFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a `kintsugi lab run` or `lab campaign`.")
]


@app.command()
def soak(
    recipe: Recipe,
    overrides: Overrides = None,
    faults: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of faults to inject. From two for each role in each phase on, as many more as these need.",
        ),
    ] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the choice of processes and phases.")] = 0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Disable the fork server: every process imports its libraries.")
    ] = False,
    output: Annotated[
        Output | None,
        typer.Option(help="Show the disturbed runs as `kintsugi train` does, on an output of this kind."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every fault and the totals to this file.")
    ] = None,
    on: On = None,
    role: Annotated[
        list[FaultRole] | None,
        typer.Option(
            help="Hit only these, several times: processes of a role, all of a host, or with --on a whole node."
        ),
    ] = None,
) -> None:
    """Run a recipe without faults and with processes killed and stopped repeatedly, and compare the results. On other
    machines, whole machines are lost too."""
    import signal

    from kintsugi.cli.hosts import placed, with_engine
    from kintsugi.config.recipe import anchored
    from kintsugi.lab.soak import report as reports
    from kintsugi.lab.soak.soak import Soak
    from kintsugi.run_folder.creation import create_run_dir, next_run_dir

    if cold and output is not None:
        raise typer.BadParameter("a run with an output is started with the fork server: leave out --cold")
    config = anchored(validated(placed(loaded(recipe, with_engine(overrides, on=on)))).config)
    if role and FaultRole.NODE in role and not config.cluster.on:
        raise typer.BadParameter("--role node: expected --on with it, which puts the run on other machines")
    if config.cluster.on:
        from kintsugi.lab.testbed.remote_hosts import check_reach

        check_reach(config)
    folder = Path(config.run_dir) if config.run_dir else next_run_dir(config.name).resolve()
    create_run_dir(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Soak(
        config,
        folder=folder,
        num_faults=faults,
        seed=seed,
        cold=cold,
        roles=tuple(role) if role else None,
        output=output,
        say=say,
    )
    report = run.run()
    if json is not None:
        reports.write(report, json)
    console().print(reports.render(report))
    if report.totals.wrong:
        raise typer.Exit(1)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs, each with its own faults.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    workers: Annotated[int, typer.Option(min=6, help="Simulated ranks, rollout workers and servers.")] = 6,
    shards: Annotated[int, typer.Option(min=1, help="Parts into which the ranks' state is cut.")] = 1,
    layouts: Annotated[bool, typer.Option(help="Draw ranks, parts and hosts for each seed.")] = False,
    processes: Annotated[int, typer.Option(min=0, help="Number of parallel processes; 0: one per core.")] = 0,
    replay: Annotated[int | None, typer.Option(metavar="SEED", help="Run only this seed.")] = None,
    trace: Annotated[bool, typer.Option(help="With --replay: print the whole trace.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to this file.")] = None,
) -> None:
    """Run the control plane on simulated processes, network, disk and time, with faults, and check its invariants."""
    import msgspec

    from kintsugi.simulation.campaign import Runner, run_campaign, summary_of

    if replay is not None:
        runner = Runner(num_workers=workers, shards=shards, draws_layouts=layouts)
        outcome = runner.run(replay, keep_trace=trace)
        for line in outcome.trace:
            say(line)
        say(summary_of(replay, outcome))
        raise typer.Exit(1 if outcome.violations else 0)
    report = run_campaign(
        first=first,
        count=seeds,
        num_workers=workers,
        num_processes=processes,
        shards=shards,
        draws_layouts=layouts,
    )
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    told = {
        name: counted(int(str(report[f"{name}s"])), name) for name in ("violation", "seed", "fault", "event")
    }
    say(
        f"{told['violation']} in {told['seed']} with {told['fault']}: {told['event']}, "
        f"{report['virtual_s']:,.0f} s of virtual time in {report['wall_s']:.1f} s"
    )
    met = msgspec.convert(report["coverage"], dict[str, dict[str, object]])
    events, crashes = met["state_event"], met["state_effect_crash"]
    say(
        f"{events['met']} of {events['possible']} pairs of state and event occurred; the master crashed at "
        f"{crashes['met']} of {crashes['possible']} pairs of state and effect"
    )
    if report["violating"]:
        say(msgspec.json.format(msgspec.json.encode(report["violating"]), indent=2).decode())
    if json is None:
        say("--json FILE writes all figures, and which states and events were covered")
    raise typer.Exit(1 if report["violations"] else 0)


@app.command(hidden=True)
def host_signals(
    host: Annotated[str, typer.Argument(help="Name of the host in its run.")],
    scratch: Annotated[Path, typer.Argument(help="Folder of the supervisors on this host.")],
) -> None:
    """Inject faults into a run on this host, as orders on standard input say: `soak` and `lab run` call it."""
    from kintsugi.lab.testbed.remote_signals import serve

    serve(host, scratch)


@lab.command("list")
def list_experiments() -> None:
    """List the experiments: title, challenges (A, B, C; see docs/laboratory.md), systems and injected faults."""
    from kintsugi.lab.scenarios import experiments

    for name in experiments.names():
        experiment = experiments.find(name).experiment
        faults = ", ".join(f"{fault.ability} on {fault.target}" for fault in experiment.faults)
        say(
            f"{name:8} {experiment.title} [{'/'.join(experiment.challenges)}; {', '.join(experiment.profiles)}]"
        )
        say(f"{'':8} {faults}")
    say("Challenges: A: a fault shows in another stage; B: logs mislead; C: exists in RL only.")
    say("Systems: ours; fragile: a conventional RL system; sft: conventional fine-tuning, for contrast.")


@lab.command("run")
def run_experiments(
    experiments: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME… [FIELD=VALUE]…",
            help="S1, S2, …, or the path of an experiment file; with --on also fields of `cluster`.",
        ),
    ],
    profile: Annotated[
        str, typer.Option(help="System to run on: ours, fragile (a conventional RL system) or both.")
    ] = "both",
    folder: Folder = None,
    json: JsonFile = None,
    on: On = None,
) -> None:
    """Run experiments on our system and on the fragile one; report visible errors and diagnoses. With --on run and
    faults are on other machines, and a machine that can not have a fault is named before anything starts."""
    from kintsugi.cli.hosts import placed
    from kintsugi.lab.commands import run_experiments as run_them

    if not run_them(experiments, profile=profile, folder=folder, json=json, say=say, on=on, place=placed):
        raise typer.Exit(1)


@lab.command("campaign")
def run_campaign(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="Recipe to run; default: the campaign's own workload."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Changes of the recipe.")
    ] = None,
    cases: Annotated[int, typer.Option(min=1, help="Number of cases.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the faults, targets and times.")] = 0,
    each: Annotated[
        bool, typer.Option("--each", help="Each of 18 faults once, instead of random ones.")
    ] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Only cases with two faults at once, in two processes.")
    ] = False,
    disk_folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With a recipe: folder for the run, on a disk that may be filled."),
    ] = None,
    folder: Folder = None,
    json: JsonFile = None,
) -> None:
    """Inject faults (or none) into a running job, diagnose each case blindly, and score the diagnoses."""
    from kintsugi.lab.commands import run_campaign as run_it

    if not run_it(
        cases,
        seed=seed,
        folder=folder,
        json=json,
        say=say,
        recipe=recipe,
        overrides=overrides or (),
        each=each,
        pairs=pairs,
        disk_folder=disk_folder,
    ):
        raise typer.Exit(1)


@lab.command()
def report(folder: LabFolder) -> None:
    """Write the report of a `lab run` or a campaign: HTML page, Markdown, figures and raw data."""
    from kintsugi.lab.commands import write_report

    write_report(folder, say=say)


@lab.command()
def kit(folder: LabFolder) -> None:
    """Write the material of a human study: the master's log of every run, an answer sheet, and the right answers."""
    from kintsugi.lab.human_study import ANSWERS_FILE, write_kit

    say(f"{write_kit(folder)}: for the participants; the right answers are in {folder / ANSWERS_FILE}")


@lab.command()
def abilities() -> None:
    """List fault types and mechanisms, and why a mechanism does not work on this machine."""
    from kintsugi.lab.commands import list_abilities

    list_abilities(say=say)


@lab.command()
def residue(
    injections: Annotated[int, typer.Option(min=1, help="Number of injections.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the injections and kills.")] = 0,
    folder: Folder = None,
    json: JsonFile = None,
) -> None:
    """Check that injections leave no residue on the host, even when injector, target or laboratory are killed."""
    from kintsugi.lab.commands import run_residue

    if not run_residue(injections, seed=seed, folder=folder, json=json, say=say):
        raise typer.Exit(1)
