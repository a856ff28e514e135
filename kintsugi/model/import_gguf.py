"""Import of a model: a Hugging Face folder or a GGUF file becomes a folder that every part of the system reads.

A GGUF file is dequantised in pieces by several threads, each of which writes its piece to its place in the safetensors
file: no tensor is held as a whole, and the time is about that of reading and writing the bytes.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor

from kintsugi.errors import ModelError
from kintsugi.model import folder_files, gguf_blocks, huggingface
from kintsugi.model.architecture import Family, ModelConfig, parameter_shapes
from kintsugi.model.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    SCORE_HEAD,
    VALUE_HEAD,
    WEIGHTS_FILE,
    check_weights,
    load_config,
)
from kintsugi.model.gguf_file import GgufFile, GgufTensor, read_gguf
from kintsugi.model.gguf_tokenizer import read_tokenizer
from kintsugi.model.tokenizer import Tokenizer

FAMILIES = get_args(Family)
PIECE_ELEMENTS = 1 << 18
"""Elements that a thread dequantises at once; a piece and its intermediate values stay in the cache of a core."""
MAX_SHARD_BYTES = folder_files.DEFAULT_MAX_SHARD_BYTES
_BF16_BYTES = 2
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

Progress = Callable[[int, int], None]
"""Called with the bytes that are written and the bytes of all weights; from several threads, one at a time."""


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
    with _scratch_folder(destination) as staged:
        if is_gguf:
            _import_gguf(source, staged=staged, progress=progress)
        else:
            _import_folder(source, staged=staged)
        written = sorted(staged.iterdir())
        staged.rename(destination)
    return [destination / path.name for path in written]


@contextmanager
def _scratch_folder(destination: Path) -> Iterator[Path]:
    """An empty folder next to the destination, of one import at a time; removed unless it was renamed."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = destination.parent / f".{destination.name}-importing"
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


def _import_folder(folder: Path, *, staged: Path) -> None:
    Tokenizer.load(folder)
    config = load_config(folder)
    with huggingface.WeightFiles(folder) as files:
        has_head = not files.shapes.keys().isdisjoint((*VALUE_HEAD, SCORE_HEAD))
    model = huggingface.load(folder, head="required" if has_head else "refused")
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    huggingface.save(state, config=config, folder=staged, tokenizer_folder=folder)


