"""Real runs whose weights travel by each transport: the same bits arrive, and nobody fell back to another way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kintsugi.journal.facts import VersionCurrent
from kintsugi.telemetry.events import WeightsFromFallback, read_events
from kintsugi.types import CollectiveSource, FolderSource, SegmentSource, StreamSource
from tests.cluster.real_runs import LAST_STEP, Run, finished, play

pytestmark = pytest.mark.cluster

KINDS: dict[str, type] = {
    "shared_memory": SegmentSource,
    "collective": CollectiveSource,
    "stream": StreamSource,
    "disk": FolderSource,
}


@pytest.fixture(scope="module")
def run_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    def to_its_end(run: Run, *, transport: str) -> None:
        run.start(f"weights.transport={transport}", "cluster.hosts=2")
        run.finish()

    scenarios = {transport: partial(to_its_end, transport=transport) for transport in KINDS}
    played = play(scenarios, tmp_path_factory.mktemp("transports"))
    return lambda transport: finished(played[transport])


@pytest.mark.slow
@pytest.mark.parametrize("transport", KINDS)
def test_every_transport_brings_the_same_bits(run_by: Callable[[str], Run], transport: str) -> None:
    run = run_by(transport)
    assert run.summary.weights_sha256 == run_by("shared_memory").summary.weights_sha256
    current = [fact for fact in run.facts if isinstance(fact, VersionCurrent)]
    assert [fact.version for fact in current] == list(range(LAST_STEP + 1))
    for fact in current:
        assert isinstance(fact.sources[0], KINDS[transport]) and len(fact.servers) == 2
    for server in ("server-0", "server-1"):
        events = [each.event for each in read_events(run.run_dir, process=server)]
        assert not any(isinstance(event, WeightsFromFallback) for event in events)
