"""One session of a run in front of a person: launched, watched, and told how it ended.

`kintsugi train` and `kintsugi resume` have it in their own process. `kintsugi.train` of Python starts it as a process
of its own (`python -m kintsugi.session RUN_DIR LIFELINE`): a launcher takes signals and orphans for itself, which is
nothing to do to a notebook or to somebody's program, and it runs on the main thread only.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from kintsugi import runs
from kintsugi.cluster.children import tail
from kintsugi.cluster.placement import log_path
from kintsugi.config import Config
from kintsugi.display import Display, print_closing
from kintsugi.errors import Fault, KintsugiError, StorageError, UserError
from kintsugi.recipe import Resolved, anchored, dump, load_config
from kintsugi.runtime import SYSTEM_CLOCK
from kintsugi.summaries import FaultLine
from kintsugi.types import Role, process_id
from kintsugi.worker import EXIT_ERROR, EXIT_USER_ERROR

NOTE = "note: "


def make_run_folder(resolved: Resolved) -> tuple[Config, Path]:
    """Give a checked configuration its folder, with what it is and where its values came from."""
    config = resolved.config
    run_dir = Path(config.run_dir) if config.run_dir else runs.next_run_dir(config.name)
    config = anchored(msgspec.structs.replace(config, run_dir=str(run_dir)))
    runs.create_run_dir(run_dir)
    try:
        dump(config, run_dir / runs.CONFIG_FILE)
        _write_origins(run_dir / runs.ORIGINS_FILE, resolved)
    except StorageError:
        runs.remove_unused(run_dir)
        raise
    return config, run_dir


def _write_origins(path: Path, resolved: Resolved) -> None:
    try:
        path.write_text(msgspec.json.format(msgspec.json.encode(resolved.origins), indent=1).decode())
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def run_session(
    config: Config, *, run_dir: Path, resume: bool, on_tick: Callable[[], None] = lambda: None
) -> int:
    """Run to the end and show how it ended; gives the exit code. The first cause of a failure is told first."""
    from kintsugi.cluster.launcher import launch
    from kintsugi.data.source import pin_data
    from kintsugi.data.streams import spools

    for sentence in pin_data(config, run_dir=run_dir).left_out:
        complain(f"{NOTE}{sentence}")
    console, since = Console(), SYSTEM_CLOCK.wall()
    log = log_path(run_dir, process_id(Role.MASTER, 0))
    log_size = log.stat().st_size if log.exists() else 0
    with Display(config, run_dir=run_dir, console=console) as display, spools(config.data, run_dir) as pump:

        def tick() -> None:
            pump()
            display.tick()
            on_tick()

        code = launch(config, run_dir=run_dir, on_tick=tick, resume=resume)
    summary = runs.read_summary(run_dir)
    if summary is not None:
        print_closing(console, summary, config=config, folder=run_dir)
    if code != 0:
        faults = runs.read_faults(run_dir, since=since)
        _complain_end(code, faults, run_dir=run_dir, last_words=tail(log, offset=log_size).strip())
    return code


def complain_error(error: KintsugiError) -> int:
    """Tell an error in one message, its cause first; gives the exit code."""
    if error.cause is not None and not isinstance(error, UserError):
        complain_faults([error.cause])
    complain(f"error: {error}")
    return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_ERROR


def complain_faults(faults: Iterable[Fault | FaultLine]) -> None:
    """The first one is the cause; the others follow from it."""
    for number, fault in enumerate(faults):
        complain(f"{'cause' if number == 0 else 'then'}: {fault.process}: {fault.kind}: {fault.message}")


def complain(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def _complain_end(code: int, faults: Sequence[FaultLine], *, run_dir: Path, last_words: str) -> None:
    """Why a run ended badly; where no fault was recorded, the end of the master's log is all there is to tell."""
    if code == EXIT_USER_ERROR and faults:
        complain(f"error: {faults[-1].message}")
    elif faults:
        complain_faults(faults)
        complain(f"error: the run failed; its folder is {run_dir}")
    elif code == EXIT_USER_ERROR and last_words:
        complain(f"error: {last_words.splitlines()[-1]}")
    elif last_words:
        complain(f"{last_words}\nerror: the master failed; the folder of the run is {run_dir}")
    else:
        complain(f"error: the run was interrupted; `kintsugi resume {run_dir}` goes on with it")


class Lifeline:
    """The read end of a pipe that only the starter can write and never does: its end is the starter's end."""

    def __init__(self, descriptor: int) -> None:
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._ended = False

    def check(self) -> None:
        """Once the starter is gone, stop as if somebody had asked for it: after the step, with a checkpoint."""
        if not self._ended and self._poller.poll(0):
            self._ended = True
            os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Body of the process that `kintsugi.train` starts: the run folder is made and has its configuration."""
    folder, descriptor = arguments
    run_dir = Path(folder)
    lifeline = Lifeline(int(descriptor))
    try:
        config = load_config(run_dir / runs.CONFIG_FILE)
        return run_session(config, run_dir=run_dir, resume=False, on_tick=lifeline.check)
    except KintsugiError as error:
        return complain_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
