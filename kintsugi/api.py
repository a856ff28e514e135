"""Python API: `train(Config(…), reward=my_reward)`, from a script, a notebook or any thread of a program.

A run is a separate process (`cli/session.py`) with all workers below it. It does not affect the calling process: no
signal handlers, no event loop. It ends when the calling process ends. Its output is relayed to `sys.stdout`.
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

from kintsugi.cli.hosts import placed
from kintsugi.cli.local_models import with_local_models
from kintsugi.cli.notebook_view import NotebookView, curve_html, in_notebook, table_html
from kintsugi.cli.session import NOTE, WARNING
from kintsugi.config.recipe import PYTHON, Resolved, given, load, load_config
from kintsugi.config.schema import Config
from kintsugi.config.validation import validate
from kintsugi.errors import KintsugiError, RunFailed, UserError
from kintsugi.notebook import CURVES, is_rounding
from kintsugi.notebook import load as load_run
from kintsugi.process.exit_codes import EXIT_USER_ERROR
from kintsugi.run_folder import reader
from kintsugi.run_folder.creation import make_run_folder, remove_unused
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.run_folder.summary import Summary
from kintsugi.runtime.processes import Child, SystemProcesses
from kintsugi.runtime.user_modules import scratch_folder
from kintsugi.runtime.waits import wait
from kintsugi.source_capture import import_path, standalone_source

Reward = str | Callable[..., Any]
OnStep = Callable[[dict[str, float | None]], object]
"""Function that gets the metrics of a step, or of an evaluation (with `eval/accuracy`), each with its `step`."""
Rewards = Reward | Sequence[Reward] | Mapping[Reward, float]

TURN_S = 0.5
"""Polling interval of a running session."""
END_DEADLINE_S = 30.0
"""Deadline of a session that is aborted."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run. All details are in its folder."""

    folder: Path
    config: Config
    summary: Summary
    metrics: dict[str, list[float | None]]
    """Metrics of every step as columns of equal length: `metrics["step"]`, `metrics["reward/mean"]`, …"""
    evaluations: list[dict[str, float | None]]
    """Metrics of the held-out evaluations, in order, each with its `step`."""
    weights: Path | None
    """Folder of the last checkpoint, in Hugging Face format; None if none was saved."""

    @property
    def outcome(self) -> str:
        """`finished`, or `stopped` on request with a checkpoint."""
        return self.summary.outcome

    @property
    def accuracy(self) -> float | None:
        """Share of held-out problems that the trained model answers correctly with greedy decoding."""
        return self.summary.eval_accuracy_after

    @property
    def accuracy_before(self) -> float | None:
        """The same for the model before training."""
        return self.summary.eval_accuracy_before

    def plot(self) -> Any:
        """Return a matplotlib figure of the learning curves, with incidents as marks; needs the extra `plots`."""
        return load_run(self.folder).plot()

    def _repr_html_(self) -> str:
        """Results and curves, as a notebook shows them."""
        rows = [
            ("outcome", f"{self.outcome}, {self.summary.steps} steps"),
            ("held-out accuracy", f"{_percent(self.accuracy_before)} → {_percent(self.accuracy)}"),
            ("run folder", str(self.folder)),
        ]
        curves = [
            curve_html(title, points)
            for name, title in CURVES
            if not is_rounding(
                points := [(at, value) for at, value in self._points(name) if value is not None]
            )
        ]
        return f"{table_html(rows)}{''.join(curves)}"

    def _points(self, name: str) -> list[tuple[float, float | None]]:
        if name in self.metrics:
            return [
                (step or 0.0, value)
                for step, value in zip(self.metrics["step"], self.metrics[name], strict=True)
            ]
        return [(line["step"] or 0.0, line[name]) for line in self.evaluations if name in line]

    def __repr__(self) -> str:
        shares = [_percent(self.accuracy_before), _percent(self.accuracy)]
        return f"RunResult({self.outcome}, {self.summary.steps} steps, accuracy {' → '.join(shares)}, '{self.folder}')"


