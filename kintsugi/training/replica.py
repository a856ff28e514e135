"""A rank's state, streamed from another rank that holds the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kintsugi.errors import RefusedError
from kintsugi.messages import Body, FetchWeights, Publish
from kintsugi.operations import FetchState, StateFetched
from kintsugi.training.copies import Counters, counters_of, state_fetched
from kintsugi.training.state import TrainingState
from kintsugi.transport import Blob, Reply
from kintsugi.types import StreamSource
from kintsugi.weights.fetch import Fetcher
from kintsugi.weights.publish import Publisher
from kintsugi.weights.stream import Answered

Ask = Callable[[str, Body], Reply]
"""Sends a request to a process and waits, with a deadline, for its reply."""


class StateSource:
    """Serves the committed state of this rank; a copy of it lies ready while somebody fetches it."""

    def __init__(self, state: TrainingState, *, process: str, host: str) -> None:
        self._state = state
        self._publisher = Publisher(process=process, host=host, segments=None)

    def answer(self, request: FetchState) -> tuple[Body, Sequence[Blob]]:
        """The manifest, or the bytes of the pieces asked for."""
        if request.pieces:
            return self._publisher.answer(FetchWeights(request.step, request.pieces))
        if request.step == self._state.prepared_step:
            self._state.commit(request.step)  # Nobody asks for a step that is not a fact.
        counters = self._state.committed_counters
        if request.step != counters.step:
            raise RefusedError(f"this replica has committed step {counters.step}, not {request.step}")
        manifest, _ = self._publisher.publish(self._state.tensors(), Publish(request.step, request.step))
        return state_fetched(manifest, counters), ()

    def forget(self) -> None:
        """Free the copy; whoever still fetches it is refused and starts again."""
        self._publisher.close()


def fetch_state(
    step: int, *, replica: str, ask: Ask, owner: str = ""
) -> tuple[Mapping[str, Tensor], Counters]:
    """The committed state of `step` as a replica holds it, or as an agent keeps it for `owner`; verified by piece."""
    reply = ask(replica, FetchState(step, owner=owner)).expect(StateFetched)
    fetcher = Fetcher(
        process="",
        host="",
        ask=lambda process, request, _: Answered(ask(process, FetchState(step, request.pieces, owner))),
    )
    fetched = fetcher.fetch(reply.manifest, [StreamSource(replica)])
    return fetched.tensors(), counters_of(reply)
