"""Commands about access: `token add`, `token list`, `token revoke`, and `audit`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kintsugi.cli.output import say, say_json

if TYPE_CHECKING:
    from kintsugi.access.audit import AuditEntry
    from kintsugi.access.tokens import TokenFile

app = typer.Typer()
token = typer.Typer(
    no_args_is_help=True, help="Manage the named tokens of `kintsugi serve` and `kintsugi page`."
)
app.add_typer(token, name="token")

File = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="File of the tokens; default: ~/.kintsugi/tokens.json."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the bearer, as the audit log shows it.")]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@token.command()
def add(
    name: Name,
    role: Annotated[
        str,
        typer.Option(
            help="viewer; operator (also stop, scale, resume); editor (also start); admin (also tokens, weights)."
        ),
    ] = "viewer",
    runs: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Run names the token is for, e.g. 'grpo-*'; may be repeated."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="T", help="30d, 12h, or a date: 2027-01-31. Default: never.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Quota at `kintsugi serve`; default: none.")
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Completions in flight at `kintsugi serve`; default: no quota.")
    ] = None,
    file: File = None,
) -> None:
    """Add a token and print it. It is shown once: the file has its hash only."""
    from kintsugi.access.roles import Action
    from kintsugi.runtime.clock import SYSTEM_CLOCK

    until = None if expires is None else expiry(expires, now=SYSTEM_CLOCK.wall())
    text = _token_file(file).add(
        name,
        role=role,
        runs=tuple(runs) if runs else ("*",),
        expires=until,
        requests_per_minute=requests_per_minute,
        in_flight=in_flight,
    )
    record_locally(None, Action.ADD_TOKEN, detail=f"{name}: {role}, runs {', '.join(runs or ['*'])}")
    say(text)


@token.command("list")
def list_tokens(
    file: File = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with all fields but the hashes.")] = False,
) -> None:
    """List names, roles, scopes and expiry of the tokens."""
    import msgspec

    from kintsugi.runtime.clock import SYSTEM_CLOCK

    token_file = _token_file(file)
    tokens = token_file.all()
    if json:
        values = [{**msgspec.to_builtins(each), "digest": None} for each in tokens]
        shown = [{key: value for key, value in each.items() if key != "digest"} for each in values]
        say_json(msgspec.json.format(msgspec.json.encode(shown), indent=2))
        return
    now = SYSTEM_CLOCK.wall()
    for each in tokens:
        state = (
            ""
            if each.expires is None
            else f", {'expired' if each.is_expired(now) else 'until'} {_day(each.expires)}"
        )
        say(f"{each.name}: {each.role}, runs {', '.join(each.runs)}{state}")
    if not tokens:
        say("no tokens" if token_file.path.exists() else f"no tokens: {token_file.path} does not exist")


@token.command()
def revoke(name: Name, file: File = None) -> None:
    """Revoke a token: it is refused from the next request on."""
    from kintsugi.access.roles import Action

    revoked = _token_file(file).revoke(name)
    record_locally(None, Action.REVOKE_TOKEN, detail=f"{name}: {revoked.role}")
    say(f"{name}: revoked")


@app.command()
def audit(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run folder, or its name in runs/; default: the host's log."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON with all fields.")] = False,
) -> None:
    """Show the audit log of a run, or of this host, and verify it. Exits with 1 if it was tampered with or damaged."""
    import msgspec

    from kintsugi.access.audit import host_log, verify, verify_run
    from kintsugi.run_folder import reader

    report = verify(host_log()) if run is None else verify_run(reader.find_run(run))
    if json:
        values = {"entries": report.entries, "problems": [str(problem) for problem in report.problems]}
        say_json(msgspec.json.format(msgspec.json.encode(values), indent=2))
    else:
        for entry in report.entries:
            say(entry_line(entry))
        for problem in report.problems:
            say(f"problem: {report.path}: {problem}", err=True)
        if report.is_intact:
            say(f"{len(report.entries)} entries; the chain is intact")
    if not report.is_intact:
        raise typer.Exit(1)


def entry_line(entry: AuditEntry) -> str:
    """`2026-05-01 12:00:03  ada (operator)  10.0.0.7  stop: accepted`."""
    from datetime import datetime

    when = f"{datetime.fromtimestamp(entry.time):%Y-%m-%d %H:%M:%S}"
    role = f" ({entry.role})" if entry.role else ""
    detail = f" {entry.detail}" if entry.detail else ""
    return f"{when}  {entry.name}{role}  {entry.origin}  {entry.action}{detail}: {entry.answer}"


def record_locally(
    run_dir: Path | None, action: str, *, answer: str = "accepted", detail: str = "", begins: bool = False
) -> None:
    """Record a command of the local user. A log that cannot be written, or is damaged, costs a warning, never the
    command."""
    from kintsugi.access.audit import record
    from kintsugi.access.gate import local_caller
    from kintsugi.errors import KintsugiError

    try:
        damage = record(run_dir, local_caller(run_dir), action, answer=answer, detail=detail, begins=begins)
    except (KintsugiError, OSError) as error:
        say(f"warning: this action is not in the audit log: {error}", err=True)
        return
    for each in damage:
        say(f"warning: audit log {each} (`kintsugi audit` shows it)", err=True)


def expiry(text: str, *, now: float) -> float:
    """Return the time that `30d`, `12h` or `2027-01-31` means; UserError for another text."""
    from datetime import datetime

    from kintsugi.errors import UserError

    if (parts := re.fullmatch(r"(\d{1,6})([smhdw])", text)) is not None:
        return now + int(parts[1]) * _UNITS[parts[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UserError(
            f"--expires: expected a duration like 30d or 12h, or a date like 2027-01-31, got {text!r}"
        ) from None


def _day(moment: float) -> str:
    from datetime import datetime

    return f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M}"


def _token_file(file: Path | None) -> TokenFile:
    from kintsugi.access.tokens import TokenFile, default_token_file

    return TokenFile(file or default_token_file())
