"""Publishers with bulk endpoints, and servers that fetch from them; the control channel is a function call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kintsugi.protocol.weights import FetchWeights, HoldDelta, HoldWeights
from kintsugi.transport import Reply
from kintsugi.weights.publish import Publisher
from kintsugi.weights.transports.shared_memory import WeightSegments
from kintsugi.weights.transports.stream import StreamFetch
from tests.unit.bulk.peers import Processes, processes


class Streams:
    """Ranks by name, and a server that asks them."""

    def __init__(self, made: Processes) -> None:
        self.processes = made
        self.ranks: dict[str, Publisher] = {}
        self.asked: list[str] = []
        self._client = made.add("server-0").client

    def publisher(self, process: str = "model-0", *, segments: WeightSegments | None = None) -> Publisher:
        """Create a rank, or replace one."""
        server = self.processes.add(process).server
        self.ranks[process] = Publisher(process=process, host="host-0", segments=segments, bulk=server)
        return self.ranks[process]

    def fetch(
        self,
        answer: Callable[[str, FetchWeights], Reply] | None = None,
    ) -> StreamFetch:
        """Fetching side of the server; `answer` stands in for the ranks."""

        def call(process: str, request: FetchWeights | HoldWeights | HoldDelta, deadline_s: float) -> Reply:
            self.asked.append(process)
            assert isinstance(request, FetchWeights)
            return answer(process, request) if answer else Reply(self.ranks[process].answer(request))

        return StreamFetch("server-0", call, self._client)


@contextmanager
def streams() -> Iterator[Streams]:
    with processes() as made:
        yield Streams(made)
