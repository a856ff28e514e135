"""A master takes a run over: a new one, one that was stopped, or one whose master died in the middle of it."""

from __future__ import annotations

from kintsugi.control.draft import Draft
from kintsugi.control.protocol import Admit, Began, ShareBook
from kintsugi.errors import Fault
from kintsugi.facts import EpochStarted, ProcessLost, RolledBack, RunStarted


def begin_epoch(event: Began, draft: Draft) -> None:
    """Everything of older epochs is refused from here on."""
    state = draft.state
    if not state.job:
        draft.fact(RunStarted(event.job, event.config_digest))
    draft.fact(EpochStarted(state.epoch + 1, event.incarnation, event.adopting))
    draft.because(f"epoch {state.epoch} begins at step {state.step}")


def clear_the_past(event: Began, draft: Draft) -> None:
    """Nobody of an earlier session lives, and steps that no checkpoint holds are undone."""
    members = draft.state.members
    gone = Fault("resumed", "Stopped", "master-0", "the run was stopped and is resumed", 0.0)
    for member in list(members.members.values()):
        lost = ProcessLost(member.process, member.incarnation, gone)
        if members.accepts(lost) is None:
            draft.fact(lost)
    if event.resumed:
        draft.fact(RolledBack(event.restore_step, f"resumed from {event.restore_path or 'the beginning'}"))


def greet_the_living(draft: Draft) -> None:
    """Whoever the journal says is there may speak to us, and learns that there is a new master."""
    members = draft.state.members
    for member in members.members.values():
        if member.peer is not None and members.is_live(member.process):
            draft.do(Admit(member.peer))
    draft.do(ShareBook())


def predecessor_lost(epoch: int, *, time: float) -> Fault:
    """The fault that a take-over in mid-run begins with."""
    message = f"the master of epoch {epoch} is gone, its agent started another"
    return Fault(f"master-0@{epoch}", "ProcessDied", "master-0", message, time)
