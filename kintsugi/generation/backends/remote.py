"""A server of another product as a `Backend`: the common part of vLLM and SGLang.

Each request is a stream of events; at most `slots` are open, the others wait here.

    submit   waiting ──(a stream is free)──▶ open ──(end token, stop string, length)──▶ Output
    stage    weights are put where the server can read them (`staged_weights`) while streams continue
    load     the server freezes all streams; it reads the weights, they are verified by what it has read and by a probe
             (`probe`), and the streams continue
    failure  a WorldError: the server is gone, or in an unexpected state. The process of this back end exits, and its
             requests continue elsewhere with the tokens they have. A UserError ends only the request that caused it

Nothing that a server samples is used before the probe has passed. A server that can not freeze streams, or does not
report which of their tokens are of which weights, ends them instead: they wait again with the tokens they have, and
their KV cache is recomputed.

Responses are checked: one log-probability per token, no more tokens than requested, the weights that were loaded.
Ends are detected here, by the rules of the embedded engine, independent of the server's own rules.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from kintsugi.errors import ConfigError, IntegrityError, KintsugiError, UserError, WorldError
from kintsugi.generation.backend import Running
from kintsugi.generation.backends import probe
from kintsugi.generation.backends.dialect import Dialect, Increment
from kintsugi.generation.backends.http import CALL_TIMEOUT_S, HttpClient, ResponseArrival
from kintsugi.generation.backends.staged_weights import (
    Answer,
    Greeting,
    StagedWeights,
    WeightStaging,
    is_local,
)
from kintsugi.generation.engine.requests import GenerationOutput, GenerationRequest, RequestId, Tokens
from kintsugi.generation.engine.stop_strings import first_stop
from kintsugi.generation.engine.validation import check_request
from kintsugi.model.architecture import ModelConfig
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import wait
from kintsugi.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

STEP_S = 0.01
"""Longest wait of a step for tokens: between two steps, the server process handles its messages."""
CHECK_EVERY_S = 10.0
"""Silence on all streams after which the server's health is checked."""
LONGEST_SILENCE_S = 120.0
"""A server that reports to be healthy and produces nothing for this long has failed."""
_TRIED_TEMPERATURE = 2.0


@dataclass(eq=False)
class _Stream:
    """A request at the server, and its sampled tokens."""

    name: str
    """Name at the server; never reused."""
    request: GenerationRequest
    versions: list[tuple[int, int]]
    """Versions of the weights, each with the first token of it; the last one is that of the next token."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return self.request.sampling.max_new_tokens - self.request.num_produced - len(self.ids)

    def cut(self, length: int) -> None:
        del self.ids[length:], self.logprobs[length:], self.tops[length:]

    def tokens(self) -> Tokens:
        """All tokens, those that the request came with first."""
        tops = np.array(self.tops, np.float64).reshape(len(self.ids), self.request.sampling.top_logprobs, 2)
        versions = np.empty(len(self.ids), np.int32)
        for start, version in self.versions:
            versions[start:] = version
        sampled = Tokens(
            np.array(self.ids, np.int32),
            np.array(self.logprobs, np.float32),
            versions,
            tops[:, :, 0].astype(np.int32),
            tops[:, :, 1].astype(np.float32),
        )
        return Tokens.joined([_produced(self.request), sampled])


class RemoteBackend:
    """Created by `open_backend`. Not thread-safe."""

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
        answer: Answer | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`answer` is by default that of the trainer's model."""
        self._client = client
        self._dialect = dialect
        self._clock = clock
        self._vocab_size = architecture.vocab_size
        self._end_token_ids = tuple(end_token_ids)
        self._text_of = text_of
        self._slots = slots
        self._max_length = max_length
        answer = answer or partial(probe.answer, architecture)
        self._staging = WeightStaging(folder, architecture=architecture, answer=answer)
        self._accepted: probe.Accepted | None = None
        self._origin = secrets.token_hex(4)
        """Part of all labels and names, which distinguishes them from those of other processes."""
        self._version = -1
        self._waiting: dict[RequestId, GenerationRequest] = {}
        """In order of arrival."""
        self._streams: dict[str, _Stream] = {}
        self._names: dict[RequestId, str] = {}
        """Names of the open streams."""
        self._load_failure: KintsugiError | None = None
        """Error after which the server's weights, and whether it is halted, are unknown."""
        self._ended_by_us: list[GenerationRequest] | None = None
        """Requests that will continue, while all streams are being ended; else None."""
        self._arrivals: list[ResponseArrival] = []
        """Events of streams that arrived while new weights were probed."""
        self._finished: list[GenerationOutput] = []
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
        """Number of steps in which tokens arrived."""
        return self._num_steps

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
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

    def step(self) -> list[GenerationOutput]:
        """Open streams, and process what arrives within some milliseconds."""
        if self._load_failure is not None:
            raise WorldError(f"{self._where} did not take new weights: {self._load_failure}")
        self._open_streams()
        if self._streams:
            self._receive()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self, request_id: RequestId) -> GenerationOutput | None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            return GenerationOutput(request, _produced(request), None)
        for output in self._finished:
            if output.request.id == request_id:
                self._finished.remove(output)
                return output
        stream = self._stream_of(request_id)
        if stream is None:
            return None
        self._close(stream)
        return GenerationOutput(stream.request, stream.tokens(), None)

    def produced(self, request_id: RequestId) -> Tokens | None:
        stream = self._stream_of(request_id)
        if stream is not None:
            return stream.tokens()
        if request_id in self._waiting:
            return _produced(self._waiting[request_id])
        return next((each.tokens for each in self._finished if each.request.id == request_id), None)

    @property
    def note(self) -> str:
        """Note for the log on how the server gets weights, possibly empty."""
        return self._dialect.note()

    def stage(self, tensors: Mapping[str, Tensor]) -> StagedWeights:
        return self._staging.stage(tensors)

    def load(self, version: int, tensors: Mapping[str, Tensor], *, running: Running = "keep") -> None:
        """Change the weights. A server that ends streams recomputes their KV cache, also with `running="keep"`."""
        weights = tensors if isinstance(tensors, StagedWeights) else self.stage(tensors)
        try:
            arrivals = self._change_weights(version, weights, keep_cache=running == "keep")
        except KintsugiError as error:
            self._load_failure = error
            self._requeue_all()
            raise
        self._load_failure = None
        self._version = version
        weights.release()
        self._arrivals += arrivals
        self._open_streams()

    def _change_weights(
        self, version: int, weights: StagedWeights, *, keep_cache: bool
    ) -> list[ResponseArrival]:
        """Return what the streams have received with the new weights."""
        label = self._label(version)
        if self._dialect.keeps_streams:
            self._dialect.freeze(self._client, keep_cache=keep_cache)
        else:
            self._end_streams()
        weights = self._update(weights, label=label)
        self._dialect.verify(self._client, weights, label=label)
        self._verify_labels({self._dialect.label(self._client)}, expected=label)
        # What a frozen server had sampled before has arrived in the meantime.
        arrivals, self._arrivals = [*self._arrivals, *self._client.arrivals(0.0)], []
        for arrival in arrivals:
            self._take(arrival)
        for stream in self._streams.values():
            stream.versions.append((len(stream.ids), version))
        self._dialect.proceed(self._client)
        return self._probe_weights(weights.answer, label=label)

    def _update(self, weights: StagedWeights, *, label: str) -> StagedWeights:
        """Let the server read the weights. A server that turns out not to see this process's memory gets files."""
        try:
            self._dialect.update(self._client, weights, label=label)
        except WorldError:
            if self._version >= 0 or not self._staging.in_memory:
                raise
            self._dialect.health(self._client)
            self._staging.in_memory = False
            weights = self._staging.copy(weights)
            self._dialect.update(self._client, weights, label=label)
        return weights

    def _probe_weights(self, answer: Sequence[float], *, label: str) -> list[ResponseArrival]:
        """Raise IntegrityError if the server computes with other weights; return what other streams received."""
        prompt = probe.prompt(self._vocab_size)
        sampling = SamplingParams(max_new_tokens=1, top_logprobs=min(probe.NUM_COMPARED, self._vocab_size))
        tops, others = self._first_tops(prompt, sampling, label=label)
        verdict = probe.judge(
            {token: value for token, value in tops if 0 <= token < self._vocab_size},
            answer,
            before=self._accepted,
        )
        if verdict.reason:
            raise IntegrityError(f"{self._where} does not compute with {label}: {verdict.reason}")
        worst = verdict.difference if self._accepted is None else self._accepted.difference
        self._accepted = probe.Accepted(answer, max(worst, verdict.difference))
        return others

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self._streams),
            "waiting": len(self._waiting),
            "decoded_tokens": self._num_tokens,
            "probe_difference": -1.0 if self._accepted is None else self._accepted.difference,
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
        """Check that the server is healthy and was started with the required options. End requests that a dead
        predecessor of this process left."""
        self._dialect.health(self._client)
        longest = self._dialect.max_length(self._client)
        if longest < self._max_length:
            raise ConfigError(
                f"`generation.max_length`: expected at most {longest} tokens, which is the longest sequence of "
                f"{self._where}, got {self._max_length}"
            )
        with Greeting(self._origin) as greeting:
            sees_memory = self._dialect.connect(self._client, greeting)
        self._staging.in_memory = is_local(self._client.url) if sees_memory is None else sees_memory
        self._dialect.halt(self._client)
        self._dialect.proceed(self._client)
        plain, scaled = self._gap(1.0), self._gap(_TRIED_TEMPERATURE)
        if abs(scaled * _TRIED_TEMPERATURE - plain) > 0.1 * plain + 0.01:
            raise ConfigError(
                f"`generation.urls`: expected log-probabilities at the temperature from {self._where}: start it "
                f"{self._dialect.how_to_scale}"
            )

    def _gap(self, temperature: float) -> float:
        """Gap between the two most likely tokens as the server reports them; it shrinks as the temperature grows."""
        sampling = SamplingParams(temperature=temperature, max_new_tokens=1, top_logprobs=2)
        (first, second), _ = self._first_tops([0], sampling, label=self._origin)
        return first[1] - second[1]

    def _first_tops(
        self, tokens: list[int], sampling: SamplingParams, *, label: str
    ) -> tuple[list[tuple[int, float]], list[ResponseArrival]]:
        """The most likely tokens after these, and what other streams received meanwhile."""
        self._num_opened += 1
        name, num_top = f"{self._origin}-{self._num_opened}", sampling.top_logprobs
        body = self._dialect.body(
            tokens, name=name, label=label, sampling=sampling, max_new_tokens=1, seed=0, ends=[]
        )
        self._client.open(name, self._dialect.generate_path, body=body)
        others: list[ResponseArrival] = []

        def attempt(remaining_s: float) -> list[tuple[int, float]] | None:
            found = None
            for arrival in self._client.arrivals(remaining_s):
                if arrival.name != name:
                    others.append(arrival)
                    continue
                if arrival.failure is not None:
                    raise arrival.failure
                for tops in self._parsed(arrival.event, num_known=0, num_top=num_top).tops:
                    found = tops
            if found is not None and len(found) != num_top:
                raise IntegrityError(
                    f"{self._where}: expected the {num_top} most likely tokens, got {len(found)}"
                )
            return found

        return wait(attempt, whom=self._client.url, what="a first token", timeout_s=LONGEST_SILENCE_S), others

    def _open_streams(self) -> None:
        """Open as many streams as there are slots. If none was open, the server may have been restarted unnoticed:
        check it first."""
        if not self._waiting or len(self._streams) >= self._slots:
            return
        if not self._streams:
            assert self._version >= 0, "weights come before requests"
            self._verify_labels({self._dialect.label(self._client)}, expected=self._label(self._version))
            self._last_arrival = self._last_check = self._clock.monotonic()
        while self._waiting and len(self._streams) < self._slots:
            self._open(self._waiting.pop(next(iter(self._waiting))))

    def _open(self, request: GenerationRequest) -> None:
        self._num_opened += 1
        stream = _Stream(f"{self._origin}-{self._num_opened}", request, [(0, self._version)])
        body = self._dialect.body(
            [*request.prompt.tolist(), *_produced(request).ids.tolist()],
            name=stream.name,
            label=self._label(self._version),
            sampling=request.sampling,
            max_new_tokens=stream.num_missing,
            seed=_seed(request),
            ends=self._ends(request),
        )
        self._streams[stream.name] = stream
        self._names[request.id] = stream.name
        self._client.open(stream.name, self._dialect.generate_path, body=body)

    def _ends(self, request: GenerationRequest) -> list[int]:
        ends = () if request.sampling.ignore_end else self._end_token_ids
        return [*ends, *request.sampling.stop_token_ids]

    def _receive(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        arrivals += self._client.arrivals(0.0 if arrivals else STEP_S)
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

    def _take(self, arrival: ResponseArrival) -> None:
        stream = self._streams.get(str(arrival.name))
        if stream is None:
            return
        try:
            if arrival.failure is not None:
                raise arrival.failure
            increment = self._increment(stream, arrival.event)
        except UserError as error:
            self._close(stream)
            self._finish(stream, None, user_error=error)
            return
        stream.ids += increment.ids
        stream.logprobs += increment.logprobs
        stream.tops += increment.tops
        if increment.spans:
            stream.versions = [(start, _version_of(label)) for label, start in increment.spans]
        self._num_tokens += len(increment.ids)
        finish = self._finish_of(stream, num_new=len(increment.ids))
        if finish is None and increment.ended == "abort":
            self._requeue(stream)
        elif finish is None and increment.ended is not None:
            # An end token of the server's own configuration.
            self._finish(stream, FinishReason.EOS)
        elif finish is not None:
            if increment.ended is None and finish is not FinishReason.LENGTH:
                self._close(stream)
            self._finish(stream, finish)

    def _increment(self, stream: _Stream, event: bytes) -> Increment:
        """Parse and check an event."""
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
        used = [self._label(version) for _, version in stream.versions]
        self._verify_labels({label for label, _ in increment.spans}.difference(used), expected=used[-1])
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
                f"{self._where} has weights {', '.join(others)}, expected {expected}: it was restarted, or another "
                "client loads weights into it"
            )

    def _finish_of(self, stream: _Stream, *, num_new: int) -> FinishReason | None:
        """Finish reason of the stream after its newest tokens, if it ended; tokens after the end are cut off."""
        start, sampling = len(stream.ids) - num_new, stream.request.sampling
        ends = set(self._ends(stream.request))
        ends_found = [
            (place, FinishReason.EOS) for place in range(start, len(stream.ids)) if stream.ids[place] in ends
        ]
        if sampling.stop:
            before = _produced(stream.request).ids
            tokens = np.concatenate([before, np.array(stream.ids, np.int32)])
            place = first_stop(tokens, start=len(before) + start, stop=sampling.stop, text_of=self._text_of)
            if place is not None:
                ends_found.append((place - len(before), FinishReason.STOP))
        if ends_found:
            place, finish = min(ends_found, key=lambda found: found[0])
            stream.cut(place + 1)
            return finish
        return FinishReason.LENGTH if stream.num_missing == 0 else None

    def _finish(
        self, stream: _Stream, finish: FinishReason | None, *, user_error: UserError | None = None
    ) -> None:
        self._forget(stream)
        tokens = stream.tokens()
        self._finished.append(GenerationOutput(stream.request, tokens, finish, user_error))

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.name, None)
        self._names.pop(stream.request.id, None)

    def _requeue(self, stream: _Stream) -> None:
        if self._ended_by_us is None:
            raise WorldError(f"{self._where} ended a request that was not cancelled")
        self._forget(stream)
        self._ended_by_us.append(GenerationOutput(stream.request, stream.tokens(), None).resume())

    def _requeue_all(self) -> None:
        """Close all streams; their requests wait again with the tokens they have."""
        requests = {}
        for stream in list(self._streams.values()):
            self._forget(stream)
            self._client.abandon(stream.name)
            output = GenerationOutput(stream.request, stream.tokens(), None)
            requests[stream.request.id] = output.resume()
        self._waiting = requests | self._waiting

    def _close(self, stream: _Stream) -> None:
        """Close a stream and free its memory at the server."""
        self._forget(stream)
        self._client.abandon(stream.name)
        self._dialect.abort(self._client, stream.name)

    def _end_streams(self) -> None:
        """End all streams at the server. Unfinished requests are queued again, before those that waited."""
        if not self._dialect.reports_ends:
            for arrival in self._client.arrivals(0.0):
                self._take(arrival)
            self._requeue_all()
            self._dialect.halt(self._client)
            return
        ended: list[GenerationRequest] = []
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


def _version_of(label: str) -> int:
    return int(label.rpartition(":")[2])


def _produced(request: GenerationRequest) -> Tokens:
    return request.produced or Tokens.none(num_top=request.sampling.top_logprobs)


def _seed(request: GenerationRequest) -> int:
    """Seed of 31 bits, from the request's random key. A continued request has another seed, because the draws of its
    second stream count from 0."""
    return xxhash.xxh3_64_intdigest(f"{request.rng_key}/{request.num_produced}".encode()) >> 33
