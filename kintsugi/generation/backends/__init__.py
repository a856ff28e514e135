"""Servers of other products in place of the embedded engine: they run already, and are used over HTTP.

`remote` is the common part, `vllm` and `sglang` translate to each API, `http` is the transport.
"""

from __future__ import annotations

from pathlib import Path

from kintsugi.config.schema import Config
from kintsugi.errors import KintsugiError
from kintsugi.generation.backends.dialect import Dialect
from kintsugi.generation.backends.http import HttpClient
from kintsugi.generation.backends.remote import RemoteBackend
from kintsugi.generation.backends.sglang import SGLang
from kintsugi.generation.backends.vllm import Vllm
from kintsugi.model.plan import plan_model


def open_backend(config: Config, index: int, *, folder: Path) -> RemoteBackend:
    """Connect to the server at `generation.urls[index]` and check it. Its weights arrive by `load`, which writes them
    into `folder` for it to read. ConfigError names a missing option of the server, WorldError means that it does not
    respond."""
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
