"""A `Generate` on a server: its requesters, its progress, and the tokens that were sent."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kintsugi.errors import DataError, UserError
from kintsugi.generation.engine.requests import GenerationOutput, Tokens
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.protocol.weights import WeightsLoaded
from kintsugi.runtime.spans import SPANS
from kintsugi.transport import Delivery
from kintsugi.types import Completion, Fragment, Peer

_ITEM_BYTES = 4
Incarnation = tuple[str, str]
"""One life of a process: (its name, incarnation)."""
Number = TypeVar("Number", np.int32, np.float32)


class ServerJob:
    """One request of one or more requesters: a restarted manager requests again what is already running."""

    def __init__(
        self, delivery: Delivery, request: Generate, *, weights: WeightsLoaded | None, now: float
    ) -> None:
        self.deliveries = [delivery]
        self.request = request
        self.weights = weights
        """Weights that were loaded when it began."""
        self.since = now
        self._num_wanted = len(request.wanted)
        self._completions: dict[int, Completion] = {}
        self._num_sent = {part.sample: len(part.tokens) // _ITEM_BYTES for part in request.produced}
        """Number of tokens of each sample that the requesters have received."""
        self._sent_finished: set[int] = set()

    @property
    def unfinished(self) -> list[int]:
        return [sample for sample in self.request.wanted if sample not in self._completions]

    @property
    def num_tokens(self) -> int:
        """Upper bound of the tokens of its unfinished samples, prompts included."""
        per_sample = len(self.request.prompt) // _ITEM_BYTES + self.request.sampling.max_new_tokens
        return (self._num_wanted - len(self._completions)) * per_sample

    def serves(self, request: Generate) -> bool:
        """Whether its result is also a result of this request, independent of how each requester waits for it."""
        mine = self.request
        if mine.ticket != request.ticket or request.produced not in ((), mine.produced):
            return False
        return mine == msgspec.structs.replace(
            request,
            timeout_s=mine.timeout_s,
            stream=mine.stream,
            number=mine.number,
            produced=mine.produced,
        )

    def join(self, delivery: Delivery) -> None:
        """Add a requester, which knows no tokens yet; the others ignore tokens that they receive again."""
        self.deliveries.append(delivery)
        self._num_sent.clear()
        self._sent_finished.clear()

    def leave(self, requester: Incarnation, number: int | None = None) -> list[Delivery]:
        """Remove the requests of this requester, under this number or under any."""
        left = [
            delivery
            for delivery in self.deliveries
            if incarnation_of(delivery.peer) == requester and number in (None, _body(delivery).number)
        ]
        self.deliveries = [delivery for delivery in self.deliveries if delivery not in left]
        return left

    def add(self, output: GenerationOutput) -> None:
        """Store a sample that has ended or was interrupted."""
        sample = output.request.id[1]
        tokens, logprobs, versions, *top = _columns(output.tokens)
        self._completions[sample] = Completion(sample, tokens, logprobs, versions, output.finish, *top)

    def answer(self, *, server: str) -> Generated:
        completions = tuple(self._completions[sample] for sample in self.request.wanted)
        about = {
            "ticket": self.request.ticket,
            "turn": self.request.turn,
            "version": None if self.weights is None else self.weights.version,
            "samples": len(completions),
            "tokens": sum(len(completion.tokens) for completion in completions) // _ITEM_BYTES,
        }
        SPANS.add("generate", about, since=self.since)
        return Generated(self.request.ticket, self.request.turn, completions, server)

    def unsent(self, produced: Callable[[int], Tokens | None]) -> tuple[Fragment, ...]:
        """Tokens that the requesters do not know yet; `produced` returns the tokens so far of an unfinished sample."""
        fragments = []
        for sample in self.request.wanted:
            if sample in self._sent_finished:
                continue
            num_sent = self._num_sent.get(sample, 0)
            done = self._completions.get(sample)
            if done is not None:
                fragments.append(_rest(done, num_sent))
                self._sent_finished.add(sample)
                continue
            tokens = produced(sample)
            if tokens is not None and len(tokens.ids) > num_sent:
                fragments.append(Fragment(sample, num_sent, *_columns(tokens.between(num_sent))))
                self._num_sent[sample] = len(tokens.ids)
        return tuple(fragments)

    def requested(self) -> list[tuple[Incarnation, int]]:
        """Requesters, and the number of each one's request."""
        return [(incarnation_of(delivery.peer), _body(delivery).number) for delivery in self.deliveries]


def incarnation_of(peer: Peer) -> Incarnation:
    return peer.process, peer.incarnation


def check(request: Generate) -> None:
    """Raise the error of a request as a whole; the back end validates each sample."""
    if not request.wanted or len(set(request.wanted)) < len(request.wanted):
        raise UserError(f"expected samples of {request.ticket}, each once, got {request.wanted}")
    brought = [part.sample for part in request.produced]
    if len(set(brought)) < len(brought) or not set(brought) <= set(request.wanted):
        raise UserError(
            f"expected produced tokens of wanted samples of {request.ticket}, got them of {brought}"
        )


def prompt_of(request: Generate) -> NDArray[np.int32]:
    return _array(request.prompt, np.int32, (-1,), request.ticket)


def produced_of(request: Generate, sample: int) -> Tokens | None:
    """Tokens of a sample that other servers have produced."""
    part = next((part for part in request.produced if part.sample == sample), None)
    if part is None:
        return None
    count, num_top, ticket = len(part.tokens) // _ITEM_BYTES, request.sampling.top_logprobs, request.ticket
    return Tokens(
        _array(part.tokens, np.int32, (count,), ticket),
        _array(part.logprobs, np.float32, (count,), ticket),
        _array(part.versions, np.int32, (count,), ticket),
        _array(part.top_tokens, np.int32, (count, num_top), ticket),
        _array(part.top_logprobs, np.float32, (count, num_top), ticket),
    )


def _array(data: bytes, kind: type[Number], shape: tuple[int, ...], ticket: str) -> NDArray[Number]:
    """Array from its wire format: little-endian, four bytes per item."""
    expected = len(data) // _ITEM_BYTES if shape == (-1,) else prod(shape)
    if len(data) != expected * _ITEM_BYTES:
        raise DataError(
            f"expected {expected} numbers of 4 bytes in the tokens of {ticket}, got {len(data)} bytes"
        )
    array = np.frombuffer(data, dtype=np.dtype(kind).newbyteorder("<"))
    return array.astype(kind, copy=False).reshape((expected,) if shape == (-1,) else shape)


def _columns(tokens: Tokens) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    return (
        tokens.ids.astype("<i4", copy=False).tobytes(),
        tokens.logprobs.astype("<f4", copy=False).tobytes(),
        tokens.versions.astype("<i4", copy=False).tobytes(),
        tokens.top_ids.astype("<i4", copy=False).tobytes(),
        tokens.top_logprobs.astype("<f4", copy=False).tobytes(),
    )


def _rest(done: Completion, num_sent: int) -> Fragment:
    """Fragment with the last tokens of a sample and its end."""
    num_tokens = len(done.tokens) // _ITEM_BYTES
    start = num_sent * _ITEM_BYTES
    top_start = num_sent * (len(done.top_tokens) // num_tokens) if num_tokens else 0
    return Fragment(
        done.sample,
        num_sent,
        done.tokens[start:],
        done.logprobs[start:],
        done.versions[start:],
        done.top_tokens[top_start:],
        done.top_logprobs[top_start:],
        done.finish,
    )


def _body(delivery: Delivery) -> Generate:
    assert isinstance(delivery.body, Generate)
    return delivery.body
