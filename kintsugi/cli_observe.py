"""The commands that look at what a run recorded: living or dead, everything at once or one prompt's way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kintsugi.cli_arguments import Run

if TYPE_CHECKING:
    from kintsugi.observe.searching import Extent, Line
    from kintsugi.observe.store import RunStore

app = typer.Typer()

LOOK_S = 0.3
"""Between two looks at a run that is followed."""
PATIENCE_S = 2.0
"""Of people, before they are told how far something has come."""

Since = Annotated[
    str | None,
    typer.Option(
        metavar="T", help="08:39:37, 2026-11-16T08:39:37, +90s after the beginning, 90s before the end."
    ),
]
Until = Annotated[str | None, typer.Option(metavar="T", help="The same.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON, with every word of it.")]


@app.command()
def logs(
    run: Run,
    keyword: Annotated[str | None, typer.Argument(metavar="WORDS", help="In this order.")] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="A ticket, a fault's id, step:7, version:7, …")
    ] = None,
    since: Since = None,
    until: Until = None,
    process: Annotated[str | None, typer.Option(help="One (model-1), or all of a role (model).")] = None,
    kind: Annotated[str | None, typer.Option(help="Alert, FaultSeen, Span, log, HostSample, …")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the run goes on.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, as it was recorded.")] = False,
) -> None:
    """Search what all processes of a run recorded and printed: by id, time, process, kind and words."""
    import msgspec

    from kintsugi import runs
    from kintsugi.errors import UserError
    from kintsugi.observe import searching, store

    folder = runs.find_run(run)
    if follow and until is not None:
        raise UserError("--follow goes on while the run does: --until can not be given with it")
    with store.RunStore(folder) as opened:
        opened.refresh(progress=_progress())
        first, last = _window(opened, since, until)
        query = searching.Query(
            keyword=keyword, request=request, process=process, kind=kind, since=first, until=last
        )
        found = (
            searching.follow(opened, query, pause=_pause(folder))
            if follow
            else searching.search(opened, query)
        )
        is_empty, extent = True, searching.extent_of(opened)
        for line in found:
            is_empty = False
            typer.echo(msgspec.json.encode(line) if json else _line_text(line, extent))
        if is_empty:
            typer.echo(f"{folder}: nothing that was recorded is so", err=True)


@app.command()
def trace(
    run: Run,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="A ticket (grpo:0:17:0), a row's number, a prompt.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For Perfetto (ui.perfetto.dev) or chrome://tracing.")
    ] = None,
    otlp: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For OpenTelemetry, as OTLP JSON.")
    ] = None,
    since: Since = None,
    until: Until = None,
    json: Json = False,
) -> None:
    """Follow one prompt from its row to the weights that learned from it; without one, export the whole run."""
    from kintsugi import runs
    from kintsugi.errors import UserError
    from kintsugi.observe import chrome_trace, searching, tracing
    from kintsugi.observe import otlp as exporter
    from kintsugi.observe.store import RunStore

    folder = runs.find_run(run)
    if prompt is None and chrome is None and otlp is None:
        raise UserError("expected a prompt to follow, or --chrome FILE or --otlp FILE for the whole run")
    if prompt is not None and (since or until):
        raise UserError("--since and --until are for the whole run; a prompt's way is told as a whole")
    with RunStore(folder) as store:
        store.refresh(progress=_progress())
        if prompt is None:
            first, last = _window(store, since, until)
            for path, write in (
                (chrome, chrome_trace.write_chrome_trace),
                (otlp, lambda path, slices: exporter.write_otlp(path, slices, run=str(folder))),
            ):
                if path is not None:
                    count = write(path, tracing.whole_run(store, since=first, until=last))
                    typer.echo(f"{path}: {count:,} entries")
            return
        from kintsugi.observe.timeline import timeline
        from kintsugi.prompts import find_prompt

        named = find_prompt(store, prompt)
        told = tracing.trace_ticket(store, named.ticket, row=named.row, prompt=named.prompt)
        extent = searching.extent_of(store)
    if chrome is not None:
        chrome_trace.write_chrome_trace(chrome, told.stations, flow=True)
    if otlp is not None:
        exporter.write_otlp_trace(otlp, told)
    with_day = extent is not None and extent.has_midnight
    typer.echo(_indented(told) if json else timeline(told, with_day=with_day))


@app.command()
def diagnose(
    run: Run,
    at: Annotated[
        str | None, typer.Option(metavar="T", help="The moment to look at; the last one if not given.")
    ] = None,
    bottleneck: Annotated[
        bool, typer.Option("--bottleneck", help="Of a healthy run: what holds it up the most.")
    ] = False,
    json: Json = False,
) -> None:
    """Name what is wrong with a run, living or dead: the cause, how it got to what people see, and what to do."""
    from kintsugi import runs
    from kintsugi.observe.store import RunStore

    folder = runs.find_run(run)
    moment = None
    if at is not None:
        with RunStore(folder) as store:
            store.refresh(progress=_progress())
            moment = _moment(store, at, option="--at", is_inside=True)
    if bottleneck:
        from kintsugi.diagnosis.bottleneck import find_bottleneck
        from kintsugi.diagnosis.bottleneck import tell as tell_bottleneck

        report = find_bottleneck(folder, at=moment)
        typer.echo(_indented(report) if json else tell_bottleneck(report))
        return
    from kintsugi.diagnosis import diagnose as diagnose_run
    from kintsugi.diagnosis.telling import as_values, tell

    diagnosis = diagnose_run(folder, at=moment)
    typer.echo(_indented(as_values(diagnosis)) if json else tell(diagnosis))


@app.command()
def watch(
    run: Run,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Hand figures out to Prometheus; 0: any that is free."),
    ] = None,
    host: Annotated[str, typer.Option(help="Who may ask for them: 0.0.0.0 for everybody.")] = "127.0.0.1",
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Post alerts and diagnoses there.")
    ] = None,
) -> None:
    """Stay with a run while it goes on: tell of steps, faults, alerts and diagnoses, and pass them on."""
    from kintsugi import runs
    from kintsugi.errors import UserError
    from kintsugi.observe import alerts, prometheus
    from kintsugi.watching import Watching

    folder = runs.find_run(run)
    if runs.living_launcher(folder) is None:
        raise UserError(
            f"{folder} is not running; `kintsugi logs` and `kintsugi diagnose` look at what it left"
        )
    if webhook is not None and (problem := alerts.webhook_problem(webhook)) is not None:
        raise UserError(f"--webhook: expected an http or https URL, but {problem}: {webhook}")
    with ExitStack() as stack:
        if port is not None:
            server = stack.enter_context(prometheus.FiguresServer(folder, host=host, port=port))
            typer.echo(f"figures: http://{host}:{server.port}/metrics")
        hook = None
        if webhook is not None:
            hook = alerts.Webhook(webhook, say=lambda text: typer.echo(text, err=True))
            stack.callback(hook.close)
        watching = Watching(folder, say=typer.echo, hook=hook)
        stack.callback(watching.close)
        pause = _pause(folder)
        while pause():
            watching.look()
        watching.look()
    typer.echo(f"{folder}: {runs.read_status(folder).state}")


def _progress() -> Callable[[int, int], None]:
    """Says on a terminal how far the first look at much has come; later ones go on from there."""
    import sys

    from kintsugi.runtime import SYSTEM_CLOCK

    told_at = SYSTEM_CLOCK.monotonic()

    def tell(done: int, size: int) -> None:
        nonlocal told_at
        now = SYSTEM_CLOCK.monotonic()
        if sys.stderr.isatty() and now - told_at > PATIENCE_S:
            told_at = now
            typer.echo(f"indexing: {done >> 20:,} of {size >> 20:,} MiB", err=True)

    return tell


def _indented(value: object) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _window(store: RunStore, since: str | None, until: str | None) -> tuple[float | None, float | None]:
    from kintsugi.errors import UserError

    first = _moment(store, since, option="--since") if since is not None else None
    last = _moment(store, until, option="--until") if until is not None else None
    if first is not None and last is not None and first > last:
        raise UserError(f"--since {since} is later than --until {until}")
    return first, last


def _moment(store: RunStore, text: str, *, option: str, is_inside: bool = False) -> float:
    from kintsugi.observe.searching import extent_of, moment

    return moment(text, extent=extent_of(store), option=option, is_inside=is_inside)


def _pause(folder: Path) -> Callable[[], bool]:
    """Waits a moment, and says whether the run still went on before that: what it then left has been looked at."""

    def pause() -> bool:
        import time

        from kintsugi import runs
        from kintsugi.runtime import wait

        goes_on = runs.living_launcher(folder) is not None

        def attempt(remaining_s: float) -> bool:
            time.sleep(min(LOOK_S, remaining_s))
            return True

        if goes_on:
            wait(attempt, whom="the run", what="something new", timeout_s=LOOK_S)
        return goes_on

    return pause


def _line_text(line: Line, extent: Extent | None) -> str:
    """With its day where the run is not of one day only, up to this line at least."""
    from kintsugi.observe.timeline import clock_text

    with_day = extent is not None and extent.including(line.time).has_midnight
    about = "~" if not line.exact else " "
    clock = clock_text(line.time, with_day=with_day)
    return f"{clock}{about} {line.process:<10} {line.kind:<14} {line.text}"
