"""Commands that read the records of a run, running or ended: `logs`, `trace`, `diagnose`, `watch`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kintsugi.cli.arguments import Json, Run
from kintsugi.cli.output import say, say_json

if TYPE_CHECKING:
    from kintsugi.telemetry.store.index import RunStore
    from kintsugi.telemetry.store.search import FoundLine, TimeExtent

app = typer.Typer()

LOOK_S = 0.3
"""Polling interval of a run that is followed."""
PROGRESS_INTERVAL_S = 2.0
"""Interval of progress lines while the index is built."""

Since = Annotated[
    str | None,
    typer.Option(
        metavar="T",
        help="Start: 08:39:37, 2026-11-16T08:39:37, +90s (after the start of the run) or 90s (before its end).",
    ),
]
Until = Annotated[str | None, typer.Option(metavar="T", help="End, in the same formats.")]


@app.command()
def logs(
    run: Run,
    keyword: Annotated[
        str | None, typer.Argument(metavar="WORDS", help="Words to search for, in this order.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Ticket, fault id, step:7, version:7, …")
    ] = None,
    since: Since = None,
    until: Until = None,
    process: Annotated[
        str | None, typer.Option(help="Process (model-1), or all processes of a role (model).")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Record type: Alert, FaultSeen, Span, log, HostSample, …")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new records until the run ends.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Search the events and logs of all processes by id, time, process, type and words."""
    import msgspec

    from kintsugi.errors import UserError
    from kintsugi.run_folder import reader
    from kintsugi.telemetry.store import index, search

    folder = reader.find_run(run)
    if follow and until is not None:
        raise UserError("--follow waits until the run ends: expected no --until with it")
    with index.RunStore(folder) as opened:
        opened.refresh(progress=_progress())
        first, last = _window(opened, since, until)
        query = search.SearchQuery(
            keyword=keyword, request=request, process=process, kind=kind, since=first, until=last
        )
        found = search.follow(opened, query, pause=_pause(folder)) if follow else search.search(opened, query)
        is_empty, extent = True, search.extent_of(opened)
        for line in found:
            is_empty = False
            if json:
                say_json(msgspec.json.encode(line))
            else:
                say(_line_text(line, extent))
        if is_empty:
            say(f"{folder}: no matching records", err=True)


@app.command()
def trace(
    run: Run,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Ticket (grpo:0:17:0), row number, or text of a prompt."),
    ] = None,
    chrome: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."
        ),
    ] = None,
    otlp: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write OpenTelemetry spans (OTLP JSON).")
    ] = None,
    since: Since = None,
    until: Until = None,
    json: Json = False,
) -> None:
    """Trace one prompt from its row to the weights trained on it. Without a prompt, export the whole run."""
    from kintsugi.errors import UserError
    from kintsugi.run_folder import reader
    from kintsugi.telemetry.export import chrome_trace
    from kintsugi.telemetry.export import otlp as exporter
    from kintsugi.telemetry.store import search, tracing
    from kintsugi.telemetry.store.index import RunStore

    folder = reader.find_run(run)
    if prompt is None and chrome is None and otlp is None:
        raise UserError("expected a prompt to trace, or --chrome FILE or --otlp FILE for the whole run")
    if prompt is not None and (since or until):
        raise UserError("--since and --until apply to the whole run: expected none of them with a prompt")
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
                    say(f"{path}: {count:,} entries")
            return
        from kintsugi.cli.prompt_lookup import find_prompt
        from kintsugi.telemetry.store.tracing import timeline

        named = find_prompt(store, prompt)
        traced = tracing.trace_ticket(store, named.ticket, row=named.row, prompt=named.prompt)
        extent = search.extent_of(store)
    if chrome is not None:
        chrome_trace.write_chrome_trace(chrome, traced.stations, flow=True)
    if otlp is not None:
        exporter.write_otlp_trace(otlp, traced)
    with_day = extent is not None and extent.has_midnight
    _say_either(traced if json else timeline(traced, with_day=with_day))


@app.command()
def diagnose(
    run: Run,
    at: Annotated[
        str | None, typer.Option(metavar="T", help="Time to diagnose; default: the end of the run, or now.")
    ] = None,
    bottleneck: Annotated[
        bool, typer.Option("--bottleneck", help="Find the bottleneck of a healthy run.")
    ] = False,
    learning: Annotated[
        bool,
        typer.Option("--learning", help="Find what keeps a run, whose processes are healthy, from learning."),
    ] = False,
    json: Json = False,
) -> None:
    """Diagnose a run, running or ended: root cause, propagation to the visible symptom, and remedy."""
    from kintsugi.errors import UserError
    from kintsugi.run_folder import reader
    from kintsugi.telemetry.store.index import RunStore

    folder = reader.find_run(run)
    if learning:
        from kintsugi.learning_health import assess_learning
        from kintsugi.learning_health.format import format_report

        if at is not None or bottleneck:
            raise UserError("--learning: expected neither --at nor --bottleneck with it")
        learned = assess_learning(folder)
        _say_either(learned if json else format_report(learned))
        return
    moment = None
    if at is not None:
        with RunStore(folder) as store:
            store.refresh(progress=_progress())
            moment = _moment(store, at, option="--at", is_inside=True)
    if bottleneck:
        from kintsugi.diagnosis.bottleneck import find_bottleneck, format_bottleneck

        report = find_bottleneck(folder, at=moment)
        _say_either(report if json else format_bottleneck(report))
        return
    from kintsugi.cli.tables import end_text
    from kintsugi.diagnosis import diagnose as diagnose_run
    from kintsugi.diagnosis.format import as_values, format_diagnosis
    from kintsugi.run_folder.ending import read_end

    diagnosis = diagnose_run(folder, at=moment)
    end = read_end(folder) if at is None else None
    text = end_text(end, run=str(folder)) if end is not None else ""
    _say_either(as_values(diagnosis, end=text) if json else format_diagnosis(diagnosis, end=text))


