"""Import of a model: a Hugging Face folder or a GGUF file becomes a folder that every part of the system reads.

Of a GGUF file the metadata are checked and the tokenizer is made before any weight is written (`gguf_weights`).
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

from kintsugi.errors import ModelError, StorageError, StorageFull
from kintsugi.model.architecture import Family, ModelConfig, parameter_shapes
from kintsugi.model.folder import (
    CONFIG_FILE,
    SCORE_HEAD,
    VALUE_HEAD,
    check_weights,
    importing_folder,
    load_config,
)
from kintsugi.model.gguf_blocks import BLOCK_SIZES
from kintsugi.model.gguf_file import GgufFile, GgufTensor, read_gguf
from kintsugi.model.gguf_tokenizer import read_tokenizer
from kintsugi.model.gguf_weights import Progress, TensorPlace, WeightWriter, create_weight_files, num_bytes
from kintsugi.model.tokenizer import Tokenizer

FAMILIES = get_args(Family)
_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names in a layer of a GGUF file → names in a layer of a Hugging Face folder."""
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def import_model(
    source: Path, destination: Path, *, progress: Progress = lambda done, total: None
) -> list[Path]:
    """Validate `source`, write it to `destination`, and return the files written.

    The destination appears as a whole or not at all: everything is written next to it and renamed at the end. What an
    import that was killed left there is removed by the next one.
    """
    if destination.exists():
        raise ModelError(f"expected nothing at {destination}, found something; choose another destination")
    is_gguf = source.suffix.lower() == ".gguf"
    if not source.exists():
        raise ModelError(f"expected a model folder or a .gguf file at {source}, found nothing")
    if source.is_file() and not is_gguf:
        raise ModelError(f"expected a model folder or a .gguf file, got the file {source}")
    try:
        with _scratch_folder(destination) as staged:
            if is_gguf:
                _import_gguf(source, staged=staged, progress=progress)
            else:
                _import_folder(source, staged=staged)
            written = sorted(staged.iterdir())
            for path in (*written, staged):
                _sync(path)
            staged.rename(destination)
            _sync(destination.parent)
    except OSError as error:
        kind = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(f"could not import {source} into {destination}: {error}") from error
    return [destination / path.name for path in written]


