"""Weights from one process's memory on the card into another's engine, verified before they are swapped in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kintsugi.errors import IntegrityError
from kintsugi.types import DeviceSource, SegmentSource
from kintsugi.weights.device_digests import piece_digests
from kintsugi.weights.manifest import manifest_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("kintsugi.generation.cuda.runner", reason="needs Triton")

from benchmarks import weight_sync_gpu  # noqa: E402
from benchmarks.weight_sync import Meeting  # noqa: E402
from kintsugi.weights.transports.device import MappedSlots  # noqa: E402

SMALL: dict[str, Any] = weight_sync_gpu.QWEN2_1500M | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meeting]:
    folder = tmp_path_factory.mktemp("weights")
    with closing(
        Meeting(SMALL, device="cuda:0", dtype="bfloat16", card=MappedSlots(CUDA), folder=folder)
    ) as meeting:
        yield meeting


@pytest.mark.parametrize(
    ("transport", "kind"), [("in_place", DeviceSource), ("shared_memory", SegmentSource)]
)
def test_every_version_arrives_as_it_was_published(meeting: Meeting, transport: str, kind: type) -> None:
    for _ in range(5):
        told = meeting.publish(transport)
        assert told.published is not None
        fetched = meeting.fetch(told)
        assert isinstance(fetched.source, kind) and not fetched.failures
        tensors = fetched.tensors()
        pieces = told.published.manifest.pieces
        arrived = [tensors[piece.name].to(CUDA) for piece in pieces]
        assert [tuple(tensor.shape) for tensor in arrived] == [piece.shape for piece in pieces]
        assert piece_digests(arrived) == [piece.digest for piece in pieces]
        fetched.check()
        fetched.release()


def test_a_server_and_a_rank_hold_as_much_memory_after_sixty_versions_as_after_two(meeting: Meeting) -> None:
    """The server's side of the device: what its allocator has reserved, and what is free on the card."""
    parameters: dict[str, torch.Tensor] = {}
    reserved, free = [], []
    for _ in range(60):
        told = meeting.publish("in_place")
        fetched = meeting.fetch(told)
        for name, tensor in fetched.tensors().items():
            parameters.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        torch.cuda.synchronize()
        fetched.check()
        fetched.release()
        reserved.append(torch.cuda.memory_reserved())
        free.append(torch.cuda.mem_get_info()[0])
    assert set(reserved[2:]) == {reserved[2]}, reserved
    # Other processes of the host may use the card meanwhile: a version per update would be sixty times its size.
    assert told.published is not None
    assert free[2] - free[-1] < 2 * told.published.manifest.size, free


def test_a_version_that_is_overwritten_while_it_is_loaded_is_noticed(meeting: Meeting) -> None:
    fetched = meeting.fetch(meeting.publish("in_place"))
    fetched.check()
    meeting.publish("in_place")
    fetched.check()
    meeting.publish("in_place")
    with pytest.raises(IntegrityError, match="was overwritten while it was copied"):
        fetched.check()


def test_a_version_with_a_wrong_checksum_is_refused_and_named(meeting: Meeting) -> None:
    told = meeting.publish("in_place")
    assert told.published is not None
    manifest = told.published.manifest
    first, *others = manifest.pieces
    wrong = manifest_of(
        [msgspec.structs.replace(first, digest="0" * 16), *others],
        version=manifest.version,
        step=manifest.step,
    )
    with pytest.raises(
        IntegrityError, match=f"^{first.name} of version {manifest.version} from the memory of"
    ):
        meeting.fetcher.fetch(wrong, told.published.sources[:1])


def test_who_comes_too_late_for_a_version_gets_none_of_a_later_one(meeting: Meeting) -> None:
    told = meeting.publish("in_place")
    assert told.published is not None
    meeting.publish("in_place")
    meeting.publish("in_place")
    with pytest.raises(
        IntegrityError, match=f"version {told.published.manifest.version} from .* was overwritten before it"
    ):
        meeting.fetcher.fetch(told.published.manifest, told.published.sources[:1])


def test_weights_are_swapped_while_an_engine_decodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_sync_gpu, "ROUNDS", {"in_place": 3, "shared_memory": 3})
    monkeypatch.setattr(weight_sync_gpu, "WARM_S", 1.0)
    monkeypatch.setattr(weight_sync_gpu, "STEADY_S", 0.2)
    found = weight_sync_gpu.run(json_path=tmp_path / "found.json", found={}, model=SMALL)
    assert "errors" not in found, found["errors"]
    for transport in ("in_place", "shared_memory"):
        assert found["transports"][transport]["rounds"] == 2
        assert found["transports"][transport]["pause_ms"]["median"] < weight_sync_gpu.MOST_PAUSE_MS