def train(
    config: Config | str | os.PathLike[str],
    *overrides: str,
    reward: Rewards | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    on_step: OnStep | None = None,
) -> RunResult:
    """Train to the end and return the result. The first Ctrl-C stops after the current step, with a checkpoint.

    `config` is a `Config` or the path of a recipe; overrides like "actor.learning_rate=3e-4" take precedence.
    `reward` is a function `f(completions, **columns) -> list[float]`, its dotted path, a sequence of these, or a
    mapping of these to weights. Workers import reward functions by their path. The source of a function defined in a
    script or notebook is written into the run folder with everything it uses; UserError says why if that
    is not possible.
    `on_step` is called in this thread with the metrics of each step, and of each evaluation, once and in order; the run
    does not wait for it. If it raises, the run stops after its step, with a checkpoint, and the exception is raised.

    Raises UserError for an invalid configuration, if possible before any process is started, and RunFailed if the run
    fails.
    """
    if not isinstance(config, Config | str | os.PathLike):
        raise UserError(f"config: expected a `Config` or the path of a recipe, got {type(config).__name__}")
    resolved = given(config, overrides) if isinstance(config, Config) else load(Path(config), overrides)
    resolved = placed(with_local_models(resolved))
    if run_dir is not None:
        resolved = _with_value(resolved, "run_dir", os.fspath(run_dir))
    with scratch_folder() as scratch:
        written = RunFolder(scratch).rewards_file
        if reward is not None:
            resolved = _with_rewards(resolved, reward, file=written)
        validate(resolved.config, origins=resolved.origins)
        made, _ = make_run_folder(resolved, rewards=written)
    folder = Path(made.run_dir or "")
    _run(folder, config=made, on_step=on_step)
    return read_run(folder)


def read_run(folder: str | os.PathLike[str]) -> RunResult:
    """Read the result of a run that has ended from its folder."""
    found = reader.find_run(os.fspath(folder)).resolve()
    summary = reader.read_summary(found)
    if summary is None:
        raise UserError(f"{found}: expected a run that has ended, it has no {RELATIVE.summary_file} yet")
    lines, _ = reader.read_metrics(found)
    steps = [line for line in lines if not reader.is_evaluation(line)]
    names = dict.fromkeys(name for line in steps for name in line)
    checkpoints = reader.checkpoint_folders(found)
    return RunResult(
        folder=found,
        config=load_config(RunFolder(found).config_file),
        summary=summary,
        metrics={name: [line.get(name) for line in steps] for name in names},
        evaluations=[line for line in lines if reader.is_evaluation(line)],
        weights=checkpoints[max(checkpoints)] if checkpoints else None,
    )


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _with_value(resolved: Resolved, field: str, value: str) -> Resolved:
    config = msgspec.structs.replace(resolved.config, **{field: value})
    return Resolved(config, {**resolved.origins, field: PYTHON})


def _with_rewards(resolved: Resolved, reward: Rewards, *, file: Path) -> Resolved:
    """Set the rewards of a configuration by path; functions without an import path are written to `file`."""
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


def _run(folder: Path, *, config: Config, on_step: OnStep | None) -> None:
    """Run a folder to its end in a separate session; raise the error of a failed run."""
    lifeline_read, lifeline_write = os.pipe2(os.O_CLOEXEC)
    view = NotebookView(config, run_dir=folder) if in_notebook() else None
    relay = _Relay(is_shown=view is None)
    steps = _StepCalls(folder, on_step)
    with tempfile.TemporaryFile() as errors:
        try:
            session = SystemProcesses().spawn(
                [sys.executable, "-P", "-m", "kintsugi.cli.session", str(folder), str(lifeline_read)],
                pass_fds=(lifeline_read,),
                environment={**os.environ, "PYTHONPATH": _search_path()},
                stdout=relay.target,
                stderr=errors,
                new_session=True,
            )
            relay.started()
            try:
                interrupted = _follow(session, relay, steps=steps, view=view)
            finally:
                session.close()
        finally:
            relay.close()
            os.close(lifeline_read)
            os.close(lifeline_write)
            if view is not None:
                view.close()
        code = session.status()
        message = _relay_notes(errors)
        if steps.error is not None:
            raise steps.error
        if interrupted:
            raise KeyboardInterrupt
        if code != 0:
            raise _failure(code, message, folder=folder)


