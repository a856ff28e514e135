"""GGUF files of tiny models, written by the gguf library as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.gguf_tokenizer import _byte_spelling

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def new_state(config: ModelConfig) -> dict[str, Tensor]:
    stream = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=stream) for name, shape in parameter_shapes(config).items()}


def write_gguf(
    path: Path,
    *,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    quantised: str = "F32",
    architecture: str | None = None,
    pre: str = "qwen2",
    tokenizer: Mapping[str, Any] | None = None,
    given: Mapping[str, tuple[np.ndarray[Any, Any], str]] | None = None,
    split_count: int | None = None,
) -> dict[str, Tensor]:
    """Write the file; returns the values that its quantised blocks stand for.

    `given` are tensors as bytes of their rows, with their kind; rows of the heads are in the file's order.
    """
    import gguf

    family = architecture or config.family
    writer = gguf.GGUFWriter(path, family)
    if split_count is not None:
        writer.add_uint16("split.count", split_count)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, tokenizer or _byte_tokenizer(config.vocab_size, pre=pre))
    found = {}
    for name, tensor in state.items():
        values = tensor.numpy()
        kind = getattr(gguf.GGMLQuantizationType, quantised if values.ndim > 1 else "F32")
        if config.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _side_by_side(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if given is not None and name in given:
            blocks, kind = given[name][0], gguf.GGMLQuantizationType[given[name][1]]
        else:
            blocks = gguf.quantize(values, kind)
        found[name] = torch.from_numpy(gguf.dequantize(blocks, kind).reshape(values.shape).copy())
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    parts = stem.split(".")
    if parts[:2] == ["model", "layers"]:
        inner = ".".join(parts[3:])
        return f"blk.{parts[2]}.{NAMES[inner]}.{suffix}" if inner in NAMES else name
    return f"{NAMES[stem]}.{suffix}" if stem in NAMES else name


def _side_by_side(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The order of llama.cpp's converter."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _byte_tokenizer(vocab_size: int, *, pre: str) -> dict[str, Any]:
    """Two special tokens, the bytes, one merge, and tokens without use."""
    spelled = list(_byte_spelling().values())
    tokens = ["<|pad|>", "<|end|>", *spelled, "he"]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), vocab_size)]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "kinds": [3, 3, *[1] * (len(spelled) + 1), *[5] * (vocab_size - len(spelled) - 3)],
        "merges": ["h e"],
        "template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }


def _add_tokenizer(writer: Any, tokenizer: Mapping[str, Any]) -> None:
    writer.add_tokenizer_model(tokenizer["model"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["kinds"])
    if "pre" in tokenizer:
        writer.add_tokenizer_pre(tokenizer["pre"])
    if "merges" in tokenizer:
        writer.add_token_merges(tokenizer["merges"])
    if "scores" in tokenizer:
        writer.add_token_scores(tokenizer["scores"])
    writer.add_eos_token_id(tokenizer.get("eos", 1))
    writer.add_pad_token_id(tokenizer.get("pad", 0))
    if "bos" in tokenizer:
        writer.add_bos_token_id(tokenizer["bos"])
        writer.add_add_bos_token(True)
    if "template" in tokenizer:
        writer.add_chat_template(tokenizer["template"])
