"""`kintsugi page`: the page of one run or of a folder of runs, and the page beside a run that is being trained.

Beside a run the page is a process of its own with a low priority. The launcher opens its socket, so that the address is
known at once, and holds the write end of its lifeline; the run depends on neither.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kintsugi.cli.output import say

if TYPE_CHECKING:
    from kintsugi.access.tokens import TokenFile
    from kintsugi.page.access import SessionAccess
    from kintsugi.page.catalog import RunCatalog

app = typer.Typer()

PORT = 8420
"""Port of `kintsugi page`, if it is free and none is given."""
BACKLOG = 128
TOKEN_BYTES, LONGEST_TOKEN = 32, 256
NICENESS = 10
END_S = 3.0
SHUTDOWN_S = 1.0


@app.command()
def page(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|FOLDER", help="A run, its name in runs/, or a folder of runs; default: runs."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port; 0: any free port. Default: 8420, or any if it is in use."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 makes the page reachable from other machines.")
    ] = "127.0.0.1",
    no_token: Annotated[
        bool,
        typer.Option("--no-token", help="Let every user of this machine see the runs, without a token."),
    ] = False,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    operate: Annotated[
        bool,
        typer.Option("--operate", help="Print an address with a token that may stop, scale and resume runs."),
    ] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Show recorded runs with faults in them.")] = False,
) -> None:
    """Show runs in a browser, running or ended: learning, samples, time, health, incidents, logs."""

    from kintsugi.access.gate import Gate
    from kintsugi.access.hosts import is_loopback
    from kintsugi.access.tokens import TokenFile, default_token_file
    from kintsugi.errors import UserError
    from kintsugi.page.catalog import RunCatalog
    from kintsugi.page.token_access import TokenAccess

    if demo and (run is not None or operate):
        raise UserError("--demo shows runs of the package: expected no run and no --operate with it")
    if no_token and not is_loopback(host):
        raise UserError(f"--no-token: expected an address of this machine only, got --host {host}")
    with ExitStack() as stack:
        if demo:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kintsugi-demo-"))
            catalog = RunCatalog(_unpacked_demo(Path(folder)))
        else:
            catalog = RunCatalog.of(run if run is not None else "runs")
        listener = stack.enter_context(_listening(host, port))
        tokens = TokenFile(default_token_file())
        _warn_of_unusable(tokens)
        gate = Gate(tokens)
        needs_token = not (no_token or (demo and is_loopback(host)))  # The demo has nothing of this machine.
        access = TokenAccess(gate, needs_token=needs_token, may_act=operate)
        address = address_of(listener, host=host)
        for line in _greeting(catalog, access, address=address):
            say(line)
        if browse:
            token = access.operator_token or access.viewer_token
            _open_browser(with_token(address, token), stack=stack)
        _serve(catalog, access, listener=listener, host=host, demo=demo)


def _warn_of_unusable(tokens: TokenFile) -> None:
    """Say why no named token will be accepted; the page's own token still is."""
    from kintsugi.errors import KintsugiError

    try:
        tokens.all()
    except KintsugiError as error:
        say(f"warning: named tokens are refused: {error}", err=True)


def _greeting(catalog: RunCatalog, access: SessionAccess, *, address: str) -> list[str]:
    shown = catalog.folder / catalog.single if catalog.single else catalog.folder
    lines = [f"page: {with_token(address, access.viewer_token)}"]
    if access.operator_token:
        acting = with_token(address, access.operator_token)
        lines.append(f"with the right to stop, scale and resume: {acting}")
    return [*lines, f"shows {shown}; Ctrl-C ends it, and no run"]


def _unpacked_demo(folder: Path) -> Path:
    from kintsugi.page.demo import unpack

    return unpack(folder)


def _listening(host: str, port: int | None) -> socket.socket:
    """Open the socket; UserError says what is wrong with address or port."""
    from kintsugi.errors import UserError

    # Without a given port, one that is in use is no reason to fail.
    ports = (PORT, 0) if port is None else (port,)
    why = ""
    for each in ports:
        try:
            return listening_socket(host, each)
        except OSError as error:
            why = error.strerror or str(error)
    raise UserError(
        f"--host {host} --port {ports[0]}: {why}; choose another with --port, or 0 for any that is free"
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket, *, host: str) -> str:
    """Return the URL of the page: `http://127.0.0.1:8420/`."""
    name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    return f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/"


def with_token(address: str, token: str) -> str:
    """`with_token("http://127.0.0.1:8420/", "abc") == "http://127.0.0.1:8420/?token=abc"`."""
    return f"{address}?token={token}" if token else address


