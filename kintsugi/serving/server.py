"""A generation server of the gateway: the same as in a run, built from a model folder instead of a recipe."""

from __future__ import annotations

from pathlib import Path

import torch

from kintsugi.errors import UserError
from kintsugi.generation.engine.factory import build_engine, note_of, verification_of
from kintsugi.generation.server import GenerationServer
from kintsugi.model.device import choose_device, identity
from kintsugi.process.main import run_worker
from kintsugi.process.shell import Shell
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.spans import SPANS
from kintsugi.serving.options import ServerOptions, described, read_options
from kintsugi.serving.pool import HOST
from kintsugi.telemetry.events import Note
from kintsugi.weights.fetch import Fetcher


def main(bootstrap: Bootstrap) -> int:
    """Build the engine that the options describe, register with the gateway, and serve until shutdown."""
    torch.set_num_threads(1)
    options = read_options(Path(bootstrap.run_dir))
    config, tokenizer = described(Path(options.model))
    device = torch.device("cpu") if options.device == "cpu" else choose_device(bootstrap.process)
    if options.device == "cuda" and device.type != "cuda":
        raise UserError("expected an accelerator for `--device cuda`, this process sees none")
    engine = build_engine(
        config,
        tokenizer,
        slots=options.slots,
        max_length=options.max_length,
        dtype=_dtype(options, device),
        device=device,
        deterministic=options.deterministic,
        kv_cache_gib=options.kv_cache_gib,
    )
    fetcher = Fetcher(process=bootstrap.process, host=HOST)

    def body(shell: Shell) -> None:
        # A gateway may run for months: its metrics report request latencies, not spans of single requests.
        SPANS.record_to(None)
        if note := note_of(engine):
            shell.events.emit(Note(note))
        GenerationServer(shell, engine, fetch=fetcher.fetch, verify=verification_of(engine)).serve()

    return run_worker(bootstrap, body, capabilities={"device": str(device), "chip": identity(device)})


def _dtype(options: ServerOptions, device: torch.device) -> torch.dtype:
    """Default type: bfloat16 on accelerators, float32 on CPUs, because all CPUs support it."""
    if options.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, options.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
