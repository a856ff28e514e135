"""A generation server of the gateway: the same as in a run, built from a model folder instead of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch

from kintsugi.bootstrap import Bootstrap
from kintsugi.errors import RefusedError, UserError
from kintsugi.generation.building import build_engine, note_of, verification_of
from kintsugi.generation.server import Server
from kintsugi.model.device import choose_device, identity
from kintsugi.observe.events import Note
from kintsugi.runtime import SPANS
from kintsugi.serving.plan import ServePlan, described, read_plan
from kintsugi.serving.pool import HOST
from kintsugi.weights.fetch import Fetcher
from kintsugi.worker import Shell, run_worker


def main(bootstrap: Bootstrap) -> int:
    """Build the engine that the plan describes, report to the gateway, and serve until told to end."""
    torch.set_num_threads(1)
    plan = read_plan(Path(bootstrap.run_dir))
    config, tokenizer = described(Path(plan.model))
    device = torch.device("cpu") if plan.device == "cpu" else choose_device(bootstrap.process)
    if plan.device == "cuda" and device.type != "cuda":
        raise UserError("expected an accelerator for `--device cuda`, this process sees none")
    engine = build_engine(
        config,
        tokenizer,
        slots=plan.slots,
        max_length=plan.max_length,
        dtype=_dtype(plan, device),
        device=device,
        deterministic=plan.deterministic,
        kv_cache_gib=plan.kv_cache_gib,
    )
    fetcher = Fetcher(process=bootstrap.process, host=HOST, ask=_refuse)

    def body(shell: Shell) -> None:
        # A gateway may run for months: how long its requests take is told by its metrics, not one by one.
        SPANS.record_to(None)
        if note := note_of(engine):
            shell.events.emit(Note(note))
        Server(shell, engine, fetch=fetcher.fetch, verify=verification_of(engine)).serve()

    return run_worker(bootstrap, body, capabilities={"device": str(device), "chip": identity(device)})


def _refuse(process: str, request: object, deadline_s: float) -> NoReturn:
    raise RefusedError(f"{process} has no weights to give: a gateway names a folder")


def _dtype(plan: ServePlan, device: torch.device) -> torch.dtype:
    """Accelerators compute in bfloat16 unless told otherwise, processors in float32, which all of them have."""
    if plan.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, plan.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