def _open_browser(address: str, *, stack: ExitStack) -> None:
    """Open a file that leads to the address, as long as the page is served: every user of this machine can read the
    arguments of a browser, and with them a token."""
    import html
    import webbrowser

    folder = Path(
        stack.enter_context(tempfile.TemporaryDirectory(prefix="kintsugi-page-"))
    )  # Of this user alone.
    file = folder / "open.html"
    file.write_text(
        f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">\n', encoding="utf-8"
    )
    if not webbrowser.open(file.as_uri()):
        say("there is no browser to open here; use the address above", err=True)


def _serve(
    catalog: RunCatalog,
    access: SessionAccess,
    *,
    listener: socket.socket,
    host: str,
    demo: bool = False,
    lifeline: int = -1,
) -> None:
    """Serve until SIGINT, SIGTERM, or the end of the lifeline."""
    import asyncio

    from kintsugi.cli.run_actions import RunActions
    from kintsugi.page.server import PageServer

    async def serve() -> None:
        from aiohttp import web

        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        if lifeline >= 0:
            loop.add_reader(lifeline, ended.set)
        server = PageServer(catalog, access=access, actions=RunActions(), host=host, demo=demo)
        runner = web.AppRunner(
            server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            await attempt_end(ended)
        finally:
            if lifeline >= 0:
                loop.remove_reader(lifeline)
            server.end()
            await runner.cleanup()

    async def attempt_end(ended: asyncio.Event) -> None:
        await ended.wait()

    asyncio.run(serve())


class PageBesideRun:
    """The page of a run that is being trained. Its failures are reported once and do not touch the run."""

    def __init__(self, run_dir: Path, *, port: int, warn: Callable[[str], None]) -> None:
        from kintsugi.runtime.processes import Child

        self._run_dir, self._warn = run_dir, warn
        self._child: Child | None = None
        self._lifeline = -1
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the page
        self.address = ""
        """URL of the page with its token; empty if it could not be started."""
        try:
            self._start(port)
        except OSError as error:
            self._close_lifeline()
            self._warn(
                f"the page could not be started: {error.strerror or error}; the run continues without it"
            )

    @property
    def pid(self) -> int | None:
        """Process of the page; None if there is none."""
        return None if self._child is None else self._child.pid

    def _start(self, port: int) -> None:
        from kintsugi.runtime.processes import SystemProcesses

        with listening_socket("127.0.0.1", port) as listener:
            read, self._lifeline = os.pipe2(os.O_CLOEXEC)
            # The token comes through the lifeline: other users can read arguments.
            token = secrets.token_urlsafe(TOKEN_BYTES)
            try:
                os.write(self._lifeline, token.encode())
                self._child = SystemProcesses().spawn(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "kintsugi.cli.page",
                        str(self._run_dir),
                        str(listener.fileno()),
                        str(read),
                    ],
                    pass_fds=(listener.fileno(), read),
                    stdout=self._output,
                    stderr=self._output,
                    new_session=True,
                )
            finally:
                os.close(read)
            self.address = with_token(address_of(listener, host="127.0.0.1"), token)

    def check(self) -> None:
        """Report once that the page has ended."""
        if self._child is None or not self._child.ended():
            return
        from kintsugi.runtime.processes import describe_status

        status = self._child.status()
        self._output.seek(0)
        said = self._output.read().decode(errors="replace").strip().splitlines()
        why = f": {said[-1]}" if said else ""
        self._warn(
            f"the page {describe_status(status)}{why}; the run continues, `kintsugi page {self._run_dir}` shows it"
        )
        self._forget()

    def close(self) -> None:
        """End the page with the run."""
        from kintsugi.errors import DeadlineExceeded

        self._close_lifeline()
        if self._child is not None:
            try:
                self._child.wait_ended(whom="the page", timeout_s=END_S)
            except DeadlineExceeded:
                self._child.send_signal(signal.SIGKILL)
                self._child.wait_ended(whom="the page", timeout_s=END_S)
            self._forget()
        self._output.close()

    def _forget(self) -> None:
        assert self._child is not None
        self._child.status()
        self._child.close()
        self._child = None
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def main(arguments: list[str]) -> None:
    """Serve the page beside a run: `python -m kintsugi.cli.page RUN_DIR SOCKET LIFELINE`, its token in the pipe."""
    from kintsugi.page.access import SessionAccess
    from kintsugi.page.catalog import RunCatalog

    folder, descriptor, lifeline = arguments
    token = os.read(int(lifeline), LONGEST_TOKEN).decode()  # It was written before this process was started.
    os.nice(NICENESS)
    with socket.socket(fileno=int(descriptor)) as listener:
        run_dir = Path(folder)
        catalog = RunCatalog(run_dir.parent, single=run_dir.name)
        access = SessionAccess(needs_token=True, may_act=False, viewer=token)
        _serve(catalog, access, listener=listener, host="127.0.0.1", lifeline=int(lifeline))


if __name__ == "__main__":
    main(sys.argv[1:])