@app.command()
def watch(
    run: Run,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve metrics for Prometheus on this port; 0: any free port."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from other hosts.")
    ] = "127.0.0.1",
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Post alerts and diagnoses to this URL.")
    ] = None,
) -> None:
    """Follow a running run: print steps, faults, alerts and diagnoses, and export them."""
    from kintsugi.cli.watch import RunFollower
    from kintsugi.errors import UserError
    from kintsugi.run_folder import reader
    from kintsugi.telemetry.export import prometheus, webhooks

    folder = reader.find_run(run)
    if reader.living_launcher(folder) is None:
        raise UserError(
            f"{folder} is not running; use `kintsugi logs` and `kintsugi diagnose` for a run that has ended"
        )
    if webhook is not None and (problem := webhooks.webhook_problem(webhook)) is not None:
        raise UserError(f"--webhook: expected an http or https URL, but {problem}: {webhook}")
    with ExitStack() as stack:
        if port is not None:
            server = stack.enter_context(prometheus.MetricsServer(folder, host=host, port=port))
            say(f"metrics: http://{host}:{server.port}/metrics")
        hook = None
        if webhook is not None:
            hook = webhooks.Webhook(webhook, say=lambda text: say(text, err=True))
            stack.callback(hook.close)
        follower = RunFollower(folder, say=say, hook=hook)
        stack.callback(follower.close)
        pause = _pause(folder)
        while pause():
            follower.look()
        follower.look()
    say(f"{folder}: {reader.read_status(folder).state}")


def _progress() -> Callable[[int, int], None]:
    """Return a callback that prints the progress of indexing on a terminal."""
    import sys

    from kintsugi.runtime.clock import SYSTEM_CLOCK

    printed_at = SYSTEM_CLOCK.monotonic()

    def print_progress(done: int, size: int) -> None:
        nonlocal printed_at
        now = SYSTEM_CLOCK.monotonic()
        if sys.stderr.isatty() and now - printed_at > PROGRESS_INTERVAL_S:
            printed_at = now
            say(f"indexing: {done >> 20:,} of {size >> 20:,} MiB", err=True)

    return print_progress


def _say_either(value: object) -> None:
    """Print a text as it is, and any other value as JSON."""
    import msgspec

    if isinstance(value, str):
        say(value)
    else:
        say_json(msgspec.json.format(msgspec.json.encode(value), indent=2))


def _window(store: RunStore, since: str | None, until: str | None) -> tuple[float | None, float | None]:
    from kintsugi.errors import UserError

    first = _moment(store, since, option="--since") if since is not None else None
    last = _moment(store, until, option="--until") if until is not None else None
    if first is not None and last is not None and first > last:
        raise UserError(f"--since {since} is later than --until {until}")
    return first, last


def _moment(store: RunStore, text: str, *, option: str, is_inside: bool = False) -> float:
    from kintsugi.telemetry.store.search import extent_of, moment

    return moment(text, extent=extent_of(store), option=option, is_inside=is_inside)


def _pause(folder: Path) -> Callable[[], bool]:
    """Return a callback that sleeps and returns whether the run was running before, so that its last records are
    read."""

    def pause() -> bool:
        import time

        from kintsugi.run_folder import reader
        from kintsugi.runtime.waits import wait

        is_running = reader.living_launcher(folder) is not None

        def attempt(remaining_s: float) -> bool:
            time.sleep(min(LOOK_S, remaining_s))
            return True

        if is_running:
            wait(attempt, whom="the run", what="something new", timeout_s=LOOK_S)
        return is_running

    return pause


def _line_text(line: FoundLine, extent: TimeExtent | None) -> str:
    """Format a found line; with the date if the run so far has spanned midnight."""
    from kintsugi.runtime.printable import printable_line
    from kintsugi.telemetry.format import clock_text

    with_day = extent is not None and extent.including(line.time).has_midnight
    about = "~" if not line.exact else " "
    clock = clock_text(line.time, with_day=with_day)
    return f"{clock}{about} {line.process:<10} {line.kind:<14} {printable_line(line.text)}"
