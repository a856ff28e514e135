"""Fetching of the current step's trajectories, along the routes that the master planned (`dataplane/`).

A rank requests its samples from the holders in batches, several in parallel. Every trajectory is verified against the
digest taken when it was scored, and requested once more if its bytes are wrong. A plan may let one rank of a host fetch
samples for its neighbours from other hosts and put them into the host's shared memory. A rank that does not find its
samples there in time, or finds damaged ones, requests them from the holder.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import xxhash

from kintsugi.dataplane.demand import batched, estimated_bytes
from kintsugi.dataplane.rate_limit import RateLimit
from kintsugi.errors import (
    DataDamaged,
    DeadlineExceeded,
    IntegrityError,
    KintsugiError,
    RefusedError,
    WorldError,
    damage_of,
)
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import FetchSamples, SamplesFetched
from kintsugi.protocol.sample_transfer import FetchRelayed, Relayed, Routes, Transfer
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import BytesDamaged, Note, NoteEvent
from kintsugi.training.packing import BatchSample, sample_of
from kintsugi.types import LogicalShard, ShardItem, Trajectory
from kintsugi.weights.transports.shared_memory import WeightSegments

FETCH_TIMEOUT_S = 60.0
"""Time without any arriving sample after which a fetch fails."""
RELAY_TIMEOUT_S = 20.0
"""Time to wait for the relaying rank, which may still be busy with the previous call; then the holders are used."""
POLL_S = 0.001
IN_FLIGHT = 2
"""Concurrent requests to one holder: the next one is in flight while one is verified."""
ATTEMPTS = 2
"""Requests for a sample before wrong bytes are an error."""


class Submit(Protocol):
    """Send a request without waiting for its reply (`process.shell.Shell.submit`)."""

    def __call__(self, process: str, body: Body, *, deadline_s: float) -> ReplyHandle: ...


def await_answer(
    answer: ReplyHandle, *, check: Callable[[], None], whom: str, what: str, timeout_s: float
) -> None:
    """Wait until a request is answered. `check` is called meanwhile and raises if the wait has to be given up."""
    idle = threading.Event()

    def attempt(remaining_s: float) -> bool | None:
        check()
        if answer.done:
            return True
        idle.wait(min(POLL_S, remaining_s))
        return None

    wait(attempt, whom=whom, what=what, timeout_s=timeout_s)


class StepSamples:
    """Fetches each trajectory once per step: calls of the same step share them."""

    def __init__(
        self,
        submit: Submit,
        *,
        check: Callable[[], None],
        process: str = "",
        segments: WeightSegments | None = None,
        emit: Callable[[NoteEvent], object] = lambda event: None,
    ) -> None:
        """`check` is called while waiting and raises if the call has to be given up."""
        self._submit = submit
        self._check = check
        self._segments = segments
        self._emit = emit
        self._segment = f"samples-{process}"
        self._relayed: Relayed | RefusedError | None = None
        """Samples that this rank fetched for its neighbours, or why it did not; None while it is fetching."""
        self._has_segment = False
        self._transfers: list[Transfer] = []
        self.trajectories: dict[str, Trajectory] = {}
        """Trajectories of this step by sample key."""

    def forget(self) -> None:
        """Drop everything of the step, which was committed or given up."""
        self.trajectories = {}
        self._transfers = []
        if self._has_segment and self._segments is not None:
            with suppress(WorldError):  # The segment is gone if its agent has ended.
                self._segments.remove(self._segment)
        self._relayed = None
        self._has_segment = False

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers since the last call."""
        taken, self._transfers = tuple(self._transfers), []
        return taken

    def of_shards(
        self,
        shards: Sequence[LogicalShard],
        *,
        step: int = 0,
        generation: int = 0,
        routes: Routes | None = None,
    ) -> dict[int, list[BatchSample]]:
        """Return the samples of the shards by shard index, fetching missing ones; every trajectory is verified."""
        routes = routes or Routes()
        wanted = [item for shard in shards for item in shard.items if item.key not in self.trajectories]
        try:
            self._fetch(wanted, FetchRelayed(step, generation, ()), routes=routes)
        except KintsugiError as error:
            self._relayed = RefusedError(f"the samples did not come: {error}", cause=error.cause)
            raise
        return {
            shard.index: [sample_of(item, self.trajectories[item.key]) for item in shard.items]
            for shard in shards
        }

    def _fetch(self, wanted: Sequence[ShardItem], question: FetchRelayed, *, routes: Routes) -> None:
        start = time.perf_counter()
        awaited = [item for item in wanted if item.holder in routes.via]
        answers = self._ask_relays(awaited, question, routes=routes)
        own = [item for item in wanted if item.holder not in routes.via]
        encoded = self._fetch_from_holders([*own, *routes.relay], routes, start=start)
        if routes.relay:
            self._relayed = self._laid_out({item.key: encoded[item.key] for item in routes.relay})
        elif self._relayed is None:
            self._relayed = RefusedError(f"nothing is relayed in step {question.step}")
        missing = self._take_relayed(awaited, answers, start=start)
        self._fetch_from_holders(missing, routes, start=start)

    # From the holders.

    def _fetch_from_holders(
        self, items: Sequence[ShardItem], routes: Routes, *, start: float
    ) -> dict[str, bytes]:
        """Fetch from all holders in parallel, some batches at a time each; return the verified bytes by key."""
        by_holder: dict[str, list[ShardItem]] = {}
        for item in items:
            by_holder.setdefault(item.holder, []).append(item)
        streams = {
            holder: SampleStream(holder, held, submit=self._submit, start=start, routes=routes)
            for holder, held in by_holder.items()
        }
        while open_streams := {holder: stream for holder, stream in streams.items() if not stream.finished}:
            self._await(open_streams)
        encoded: dict[str, bytes] = {}
        for stream in streams.values():
            self.trajectories |= stream.trajectories
            self._transfers.append(stream.transfer())
            encoded |= stream.encoded
            if stream.damage:
                self._emit(BytesDamaged(f"{stream.damage}; it was fetched again", origin=stream.holder))
        return encoded

    def _await(self, streams: Mapping[str, SampleStream]) -> None:
        """Wait until any stream has advanced. Each wait names only the holders that have not finished."""
        idle = threading.Event()

        def attempt(remaining_s: float) -> bool | None:
            self._check()
            if sum(stream.advance() for stream in streams.values()):
                return True
            idle.wait(min(POLL_S, remaining_s))
            return None

        paced_s = max(stream.held_back_s for stream in streams.values())
        timeout_s = FETCH_TIMEOUT_S + paced_s
        wait(attempt, whom=", ".join(streams), what="trajectories", timeout_s=timeout_s)

    # Through the host's memory.

    @property
    def is_fetching(self) -> bool:
        """Whether this rank is still fetching, so that a neighbour's request has to wait."""
        return self._relayed is None

    def relayed(self, request: FetchRelayed) -> Relayed:
        """Return the positions of a neighbour's samples in shared memory."""
        if not isinstance(self._relayed, Relayed):
            raise self._relayed or RefusedError(f"nothing was relayed for step {request.step}")
        places = self._relayed.places
        return Relayed(self._relayed.segment, {key: places[key] for key in request.keys if key in places})

    def _laid_out(self, encoded: Mapping[str, bytes]) -> Relayed | RefusedError:
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for key, content in encoded.items():
            places[key] = end, len(content)
            end += len(content)
        if self._segments is None:
            return RefusedError("this process has no memory that its host shares")
        try:
            descriptor = self._segments.create(self._segment, end)
        except WorldError as error:
            return RefusedError(f"no memory to lay samples out in: {error}", cause=error.cause)
        self._has_segment = True
        try:
            with mmap.mmap(descriptor, end) as memory:
                memory[:] = b"".join(encoded.values())
        finally:
            os.close(descriptor)
        COUNTERS.add("samples_relayed", len(encoded))
        return Relayed(self._segment, places)

    def _ask_relays(
        self, items: Sequence[ShardItem], question: FetchRelayed, *, routes: Routes
    ) -> dict[str, ReplyHandle]:
        keys: dict[str, list[str]] = {}
        for item in items:
            keys.setdefault(routes.via[item.holder], []).append(item.key)
        return {
            rank: self._submit(
                rank, msgspec.structs.replace(question, keys=tuple(asked)), deadline_s=RELAY_TIMEOUT_S
            )
            for rank, asked in keys.items()
        }

    def _take_relayed(
        self, items: Sequence[ShardItem], answers: Mapping[str, ReplyHandle], *, start: float
    ) -> list[ShardItem]:
        """Read the relayed samples; return the items that have to be fetched from their holders."""
        for rank, answer in answers.items():
            try:
                await_answer(
                    answer,
                    check=self._check,
                    whom=rank,
                    what="relayed trajectories",
                    timeout_s=RELAY_TIMEOUT_S,
                )
            except DeadlineExceeded as error:
                self._was_not_relayed(rank, error)
                continue
            try:
                relayed = answer.result().expect(Relayed)
                asked_s = time.perf_counter() - start
                size = self._read(relayed, items, rank=rank)
            except (WorldError, OSError, ValueError) as error:
                self._was_not_relayed(rank, error)
                continue
            self._transfers.append(Transfer(rank, 1, size, asked_s, time.perf_counter() - start))
        return [item for item in items if item.key not in self.trajectories]

    def _was_not_relayed(self, rank: str, error: Exception) -> None:
        COUNTERS.add("relays_failed")
        message = f"samples are fetched from their holders, because {rank} did not relay them: {error}"
        damage = damage_of(error)
        self._emit(Note(message) if damage is None else BytesDamaged(message, origin=damage.origin))

    def _read(self, relayed: Relayed, items: Sequence[ShardItem], *, rank: str) -> int:
        """Read and verify samples that a rank laid out in shared memory, leaving out damaged ones; return the number of
        bytes read."""
        if self._segments is None:
            raise RefusedError("this process has no memory that its host shares")
        descriptor = self._segments.open(relayed.segment)
        try:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as memory:
                contents = {key: memory[at : at + size] for key, (at, size) in relayed.places.items()}
        finally:
            os.close(descriptor)
        digests = {item.key: item.digest for item in items}
        for key, content in contents.items():
            if xxhash.xxh3_64_hexdigest(content) == digests.get(key):
                self.trajectories[key] = _decoder.decode(content)
            else:
                COUNTERS.add("samples_damaged")
                message = f"sample {key} was damaged on its way through {relayed.segment}"
                self._emit(BytesDamaged(message, origin=rank))
        return sum(len(content) for content in contents.values())


