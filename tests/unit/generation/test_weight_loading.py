"""Weights are fetched beside the decoding: a server goes on generating, and only the swap is between two steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest
import torch

from kintsugi.errors import DeviceError, DeviceOutOfMemory, IntegrityError, RefusedError
from kintsugi.generation.server import GenerationServer
from kintsugi.protocol.weights import WeightsLoaded
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.types import FolderSource, WeightManifest, WeightSource
from kintsugi.weights.fetch import Fetched
from tests.unit.generation.driven_server import Setup, generate


class Slow(Setup):
    """Fetches when the test says so, as if in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []
        self.num_released = 0
        self.server = GenerationServer(
            self.shell, self.backend, fetch=self._held, clock=self.clock, background=self.waiting.append
        )

    def _held(self, manifest: WeightManifest, sources: Sequence[WeightSource]) -> Fetched:
        self.clock.advance(7.0)
        if manifest.version == self.damaged:
            raise IntegrityError("expected xxh3 00, got ff")
        return Fetched(manifest, FolderSource("nowhere"), on_release=self._release)

    def _release(self) -> None:
        self.num_released += 1

    def fetch_all(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()
            self.server.turn(0)


@pytest.fixture
def setup() -> Slow:
    setup = Slow()
    setup.load(1)
    setup.turn()
    setup.fetch_all()
    assert setup.backend.version == 1
    return setup


def test_a_server_decodes_while_new_weights_are_fetched(setup: Slow) -> None:
    requested = setup.shell.ask(generate("a", endless=True, num_samples=1, max_new_tokens=40))
    loaded = setup.load(2)
    setup.turn(10)
    assert setup.backend.num_sampled >= 9 and loaded not in setup.shell.replies
    setup.fetch_all()
    setup.run()
    (completion,) = setup.shell.generated(requested).completions
    versions = list(array("i", completion.versions))
    assert versions[0] == 1 and versions[-1] == 2 and versions == sorted(versions)
    assert versions.count(1) >= 9


def test_it_says_how_long_fetching_took_and_how_long_it_paused(setup: Slow) -> None:
    loaded = setup.load(2)
    setup.turn()
    setup.fetch_all()
    reply = setup.shell.replies[loaded]
    assert isinstance(reply, WeightsLoaded)
    assert reply.fetch_s == {"server-0": 7.0} and reply.pause_ms == {"server-0": 0.0}
    setup.turn()
    assert setup.shell.gauges["weight_fetch_s"] == 7.0 and setup.shell.gauges["weight_pause_ms"] == 0.0


def test_the_devices_own_measure_of_the_pause_counts(setup: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.backend, "load", lambda *arguments, **named: lambda: 1.5)
    loaded = setup.load(2)
    setup.turn()
    setup.fetch_all()
    reply = setup.shell.replies[loaded]
    assert isinstance(reply, WeightsLoaded) and reply.pause_ms == {"server-0": 1.5}


def test_weights_that_are_damaged_never_reach_the_back_end_and_the_old_ones_stay(setup: Slow) -> None:
    setup.damaged = 2
    damaged = setup.load(2)
    setup.turn()
    setup.fetch_all()
    assert isinstance(setup.shell.errors[damaged], IntegrityError)
    assert setup.backend.loaded == [(1, "keep")] and setup.backend.version == 1
    again = setup.load(1)
    setup.turn()
    assert again in setup.shell.replies and not setup.waiting


def test_a_device_without_room_for_the_new_weights_is_a_load_that_failed(
    setup: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with monkeypatch.context() as patched:
        patched.setattr(setup.server._loader, "_stage", full)
        failed = setup.load(2)
        setup.turn()
        setup.fetch_all()
    assert isinstance(setup.shell.errors[failed], DeviceOutOfMemory) and setup.num_released == 2
    again = setup.load(2)
    setup.turn()
    setup.fetch_all()
    assert again in setup.shell.replies and setup.backend.version == 2


def test_a_device_that_broke_while_weights_came_ends_the_server(
    setup: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tensors: object) -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(setup.server._loader, "_stage", broken)
    setup.load(2)
    setup.turn()
    with pytest.raises(DeviceError, match="illegal memory access"):
        setup.fetch_all()


def test_who_asks_for_what_is_under_way_joins_it_and_a_later_version_passes_those_that_wait(
    setup: Slow,
) -> None:
    first = setup.load(2)
    setup.turn()
    same, superseded_deliveries, last = setup.load(2), setup.load(3), setup.load(4)
    setup.turn()
    assert isinstance(setup.shell.errors[superseded_deliveries], RefusedError)
    setup.fetch_all()
    assert [version for version, _ in setup.backend.loaded] == [1, 2, 4]
    assert setup.shell.replies[first] == setup.shell.replies[same]
    assert last in setup.shell.replies
    assert setup.num_released == 3


def test_a_real_thread_wakes_the_server_when_the_weights_are_there() -> None:
    setup = Setup()
    woken: list[int] = []
    setup.shell.wake = lambda: woken.append(1)  # type: ignore[method-assign]
    setup.server = GenerationServer(setup.shell, setup.backend, fetch=setup._fetch, clock=VirtualClock())
    loaded = setup.load(1)
    while loaded not in setup.shell.replies:
        setup.server.turn(0)
    assert woken == [1] and setup.backend.version == 1


@pytest.mark.parametrize("cause", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_a_failed_assertion_while_weights_are_fetched_ends_the_server(
    setup: Slow, cause: Exception | None
) -> None:
    def fetch(manifest: WeightManifest, sources: Sequence[WeightSource]) -> Fetched:
        raise AssertionError("a bug of ours") from cause

    setup.server = GenerationServer(
        setup.shell, setup.backend, fetch=fetch, clock=setup.clock, background=lambda work: work()
    )
    loaded = setup.load(2)
    with pytest.raises(AssertionError, match="a bug of ours"):
        setup.server.turn(0)
    assert loaded not in setup.shell.replies and loaded not in setup.shell.errors
