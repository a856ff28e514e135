"""A backward pass that begins at tensors with known gradients."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from kintsugi.model.gradient_roots import gradient_root

FIRST_STAGE = """
import sys, torch
from kintsugi.model.gradient_roots import gradient_root
from kintsugi.model.recompute import recomputed
layer = torch.nn.Linear(4, 4)
hidden = torch.nn.Embedding(8, 4)(torch.arange(8))
output = recomputed(layer, hidden, parameters=layer.parameters())
gradient_root([output], [torch.ones_like(output)]).backward()
assert layer.weight.grad is not None
print(*sorted({"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & set(sys.modules)))
"""


def gradients_of(backward: str) -> list[Tensor]:
    """Of an embedding that is used twice, from two roots, one of them a loss."""
    stream = torch.Generator().manual_seed(3)
    embedding = torch.randn(16, 8, generator=stream).requires_grad_(True)
    layer = torch.randn(8, 8, generator=stream).requires_grad_(True)
    rows, known = torch.tensor([3, 5, 3, 1]), torch.randn(4, 8, generator=stream)
    hidden = embedding[rows]
    loss = (torch.randn(4, 8, generator=stream) @ layer @ embedding.T).logsumexp(-1).mean()
    if backward == "torch":
        torch.autograd.backward([hidden @ layer, loss], [known, None])
    else:
        gradient_root([hidden @ layer, loss], [known, torch.ones_like(loss)]).backward()
    assert embedding.grad is not None and layer.grad is not None
    return [embedding.grad, layer.grad]


def test_gradients_are_bit_for_bit_those_of_a_backward_pass_that_is_given_them() -> None:
    for ours, expected in zip(gradients_of("root"), gradients_of("torch"), strict=True):
        assert torch.equal(ours, expected)


def test_the_first_backward_pass_of_a_process_imports_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STAGE], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == []
