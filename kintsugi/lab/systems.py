"""The system that an experiment breaks: ours or the fragile one, in its place, with who does the breaking."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kintsugi.config import Config
from kintsugi.control.journal import read_facts
from kintsugi.errors import StorageError
from kintsugi.facts import Fact, ProcessRequested, RolledBack, StepCommitted
from kintsugi.lab.experiments import Places, Profile
from kintsugi.lab.injecting import Injector
from kintsugi.lab.places import Place
from kintsugi.lab.running import MarkedRun
from kintsugi.recipe import anchored
from kintsugi.runs import JOURNAL_FILE, checkpoint_folders
from kintsugi.types import Role, process_id

RUN_FOLDER = "run"
LAB_FOLDER = "lab"


class System:
    """A run that can be broken, and who does it."""

    def __init__(self, run: MarkedRun, *, folder: Path) -> None:
        self.run = run
        self._folder = folder
        self._injectors: list[Injector] = []
        self.interrupted = False
        """The laboratory ended it though it went on: what it had not saved yet was not lost by itself."""

    def new_injector(self) -> Injector:
        """One for each who waits for a moment: an injector does one thing at a time. Closed with the system."""
        injector = Injector(self.run, self._folder / str(1 + len(self._injectors)))
        self._injectors.append(injector)
        return injector

    def close(self) -> None:
        """Every fault is undone and nothing runs any more when this returns. One that fails keeps no other."""
        with ExitStack() as stack:
            stack.callback(self.run.close)
            for injector in self._injectors:
                stack.callback(injector.close)

    def facts(self) -> tuple[Fact, ...]:
        """Of the journal, which the fragile system has not."""
        path = self.run.run_dir / JOURNAL_FILE
        try:
            return read_facts(path) if path.exists() else ()
        except StorageError:
            return ()

    def host_of(self) -> dict[str, str]:
        """Process → its host."""
        config = self.run.config
        found = {process_id(Role.MASTER, 0): "host-0"}
        found |= {process_id(Role.AGENT, index): f"host-{index}" for index in range(config.cluster.hosts)}
        return found | {
            fact.process: fact.host for fact in self.facts() if isinstance(fact, ProcessRequested)
        }

    def completed(self) -> bool:
        """Whether it came to its last step and ended well."""
        return not self.run.running and self.run.exit_code() == 0

    def steps_lost(self, *, reached: int) -> int:
        """Committed steps that were undone; of a run that failed also those that no checkpoint has."""
        lost = undone(self.facts())
        if self.completed() or self.run.running or self.interrupted:
            return lost
        saved = {*checkpoint_folders(self.run.run_dir), *saved_by_the_fragile(self.run.run_dir)}
        return lost + max(0, reached - max(saved, default=0))


def undone(facts: tuple[Fact, ...]) -> int:
    """Committed steps that a rollback undid."""
    step = lost = 0
    for fact in facts:
        match fact:
            case StepCommitted(step=committed):
                step = committed
            case RolledBack(step=to):
                lost += max(0, step - to)
                step = to
            case _:
                pass
    return lost


_SAVING = re.compile(r"step (\d+): latest_recover_save (begins|took)|(latest_recover_save timeout)")
_PLAIN_SAVING = re.compile(r"Saving checkpoint of step (\d+) to|step (\d+): loss")


def saved_by_the_fragile(run_dir: Path) -> set[int]:
    """Steps of which its logs say that they were saved, and not that the save failed."""
    saved: set[int] = set()
    gave_up = False
    for match in _SAVING.finditer(_log(run_dir, process_id(Role.MASTER, 0))):
        step, word, timeout = match.groups()
        gave_up = bool(timeout) or (gave_up and word != "begins")
        if word == "took" and not gave_up:
            saved.add(int(step))
    if saved:
        return saved
    # Plain fine-tuning has no controller: its first rank saves, and goes on if that went well.
    pending = 0
    for match in _PLAIN_SAVING.finditer(_log(run_dir, process_id(Role.MODEL, 0))):
        saving, computed = match.groups()
        if computed and pending:
            saved.add(pending)
        pending = int(saving) if saving else 0
    return saved


def _log(run_dir: Path, process: str) -> str:
    path = run_dir / "logs" / f"{process}.log"
    return path.read_text(errors="replace") if path.is_file() else ""


@contextmanager
def system_for(config: Config, profile: Profile, *, places: Places, folder: Path) -> Iterator[System]:
    """Ready to be started. When it is left nothing runs any more, and the run's folder is at `folder/run`."""
    config = anchored(config)
    with ExitStack() as stack:
        place = stack.enter_context(
            Place(
                folder / "place",
                num_hosts=config.cluster.hosts if places.isolated_hosts else 0,
                named=places.named_hosts,
                disk_bytes=places.disk_mib << 20 if places.disk_mib is not None else None,
            )
        )
        run_dir = place.run_dir() if place.disk is not None else folder / RUN_FOLDER
        run = _run(config, profile, run_dir=run_dir, place=place)
        stack.callback(_keep, place, run_dir, folder / RUN_FOLDER)
        system = System(run, folder=folder / LAB_FOLDER)
        stack.callback(system.close)
        yield system


def _run(config: Config, profile: Profile, *, run_dir: Path, place: Place) -> MarkedRun:
    if profile is Profile.OURS:
        return MarkedRun(config, run_dir=run_dir, place=place)
    from kintsugi.lab.fragile.running import FragileRun

    return FragileRun(config, run_dir=run_dir, place=place)


def _keep(place: Place, run_dir: Path, to: Path) -> None:
    """Of a disk that disappears."""
    if run_dir != to and run_dir.is_dir():
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        place.keep(run_dir, to)
