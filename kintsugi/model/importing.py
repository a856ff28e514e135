"""Bring a model in: a Hugging Face folder or a GGUF file becomes a folder that every part of the system reads."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch

from kintsugi.errors import ModelError
from kintsugi.model import huggingface
from kintsugi.model.folder import SCORE_HEAD, VALUE_HEAD, load_config
from kintsugi.model.tokenizer import Tokenizer

_GGUF_PACKAGES = ("transformers", "gguf", "accelerate")


def import_model(source: Path, destination: Path) -> list[Path]:
    """Validate `source`, write it to `destination`, and return the files written.

    The destination appears whole or not at all: everything is written beside it and renamed at the end.
    """
    if destination.exists():
        raise ModelError(f"expected nothing at {destination}, found something; choose another destination")
    is_gguf = source.suffix.lower() == ".gguf"
    if not source.exists():
        raise ModelError(f"expected a model folder or a .gguf file at {source}, found nothing")
    if source.is_file() and not is_gguf:
        raise ModelError(f"expected a model folder or a .gguf file, got the file {source}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as scratch:
        folder = source
        if is_gguf:
            folder = Path(scratch) / "dequantised"
            _dequantise(source, folder=folder)
        staged = Path(scratch) / "staged"
        written = _import_folder(folder, staged=staged)
        shutil.move(staged, destination)
    return [destination / path.relative_to(staged) for path in written]


def _import_folder(folder: Path, *, staged: Path) -> list[Path]:
    Tokenizer.load(folder)
    config = load_config(folder)
    with huggingface.WeightFiles(folder) as files:
        has_head = not files.shapes.keys().isdisjoint((*VALUE_HEAD, SCORE_HEAD))
    model = huggingface.load(folder, head="required" if has_head else "refused")
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return huggingface.save(state, config=config, folder=staged, tokenizer_folder=folder)


def _dequantise(source: Path, *, folder: Path) -> None:
    """Write a GGUF file as a bf16 Hugging Face folder; transformers knows each family's layout in GGUF."""
    missing = [name for name in _GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading the GGUF file {source} needs {', '.join(missing)}; "
            "install them with `pip install kintsugi[import]`"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(
            **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"transformers cannot read the GGUF file {source}: {error}") from error
    if tokenizer.pad_token is None:  # Not every version of transformers reads it from the file.
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
