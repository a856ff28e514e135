"""Ranks that share a model, all of them on the one card: the layout changes no bit there either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_runs import SHORT, train
from tests.unit.model.tied_model import write_tied_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYOUTS = {
    "two shards": {"shards": 2},
    "two stages": {"stages": 2},
    "two tensors": {"tensors": 2},
    "two tensors of two shards": {"shards": 2, "tensors": 2},
    "two tensors of two stages": {"stages": 2, "tensors": 2},
}


def of_layout(
    run_dir: Path, *given: str, shards: int = 1, stages: int = 1, tensors: int = 1
) -> dict[str, Any]:
    return train(
        run_dir,
        *SHORT,
        *given,
        f"actor.workers={shards * stages * tensors}",
        f"actor.layout.shards={shards}",
        f"actor.layout.stages={stages}",
        f"actor.layout.tensors={tensors}",
        "actor.logical_slices=2",
    )


@pytest.fixture(scope="module")
def weights_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> str:
    weights: str = of_layout(tmp_path_factory.mktemp("one") / "run")["weights_sha256"]
    return weights


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_ends_in_the_weights_of_one_rank(
    layout: dict[str, int], weights_of_one_rank: str, tmp_path: Path
) -> None:
    assert of_layout(tmp_path / "run", **layout)["weights_sha256"] == weights_of_one_rank


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_with_tied_embeddings_end_in_the_weights_of_one_rank(dtype: str, tmp_path: Path) -> None:
    write_tied_model(tmp_path / "model")
    given = ("model.new=null", f"model.path={tmp_path / 'model'}", f"actor.dtype={dtype}")
    whole = of_layout(tmp_path / "one", *given)
    cut = of_layout(tmp_path / "two", *given, stages=2)
    assert cut["weights_sha256"] == whole["weights_sha256"]
