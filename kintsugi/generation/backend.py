"""What a generation server needs of what makes its tokens: the engine of this package, or a server of another make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from kintsugi.generation.requests import Output, Request, RequestId, Tokens

if TYPE_CHECKING:
    from torch import Tensor

Running = Literal["keep", "recompute"]
"""What becomes of the keys and values of running requests when new weights come."""
Pause = Callable[[], float]
"""For how many milliseconds the device could not decode; asked later, so that nobody waits for the device."""


class Backend(Protocol):
    """Not thread-safe, but for `stage`: whoever calls `step` also submits, interrupts and loads."""

    @property
    def version(self) -> int:
        """Of the weights that the next step uses; -1 before the first `load`."""
        ...

    @property
    def num_requests(self) -> int:
        """Waiting and running."""
        ...

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do and nothing to give."""
        ...

    @property
    def num_steps(self) -> int:
        """Decode steps since the start."""
        ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, first come first served. Refuses all of them if it refuses one."""
        ...

    def step(self) -> list[Output]:
        """Work for some milliseconds; gives the requests that ended."""
        ...

    def interrupt(self, request_id: RequestId) -> Output | None:
        """Take a request out, with what it has produced, and free its memory; None if it is not held."""
        ...

    def produced(self, request_id: RequestId) -> Tokens | None:
        """All tokens so far of a request that is held, those it came with first."""
        ...

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In another thread, while steps go on: bring weights to where a `load` of what this gives takes a moment."""
        ...

    def load(self, version: int, tensors: Mapping[str, Tensor], *, running: Running = "keep") -> Pause | None:
        """Change the weights between two steps. Tokens that are sampled later carry the new version; running requests
        go on with the keys and values they have, or with new ones, computed from the tokens they have. Gives how long
        the device took, where that is not how long this call took. What was given may be overwritten afterwards."""
        ...

    def stats(self) -> dict[str, float]: ...