class _StepCalls:
    """Calls the user's function for every new line of the metrics, once per step also after a rollback."""

    def __init__(self, folder: Path, function: OnStep | None) -> None:
        self._folder, self._function = folder, function
        self._offset = 0
        self._last = (0.0, False)
        self.error: Exception | None = None
        """Exception of the function; it is not called again."""

    def attempt(self) -> None:
        if self._function is None or self.error is not None:
            return
        lines, self._offset = reader.read_metrics(self._folder, offset=self._offset)
        for line in lines:
            place = (line["step"] or 0.0, reader.is_evaluation(line))
            if place <= self._last:
                continue
            self._last = place
            try:
                self._function(dict(line))
            except Exception as error:  # noqa: BLE001 - the boundary to the user's function: raised at the end of the run.
                self.error = error
                return


def _search_path() -> str:
    """PYTHONPATH for the workers: the module search path of this process."""
    return os.pathsep.join(dict.fromkeys(str(Path(entry).resolve()) for entry in sys.path))


class _Relay:
    """Relay of the session's output: a terminal is passed on directly, otherwise text is copied to `sys.stdout`, unless
    a notebook shows the run itself."""

    def __init__(self, *, is_shown: bool = True) -> None:
        self.reader, self._writer = -1, -1
        self._is_shown = is_shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if is_shown and sys.stdout.isatty():
            self.target = sys.stdout.fileno()
        else:
            self.reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(self._writer, True)
            self.target = self._writer

    def started(self) -> None:
        """Close the write end, of which the session has a copy."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def attempt(self) -> None:
        """Copy available output."""
        while self.reader >= 0:
            try:
                content = os.read(self.reader, 65536)
            except BlockingIOError:
                return
            if self._is_shown:
                sys.stdout.write(self._decoder.decode(content, final=not content))
                sys.stdout.flush()
            if not content:
                self.close()

    def close(self) -> None:
        self.started()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


def _follow(session: Child, relay: _Relay, *, steps: _StepCalls, view: NotebookView | None) -> int:
    """Wait for the end; return the number of interrupts. The first requests a stop, the second aborts the run. So does,
    once, an exception of the user's function."""
    interrupts = 0
    has_failed = False
    try:
        while not session.ended():
            try:
                _wait_and_relay(session, relay)
                steps.attempt()
                if view is not None:
                    view.tick()
            except KeyboardInterrupt:
                interrupts += 1
                session.send_signal(signal.SIGTERM)
            if steps.error is not None and not has_failed:
                has_failed = True
                session.send_signal(signal.SIGTERM)
        relay.attempt()
        steps.attempt()
    finally:
        if not session.ended():
            for _ in range(2):
                session.send_signal(signal.SIGTERM)
            session.wait_ended(whom="session", timeout_s=END_DEADLINE_S)
    return interrupts


def _wait_and_relay(session: Child, relay: _Relay) -> None:
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


def _relay_notes(errors: IO[bytes]) -> str:
    """Print the notes and warnings of the session and return the rest of its error output."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    notes = [line for line in lines if line.startswith((NOTE, WARNING))]
    sys.stderr.writelines(f"{note}\n" for note in notes)
    return "\n".join(line for line in lines if line not in notes).strip().removeprefix("error: ")


def _failure(code: int | None, message: str, *, folder: Path) -> KintsugiError:
    """Error of a failed session. A folder in which nothing was started is removed."""
    if not RunFolder(folder).journal_file.exists():
        remove_unused(folder)
    if code == EXIT_USER_ERROR:
        return UserError(message)
    failed = RunFailed(message or f"the session of {folder} ended with exit code {code} and no message")
    if (trace := reader.last_user_traceback(folder)) is not None:
        failed.add_note(trace)
    return failed
