"""A durable checkpoint of a committed step: written by one rank, verified, a fact; or a failure that people hear of."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.control.draft import Conversation, Draft
from kintsugi.control.protocol import Raise
from kintsugi.errors import DeadlineExceeded, Fault, StorageError, StorageFull
from kintsugi.facts import CheckpointFailed, CheckpointSaved
from kintsugi.messages import Body, Save, Saved

_OF_THE_DISK = (StorageError.__name__, StorageFull.__name__, DeadlineExceeded.__name__)
"""A save that takes absurdly long is the disk's fault too; a writer that hangs is found by its silence."""


class Saving:
    """One save at a time. The previous checkpoint stays good until the new one is proved."""

    def __init__(
        self, folder: str, *, draft: Draft, talk: Conversation, done: Callable[[float], None]
    ) -> None:
        self._folder, self._draft, self._talk, self._done = folder, draft, talk, done

    def begin(self, writer: str, now: float, *, stage: str) -> None:
        body = Save(self._draft.state.step, stage, self._folder)
        self._talk.ask_all({writer: body}, now, then=self._saved)

    def _saved(self, now: float) -> None:
        (answer,) = self._talk.answers.values()
        self.note(answer)
        self._done(now)

    def note(self, saved: Body) -> None:
        """A checkpoint exists, however it came about."""
        assert isinstance(saved, Saved), f"expected Saved, got {type(saved).__name__}"
        self._draft.fact(CheckpointSaved(saved.step, saved.path, saved.digest))

    def failed(self, fault: Fault) -> bool:
        """Note a save that failed because of the disk; False if it failed for another reason and may be repeated."""
        if fault.kind not in _OF_THE_DISK:
            return False
        step = self._draft.state.step
        self._draft.fact(CheckpointFailed(step, fault))
        self._draft.do(Raise(f"checkpoint of step {step} failed: {fault.message}"))
        self._talk.abandon_round()
        return True
