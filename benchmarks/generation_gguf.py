"""A Hugging Face folder of the Llama family as a bf16 GGUF file, so that llama.cpp computes with the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from kintsugi.model import huggingface
from kintsugi.model.architecture import ModelConfig

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, *, path: Path) -> None:
    """Matrices in bf16, norms in fp32, without a vocabulary: prompts are given as token ids."""
    model = huggingface.load(folder, dtype=torch.float32)
    config = model.config
    assert config.family == "llama", f"GGUF is written for the Llama family, not for {config.family}"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, parameter in model.named_parameters():
        values = _paired(name, parameter.detach(), config=config)
        kind = gguf.GGMLQuantizationType.F32 if values.dim() == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(_name(name), _encoded(values, kind=kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    stem, suffix = name.rsplit(".", 1)
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", stem)
    return f"blk.{layer[1]}.{_TENSORS[layer[2]]}.{suffix}" if layer else f"{_TENSORS[stem]}.{suffix}"


def _paired(name: str, values: Tensor, *, config: ModelConfig) -> Tensor:
    """llama.cpp rotates neighbouring dimensions of a Llama head; Hugging Face's halves are brought side by side."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)


def _encoded(values: Tensor, *, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    array: np.ndarray = gguf.quantize(values.contiguous().numpy(), kind)
    return array
