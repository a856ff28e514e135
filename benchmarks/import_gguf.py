"""`kintsugi import` of a GGUF file against reading the file and writing as many bytes as the import writes.

    python benchmarks/import_gguf.py --out DIR [--gguf FILE] [--rounds 3]

Without a file one of the shape of Qwen2.5-Coder-1.5B-Instruct is written to DIR: 1.78 billion parameters in random
blocks, Q4_K with Q6_K as the official file has them, and a byte-level vocabulary of 151,936 tokens. Imports and plain
copies alternate. A plain copy reads the file and writes the bytes of the weights in pieces of 8 MiB, then calls fsync;
nothing overlaps. An import is the whole command, from the start of its process to the end. Reported: each round, the
medians, their ratio, CPU seconds and the largest resident memory of the import; then the parts of one more import in
this process. Files in DIR are removed, but the GGUF file stays.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.model import gguf_weights, import_gguf
from kintsugi.model.gguf_blocks import BLOCK_SIZES, NUMBERS
from kintsugi.model.gguf_tokenizer import _byte_spelling
from kintsugi.model.tokenizer import Tokenizer

PIECE = 8 << 20
WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1536, 8960, 28, 12, 2, 128, 151_936
SCALE_PLACES = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its float16 numbers."""
_UINT32, _FLOAT32, _STRING, _ARRAY, _INT32 = 4, 6, 8, 9, 5


# A file of random blocks.


def tensors() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and kind of every tensor, as in the official file."""
    yield "token_embd.weight", (VOCABULARY, WIDTH), "Q4_K"
    for layer in range(LAYERS):
        better = "Q6_K" if layer % 2 == 0 else "Q4_K"
        attention, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for name, shape, kind in (
            ("attn_norm.weight", (WIDTH,), "F32"),
            ("ffn_norm.weight", (WIDTH,), "F32"),
            ("attn_q.weight", (attention, WIDTH), "Q4_K"),
            ("attn_q.bias", (attention,), "F32"),
            ("attn_k.weight", (key_value, WIDTH), "Q4_K"),
            ("attn_k.bias", (key_value,), "F32"),
            ("attn_v.weight", (key_value, WIDTH), better),
            ("attn_v.bias", (key_value,), "F32"),
            ("attn_output.weight", (WIDTH, attention), "Q4_K"),
            ("ffn_gate.weight", (INNER, WIDTH), "Q4_K"),
            ("ffn_up.weight", (INNER, WIDTH), "Q4_K"),
            ("ffn_down.weight", (WIDTH, INNER), better),
        ):
            yield f"blk.{layer}.{name}", shape, kind
    yield "output_norm.weight", (WIDTH,), "F32"
    yield "output.weight", (VOCABULARY, WIDTH), "Q6_K"


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: two special tokens, the bytes, and tokens of two and three bytes."""
    letters = list(_byte_spelling().values())
    tokens, merges = ["<|pad|>", "<|end|>", *letters], []
    pairs = [(left, right) for left in letters for right in letters]
    longer = ((left + right, letter) for left, right in pairs for letter in letters)
    for left, right in (*pairs, *(each for _, each in zip(range(VOCABULARY), longer, strict=False))):
        if len(tokens) == VOCABULARY:
            break
        tokens.append(left + right)
        merges.append(f"{left} {right}")
    return tokens, merges


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _entry(key: str, value: Any) -> bytes:
    match value:
        case str():
            return _text(key) + struct.pack("<I", _STRING) + _text(value)
        case float():
            return _text(key) + struct.pack("<If", _FLOAT32, value)
        case int():
            return _text(key) + struct.pack("<II", _UINT32, value)
        case [str(), *_]:
            return _text(key) + struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    return _text(key) + struct.pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)


def _metadata() -> dict[str, Any]:
    tokens, merges = vocabulary()
    return {
        "general.architecture": "qwen2",
        "qwen2.block_count": LAYERS,
        "qwen2.context_length": 32_768,
        "qwen2.embedding_length": WIDTH,
        "qwen2.feed_forward_length": INNER,
        "qwen2.attention.head_count": HEADS,
        "qwen2.attention.head_count_kv": KV_HEADS,
        "qwen2.rope.freq_base": 1e6,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
    }


