"""System under test: ours or the fragile one, on its testbed, with its injectors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kintsugi.config.recipe import anchored
from kintsugi.config.schema import Config
from kintsugi.errors import StorageError
from kintsugi.journal.facts import Fact, ProcessRequested, RolledBack, StepCommitted
from kintsugi.journal.journal import read_facts
from kintsugi.lab.injector.injector import Injector
from kintsugi.lab.scenarios.experiments import Profile, TestbedSpec
from kintsugi.lab.testbed.run import MarkedRun
from kintsugi.lab.testbed.testbed import RunTestbed
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import checkpoint_folders
from kintsugi.types import Role, process_id

RUN_FOLDER = "run"
LAB_FOLDER = "lab"


class System:
    """Run that faults are injected into, and its injectors."""

    def __init__(self, run: MarkedRun, *, folder: Path) -> None:
        self.run = run
        self._folder = folder
        self._injectors: list[Injector] = []
        self.interrupted = False
        """Set when the laboratory ended a run that made progress: its unsaved steps do not count as lost."""

    def new_injector(self) -> Injector:
        """Return a new injector, closed with the system; an injector handles one fault at a time."""
        injector = Injector(self.run, self._folder / str(1 + len(self._injectors)))
        self._injectors.append(injector)
        return injector

    def close(self) -> None:
        """Undo all faults and end all processes; an error in one does not keep the others."""
        with ExitStack() as stack:
            stack.callback(self.run.close)
            for injector in self._injectors:
                stack.callback(injector.close)

    def facts(self) -> tuple[Fact, ...]:
        """Return the facts of the journal; the fragile system has none."""
        path = RunFolder(self.run.run_dir).journal_file
        try:
            return read_facts(path) if path.exists() else ()
        except StorageError:
            return ()

    def host_of(self) -> dict[str, str]:
        """Return process → host."""
        config = self.run.config
        found = {process_id(Role.MASTER, 0): "host-0"}
        found |= {process_id(Role.AGENT, index): f"host-{index}" for index in range(config.cluster.hosts)}
        return found | {
            fact.process: fact.host for fact in self.facts() if isinstance(fact, ProcessRequested)
        }

    def completed(self) -> bool:
        """Whether the run reached its last step and exited with success."""
        return not self.run.running and self.run.exit_code() == 0

    def steps_lost(self, *, reached: int) -> int:
        """Count committed steps that were undone and, for a run that failed, those that no checkpoint contains."""
        lost = num_undone(self.facts())
        if self.completed() or self.run.running or self.interrupted:
            return lost
        saved = {*checkpoint_folders(self.run.run_dir), *saved_by_fragile(self.run.run_dir)}
        return lost + max(0, reached - max(saved, default=0))


def num_undone(facts: tuple[Fact, ...]) -> int:
    """Count committed steps that a rollback undid."""
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


def saved_by_fragile(run_dir: Path) -> set[int]:
    """Return the steps that were saved according to the logs, without failed saves."""
    saved: set[int] = set()
    gave_up = False
    for match in _SAVING.finditer(_log(run_dir, process_id(Role.MASTER, 0))):
        step, word, timeout = match.groups()
        gave_up = bool(timeout) or (gave_up and word != "begins")
        if word == "took" and not gave_up:
            saved.add(int(step))
    if saved:
        return saved
    # Plain fine-tuning has no controller: its first rank saves, and continues if that succeeded.
    pending = 0
    for match in _PLAIN_SAVING.finditer(_log(run_dir, process_id(Role.MODEL, 0))):
        saving, computed = match.groups()
        if computed and pending:
            saved.add(pending)
        pending = int(saving) if saving else 0
    return saved


def _log(run_dir: Path, process: str) -> str:
    path = RunFolder(run_dir).log_file(process)
    return path.read_text(errors="replace") if path.is_file() else ""


@contextmanager
def system_for(config: Config, profile: Profile, *, places: TestbedSpec, folder: Path) -> Iterator[System]:
    """Build the system, ready to be started. On exit no process is running, and the run folder is at `folder/run`."""
    config = anchored(config)
    with ExitStack() as stack:
        testbed = stack.enter_context(
            RunTestbed(
                folder / "place",
                num_hosts=config.cluster.hosts if places.isolated_hosts else 0,
                named=places.named_hosts,
                disk_bytes=places.disk_mib << 20 if places.disk_mib is not None else None,
                disk_folder=Path(places.disk_folder).resolve() if places.disk_folder is not None else None,
            )
        )
        run_dir = testbed.run_dir() if testbed.disk is not None else folder / RUN_FOLDER
        run = _run(config, profile, run_dir=run_dir, testbed=testbed)
        stack.callback(_keep, testbed, run_dir, folder / RUN_FOLDER)
        system = System(run, folder=folder / LAB_FOLDER)
        stack.callback(system.close)
        yield system


def _run(config: Config, profile: Profile, *, run_dir: Path, testbed: RunTestbed) -> MarkedRun:
    if profile is Profile.OURS:
        return MarkedRun(config, run_dir=run_dir, testbed=testbed)
    from kintsugi.lab.fragile.run import FragileRun

    return FragileRun(config, run_dir=run_dir, testbed=testbed)


def _keep(testbed: RunTestbed, run_dir: Path, to: Path) -> None:
    """Move the run folder from a disk that is about to be removed, or is not for keeping."""
    if run_dir != to and run_dir.is_dir():
        shutil.rmtree(RunFolder(run_dir).checkpoints_folder, ignore_errors=True)
        testbed.keep(run_dir, to)
        shutil.rmtree(run_dir, ignore_errors=True)
