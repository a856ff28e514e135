"""Upload of a rank's share of a version to the meta-server, in a background thread.

The rank announces pieces, and the meta-server fetches them over the bulk channel. A whole version in shared memory of
the meta-server's host is announced by the name of that memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kintsugi.bulk.pull import SLOW_S, EventSink
from kintsugi.errors import KintsugiError
from kintsugi.process.membership import ShuttingDown
from kintsugi.process.shell import ReplyHandle
from kintsugi.protocol.membership import Ok
from kintsugi.protocol.messages import Body
from kintsugi.protocol.weights import Publish, UploadWeights
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.spans import SPANS
from kintsugi.runtime.waits import wait
from kintsugi.telemetry.events import OperationFailed, SlowLink
from kintsugi.types import Piece, StreamSource, WeightSource
from kintsugi.weights.publish import VersionLayout

UPLOAD_BYTES = 16 << 20
"""Bytes per announcement: few, so that servers can fetch them while the rest is uploaded."""
IN_FLIGHT = 2
"""Announcements in flight: the meta-server fetches the pieces of one while another is on its way."""
UPLOAD_TIMEOUT_S = 60.0
"""Deadline of one announcement."""

Submit = Callable[[str, Body, float], ReplyHandle]
"""Sends a request: (process, body, deadline in seconds)."""


class RelayTransport:
    """`publish` starts an upload; a later one ends it, because the older version is obsolete."""

    name = "stream"

    def __init__(
        self, submit: Submit, *, process: str, agent: str, emit: EventSink, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`agent` is the agent of this host. `emit` receives an event while the upload is slow."""
        self._submit = submit
        self._process = process
        self._agent = agent
        self._emit = emit
        self._clock = clock
        self._current = 0
        self._threads: list[threading.Thread] = []

    def publish(self, version_layout: VersionLayout, order: Publish) -> Sequence[WeightSource]:
        if not order.meta_server:
            return ()
        self._current += 1
        thread = threading.Thread(
            target=self._upload,
            args=(version_layout, order.meta_server, self._current),
            name="upload",
            daemon=True,
        )
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        return (StreamSource(order.meta_server, owners=(self._process,), chain=order.chain),)

    def close(self) -> None:
        """Nothing to do: an upload ends with the request that it waits for."""
        self._current += 1

    def _upload(self, version_layout: VersionLayout, meta_server: str, number: int) -> None:
        manifest = version_layout.manifest
        sent: deque[tuple[ReplyHandle, float]] = deque()
        num_bytes, since, is_reported = 0, self._clock.monotonic(), False
        try:
            for body in _announcements(version_layout, is_local=meta_server == self._agent):
                if number != self._current:
                    return
                begun = self._clock.monotonic()
                sent.append((self._submit(meta_server, body, UPLOAD_TIMEOUT_S), begun))
                while len(sent) >= IN_FLIGHT:
                    is_reported |= self._settle(
                        *sent.popleft(), version_layout, meta_server, num_bytes, since, is_reported
                    )
                num_bytes += sum(piece.size for piece in body.pieces.values())
            while sent:
                is_reported |= self._settle(
                    *sent.popleft(), version_layout, meta_server, num_bytes, since, is_reported
                )
            about = {"to": meta_server, "version": manifest.version, "bytes": num_bytes}
            SPANS.add("weights_upload", about, since=since)
        except ShuttingDown:
            return
        except KintsugiError as error:
            message = f"{self._process} could not upload version {manifest.version} to {meta_server}, "
            message += f"servers fetch from the rank directly: {error}"
            self._emit(OperationFailed(message, operation="upload of weights", error=str(error)))

    def _settle(
        self,
        answer: ReplyHandle,
        begun: float,
        version_layout: VersionLayout,
        meta_server: str,
        num_bytes: int,
        since: float,
        is_reported: bool,
    ) -> bool:
        """Wait for one reply; return whether it was slow, which is reported once per version."""
        reply = wait(
            lambda _: answer.result(),
            whom=meta_server,
            what=f"the upload of version {version_layout.manifest.version}",
            timeout_s=UPLOAD_TIMEOUT_S,
        )
        reply.expect(Ok)
        now = self._clock.monotonic()
        if is_reported or now - begun < SLOW_S:
            return False
        rate = num_bytes / 1e6 / max(1e-3, now - since)
        message = f"the link from {self._process} to {meta_server} is slow: uploading version "
        message += (
            f"{version_layout.manifest.version} at {rate:.1f} MB/s, one request took {now - begun:.1f} s"
        )
        self._emit(SlowLink(message, of=self._process, peer=meta_server))
        return True


def _announcements(version_layout: VersionLayout, *, is_local: bool) -> Iterator[UploadWeights]:
    """Pieces of about `UPLOAD_BYTES` each, in the order of the layout, in which servers request them too."""
    version, size = version_layout.manifest.version, version_layout.size
    if is_local and version_layout.segment:
        yield UploadWeights(version, size, dict(version_layout.pieces), segment=version_layout.segment)
        return
    offer = version_layout.offer
    assert offer is not None, "a version that is uploaded is offered"
    batch: dict[int, Piece] = {}
    for index in sorted(version_layout.pieces):
        piece = version_layout.pieces[index]
        if batch and sum(each.size for each in batch.values()) + piece.size > UPLOAD_BYTES:
            yield UploadWeights(version, size, batch, offer)
            batch = {}
        batch[index] = piece
    if batch:
        yield UploadWeights(version, size, batch, offer)
