"""A model's weights as `native.cpp` reads them: matrices in panels of some outputs each, and every width rounded up with
zeros, which add nothing, so that there are no ends of rows to treat otherwise."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from kintsugi.generation import native_library
from kintsugi.generation.native_library import HeadShape
from kintsugi.model.rotary import rotation_at
from kintsugi.model.transformer import DecoderLayer, Transformer


class NativeWeights:
    """`refresh` must be called whenever the model's own have changed."""

    def __init__(self, model: Transformer, *, panel: int, shape: HeadShape, max_length: int) -> None:
        """`model` must be packed."""
        config = model.config
        self._model = model
        self._panel, self._shape = panel, shape
        self.hidden, self.inner = self._rounded(config.hidden_size), self._rounded(config.intermediate_size)
        self.vocabulary = self._rounded(config.vocab_size)
        self._num_turned = config.num_heads + config.num_kv_heads
        self._num_heads = self._num_turned + config.num_kv_heads
        self.heads = self._rounded(self._num_heads * shape.size)
        # The halves of a rotary pair side by side: 0, head_dim / 2, 1, head_dim / 2 + 1, …
        self._entries = torch.arange(config.head_dim).view(2, -1).t().flatten()
        self._kept: dict[str, Tensor] = {}
        self.layers = (native_library.Layer * config.num_layers)()
        self.turns = self._turns(max_length)

    def address(self, name: str) -> int:
        """Of "embedding", "to_vocabulary" or "last_norm"; like all, it stays the same."""
        return self._kept[name].data_ptr()

    def refresh(self) -> None:
        model, hidden = self._model, self.hidden
        embedding = model.model.embed_tokens.weight.detach()
        self._keep("embedding", _padded(embedding, len(embedding), hidden))
        self._keep("to_vocabulary", self._panels(model.output_weight.detach(), self.vocabulary, hidden))
        self._keep("last_norm", _padded(model.model.norm.weight.detach(), hidden).float())
        for number, layer in enumerate(model.model.layers):
            assert isinstance(layer, DecoderLayer)
            for name, tensor in self._of_layer(layer).items():
                address = None if tensor is None else self._keep(f"{number}.{name}", tensor)
                setattr(self.layers[number], name, address)

    def _of_layer(self, layer: DecoderLayer) -> dict[str, Tensor | None]:
        attention, feed_forward = layer.self_attn, layer.mlp
        hidden, inner, size = self.hidden, self.inner, self._shape.size
        gate_up = [feed_forward.gate_proj, feed_forward.up_proj]
        output = attention.o_proj.weight.unflatten(1, (-1, self._shape.head_dim))
        output = _padded(output, *output.shape[:2], size).flatten(1)
        matrices = {
            "qkv": self._panels(self._spread(attention.qkv_weight), self.heads, hidden),
            "output": self._panels(output, hidden, output.shape[1]),
            "gate_up": self._panels(
                torch.cat([_padded(each.weight, inner, hidden) for each in gate_up]), 2 * inner, hidden
            ),
            "down": self._panels(feed_forward.down_proj.weight, hidden, inner),
        }
        qkv_bias = None if attention.qkv_bias is None else self._spread(attention.qkv_bias)
        biases = {
            "qkv_bias": _bias(qkv_bias, self.heads),
            "output_bias": _bias(attention.o_proj.bias, hidden),
            "gate_up_bias": None,
            "down_bias": _bias(feed_forward.down_proj.bias, hidden),
        }
        if feed_forward.gate_up_bias is not None:
            biases["gate_up_bias"] = torch.cat([_padded(each.bias, inner) for each in gate_up]).float()
        norms = {
            "first_norm": _padded(layer.input_layernorm.weight, hidden).float(),
            "second_norm": _padded(layer.post_attention_layernorm.weight, hidden).float(),
        }
        for name, norm in (("query_norm", attention.q_norm), ("key_norm", attention.k_norm)):
            if norm is not None:
                norms[name] = _padded(norm.weight[self._entries], size).float()
        return {**matrices, **biases, **norms}

    def _spread(self, rows: Tensor) -> Tensor:
        """Rows of query, key and value projections, each head rounded up, the entries of turning ones in pairs."""
        heads = rows.detach().unflatten(0, (self._num_heads, self._shape.head_dim)).clone()
        heads[: self._num_turned] = heads[: self._num_turned, self._entries]
        return _padded(heads, self._num_heads, self._shape.size, *heads.shape[2:]).flatten(0, 1)

    def _panels(self, weight: Tensor, outputs: int, inputs: int) -> Tensor:
        """[outputs / panel, inputs / depth, panel, depth]: what is multiplied by the same inputs lies together."""
        depth = 2 if self._shape.is_half else 1
        panels = _padded(weight, outputs, inputs).unflatten(1, (-1, depth)).unflatten(0, (-1, self._panel))
        return panels.transpose(1, 2)

    def _turns(self, max_length: int) -> Tensor:
        """[positions, 2, size]: cosine and signed sine of every entry, in fp32."""
        model, size = self._model, self._shape.size
        rotation = rotation_at(
            torch.arange(max_length), frequencies=model.frequencies, config=model.config, dtype=model.dtype
        )
        turns = torch.stack([each[:, 0].flatten(1)[:, self._entries] for each in rotation], dim=1)
        return _padded(turns, max_length, 2, size).float().contiguous()

    def _rounded(self, width: int) -> int:
        return -(-width // self._panel) * self._panel

    def _keep(self, name: str, tensor: Tensor) -> int:
        """Where it lies: where it lay before, if it did."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            kept.copy_(tensor)
        return kept.data_ptr()


def _padded(tensor: Tensor, *sizes: int) -> Tensor:
    """With zeros behind each dimension, up to these sizes."""
    missing = [size - has for size, has in zip(sizes, tensor.shape, strict=True)]
    return functional.pad(tensor, [amount for each in reversed(missing) for amount in (0, each)])


def _bias(bias: Tensor | None, size: int) -> Tensor | None:
    return None if bias is None else _padded(bias, size).float()
