"""Interface of a generation back end: the engine of this package, or a server of another product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, RequestId, Tokens

if TYPE_CHECKING:
    from torch import Tensor

Running = Literal["keep", "recompute"]
"""Treatment of the KV cache of running requests when new weights are loaded."""
Pause = Callable[[], float]
"""Returns for how many milliseconds the device could not decode; called later, so that loading does not wait for the
device."""


class Backend(Protocol):
    """Not thread-safe except `stage`: the thread that calls `step` also submits, interrupts and loads."""

    @property
    def version(self) -> int:
        """Version of the weights that the next step uses; -1 before the first `load`."""
        ...

    @property
    def num_requests(self) -> int:
        """Number of waiting and running requests."""
        ...

    @property
    def idle(self) -> bool:
        """Whether `step` has no work and no results to return."""
        ...

    @property
    def num_steps(self) -> int:
        """Number of decode steps since the start."""
        ...

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests, first come first served. All of them are refused if one is."""
        ...

    def step(self) -> list[GenerationOutput]:
        """Work for some milliseconds and return the requests that ended."""
        ...

    def interrupt(self, request_id: RequestId) -> GenerationOutput | None:
        """Remove a request, return the tokens it has produced, and free its memory; None if the back end does not hold
        it."""
        ...

    def produced(self, request_id: RequestId) -> Tokens | None:
        """All tokens so far of a request, those it came with first."""
        ...

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Bring weights to where `load` takes only a moment. Runs in another thread while steps continue."""
        ...

    def load(self, version: int, tensors: Mapping[str, Tensor], *, running: Running = "keep") -> Pause | None:
        """Change the weights between two steps. Tokens that are sampled later carry the new version. Running requests
        continue with their KV cache, or with a new one that is computed from their tokens. Returns the device's own
        pause, if that differs from the duration of this call. The tensors may be overwritten afterwards."""
        ...

    def stats(self) -> dict[str, float]: ...
