"""What a version of the weights looks like as bytes, and how it is recognised."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kintsugi.errors import IntegrityError
from kintsugi.weights.manifest import build_manifest, tensor_views, verify, weights_sha256

MESH = {"dp": 0, "tp": 0, "pp": 0}


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "norm.weight": torch.randn(7, generator=generator),
        "embed.weight": torch.randn(5, 3, generator=generator, dtype=torch.float32).to(torch.bfloat16),
        "head.weight": torch.randn(4, 6, generator=generator).T,
        "scale": torch.tensor(0.5),
        "empty": torch.zeros(0, 4),
        "steps": torch.arange(9, dtype=torch.int64),
    }


def test_every_piece_is_aligned_and_none_overlap() -> None:
    manifest = build_manifest(some_weights(), version=1, step=1, mesh=MESH)
    end = 0
    for piece in manifest.pieces:
        assert piece.offset % 64 == 0 and piece.offset >= end
        end = piece.offset + piece.size
    assert manifest.size == end
    assert [piece.name for piece in manifest.pieces] == sorted(some_weights())


def test_a_manifest_does_not_depend_on_the_order_of_the_tensors() -> None:
    weights = some_weights()
    backwards = dict(reversed(list(weights.items())))
    one = build_manifest(weights, version=1, step=1, mesh=MESH)
    assert build_manifest(backwards, version=1, step=1, mesh=MESH) == one
    assert weights_sha256(backwards) == weights_sha256(weights)


def test_the_sha256_sees_every_value_and_every_name() -> None:
    weights = some_weights()
    other = {**weights, "scale": torch.tensor(0.25)}
    renamed = {("scales" if name == "scale" else name): tensor for name, tensor in weights.items()}
    assert len({weights_sha256(w) for w in (weights, other, renamed)}) == 3


def test_verify_accepts_what_build_manifest_wrote() -> None:
    buffer = memoryview(bytearray(4096))
    manifest = build_manifest(some_weights(), version=1, step=1, mesh=MESH, into=buffer)
    verify(manifest, buffer, source="memory")
    assert torch.equal(tensor_views(manifest, buffer)["steps"], torch.arange(9))
    with pytest.raises(IntegrityError, match=r"expected .* bytes, got 10"):
        verify(manifest, buffer[:10], source="memory")


def test_the_manifest_module_needs_no_torch_to_be_imported() -> None:
    script = "import sys, kintsugi.weights.fetch, kintsugi.weights.publish; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=20).returncode == 0
