"""Operations that a server of another product must support, independent of its API."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

from kintsugi.generation.backends.http import HttpClient
from kintsugi.generation.backends.staged_weights import Greeting, StagedWeights
from kintsugi.types import SamplingParams

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
    spans: tuple[tuple[str, int], ...]
    """Labels of the weights that the server reports to have used, where it does, each with its first token."""


class Dialect(Protocol):
    """Translation to the API of one product."""

    name: str
    generate_path: str
    how_to_scale: str
    """Option with which the server reports log-probabilities at the temperature."""
    reports_ends: bool
    """Whether a stream that `halt` ends says so in an event. Otherwise it is closed here."""

    @property
    def keeps_streams(self) -> bool:
        """Whether streams stay open while weights change, and the server reports which tokens are of which weights."""
        ...

    def connect(self, client: HttpClient, greeting: Greeting) -> bool | None:
        """Prepare weight updates. Whether the server can read the memory of this process; None if that is not known
        before it does."""
        ...

    def note(self) -> str:
        """Note for the log on how the server gets weights, possibly empty."""
        ...

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
        label: str,
        sampling: SamplingParams,
        max_new_tokens: int,
        seed: int,
        ends: list[int],
    ) -> dict[str, Any]:
        """Request body that continues `tokens`, as a stream called `name`, up to one of the tokens `ends`. The server's
        weights are called `label`."""
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

    def freeze(self, client: HttpClient, *, keep_cache: bool) -> None:
        """Pause all requests; without `keep_cache` their KV cache is recomputed when they continue. Only where streams
        are kept."""
        ...

    def update(self, client: HttpClient, weights: StagedWeights, *, label: str) -> None:
        """Load weights and name them. Requests that start later use no KV cache of other weights."""
        ...

    def verify(self, client: HttpClient, weights: StagedWeights, *, label: str) -> None:
        """Raise IntegrityError if the server does not have these weights, as far as its API can show."""
        ...

    def proceed(self, client: HttpClient) -> None:
        """Undo `halt` and `freeze`."""
        ...
