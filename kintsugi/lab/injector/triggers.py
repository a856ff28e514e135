"""Waiting for a trigger: step, phase, event and delay; UserError when it can no longer occur."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from kintsugi.errors import DeadlineExceeded, UserError
from kintsugi.lab.injector.checks import check_trigger
from kintsugi.lab.injector.injection import Trigger
from kintsugi.lab.testbed.watch import GLANCE_S, RunWatch
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.waits import wait


class TriggerWatch:
    """Follows a run until a trigger holds."""

    def __init__(
        self, trigger: Trigger, *, watch: RunWatch, run_dir: Path, alive: Callable[[], bool]
    ) -> None:
        check_trigger(trigger)
        self._trigger = trigger
        self._watch = watch
        self._alive = alive
        self._events = (
            LineWatch(RunFolder(run_dir).events_folder, trigger.event) if trigger.event is not None else None
        )

    @property
    def holds(self) -> bool:
        """Whether the run is in the step and phase of the trigger now; the event is not checked again."""
        trigger, watch = self._trigger, self._watch
        at_step = trigger.step is None or watch.step + 1 == trigger.step
        return at_step and (trigger.phase is None or watch.is_in(trigger.phase))

    def until_holds(self) -> None:
        """Wait for the trigger; UserError when the step has passed, the run has ended, or the time-out is over."""
        trigger = self._trigger

        def attempt(remaining_s: float) -> bool | None:
            self._watch.look()
            if (self._events is None or self._events.seen()) and self.holds:
                return True
            if trigger.step is not None and self._watch.step >= trigger.step:
                raise UserError(
                    f"trigger.step: step {trigger.step} is past, {self._watch.step} was committed; expected a later one"
                )
            if not self._alive():
                raise UserError(
                    f"{self._description()} never came: the run has ended after step {self._watch.step}"
                )
            time.sleep(min(remaining_s, GLANCE_S))
            return None

        try:
            wait(attempt, whom="the run", what=self._description(), timeout_s=trigger.timeout_s)
        except DeadlineExceeded as error:
            where = f"step {self._watch.step + 1}, phase {self._watch.phase or 'none'}"
            raise UserError(
                f"{self._description()} did not come within {trigger.timeout_s:g} s; the run is at {where}"
            ) from error

    def pause(self) -> None:
        """Wait for `after_s`."""
        since = SYSTEM_CLOCK.monotonic()

        def attempt(remaining_s: float) -> bool | None:
            time.sleep(max(0.0, min(remaining_s, since + self._trigger.after_s - SYSTEM_CLOCK.monotonic())))
            return True

        if self._trigger.after_s > 0:
            wait(attempt, whom="the run", what="the seconds after", timeout_s=self._trigger.after_s + 1.0)

    def _description(self) -> str:
        trigger = self._trigger
        parts = [f"step {trigger.step}"] if trigger.step is not None else []
        parts += [f"phase {trigger.phase}"] if trigger.phase is not None else []
        parts += [f"an event like {trigger.event!r}"] if trigger.event is not None else []
        return "trigger: " + (" and ".join(parts) or "any moment")


class LineWatch:
    """Search for lines that match a pattern and were appended to a file of a folder since this object was created."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder = folder
        self._pattern = re.compile(pattern.encode())
        self._seen = False
        self._offsets = {path: _written(path) for path in folder.glob("*.jsonl")}

    def seen(self) -> bool:
        for path in self._folder.glob("*.jsonl") if not self._seen else ():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                content = file.read().partition(b"\0")[0]
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            self._seen = self._seen or any(self._pattern.search(line) for line in whole.splitlines())
        return self._seen


def _written(path: Path) -> int:
    """Number of bytes of complete lines; space that a log has preallocated reads as zeros."""
    content = path.read_bytes().partition(b"\0")[0]
    return content.rfind(b"\n") + 1
