"""Kintsugi from Python: `train(Config(…), reward=my_reward)`, in a script, a notebook or any thread of a program.

The run is a process of its own (`session.py`) with all its workers below it, so that nothing of the caller's process is
touched: no signal handler, no child, no event loop. It ends with the caller. What it says appears as it is said.
"""

from __future__ import annotations

import codecs
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from kintsugi import runs
from kintsugi.config import Config
from kintsugi.errors import KintsugiError, RunFailed, UserError
from kintsugi.recipe import PYTHON, Resolved, given, load, load_config
from kintsugi.rollout.importing import scratch_folder
from kintsugi.runtime import Child, SystemProcesses, wait
from kintsugi.session import NOTE, make_run_folder
from kintsugi.standalone import import_path, standalone_source
from kintsugi.summaries import Summary
from kintsugi.validation import validate
from kintsugi.worker import EXIT_USER_ERROR

Reward = str | Callable[..., Any]
Rewards = Reward | Sequence[Reward] | Mapping[Reward, float]

TURN_S = 0.5
END_DEADLINE_S = 30.0
"""For a session that was told to end at once."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of a run; everything else is in its folder."""

    folder: Path
    config: Config
    summary: Summary
    metrics: dict[str, list[float | None]]
    """Every figure of every step as columns of equal length: `metrics["step"]`, `metrics["reward/mean"]`, …"""
    evaluations: list[dict[str, float | None]]
    """Figures of the held-out evaluations, in order, each with its `step`."""
    weights: Path | None
    """Folder of the last checkpoint, in Hugging Face's format; None if none was saved."""

    @property
    def outcome(self) -> str:
        """`finished`, or `stopped` by request with a checkpoint."""
        return self.summary.outcome

    @property
    def accuracy(self) -> float | None:
        """Share of the held-out problems that the trained model answers right, greedily."""
        return self.summary.eval_accuracy_after

    @property
    def accuracy_before(self) -> float | None:
        return self.summary.eval_accuracy_before

    def __repr__(self) -> str:
        shares = [_percent(self.accuracy_before), _percent(self.accuracy)]
        return f"RunResult({self.outcome}, {self.summary.steps} steps, accuracy {' → '.join(shares)}, '{self.folder}')"