def random_bytes(kind: str, *, count: int, stream: np.random.Generator) -> np.ndarray[Any, Any]:
    """Bytes of about `count` elements whose values are finite and small."""
    elements, size = next(BLOCK_SIZES[number] for number, name in NUMBERS.items() if name == kind)
    if kind == "F32":
        return (stream.standard_normal(count) / 64).astype(np.float32).view(np.uint8)
    blocks = stream.integers(0, 256, (count // elements, size), dtype=np.uint8)
    for start in SCALE_PLACES[kind]:
        scales = (stream.standard_normal(len(blocks)) / 4096).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def write_random_gguf(path: Path) -> None:
    """Write the file, whole or not at all; random bytes are repeated every four million elements."""
    number_of = {name: number for number, name in NUMBERS.items()}
    entries = [_entry(key, value) for key, value in _metadata().items()]
    table, data, offset = [], [], 0
    for name, shape, kind in tensors():
        elements, size = BLOCK_SIZES[number_of[kind]]
        length = int(np.prod(shape)) // elements * size
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        table.append(_text(name) + dimensions + struct.pack("<IQ", number_of[kind], offset))
        data.append((kind, length))
        offset += -(-length // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(table), len(entries)) + b"".join(entries + table)
    stream = np.random.default_rng(0)
    pools = {kind: random_bytes(kind, count=4 << 20, stream=stream) for kind in {"F32", *SCALE_PLACES}}
    scratch = path.with_name(f".{path.name}")
    with scratch.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for kind, length in data:
            left = length
            while left:
                left -= file.write(pools[kind][: min(left, len(pools[kind]))].data)
            file.write(bytes(-length % 32))
    scratch.rename(path)


# Measurements.


def plain_copy(source: Path, *, size: int, to: Path) -> float:
    """Seconds to read `source` and write `size` bytes."""
    buffer = bytearray(os.urandom(PIECE))
    began = time.monotonic()
    with source.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    with to.open("wb", buffering=0) as file:
        left = size
        while left:
            left -= file.write(memoryview(buffer)[: min(left, PIECE)]) or 0
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    to.unlink()
    return seconds


def whole_import(source: Path, *, to: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and largest resident memory in MB of the command; its folder is left."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "kintsugi", "import", str(source), str(to)], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"`kintsugi import` ended with code {process.returncode}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def parts_of_an_import(source: Path, *, to: Path) -> dict[str, tuple[float, float]]:
    """Part → its seconds and CPU seconds of all threads, of an import in this process."""
    found: dict[str, tuple[float, float]] = {}

    def timed(owner: Any, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def call(*words: Any, **options: Any) -> Any:
            wall, cpu = time.monotonic(), time.process_time()
            try:
                return inner(*words, **options)
            finally:
                before = found.get(part, (0.0, 0.0))
                found[part] = (before[0] + time.monotonic() - wall, before[1] + time.process_time() - cpu)

        setattr(owner, name, call)

    timed(import_gguf, "read_gguf", "metadata read")
    timed(import_gguf, "read_tokenizer", "tokenizer made")
    timed(import_gguf, "create_weight_files", "files created")
    timed(gguf_weights.WeightWriter, "write", "weights read, dequantised, written")
    timed(Tokenizer, "save", "tokenizer written")
    timed(Tokenizer, "load", "tokenizer read back")
    timed(gguf_weights.WeightWriter, "sync", "rest of the weights brought to the disk")
    timed(import_gguf, "import_model", "all, without the start of the process")
    import_gguf.import_model(source, to)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, help="file to import; default: one of random blocks")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    source = arguments.gguf or arguments.out / "random.gguf"
    if arguments.gguf is None and not source.exists():
        write_random_gguf(source)
    imported = arguments.out / "imported"
    shutil.rmtree(imported, ignore_errors=True)
    imports, copies = [], []
    for number in range(arguments.rounds):
        seconds, cpu, memory = whole_import(source, to=imported)
        size = sum(path.stat().st_size for path in imported.iterdir())
        shutil.rmtree(imported)
        imports.append(seconds)
        copies.append(plain_copy(source, size=size, to=arguments.out / "copy"))
        print(
            f"round {number + 1}: import {seconds:.2f} s, {cpu:.2f} CPU seconds, at most {memory:.0f} MB; "
            f"reading {source.stat().st_size / 1e9:.3f} GB and writing {size / 1e9:.3f} GB {copies[-1]:.2f} s; "
            f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs",
            flush=True,
        )
    typical, plain = statistics.median(imports), statistics.median(copies)
    print(f"medians: import {typical:.2f} s, copy {plain:.2f} s, ratio {typical / plain:.2f} (goal 2)")
    for part, (seconds, cpu) in parts_of_an_import(source, to=imported).items():
        print(f"  {part:<42} {seconds:6.2f} s {cpu:6.2f} CPU seconds")
    shutil.rmtree(imported)


if __name__ == "__main__":
    main()
