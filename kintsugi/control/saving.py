"""A durable checkpoint of a committed step: written by one rank, verified, a fact; or a failure that people hear of."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

from kintsugi.config import Config
from kintsugi.control import agenda
from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.protocol import Raise
from kintsugi.errors import DeadlineExceeded, Fault, StorageError, StorageFull
from kintsugi.facts import CheckpointFailed, CheckpointSaved
from kintsugi.messages import Body, Save, Saved

_OF_THE_DISK = (StorageError.__name__, StorageFull.__name__, DeadlineExceeded.__name__)
"""A save that takes absurdly long is the disk's fault too; a writer that hangs is found by its silence."""


AGAIN_S = 2.0
"""After so long the last save is tried again when there was no room for it."""


class Failed(Enum):
    """What follows from a save that failed."""

    OTHERWISE = "it is not the disk's fault, and may be repeated"
    THIS_TIME = "the next one may succeed"
    FOR_NOW = "it is the last one, and waits for room"
    FOR_GOOD = "no other one will come"


class Saving:
    """One save at a time. The previous checkpoint stays good until the new one is proved."""

    def __init__(
        self, config: Config, folder: str, *, draft: Draft, talk: Conversation, done: Callable[[float], None]
    ) -> None:
        self._config, self._folder, self._draft, self._talk, self._done = config, folder, draft, talk, done
        self._writer = self._stage = ""
        self._again_at = math.inf
        self._waits = False

    def begin(self, writer: str, now: float, *, stage: str) -> None:
        self._writer, self._stage, self._again_at = writer, stage, math.inf
        body = Save(self._draft.state.step, stage, self._folder)
        self._talk.ask_all({writer: body}, now, then=self._saved)

    def tick(self, now: float) -> None:
        if now >= self._again_at:
            self.begin(self._writer, now, stage=self._stage)

    def abandon(self) -> None:
        """Whoever was to write does not."""
        self._again_at = math.inf

    def _saved(self, now: float) -> None:
        (answer,) = self._talk.answers.values()
        self.note(answer)
        self._done(now)

    def note(self, saved: Body) -> None:
        """A checkpoint exists, however it came about."""
        assert isinstance(saved, Saved), f"expected Saved, got {type(saved).__name__}"
        self._draft.fact(CheckpointSaved(saved.step, saved.path, saved.digest))

    def failed(self, fault: Fault, now: float) -> Failed:
        """Note a save that failed because of the disk. Everything is in the ranks' memory while the last one waits, and
        who does not want to wait stops the run."""
        if fault.kind not in _OF_THE_DISK:
            return Failed.OTHERWISE
        state = self._draft.state
        is_last = agenda.is_last(self._config, step=state.step)
        self._talk.abandon_round()
        if fault.kind == StorageFull.__name__ and is_last and state.stop_reason is None:
            if not self._waits:
                self._draft.do(Raise(f"checkpoint of step {state.step} waits for room: {fault.message}"))
            self._waits, self._again_at = True, now + AGAIN_S
            return Failed.FOR_NOW
        self._draft.fact(CheckpointFailed(state.step, fault))
        self._draft.do(Raise(f"checkpoint of step {state.step} failed: {fault.message}"))
        return Failed.FOR_GOOD if is_last or state.stop_reason is not None else Failed.THIS_TIME
