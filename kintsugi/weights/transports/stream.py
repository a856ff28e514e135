"""Fetching by stream: over the bulk channel, from the agents of a chain, the meta-server, or the ranks themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kintsugi.bulk.client import BulkClient
from kintsugi.bulk.pull import EventSink, Pull, Share
from kintsugi.errors import RefusedError
from kintsugi.protocol.bulk import BulkOffer
from kintsugi.protocol.weights import FetchWeights, HoldDelta, HoldWeights, WeightsFetched, WeightsHeld
from kintsugi.transport import Reply
from kintsugi.types import Role, StreamSource, WeightManifest, role_of
from kintsugi.weights.manifest import check_whole

AGENT_TIMEOUT_S = 5.0
"""Deadline for an agent's answer where its offer is."""
RANK_TIMEOUT_S = 60.0
"""The same for a rank, which may be in the middle of a computation."""
HOLD_TIMEOUT_S = 20.0
"""Longest wait for this host's agent to fetch a version; then a server fetches for itself."""

Call = Callable[[str, FetchWeights | HoldWeights | HoldDelta, float], Reply]
"""Sends a request and waits for its reply, from any thread: (process, request, deadline in seconds)."""


def shares_of(manifest: WeightManifest, source: StreamSource, *, own: str) -> list[Share]:
    """Shares of a version with their sources in order: the agent before this one in the chain, the meta-server, the
    rank. `own` is the agent that fetches, or any other process.

    >>> source = StreamSource("agent-0", ("model-0",), ("agent-1", "agent-2"))
    >>> shares_of(WeightManifest(3, 3, (), 0, ""), source, own="agent-2")[0].sources
    ('agent-1', 'agent-0', 'model-0')
    """
    before = source.chain[: source.chain.index(own)][-1:] if own in source.chain else ()
    owners = source.owners or (source.process,)
    shares: list[Share] = []
    for number, owner in enumerate(owners):
        indices = tuple(
            index
            for index, piece in enumerate(manifest.pieces)
            if len(owners) == 1 or piece.mesh.get("dp", 0) == number
        )
        sources = dict.fromkeys((*before, source.process, owner))
        shares.append(Share(owner, tuple(each for each in sources if each != own), indices))
    return shares


def locate(process: str, manifest: WeightManifest, source: StreamSource, *, call: Call) -> BulkOffer:
    """Ask an agent or a rank for its offer of a version."""
    if role_of(process) is Role.AGENT:
        held = call(process, HoldWeights(manifest, source), AGENT_TIMEOUT_S).expect(WeightsHeld)
        return held.offer
    fetched = call(process, FetchWeights(manifest.version), RANK_TIMEOUT_S).expect(WeightsFetched)
    if fetched.offer is None or fetched.version != manifest.version:
        raise RefusedError(f"{process}: expected an offer of version {manifest.version}, got {fetched}")
    return fetched.offer


@dataclass(frozen=True, slots=True)
class StreamFetch:
    """Fetches versions for one server: through the agent of its host, or by itself."""

    process: str
    call: Call
    client: BulkClient
    agent: str = ""
    """Agent of this host, which fetches once for all its processes; empty: there is none to ask."""
    emit: EventSink = lambda event: None
    """Receives an event for every slow source, while it is slow."""

    def hold(self, manifest: WeightManifest, source: StreamSource) -> str:
        """Let the agent fetch a version; return the name of the host's memory that has it."""
        request = HoldWeights(manifest, source, is_awaited=True)
        return self.call(self.agent, request, HOLD_TIMEOUT_S).expect(WeightsHeld).segment

    def fill(self, manifest: WeightManifest, source: StreamSource, buffer: memoryview) -> None:
        """Fetch and verify a version, each piece at its offset in the buffer."""

        def place(index: int) -> memoryview:
            piece = manifest.pieces[index]
            return buffer[piece.offset : piece.offset + piece.size]

        Pull(
            dict(enumerate(manifest.pieces)),
            shares_of(manifest, source, own=self.process),
            into=place,
            locate=lambda process: locate(process, manifest, source, call=self.call),
            client=self.client,
            what=f"version {manifest.version}",
            emit=self.emit,
        ).run()
        check_whole(manifest, source=f"stream of {source.process}")
