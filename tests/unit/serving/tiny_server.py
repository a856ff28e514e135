"""A server without an engine, which starts in a moment: it registers, and does what the file `behaviour` says."""

from __future__ import annotations

from pathlib import Path

from kintsugi.errors import UserError
from kintsugi.process.main import run_worker
from kintsugi.process.shell import Shell
from kintsugi.protocol.bootstrap import Bootstrap


def main(bootstrap: Bootstrap) -> int:
    path = Path(bootstrap.run_dir) / "behaviour"
    match path.read_text() if path.exists() else "serve":
        case "die":
            return 3
        case "refuse":
            raise UserError("this model is no good")
    return run_worker(bootstrap, idle)


def idle(shell: Shell) -> None:
    while True:
        shell.next_request(5.0)
