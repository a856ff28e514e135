"""Servers of other makes in the place of the embedded engine: they run already, and are spoken to over HTTP.

`remote` is what they have in common, `vllm` and `sglang` what each says in its own words, `http` how it gets there.
"""

from __future__ import annotations

from pathlib import Path

from kintsugi.config import Config
from kintsugi.errors import KintsugiError
from kintsugi.generation.backends.dialect import Dialect
from kintsugi.generation.backends.http import HttpClient
from kintsugi.generation.backends.remote import RemoteBackend
from kintsugi.generation.backends.sglang import SGLang
from kintsugi.generation.backends.vllm import Vllm
from kintsugi.model.plan import plan_model


def open_backend(config: Config, index: int, *, folder: Path) -> RemoteBackend:
    """The server at `generation.urls[index]`, checked; its weights arrive by `load`, which writes them into `folder`
    for it to read. ConfigError says which of its options is missing, WorldError that it does not answer."""
    section = config.generation
    dialects: dict[str, type[Dialect]] = {"vllm": Vllm, "sglang": SGLang}
    architecture, tokenizer = plan_model(config)
    client = HttpClient(section.urls[index])
    try:
        return RemoteBackend(
            client,
            dialect=dialects[section.backend](),
            architecture=architecture,
            end_token_ids=tuple({*architecture.eos_token_ids, tokenizer.eos_token_id}),
            text_of=tokenizer.decode,
            slots=section.slots,
            max_length=section.max_length,
            folder=folder,
        )
    except KintsugiError:
        client.close()
        raise
