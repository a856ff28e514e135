"""Operations that a server of another product must support, independent of its API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from kintsugi.generation.backends.http import HttpClient
from kintsugi.types import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

UPDATE_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 5.0


Ended = Literal["stop", "length", "abort"]
"""Reason of the server for ending a stream."""


class Increment(NamedTuple):
    """Tokens that one event adds to a stream."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    """Per token, the most likely first; empty lists where none were requested."""
    ended: Ended | None
    labels: frozenset[str]
    """Labels of the weights that the server reports to have used, where it does."""


class Dialect(Protocol):
    """Translation to the API of one product. Stateless."""

    name: str
    generate_path: str
    how_to_scale: str
    """Option with which the server reports log-probabilities at the temperature."""

    def max_length(self, client: HttpClient) -> int:
        """Longest sequence that the server takes. ConfigError if it was started without a required option."""
        ...

    def health(self, client: HttpClient) -> None:
        """Check the server; WorldError or DeadlineExceeded if it is not healthy."""
        ...

    def label(self, client: HttpClient) -> str:
        """Label of the weights that the server has."""
        ...

    def check(self, sampling: SamplingParams) -> None:
        """Raise UserError for parameters with which the server would not report what `SamplingParams` promises."""
        ...

    def body(
        self,
        tokens: list[int],
        *,
        name: str,
        sampling: SamplingParams,
        max_new_tokens: int,
        seed: int,
        ends: list[int],
    ) -> dict[str, Any]:
        """Request body that continues `tokens`, as a stream called `name`, up to one of the tokens `ends`."""
        ...

    def read(self, event: bytes, *, num_known: int, num_top: int) -> Increment:
        """Parse the tokens after the first `num_known` of the stream. UserError and WorldError are errors that the
        server reports; msgspec.MsgspecError means that this is not an event."""
        ...

    def abort(self, client: HttpClient, name: str) -> None:
        """End one request after its stream was closed."""
        ...

    def halt(self, client: HttpClient) -> None:
        """End all requests with the tokens they have, and start none."""
        ...

    def update(self, client: HttpClient, folder: Path, *, label: str) -> None:
        """Load the weights of a Hugging Face folder, and clear the KV cache."""
        ...

    def verify(self, client: HttpClient, tensors: Mapping[str, Tensor]) -> None:
        """Raise IntegrityError if the server does not have these weights, as far as its API can show."""
        ...

    def proceed(self, client: HttpClient) -> None:
        """Undo `halt`."""
        ...
