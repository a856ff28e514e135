"""What a server of another make has to understand, in whatever words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from kintsugi.generation.backends.http import HttpClient
from kintsugi.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor

UPDATE_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 5.0


Ended = Literal["stop", "length", "abort"]
"""Why a server says that it ended a stream."""


class Increment(NamedTuple):
    """What an event adds to a stream."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    """Per token, the most likely first; empty lists where none were asked for."""
    ended: Ended | None
    labels: frozenset[str]
    """Of the weights that the server says it used, where it says so."""


class Dialect(Protocol):
    """How one make of server is spoken to. Keeps no state."""

    name: str
    generate_path: str
    how_to_scale: str
    """How it is started so that its log-probabilities are at the temperature."""

    def max_length(self, client: HttpClient) -> int:
        """Of the longest sequence it takes. ConfigError if it was started without an option that is needed here."""
        ...

    def health(self, client: HttpClient) -> None:
        """WorldError or DeadlineExceeded if it is not well."""
        ...

    def label(self, client: HttpClient) -> str:
        """Of the weights that it has."""
        ...

    def check(self, sampling: Sampling) -> None:
        """UserError about what it would not report as `Sampling` promises."""
        ...

    def body(
        self,
        tokens: list[int],
        *,
        name: str,
        sampling: Sampling,
        max_new_tokens: int,
        seed: int,
        ends: list[int],
    ) -> dict[str, Any]:
        """The request that continues `tokens`, as a stream called `name`, up to one of the tokens `ends`."""
        ...

    def read(self, event: bytes, *, num_known: int, num_top: int) -> Increment:
        """What comes after the first `num_known` tokens of the stream. A UserError or a WorldError is the server's own
        word; msgspec.MsgspecError means that it is no event at all."""
        ...

    def abort(self, client: HttpClient, name: str) -> None:
        """End one request, whose stream has been hung up."""
        ...

    def halt(self, client: HttpClient) -> None:
        """End all requests, with what they have, and begin none."""
        ...

    def update(self, client: HttpClient, folder: Path, *, label: str) -> None:
        """Load the weights of a Hugging Face folder, and forget all keys and values."""
        ...

    def verify(self, client: HttpClient, tensors: Mapping[str, Tensor]) -> None:
        """IntegrityError if it does not have these weights, as far as it can be asked."""
        ...

    def proceed(self, client: HttpClient) -> None:
        """Undo `halt`."""
        ...