def train(
    config: Config | str | os.PathLike[str],
    *overrides: str,
    reward: Rewards | None = None,
    run_dir: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Train to the end and give the result; the first interrupt stops after the step, with a checkpoint.

    `config` is a `Config` or the path of a recipe; overrides like "actor.learning_rate=3e-4" have the last word.
    `reward` is a function `f(completions, **columns) -> list[float]`, its dotted path, several of them, or a mapping to
    weights. Workers import it: a function of a module by its path; one of a script or notebook is written into the run
    folder with what it uses, or refused with the reason.

    Raises UserError for a mistake, before anything starts where it can be seen then, and RunFailed for a failed run.
    """
    if not isinstance(config, Config | str | os.PathLike):
        raise UserError(f"config: expected a `Config` or the path of a recipe, got {type(config).__name__}")
    resolved = given(config, overrides) if isinstance(config, Config) else load(Path(config), overrides)
    if run_dir is not None:
        resolved = _with_value(resolved, "run_dir", os.fspath(run_dir))
    with scratch_folder() as scratch:
        written = scratch / runs.REWARDS_FILE
        if reward is not None:
            resolved = _with_rewards(resolved, reward, file=written)
        validate(resolved.config, origins=resolved.origins)
        folder = _make_folder(resolved, rewards=written)
    _run(folder)
    return read_run(folder)


def read_run(folder: str | os.PathLike[str]) -> RunResult:
    """The result of a run that has ended, from its folder."""
    found = runs.find_run(os.fspath(folder)).resolve()
    summary = runs.read_summary(found)
    if summary is None:
        raise UserError(f"{found}: expected a run that has ended, it has no {runs.SUMMARY_FILE} yet")
    lines, _ = runs.read_metrics(found)
    steps = [line for line in lines if not runs.is_evaluation(line)]
    names = dict.fromkeys(name for line in steps for name in line)
    checkpoints = runs.checkpoint_folders(found)
    return RunResult(
        folder=found,
        config=load_config(found / runs.CONFIG_FILE),
        summary=summary,
        metrics={name: [line.get(name) for line in steps] for name in names},
        evaluations=[line for line in lines if runs.is_evaluation(line)],
        weights=checkpoints[max(checkpoints)] if checkpoints else None,
    )


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _with_value(resolved: Resolved, field: str, value: str) -> Resolved:
    config = msgspec.structs.replace(resolved.config, **{field: value})
    return Resolved(config, {**resolved.origins, field: PYTHON})


def _with_rewards(resolved: Resolved, reward: Rewards, *, file: Path) -> Resolved:
    """The configuration with the rewards as paths; functions without one go into `file`."""
    weights = _weighted(reward)
    local = [each for each in weights if not isinstance(each, str) and import_path(each) is None]
    if local:
        file.write_text(standalone_source(local), encoding="utf-8")
    paths = tuple(
        _path_of(each, file=file) + ("" if weight is None else f" * {weight}")
        for each, weight in weights.items()
    )
    algorithm = msgspec.structs.replace(resolved.config.algorithm, reward=paths)
    config = msgspec.structs.replace(resolved.config, algorithm=algorithm)
    return Resolved(config, {**resolved.origins, "algorithm.reward": PYTHON})


def _weighted(reward: Rewards) -> dict[Reward, float | None]:
    several = reward if isinstance(reward, Sequence | Mapping) and not isinstance(reward, str) else [reward]
    for each in several:
        if not isinstance(each, str) and not callable(each):
            raise UserError(f"reward: expected functions or their dotted paths, got {type(each).__name__}")
    return dict(reward) if isinstance(reward, Mapping) else dict.fromkeys(several)


def _path_of(reward: Reward, *, file: Path) -> str:
    if isinstance(reward, str):
        return reward
    return import_path(reward) or f"{file}:{reward.__name__}"


def _make_folder(resolved: Resolved, *, rewards: Path) -> Path:
    """The run folder; rewards that were written down move into it."""
    algorithm = resolved.config.algorithm
    run_dir = resolved.config.run_dir or runs.next_run_dir(resolved.config.name)
    folder = Path(run_dir).resolve()
    moved = tuple(path.replace(str(rewards), str(folder / runs.REWARDS_FILE), 1) for path in algorithm.reward)
    config = msgspec.structs.replace(
        resolved.config, run_dir=str(folder), algorithm=msgspec.structs.replace(algorithm, reward=moved)
    )
    make_run_folder(Resolved(config, resolved.origins))
    if rewards.exists():
        (folder / runs.REWARDS_FILE).write_bytes(rewards.read_bytes())
    return folder


def _run(folder: Path) -> None:
    """Run a folder to its end in a session of its own; raises what it ended with."""
    lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
    relay = _Relay()
    with tempfile.TemporaryFile() as errors:
        try:
            session = SystemProcesses().spawn(
                [sys.executable, "-m", "kintsugi.session", str(folder), str(lifeline_read)],
                pass_fds=(lifeline_read,),
                environment={**os.environ, "PYTHONPATH": _search_path()},
                stdout=relay.target,
                stderr=errors,
                new_session=True,
            )
            relay.started()
            try:
                interrupted = _follow(session, relay)
            finally:
                session.close()
        finally:
            relay.close()
            os.close(lifeline_read)
            os.close(lifeline_write)
        code = session.status()
        said = _pass_notes_on(errors)
        if interrupted:
            raise KeyboardInterrupt
        if code != 0:
            raise _failure(code, said, folder=folder)


def _search_path() -> str:
    """Workers find modules where this process does: beside the script, in the notebook's folder, wherever else."""
    return os.pathsep.join(dict.fromkeys(str(Path(entry).resolve()) for entry in sys.path))


class _Relay:
    """What the session says: a terminal shows it directly; anything else, such as a notebook, gets it as text."""

    def __init__(self) -> None:
        self.reader, self._writer = -1, -1
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if sys.stdout.isatty():
            self.target = sys.stdout.fileno()
        else:
            self.reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(self._writer, True)
            self.target = self._writer

    def started(self) -> None:
        """The session has its own copy of the writing end."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def attempt(self) -> None:
        """Pass on what is there."""
        while self.reader >= 0:
            try:
                content = os.read(self.reader, 65536)
            except BlockingIOError:
                return
            sys.stdout.write(self._decoder.decode(content, final=not content))
            sys.stdout.flush()
            if not content:
                self.close()

    def close(self) -> None:
        self.started()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


def _follow(session: Child, relay: _Relay) -> int:
    """Wait for the end; gives how often the user interrupted. The first time asks it to stop, the second ends it."""
    interrupts = 0
    try:
        while not session.ended():
            try:
                _turn(session, relay)
            except KeyboardInterrupt:
                interrupts += 1
                session.send_signal(signal.SIGTERM)
        relay.attempt()
    finally:
        if not session.ended():
            for _ in range(2):
                session.send_signal(signal.SIGTERM)
            session.wait_ended(whom="session", timeout_s=END_DEADLINE_S)
    return interrupts


def _turn(session: Child, relay: _Relay) -> None:
    poller = select.poll()
    poller.register(session.pidfd, select.POLLIN)
    if relay.reader >= 0:
        poller.register(relay.reader, select.POLLIN)
    wait(
        lambda remaining_s: poller.poll(remaining_s * 1000),
        whom="session",
        what="the end of the run",
        timeout_s=TURN_S,
    )
    relay.attempt()


def _pass_notes_on(errors: IO[bytes]) -> str:
    """Show what the session noted by the way; what is left is how it ended badly, if it did."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    notes = [line for line in lines if line.startswith(NOTE)]
    sys.stderr.writelines(f"{note}\n" for note in notes)
    return "\n".join(line for line in lines if line not in notes).strip().removeprefix("error: ")


def _failure(code: int | None, said: str, *, folder: Path) -> KintsugiError:
    """What the session said of its end; a folder that never became a run is taken away."""
    if not (folder / runs.JOURNAL_FILE).exists():
        runs.remove_unused(folder)
    if code == EXIT_USER_ERROR:
        return UserError(said)
    return RunFailed(said or f"the session of {folder} ended with {code} and said nothing")
