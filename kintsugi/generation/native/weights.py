"""A model's weights in the layout of `kernels.cpp`: matrices in panels of some outputs each, and every width padded
with zeros to whole vectors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor

from kintsugi.generation.native.library import HeadShape
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.rotary import inverse_frequencies, rotation_at

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


class PackedWeights(dict[str, Tensor]):
    """A version, ready to use: parameters of layer 0 by "0.qkv" and so on, and the rest; see `kernels.cpp`."""


class Packing:
    """Converts parameters by name to `PackedWeights`."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, panel: int, shape: HeadShape) -> None:
        self._config = config
        self._dtype = dtype
        self._panel = panel
        self._shape = shape
        self.hidden = self._rounded(config.hidden_size)
        self.inner = self._rounded(config.intermediate_size)
        self.vocabulary = self._rounded(config.vocab_size)
        self._num_heads = config.num_heads + 2 * config.num_kv_heads
        self.heads = self._rounded(self._num_heads * shape.size)

    @torch.inference_mode()
    def packed(self, tensors: Mapping[str, Tensor]) -> PackedWeights:
        given = {name: tensor.detach().to(self._dtype) for name, tensor in tensors.items()}
        embedding = given["model.embed_tokens.weight"]
        packed = PackedWeights(
            embedding=_padded(embedding, len(embedding), self.hidden),
            to_vocabulary=self._panels(
                given.get("lm_head.weight", embedding), outputs=self.vocabulary, inputs=self.hidden
            ),
            last_norm=_padded(given["model.norm.weight"], self.hidden).float(),
        )
        for number in range(self._config.num_layers):
            prefix = f"model.layers.{number}."
            own = {
                name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)
            }
            found = self._matrices(own) | self._biases(own) | self._norms(own)
            packed.update({f"{number}.{name}": tensor for name, tensor in found.items()})
        # No tensor may be a view of the input, which its owner will overwrite.
        return PackedWeights(
            {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in packed.items()}
        )

    def _matrices(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden, inner, size = self.hidden, self.inner, self._shape.size
        qkv = torch.cat([given[f"{name}.weight"] for name in _PROJECTIONS])
        output = given["self_attn.o_proj.weight"].unflatten(1, (-1, self._shape.head_dim))
        output = _padded(output, *output.shape[:2], size).flatten(1)
        gate_up = torch.cat([_padded(given[f"{name}.weight"], inner, hidden) for name in _GATE_UP])
        return {
            "qkv": self._panels(self._spread(qkv), outputs=self.heads, inputs=hidden),
            "output": self._panels(output, outputs=hidden, inputs=output.shape[1]),
            "gate_up": self._panels(gate_up, outputs=2 * inner, inputs=hidden),
            "down": self._panels(given["mlp.down_proj.weight"], outputs=hidden, inputs=inner),
        }

    def _biases(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Biases that the model has."""
        found = {}
        if "self_attn.q_proj.bias" in given:
            bias = self._spread(torch.cat([given[f"{name}.bias"] for name in _PROJECTIONS]))
            found["qkv_bias"] = _padded(bias, self.heads)
        if "self_attn.o_proj.bias" in given:
            found["output_bias"] = _padded(given["self_attn.o_proj.bias"], self.hidden)
        if "mlp.down_proj.bias" in given:
            found["down_bias"] = _padded(given["mlp.down_proj.bias"], self.hidden)
            found["gate_up_bias"] = torch.cat(
                [_padded(given[f"{name}.bias"], self.inner) for name in _GATE_UP]
            )
        return {name: bias.float() for name, bias in found.items()}

    def _norms(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {
            "first_norm": _padded(given["input_layernorm.weight"], self.hidden),
            "second_norm": _padded(given["post_attention_layernorm.weight"], self.hidden),
        }
        for target, name in (("query_norm", "self_attn.q_norm"), ("key_norm", "self_attn.k_norm")):
            if f"{name}.weight" in given:
                found[target] = _padded(given[f"{name}.weight"], self._shape.size)
        return {name: norm.float() for name, norm in found.items()}

    def _spread(self, rows: Tensor) -> Tensor:
        """Rows of query, key and value projections, each head padded."""
        heads = rows.unflatten(0, (self._num_heads, self._shape.head_dim))
        return _padded(heads, self._num_heads, self._shape.size, *heads.shape[2:]).flatten(0, 1)

    def _panels(self, weight: Tensor, *, outputs: int, inputs: int) -> Tensor:
        """[outputs / panel, inputs / depth, panel, depth]: weights that are multiplied by the same inputs are
        contiguous."""
        depth = 2 if self._shape.is_half else 1
        panels = _padded(weight, outputs, inputs).unflatten(1, (-1, depth)).unflatten(0, (-1, self._panel))
        return panels.transpose(1, 2)

    def turns(self, max_length: int) -> Tensor:
        """[positions, 2, size]: cosine and signed sine of every entry, in fp32 but rounded as the trainer's are."""
        rotation = rotation_at(
            torch.arange(max_length),
            frequencies=inverse_frequencies(self._config, device=torch.device("cpu")),
            config=self._config,
            dtype=self._dtype,
        )
        turns = torch.stack([each[:, 0].flatten(1) for each in rotation], dim=1)
        return _padded(turns, max_length, 2, self._shape.size).float().contiguous()

    def _rounded(self, width: int) -> int:
        return -(-width // self._panel) * self._panel


def _padded(tensor: Tensor, *sizes: int) -> Tensor:
    """Pad each dimension with zeros to these sizes."""
    missing = [size - has for size, has in zip(sizes, tensor.shape, strict=True)]
    return functional.pad(tensor, [amount for each in reversed(missing) for amount in (0, each)])