_decoder = msgspec.msgpack.Decoder(Trajectory)


class SampleStream:
    """Samples that one holder has for one step: requested in batches, some of them concurrently."""

    def __init__(
        self, holder: str, items: Sequence[ShardItem], *, submit: Submit, start: float, routes: Routes
    ) -> None:
        self.holder = holder
        self._submit = submit
        self._start = start
        self._batches: deque[tuple[Sequence[ShardItem], int]] = deque(
            (batch, 1) for batch in batched(items, batch_bytes=routes.batch_bytes)
        )
        self._rate_limit = RateLimit(routes.limits.get(holder))
        self._in_flight: list[tuple[ReplyHandle, Sequence[ShardItem], int]] = []
        self._requests = self._repeated = 0
        self.damage = ""
        """Description of the first sample that arrived with other bytes than its holder announced."""
        self._first_s = self._last_s = 0.0
        self.trajectories: dict[str, Trajectory] = {}
        self.encoded: dict[str, bytes] = {}

    @property
    def finished(self) -> bool:
        return not self._batches and not self._in_flight

    @property
    def held_back_s(self) -> float:
        """Seconds until the rate limit admits the next request; not counted as a delay of the holder."""
        return self._rate_limit.free_in_s(time.monotonic())

    def advance(self) -> bool:
        """Send more requests and take the answers that have arrived; return whether any has."""
        while (
            self._batches and len(self._in_flight) < IN_FLIGHT and self._rate_limit.admits(time.monotonic())
        ):
            batch, attempt = self._batches.popleft()
            self._rate_limit.take(sum(estimated_bytes(item) for item in batch), now=time.monotonic())
            body = FetchSamples(tuple(item.key for item in batch))
            self._requests += 1
            self._in_flight.append(
                (self._submit(self.holder, body, deadline_s=FETCH_TIMEOUT_S), batch, attempt)
            )
        answered = [each for each in self._in_flight if each[0].done]
        self._in_flight = [each for each in self._in_flight if not any(each is other for other in answered)]
        for answer, batch, attempt in answered:
            self._take(answer.result().expect(SamplesFetched).samples, batch, attempt=attempt)
        return bool(answered)

    def _take(self, samples: Iterable[Trajectory], batch: Sequence[ShardItem], *, attempt: int) -> None:
        """Verify a batch. Missing or wrong samples are requested again; if wrong again, IntegrityError names one."""
        by_key = {sample.key: sample for sample in samples}
        wrong: dict[str, str] = {}
        for item in batch:
            if item.key not in by_key:
                wrong[item.key] = f"{self.holder} answered without sample {item.key}"
                continue
            encoded = msgspec.msgpack.encode(by_key[item.key])
            found = xxhash.xxh3_64_hexdigest(encoded)
            if found != item.digest:
                wrong[item.key] = (
                    f"sample {item.key} from {self.holder}: expected xxh3 {item.digest}, got {found}"
                )
                self.damage = self.damage or wrong[item.key]
                continue
            self.trajectories[item.key] = by_key[item.key]
            self.encoded[item.key] = encoded
        self._last_s = time.perf_counter() - self._start
        self._first_s = self._first_s or self._last_s
        COUNTERS.add("samples_fetched", len(batch) - len(wrong))
        if wrong:
            COUNTERS.add("samples_damaged", len(wrong))
            if attempt >= ATTEMPTS:
                raise IntegrityError(next(iter(wrong.values())), detail=DataDamaged(self.holder))
            self._repeated += len(wrong)
            self._batches.append(([item for item in batch if item.key in wrong], attempt + 1))

    def transfer(self) -> Transfer:
        """Measurements of this stream."""
        size = sum(len(content) for content in self.encoded.values())
        return Transfer(self.holder, self._requests, size, self._first_s, self._last_s, self._repeated)
