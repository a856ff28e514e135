"""A rank's share of a version on its way to the meta-server, in a thread beside what the rank does next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kintsugi.errors import KintsugiError
from kintsugi.messages import Body, Ok, Publish, UploadWeights
from kintsugi.runtime import SPANS, SYSTEM_CLOCK, Clock, wait
from kintsugi.transport import Blob, chunks
from kintsugi.types import StreamSource, WeightSource
from kintsugi.weights.publish import LaidOut
from kintsugi.weights.stream import FETCH_TIMEOUT_S, IN_FLIGHT, SLOW_S, STREAM_BYTES, Answer, Say
from kintsugi.worker import ShuttingDown

Submit = Callable[[str, Body, Sequence[Blob], float], Answer]
"""Sends a request with bulk frames: (whom, what, frames, deadline in seconds)."""


class UploadOutlet:
    """`offer` begins an upload; a later one ends it, as nobody wants an older version any more."""

    transport = "stream"

    def __init__(self, submit: Submit, *, process: str, say: Say, clock: Clock = SYSTEM_CLOCK) -> None:
        """`say` is told when the upload is slow, while it happens."""
        self._submit, self._process, self._say, self._clock = submit, process, say, clock
        self._current = 0
        self._threads: list[threading.Thread] = []

    def offer(self, laid_out: LaidOut, order: Publish) -> Sequence[WeightSource]:
        if not order.meta_server:
            return ()
        self._current += 1
        thread = threading.Thread(
            target=self._upload,
            args=(laid_out, order.meta_server, self._current),
            name="upload",
            daemon=True,
        )
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return (StreamSource(order.meta_server, owners=(self._process,)),)

    def close(self) -> None:
        """What is under way ends with the request that it waits for."""
        self._current += 1

    def _upload(self, laid_out: LaidOut, meta_server: str, number: int) -> None:
        manifest = laid_out.manifest
        sent: deque[tuple[Answer, float]] = deque()
        num_bytes, since, is_named = 0, self._clock.monotonic(), False
        try:
            for indices in _batches(laid_out):
                if number != self._current:
                    return
                frames = [frame for index in indices for frame in chunks(laid_out.bytes_of(index))]
                sizes = {index: laid_out.pieces[index].size for index in indices}
                body = UploadWeights(manifest.version, manifest.digest, sizes)
                begun = self._clock.monotonic()
                sent.append((self._submit(meta_server, body, frames, FETCH_TIMEOUT_S), begun))
                while len(sent) >= IN_FLIGHT:
                    is_named |= self._settle(
                        *sent.popleft(), laid_out, meta_server, num_bytes, since, is_named
                    )
                num_bytes += sum(sizes.values())
            while sent:
                is_named |= self._settle(*sent.popleft(), laid_out, meta_server, num_bytes, since, is_named)
            about = {"to": meta_server, "version": manifest.version, "bytes": num_bytes}
            SPANS.add("weights_upload", about, since=since)
        except ShuttingDown:
            return
        except KintsugiError as error:
            self._say(
                f"{self._process} could not upload version {manifest.version} to {meta_server}, "
                f"servers have to ask it directly: {error}"
            )

    def _settle(
        self,
        answer: Answer,
        begun: float,
        laid_out: LaidOut,
        meta_server: str,
        num_bytes: int,
        since: float,
        is_named: bool,
    ) -> bool:
        """Wait for one answer; whether it was slow, which is said once per version."""
        reply = wait(
            lambda _: answer.result(),
            whom=meta_server,
            what=f"the upload of version {laid_out.manifest.version}",
            timeout_s=FETCH_TIMEOUT_S,
        )
        reply.expect(Ok)
        now = self._clock.monotonic()
        if is_named or now - begun < SLOW_S:
            return False
        rate = num_bytes / 1e6 / max(1e-3, now - since)
        self._say(
            f"the link from {self._process} to {meta_server} is slow: uploading version "
            f"{laid_out.manifest.version} at {rate:.1f} MB/s, one request took {now - begun:.1f} s"
        )
        return True


def _batches(laid_out: LaidOut) -> Iterator[tuple[int, ...]]:
    """In the order of the layout, in which servers ask for them too."""
    indices: list[int] = []
    size = 0
    for index in sorted(laid_out.pieces):
        if indices and size + laid_out.pieces[index].size > STREAM_BYTES:
            yield tuple(indices)
            indices, size = [], 0
        indices.append(index)
        size += laid_out.pieces[index].size
    if indices:
        yield tuple(indices)