def _import_gguf(source: Path, *, staged: Path, progress: Progress) -> None:
    """Write a GGUF file as a bf16 Hugging Face folder. Nothing but the file is read: no code, no other files."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"reading the GGUF file {source} needs gguf; install it with `pip install 'kintsugi[import]'`"
        )
    import gguf

    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    file = read_gguf(source, block_sizes=sizes)
    config = gguf_config(file)
    wanted = parameter_shapes(config)
    tensors = _tensors_by_parameter(file, wanted=wanted)
    fields = {**config.to_huggingface(), "torch_dtype": "bfloat16"}
    (staged / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    with ExitStack() as stack:
        places = _create_weight_files(wanted, folder=staged, stack=stack)
        writer = _Writer(file, config=config, progress=progress, total=_BF16_BYTES * _count(wanted))
        writer.write(
            [(tensors[name], *places[name]) for name in wanted],
            beside=lambda: _import_tokenizer(file, staged=staged),
        )
    check_weights(staged, config=config)
    for path in staged.iterdir():
        _sync(path)
    _sync(staged)


def _import_tokenizer(file: GgufFile, *, staged: Path) -> None:
    read_tokenizer(file.metadata, where=file.path).save(staged)
    Tokenizer.load(staged)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The architecture that the metadata describe; ModelError if the family is not supported."""
    family, where = file.architecture, str(file.path)
    if family not in FAMILIES:
        raise ModelError(
            f"{where}: expected a model of a supported family ({', '.join(FAMILIES)}), got {family or 'none'!r}"
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


def _create_weight_files(
    wanted: Mapping[str, tuple[int, ...]], *, folder: Path, stack: ExitStack
) -> dict[str, tuple[int, int]]:
    """Create the safetensors files with their headers; returns descriptor and position of each tensor."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, shape in wanted.items():
        size = _BF16_BYTES * math.prod(shape)
        if shards[-1] and shard_bytes + size > MAX_SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += size
    file_names = (
        [WEIGHTS_FILE]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    places: dict[str, tuple[int, int]] = {}
    for file_name, names in zip(file_names, shards, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in names:
            end = position + _BF16_BYTES * math.prod(wanted[name])
            header[name] = {"dtype": "BF16", "shape": wanted[name], "data_offsets": (position, end)}
            position = end
        encoded = msgspec.json.encode(header)
        encoded += b" " * (-len(encoded) % 8)
        descriptor = os.open(folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        stack.callback(os.close, descriptor)
        os.write(descriptor, len(encoded).to_bytes(8, "little") + encoded)
        start = 8 + len(encoded)
        os.posix_fallocate(descriptor, 0, start + position)
        places |= {name: (descriptor, start + header[name]["data_offsets"][0]) for name in names}
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(file_names, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": _BF16_BYTES * _count(wanted)}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return places


def _count(wanted: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in wanted.values())


class _Writer:
    """Dequantises tensors in pieces, by as many threads as there are CPUs, and writes them to their places."""

    def __init__(self, file: GgufFile, *, config: ModelConfig, progress: Progress, total: int) -> None:
        self._file, self._config = file, config
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def write(self, tensors: list[tuple[GgufTensor, int, int]], *, beside: Callable[[], object]) -> None:
        """Each tensor with the descriptor and position it goes to. `beside` is called by one of the threads; what it
        raises ends the import."""
        num_cpus, num_threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
        source = os.open(self._file.path, os.O_RDONLY | os.O_CLOEXEC)
        torch.set_num_threads(1)  # Each piece is the work of one thread.
        try:
            with ThreadPoolExecutor(num_cpus, thread_name_prefix="import") as pool:
                pieces = (piece for each in tensors for piece in self._pieces(*each))
                tasks = [beside, *(partial(self._write_piece, source, *piece) for piece in pieces)]
                try:
                    for _ in pool.map(lambda task: task(), tasks):
                        pass
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        finally:
            torch.set_num_threads(num_threads)
            os.close(source)

    def _pieces(
        self, tensor: GgufTensor, descriptor: int, position: int
    ) -> Iterator[tuple[GgufTensor, range, int, int]]:
        """Rows of a tensor; one whose rows change their order is one piece."""
        columns = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        at_once = num_rows if self._num_heads(tensor) else max(1, PIECE_ELEMENTS // columns)
        for start in range(0, num_rows, at_once):
            rows = range(start, min(num_rows, start + at_once))
            yield tensor, rows, descriptor, position + _BF16_BYTES * columns * start

    def _write_piece(
        self, source: int, tensor: GgufTensor, rows: range, descriptor: int, position: int
    ) -> None:
        row_bytes = tensor.size // math.prod(tensor.shape[:-1])
        raw = torch.empty(len(rows), row_bytes, dtype=torch.uint8)
        _read(source, raw.numpy().data.cast("B"), position=tensor.start + row_bytes * rows.start)
        values = self._dequantised(raw, tensor).view(len(rows), tensor.shape[-1])
        if num_heads := self._num_heads(tensor):
            values = _in_halves(values, num_heads=num_heads)
        data = values.to(torch.bfloat16).view(torch.int16).numpy().data.cast("B")
        while data:
            written = os.pwrite(descriptor, data, position)
            data, position = data[written:], position + written
        with self._lock:
            self._done += _BF16_BYTES * len(rows) * tensor.shape[-1]
            self._progress(self._done, self._total)

    def _dequantised(self, raw: Tensor, tensor: GgufTensor) -> Tensor:
        """Values of whole rows, by the library `gguf` where a kind is rare."""
        import gguf

        kind = gguf.GGMLQuantizationType(tensor.kind)
        found = gguf_blocks.values_of(raw, kind.name, block_bytes=gguf.GGML_QUANT_SIZES[kind][1])
        return torch.from_numpy(gguf.dequantize(raw.numpy(), kind)) if found is None else found

    def _num_heads(self, tensor: GgufTensor) -> int:
        """Heads whose rows llama.cpp has reordered; 0 for other tensors."""
        if self._config.family != "llama":
            return 0
        heads = {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads}
        return heads.get(tensor.name.split(".")[-2], 0)


def _in_halves(values: Tensor, *, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of a head, which puts the two rows of a rotary pair side by side."""
    by_pair = values.view(num_heads, -1, 2, values.shape[-1])
    return by_pair.transpose(1, 2).reshape(values.shape)


def _read(descriptor: int, target: memoryview, *, position: int) -> None:
    while target:
        count = os.preadv(descriptor, [target], position)
        if count == 0:
            raise ModelError("the GGUF file became shorter while it was read")
        target, position = target[count:], position + count


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