@contextmanager
def _scratch_folder(destination: Path) -> Iterator[Path]:
    """An empty folder next to the destination, of one import at a time; removed unless it was renamed."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = importing_folder(destination)
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(f"another import into {destination} is running") from error
        staged = folder / "model"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        try:
            yield staged
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _check_room(folder: Path, *, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageFull(
            f"expected {needed / 1e9:.1f} GB of free space in {folder.parent.parent} for the weights, found "
            f"{free / 1e9:.1f} GB; free some, or choose another destination"
        )


def _import_folder(folder: Path, *, staged: Path) -> None:
    from kintsugi.model import huggingface

    Tokenizer.load(folder)
    config = load_config(folder)
    with huggingface.WeightFiles(folder) as files:
        has_head = not files.shapes.keys().isdisjoint((*VALUE_HEAD, SCORE_HEAD))
    model = huggingface.load(folder, head="required" if has_head else "refused")
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _check_room(staged, needed=sum(each.nbytes for each in state.values()))
    huggingface.save(state, config=config, folder=staged, tokenizer_folder=folder)


def _import_gguf(source: Path, *, staged: Path, progress: Progress) -> None:
    """Write a GGUF file as a bf16 Hugging Face folder. Nothing but the file is read: no code, no other files."""
    file = read_gguf(source, block_size=_block_size)
    config = gguf_config(file)
    wanted = parameter_shapes(config)
    tensors = _tensors_by_parameter(file, wanted=wanted)
    tokenizer = read_tokenizer(file.metadata, where=file.path)
    _check_room(staged, needed=num_bytes(wanted))
    fields = {**config.to_huggingface(), "torch_dtype": "bfloat16"}
    (staged / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    with ExitStack() as stack:
        places = create_weight_files(wanted, folder=staged, stack=stack)
        writer = stack.enter_context(WeightWriter(source, progress=progress, total=num_bytes(wanted)))
        writer.write(
            [
                TensorPlace(tensor, *places[name], num_heads=_num_heads(tensor, config))
                for name, tensor in ((name, tensors[name]) for name in wanted)
            ]
        )
        tokenizer.save(staged)  # While the last weights go to the disk.
        Tokenizer.load(staged)
        writer.sync()
    check_weights(staged, config=config)


def _block_size(kind: int) -> tuple[int, int] | None:
    """Elements and bytes of a block of a GGML type, from the library `gguf` where it is rare; None if it is unknown."""
    if kind in BLOCK_SIZES:
        return BLOCK_SIZES[kind]
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"reading tensors of the GGML type {kind} needs gguf; install it with `pip install 'kintsugi[import]'`"
        )
    import gguf

    return {int(each): size for each, size in gguf.GGML_QUANT_SIZES.items()}.get(kind)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The architecture that the metadata describe; ModelError if the family is not supported."""
    family, where = file.architecture, str(file.path)
    if family not in FAMILIES:
        raise ModelError(
            f"{where}: expected a model of a supported family ({', '.join(FAMILIES)}), got {family or 'none'!r}"
        )
    if (count := file.metadata.get("split.count", 1)) != 1:
        raise ModelError(
            f"{where}: it is one of {count} parts of a model, expected a whole one; join them first: "
            "`llama-gguf-split --merge FIRST_PART WHOLE`"
        )
    if "rope_freqs.weight" in file.tensors:
        raise ModelError(
            f"{where}: its rotary frequencies are scaled by a tensor, rope_freqs.weight, which can not be imported; "
            "import the model's Hugging Face folder instead"
        )

    def value(name: str) -> Any:
        return file.metadata.get(f"{family}.{name}")

    embedding = file.tensors.get("token_embd.weight")
    fields = {
        "model_type": family,
        "vocab_size": None if embedding is None else embedding.shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "rope_scaling": _rope_scaling(value),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    given = {name: found for name, found in fields.items() if found is not None}
    return ModelConfig.from_huggingface(given, where=where)


def _rope_scaling(value: Callable[[str], Any]) -> dict[str, Any] | None:
    kind = value("rope.scaling.type")
    if kind in (None, "none"):
        return None
    fields = {
        "rope_type": kind,
        "factor": value("rope.scaling.factor"),
        "original_max_position_embeddings": value("rope.scaling.original_context_length"),
    }
    return {name: found for name, found in fields.items() if found is not None}


def _tensors_by_parameter(file: GgufFile, *, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, GgufTensor]:
    """Each parameter's tensor; ModelError names those that are missing, unknown or of another shape."""
    found = {_parameter_name(name): tensor for name, tensor in file.tensors.items()}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{tensor.name} is unknown" for name, tensor in found.items() if name not in wanted]
    problems += [
        f"{found[name].name} has the shape {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ModelError(f"{file.path} does not fit its own metadata: {'; '.join(problems[:5])}{more}")
    return found


def _parameter_name(name: str) -> str:
    """Name in a Hugging Face folder; names that are not known stay as they are.

    >>> _parameter_name("blk.3.attn_q.bias")
    'model.layers.3.self_attn.q_proj.bias'
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.{suffix}"
    match stem.split("."):
        case ["blk", layer, part] if part in _TENSOR_NAMES:
            return f"model.layers.{layer}.{_TENSOR_NAMES[part]}.{suffix}"
    return name


def _num_heads(tensor: GgufTensor, config: ModelConfig) -> int:
    """Heads whose rows llama.cpp has reordered; 0 for other tensors."""
    if config.family != "llama":
        return 0
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    return heads.get(tensor.name.split(".")[-2], 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
