"""Weights with which a rank computes, read by another process on its card: as they were published, or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from kintsugi.errors import IntegrityError, is_overwritten
from kintsugi.protocol.weights import Published
from kintsugi.types import DeviceSource
from kintsugi.weights.device_digests import piece_digests
from kintsugi.weights.transports.device import MappedSlots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)

Do = Callable[[str], Published]


@pytest.fixture
def do() -> Iterator[Do]:
    """Carries out a word at a rank in another process; `publish` gives what it published."""
    command = [sys.executable, "-m", "tests.gpu.programs.sharing_rank"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None and program.stdout is not None

        def do(word: str) -> Published:
            assert program.stdin is not None and program.stdout is not None
            program.stdin.write(f"{word}\n".encode())
            program.stdin.flush()
            answer = program.stdout.readline()
            assert answer, "the rank has ended"
            return msgspec.json.decode(answer, type=Published | None)

        yield do
        program.stdin.close()
        program.wait(60)


def taken(reader: MappedSlots, published: Published) -> list[str]:
    """Digests of the weights as a server has copied them."""
    source = published.sources[0]
    assert isinstance(source, DeviceSource)
    found, check = reader.take(published.manifest, source)
    copies = [found[piece.name].clone() for piece in published.manifest.pieces]
    torch.cuda.synchronize(CUDA)
    check()
    return piece_digests(copies)


def test_every_version_arrives_from_where_the_rank_computes(do: Do) -> None:
    reader, digests = MappedSlots(CUDA), set()
    for step in range(5):
        published = do("publish")
        assert published.manifest.step == step
        assert taken(reader, published) == [piece.digest for piece in published.manifest.pieces]
        digests.add(published.manifest.digest)
        do("begin")
        do("commit")
    assert len(digests) == 5, "every update changed the weights"
    assert len(reader._mapped) == 1, "all versions were in one memory"


def test_during_an_update_no_version_is_served_and_after_a_rollback_the_same_again(do: Do) -> None:
    reader = MappedSlots(CUDA)
    before = do("publish")
    source = before.sources[0]
    assert isinstance(source, DeviceSource)
    _, check = reader.take(before.manifest, source)
    do("begin")
    with pytest.raises(IntegrityError, match="was overwritten while it was copied: expected number 1, got 0"):
        check()
    with pytest.raises(IntegrityError, match="was overwritten before it was read") as caught:
        taken(reader, before)
    assert is_overwritten(caught.value)
    do("roll_back")
    with pytest.raises(IntegrityError, match="was overwritten before it was read"):
        taken(reader, before)
    again = do("publish")
    assert again.manifest == before.manifest
    assert taken(reader, again) == [piece.digest for piece in before.manifest.pieces]
    with pytest.raises(IntegrityError, match="expected number 1, got 2"):
        check()
