"""A server of another make as a `Backend`: what vLLM and SGLang have in common.

Each request is a stream of events; at most `slots` are open, the rest wait here.

    submit   waiting ──(a stream is free)──▶ open ──(end token, stop text, length)──▶ Output
    load     the server ends all streams, which wait again with the tokens they have; it reads the weights from a
             folder, they are verified, and the streams go on
    failure  a WorldError: the server is gone, or not what it should be. The process that holds this ends, and what its
             requests have produced is continued elsewhere. A UserError is about one request, which alone ends by it

Streams end before weights change: each has one version from its first to its last token, and the keys and values of
running requests are always computed again. A server that kept them would give those of old weights to later prompts.

The server's word is checked: a log-probability per token, no more tokens than asked for, the weights that were loaded
last. Ends are looked for here, by the rules of the embedded engine, whatever the server takes for an end.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from kintsugi.errors import ConfigError, IntegrityError, KintsugiError, UserError, WorldError
from kintsugi.generation.backend import Running
from kintsugi.generation.backends.dialect import Dialect, Increment
from kintsugi.generation.backends.folders import WeightFolders
from kintsugi.generation.backends.http import CALL_TIMEOUT_S, Arrival, HttpClient
from kintsugi.generation.requests import Output, Request, RequestId, Tokens
from kintsugi.generation.stops import first_stop
from kintsugi.generation.validation import check_request
from kintsugi.model.architecture import ModelConfig
from kintsugi.runtime import SYSTEM_CLOCK, Clock, wait
from kintsugi.types import Finish, Sampling

if TYPE_CHECKING:
    from torch import Tensor

STEP_S = 0.01
"""Longest that a step waits for tokens: between two steps, the server process looks at its messages."""
CHECK_EVERY_S = 10.0
"""Of silence on all streams; then the server is asked whether it is well."""
LONGEST_SILENCE_S = 120.0
"""A server that says it is well and produces nothing for so long is not."""
_TRIED_TEMPERATURE = 2.0


@dataclass(eq=False)
class _Stream:
    """A request that the server has, and what it has sampled for it."""

    name: str
    """As the server knows it; never used again."""
    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return self.request.sampling.max_new_tokens - self.request.num_produced - len(self.ids)

    def cut(self, length: int) -> None:
        del self.ids[length:], self.logprobs[length:], self.tops[length:]

    def tokens(self, *, version: int) -> Tokens:
        """All of them, those that the request came with first."""
        tops = np.array(self.tops, np.float64).reshape(len(self.ids), self.request.sampling.top_logprobs, 2)
        sampled = Tokens(
            np.array(self.ids, np.int32),
            np.array(self.logprobs, np.float32),
            np.full(len(self.ids), version, np.int32),
            tops[:, :, 0].astype(np.int32),
            tops[:, :, 1].astype(np.float32),
        )
        return Tokens.joined([_produced(self.request), sampled])


class RemoteBackend:
    """`open_backend` makes one. Not thread-safe."""

    def __init__(
        self,
        client: HttpClient,
        *,
        dialect: Dialect,
        architecture: ModelConfig,
        end_token_ids: Sequence[int],
        text_of: Callable[[Sequence[int]], str],
        slots: int,
        max_length: int,
        folder: Path,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client, self._dialect, self._clock = client, dialect, clock
        self._vocab_size = architecture.vocab_size
        self._end_token_ids, self._text_of = tuple(end_token_ids), text_of
        self._slots, self._max_length = slots, max_length
        self._folders = WeightFolders(folder, architecture=architecture)
        self._origin = secrets.token_hex(4)
        """In all labels and names, so that they are not taken for those of another process."""
        self._version = -1
        self._waiting: dict[RequestId, Request] = {}
        """In order."""
        self._streams: dict[str, _Stream] = {}
        self._names: dict[RequestId, str] = {}
        """Of the open streams."""
        self._load_failure: KintsugiError | None = None
        """Why nobody knows which weights the server has, and whether it is halted."""
        self._ended_by_us: list[Request] | None = None
        """While all streams are being ended, those that will go on; else None."""
        self._finished: list[Output] = []
        self._num_opened = self._num_steps = self._num_tokens = 0
        self._last_arrival = self._last_check = clock.monotonic()
        self._check_server()

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._streams)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._streams or self._finished)

    @property
    def num_steps(self) -> int:
        """In which tokens came."""
        return self._num_steps

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        for request in requests:
            check_request(
                request,
                max_length=self._max_length,
                vocab_size=self._vocab_size,
                num_end_tokens=len(self._end_token_ids),
                reads_text=True,
            )
            self._dialect.check(request.sampling)
        self._waiting.update((request.id, request) for request in requests)

    def step(self) -> list[Output]:
        """Open streams, and take what arrives in some milliseconds."""
        if self._load_failure is not None:
            raise WorldError(f"{self._where} did not take new weights: {self._load_failure}")
        self._open_streams()
        if self._streams:
            self._receive()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self, request_id: RequestId) -> Output | None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            return Output(request, _produced(request), None)
        for output in self._finished:
            if output.request.id == request_id:
                self._finished.remove(output)
                return output
        stream = self._stream_of(request_id)
        if stream is None:
            return None
        self._hang_up(stream)
        return Output(stream.request, stream.tokens(version=self._version), None)

    def produced(self, request_id: RequestId) -> Tokens | None:
        stream = self._stream_of(request_id)
        if stream is not None:
            return stream.tokens(version=self._version)
        if request_id in self._waiting:
            return _produced(self._waiting[request_id])
        return next((each.tokens for each in self._finished if each.request.id == request_id), None)

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def load(self, version: int, tensors: Mapping[str, Tensor], *, running: Running = "keep") -> None:
        """Running requests go on with new keys and values, also where old ones would do."""
        tensors = self._folders.complete(tensors)
        folder = self._folders.write(version, tensors)
        try:
            self._change_weights(folder, tensors, label=self._label(version))
        except KintsugiError as error:
            self._load_failure = error
            raise
        self._load_failure = None
        self._version = version
        self._folders.keep_only(folder)
        self._open_streams()

    def _change_weights(self, folder: Path, tensors: Mapping[str, Tensor], *, label: str) -> None:
        self._end_streams()
        self._dialect.update(self._client, folder, label=label)
        self._verify_labels({self._dialect.label(self._client)}, expected=label)
        self._dialect.verify(self._client, tensors)
        self._dialect.proceed(self._client)

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._streams),
            "waiting": len(self._waiting),
            "decoded_tokens": self._num_tokens,
        }

    def close(self) -> None:
        self._client.close()

    @property
    def _where(self) -> str:
        return f"the {self._dialect.name} server at {self._client.url}"

    def _label(self, version: int) -> str:
        return f"{self._origin}:{version}"

    def _stream_of(self, request_id: RequestId) -> _Stream | None:
        name = self._names.get(request_id)
        return None if name is None else self._streams[name]

    def _check_server(self) -> None:
        """Whether it is well and was started as it must be. What a dead predecessor of ours left there is ended."""
        self._dialect.health(self._client)
        longest = self._dialect.max_length(self._client)
        if longest < self._max_length:
            raise ConfigError(
                f"`generation.max_length`: expected at most {longest} tokens, which is the longest sequence of "
                f"{self._where}, got {self._max_length}"
            )
        self._dialect.halt(self._client)
        self._dialect.proceed(self._client)
        plain, scaled = self._gap(1.0), self._gap(_TRIED_TEMPERATURE)
        if abs(scaled * _TRIED_TEMPERATURE - plain) > 0.1 * plain + 0.01:
            raise ConfigError(
                f"`generation.urls`: expected log-probabilities at the temperature from {self._where}: start it "
                f"{self._dialect.how_to_scale}"
            )

    def _gap(self, temperature: float) -> float:
        """Between the two most likely tokens, as the server reports them; it shrinks as the temperature grows."""
        sampling = Sampling(temperature=temperature, max_new_tokens=1, top_logprobs=2)
        name = f"{self._origin}-at-{temperature}"
        body = self._dialect.body([0], name=name, sampling=sampling, max_new_tokens=1, seed=0, ends=[])
        self._client.open(name, self._dialect.generate_path, body=body)

        def attempt(remaining_s: float) -> float | None:
            for arrival in self._client.arrivals(remaining_s):
                if arrival.failure is not None:
                    raise arrival.failure
                for first, second in self._parsed(arrival.event, num_known=0, num_top=2).tops:
                    return first[1] - second[1]
            return None

        return wait(attempt, whom=self._client.url, what="a first token", timeout_s=CALL_TIMEOUT_S)

    def _open_streams(self) -> None:
        """As many as there are slots for. Where none was open, the server may have been restarted unseen."""
        if not self._waiting or len(self._streams) >= self._slots:
            return
        if not self._streams:
            assert self._version >= 0, "weights come before requests"
            self._verify_labels({self._dialect.label(self._client)}, expected=self._label(self._version))
            self._last_arrival = self._last_check = self._clock.monotonic()
        while self._waiting and len(self._streams) < self._slots:
            self._open(self._waiting.pop(next(iter(self._waiting))))

    def _open(self, request: Request) -> None:
        self._num_opened += 1
        stream = _Stream(f"{self._origin}-{self._num_opened}", request)
        body = self._dialect.body(
            [*request.prompt.tolist(), *_produced(request).ids.tolist()],
            name=stream.name,
            sampling=request.sampling,
            max_new_tokens=stream.num_missing,
            seed=_seed(request),
            ends=self._ends(request),
        )
        self._streams[stream.name] = stream
        self._names[request.id] = stream.name
        self._client.open(stream.name, self._dialect.generate_path, body=body)

    def _ends(self, request: Request) -> list[int]:
        ends = () if request.sampling.ignore_end else self._end_token_ids
        return [*ends, *request.sampling.stop_token_ids]

    def _receive(self) -> None:
        arrivals = self._client.arrivals(STEP_S)
        now = self._clock.monotonic()
        if arrivals:
            self._last_arrival = self._last_check = now
            self._num_steps += 1
            for arrival in arrivals:
                self._take(arrival)
        elif now - self._last_arrival > LONGEST_SILENCE_S:
            raise WorldError(
                f"{self._where} has produced nothing for {now - self._last_arrival:.0f} s, "
                f"with {len(self._streams)} requests"
            )
        elif now - self._last_check > CHECK_EVERY_S:
            self._dialect.health(self._client)
            self._last_check = now

    def _take(self, arrival: Arrival) -> None:
        stream = self._streams.get(str(arrival.name))
        if stream is None:
            return
        try:
            if arrival.failure is not None:
                raise arrival.failure
            increment = self._increment(stream, arrival.event)
        except UserError as error:
            self._hang_up(stream)
            self._finish(stream, None, refusal=error)
            return
        stream.ids += increment.ids
        stream.logprobs += increment.logprobs
        stream.tops += increment.tops
        self._num_tokens += len(increment.ids)
        finish = self._finish_of(stream, num_new=len(increment.ids))
        if finish is None and increment.ended == "abort":
            self._put_back(stream)
        elif finish is None and increment.ended is not None:
            # An end token of the server's own.
            self._finish(stream, Finish.EOS)
        elif finish is not None:
            if increment.ended is None and finish is not Finish.LENGTH:
                self._hang_up(stream)
            self._finish(stream, finish)

    def _increment(self, stream: _Stream, event: bytes) -> Increment:
        """What an event says, checked."""
        num_top = stream.request.sampling.top_logprobs
        increment = self._parsed(event, num_known=len(stream.ids), num_top=num_top)
        ids, sizes = increment.ids, {len(tops) for tops in increment.tops}
        if not len(ids) == len(increment.logprobs) == len(increment.tops) or sizes - {num_top}:
            raise IntegrityError(
                f"{self._where}: expected a log-probability for each of {len(ids)} tokens, and {num_top} of the most "
                f"likely ones, got {len(increment.logprobs)}, and {sorted(sizes)} of {len(increment.tops)}"
            )
        if len(ids) > stream.num_missing or any(not 0 <= token < self._vocab_size for token in ids):
            raise IntegrityError(
                f"{self._where}: expected at most {stream.num_missing} more tokens of the vocabulary, got {ids}"
            )
        if increment.ended == "length" and len(ids) < stream.num_missing:
            raise IntegrityError(
                f"{self._where}: expected {stream.num_missing} more tokens, got an end after {len(ids)}"
            )
        self._verify_labels(increment.labels, expected=self._label(self._version))
        return increment

    def _parsed(self, event: bytes, *, num_known: int, num_top: int) -> Increment:
        try:
            return self._dialect.read(event, num_known=num_known, num_top=num_top)
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"{self._where} sent what is no event of its kind: {error}") from error

    def _verify_labels(self, found: Iterable[str], *, expected: str) -> None:
        others = sorted(set(found) - {expected})
        if others:
            raise WorldError(
                f"{self._where} has weights {', '.join(others)}, expected {expected}: it was restarted, or somebody "
                "else loads weights into it"
            )

    def _finish_of(self, stream: _Stream, *, num_new: int) -> Finish | None:
        """How the stream ended with its newest tokens, if it did; what came after its end is cut off."""
        start, sampling = len(stream.ids) - num_new, stream.request.sampling
        ends = set(self._ends(stream.request))
        places = [(place, Finish.EOS) for place in range(start, len(stream.ids)) if stream.ids[place] in ends]
        if sampling.stop:
            before = _produced(stream.request).ids
            tokens = np.concatenate([before, np.array(stream.ids, np.int32)])
            place = first_stop(tokens, start=len(before) + start, stop=sampling.stop, text_of=self._text_of)
            if place is not None:
                places.append((place - len(before), Finish.STOP))
        if places:
            place, finish = min(places, key=lambda found: found[0])
            stream.cut(place + 1)
            return finish
        return Finish.LENGTH if stream.num_missing == 0 else None

    def _finish(self, stream: _Stream, finish: Finish | None, *, refusal: UserError | None = None) -> None:
        self._forget(stream)
        tokens = stream.tokens(version=self._version)
        self._finished.append(Output(stream.request, tokens, finish, refusal))

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.name, None)
        self._names.pop(stream.request.id, None)

    def _put_back(self, stream: _Stream) -> None:
        if self._ended_by_us is None:
            raise WorldError(f"{self._where} gave up a request that nobody cancelled")
        self._forget(stream)
        self._ended_by_us.append(Output(stream.request, stream.tokens(version=self._version), None).resume())

    def _hang_up(self, stream: _Stream) -> None:
        """Nobody wants more of it: its memory is for others."""
        self._forget(stream)
        self._client.abandon(stream.name)
        self._dialect.abort(self._client, stream.name)

    def _end_streams(self) -> None:
        """The server ends all that it has; what is not finished by then waits again, before those that waited."""
        ended: list[Request] = []
        self._ended_by_us = ended

        def attempt(remaining_s: float) -> bool | None:
            if self._streams:
                for arrival in self._client.arrivals(min(STEP_S, remaining_s)):
                    self._take(arrival)
            return None if self._streams else True

        try:
            self._dialect.halt(self._client)
            wait(attempt, whom=self._client.url, what="the end of all streams", timeout_s=CALL_TIMEOUT_S)
        finally:
            ended.sort(key=lambda request: request.id)
            self._waiting = {request.id: request for request in ended} | self._waiting
            self._ended_by_us = None


def _produced(request: Request) -> Tokens:
    return request.produced or Tokens.none(num_top=request.sampling.top_logprobs)


def _seed(request: Request) -> int:
    """31 bits: of the request's noise, and another where it goes on in a second stream, whose draws count from 0."""
    return xxhash.xxh3_64_intdigest(f"{request.noise_key}/{request.num_produced}".encode()) >> 33
