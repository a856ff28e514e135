"""Architecture of a model: its sizes, its parameters' names and shapes, and its `config.json`.

Imports no torch, so that `kintsugi check` and the master can reason about a model without loading one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from kintsugi.errors import ModelError

Family = Literal["llama", "qwen2", "qwen3"]
SUPPORTED_FAMILIES: tuple[str, ...] = get_args(Family)

_ARCHITECTURE_NAMES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DEFAULT_MAX_POSITIONS: dict[str, int] = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_QWEN3_DEFAULT_HEAD_DIM = 128


class LinearRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="linear"):
    """Positions divided by `factor`."""

    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="llama3"):
    """Long wavelengths stretched by `factor`, short ones kept, a linear blend between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnRope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="yarn"):
    """YaRN: a ramp over frequencies between kept and stretched, and a temperature on attention."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    @property
    def attention_scale(self) -> float:
        """Factor of cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


RopeScaling = LinearRope | Llama3Rope | YarnRope


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sizes of one decoder-only transformer.

    >>> tiny = ModelConfig(family="llama", vocab_size=16, hidden_size=96, intermediate_size=256, num_layers=2,
    ...                    num_heads=4, num_kv_heads=4, head_dim=24, max_positions=64)
    >>> num_parameters(tiny)
    224736
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Key and value heads; each serves `num_heads / num_kv_heads` query heads."""
    head_dim: int
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    """The output projection is the embedding; no `lm_head.weight` exists."""
    has_logits: bool = True
    """False for a critic or reward model, which computes values only."""
    attention_bias: bool = False
    """Biases on the query, key and value projections, and except for qwen2 on the output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS normalisation of each query and key head (qwen3)."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE_FIELDS:
            if getattr(self, name) <= 0:
                raise ModelError(f"expected model field `{name}` to be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"expected model field `num_heads` divisible by `num_kv_heads` {self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"expected model field `head_dim` to be even (rotary pairs), got {self.head_dim}"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_output_bias(self) -> bool:
        return self.attention_bias and self.family != "qwen2"

    def to_huggingface(self) -> dict[str, Any]:
        """The contents of `config.json`, in the spelling that transformers 4, 5 and vLLM all read."""
        fields: dict[str, Any] = {
            "architectures": [_ARCHITECTURE_NAMES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": _rope_scaling_to_huggingface(self.rope_scaling),
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "eos_token_id": _one_or_list(self.eos_token_ids),
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.family != "qwen2":
            fields["attention_bias"] = self.attention_bias
        if self.family == "llama":
            fields["mlp_bias"] = self.mlp_bias
        else:
            fields["use_sliding_window"] = False
        return fields

    @classmethod
    def from_huggingface(cls, fields: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Read a `config.json`; a field that this package would compute differently from transformers is refused."""
        family = fields.get("model_type")
        if family not in SUPPORTED_FAMILIES:
            raise ModelError(
                f"{where}: expected field `model_type` to be one of {', '.join(SUPPORTED_FAMILIES)}, got {family!r}"
            )
        _refuse_unsupported(fields, where=where)
        num_heads = _required(fields, "num_attention_heads", where=where)
        hidden_size = _required(fields, "hidden_size", where=where)
        num_kv_heads = fields.get("num_key_value_heads")
        if num_kv_heads is None:
            num_kv_heads = (
                num_heads if family == "llama" else _required(fields, "num_key_value_heads", where=where)
            )
        head_dim = fields.get("head_dim")
        if head_dim is None:
            head_dim = _QWEN3_DEFAULT_HEAD_DIM if family == "qwen3" else hidden_size // num_heads
        theta, scaling = _read_rope(fields, where=where)
        resolved = {
            "family": family,
            "vocab_size": _required(fields, "vocab_size", where=where),
            "hidden_size": hidden_size,
            "intermediate_size": _required(fields, "intermediate_size", where=where),
            "num_layers": _required(fields, "num_hidden_layers", where=where),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_positions": fields.get("max_position_embeddings", _DEFAULT_MAX_POSITIONS[family]),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rms_norm_eps": fields.get("rms_norm_eps", 1e-6),
            "tie_embeddings": fields.get("tie_word_embeddings", False),
            "attention_bias": True if family == "qwen2" else fields.get("attention_bias", False),
            "mlp_bias": fields.get("mlp_bias", False) if family == "llama" else False,
            "qk_norm": family == "qwen3",
            "eos_token_ids": _as_ids(fields.get("eos_token_id")),
            "bos_token_id": fields.get("bos_token_id"),
            "pad_token_id": fields.get("pad_token_id"),
        }
        try:
            return msgspec.convert(resolved, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"{where}: {error}") from error


_POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
    "rope_theta",
    "rms_norm_eps",
)


def parameter_shapes(config: ModelConfig, *, with_value_head: bool = False) -> dict[str, tuple[int, ...]]:
    """Every parameter's Hugging Face name and shape, in the model's own order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def add_linear(name: str, *, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        add_linear(f"{attention}.q_proj", rows=config.query_size, columns=hidden, bias=config.attention_bias)
        add_linear(f"{attention}.k_proj", rows=config.kv_size, columns=hidden, bias=config.attention_bias)
        add_linear(f"{attention}.v_proj", rows=config.kv_size, columns=hidden, bias=config.attention_bias)
        add_linear(
            f"{attention}.o_proj", rows=hidden, columns=config.query_size, bias=config.attention_output_bias
        )
        if config.qk_norm:
            shapes[f"{attention}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
        add_linear(f"{prefix}.mlp.gate_proj", rows=inner, columns=hidden, bias=config.mlp_bias)
        add_linear(f"{prefix}.mlp.up_proj", rows=inner, columns=hidden, bias=config.mlp_bias)
        add_linear(f"{prefix}.mlp.down_proj", rows=hidden, columns=inner, bias=config.mlp_bias)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if with_value_head:
        add_linear("value_head", rows=1, columns=hidden, bias=True)
    return shapes


def value_config(config: ModelConfig) -> ModelConfig:
    """The same model as a critic or reward model: it has no logits, and needs no output projection of its own."""
    return msgspec.structs.replace(config, tie_embeddings=True, has_logits=False)


def num_parameters(config: ModelConfig, *, with_value_head: bool = False) -> int:
    shapes = parameter_shapes(config, with_value_head=with_value_head)
    return sum(math.prod(shape) for shape in shapes.values())


def _required(fields: Mapping[str, Any], name: str, *, where: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{where}: expected field `{name}` to be a whole number, got {value!r}")
    return value


def _refuse_unsupported(fields: Mapping[str, Any], *, where: str) -> None:
    """Fields that change the mathematics and that `Transformer` does not implement."""
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: expected field `hidden_act` to be 'silu', got {activation!r}")
    if fields.get("use_sliding_window"):
        raise ModelError(f"{where}: field `use_sliding_window` is true; only full attention is supported")
    other_layers = set(fields.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise ModelError(
            f"{where}: expected every entry of field `layer_types` to be 'full_attention', got {sorted(other_layers)}"
        )
    if "quantization_config" in fields:
        raise ModelError(
            f"{where}: field `quantization_config` is set; quantised weights cannot be trained, "
            "use the unquantised model or `kintsugi import` a GGUF file"
        )


def _read_rope(fields: Mapping[str, Any], *, where: str) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    scaling = fields.get(name)
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{where}: expected field `{name}` to be an object, got {scaling!r}")
    theta = scaling.get("rope_theta", fields.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    for holder in (scaling, fields):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                f"{where}: expected `partial_rotary_factor` to be 1, got {holder['partial_rotary_factor']!r}"
            )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    original = scaling.get("original_max_position_embeddings")
    if kind == "yarn":
        _refuse_yarn_variants(scaling, where=f"{where}: field `{name}`")
        original = fields.get("max_position_embeddings") if original is None else original
    wanted: dict[str, tuple[str, ...]] = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
    }
    if kind not in wanted:
        raise ModelError(
            f"{where}: expected `rope_type` in field `{name}` to be one of default, {', '.join(wanted)}, got {kind!r}"
        )
    values = {key: scaling[key] for key in wanted[kind] if scaling.get(key) is not None}
    if kind != "linear":
        values["original_max_positions"] = original
    try:
        resolved: RopeScaling = msgspec.convert({"kind": kind, **values}, LinearRope | Llama3Rope | YarnRope)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: field `{name}` of type {kind!r}: {error}") from error
    return theta, resolved


def _refuse_yarn_variants(scaling: Mapping[str, Any], *, where: str) -> None:
    for key in ("mscale", "mscale_all_dim"):
        if scaling.get(key) is not None:
            raise ModelError(f"{where}: `{key}` is set; only plain YaRN is supported, without it")
    if scaling.get("truncate", True) is not True:
        raise ModelError(f"{where}: expected `truncate` to be true, got {scaling['truncate']!r}")


def _rope_scaling_to_huggingface(scaling: RopeScaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearRope():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Rope():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnRope():
            fields: dict[str, Any] = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            if scaling.attention_factor is not None:
                fields["attention_factor"] = scaling.attention_factor
            return fields


def _as_ids(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
