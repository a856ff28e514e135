"""The engine that a model, a device and some memory call for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from kintsugi.bootstrap import Bootstrap
from kintsugi.config import Config, ShareDevice
from kintsugi.disk import storage_errors
from kintsugi.errors import UserError
from kintsugi.generation.backend import Backend
from kintsugi.generation.cpu import PAGE_SIZE, CpuRunner
from kintsugi.generation.engine import Engine
from kintsugi.generation.native import NATIVE_DTYPES, NativeRunner, head_shape
from kintsugi.generation.native_library import why_not
from kintsugi.generation.pages import num_pages_of
from kintsugi.lease.client import Memory
from kintsugi.lease.memory import Kept, check_policy
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.known_answer import KnownAnswer
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.model.transformer import Transformer

_GIB = 2**30
SHARE_OF_FREE_MEMORY = 0.5
"""Of a device, beside two versions of the weights; the rest is for activations, and for others who use it."""
STEPS_PER_VISIT = 8
"""Of a device that the host visits; new weights wait for a visit to end."""
STEPS_FILE = "steps"
"""In the folder of a deterministic run: how its servers compute on processors."""
_COMPILED, _EAGER = "compiled", "eager"


def build_engine(
    architecture: ModelConfig,
    tokenizer: Tokenizer,
    *,
    slots: int,
    max_length: int,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    kv_cache_gib: float | None = None,
    native: bool | None = None,
) -> Engine:
    """An engine whose weights are still to be loaded.

    `native` has the processor's steps compiled for it, or not; unset, they are where that is possible. Either way has
    bits of its own, so the servers of a deterministic run go by `agreed_steps`.

    `kv_cache_gib` is the memory for keys and values; without it there is enough for all slots at full length, on an
    accelerator as far as it has memory: with less, requests wait for each other.
    """
    model = Transformer(architecture, packed=True, dtype=dtype, device=device)
    end_token_ids = tuple({*architecture.eos_token_ids, tokenizer.eos_token_id})
    if device.type == "cpu":
        if native is None:
            native = not why_not_native(architecture, dtype=dtype)
        page_bytes = PAGE_SIZE * _token_bytes(architecture, dtype)
        if native:
            # Heads are rounded up to whole vectors there.
            page_bytes = page_bytes // architecture.head_dim * head_shape(architecture, dtype=dtype).size
        num_pages = _num_pages(
            num_pages_of(max_length, page_size=PAGE_SIZE),
            slots=slots,
            page_bytes=page_bytes,
            kv_cache_gib=kv_cache_gib,
        )
        if native:
            native_runner = NativeRunner(model, num_slots=slots, max_length=max_length, num_pages=num_pages)
            # Bits that depend on nothing but a request's own tokens need no further care.
            return Engine(
                native_runner, end_token_ids=end_token_ids, deterministic=False, text_of=tokenizer.decode
            )
        cpu_runner = CpuRunner(
            model,
            num_slots=slots,
            max_length=max_length,
            num_pages=num_pages,
            deterministic=deterministic,
        )
        return Engine(
            cpu_runner, end_token_ids=end_token_ids, deterministic=deterministic, text_of=tokenizer.decode
        )
    # Only here: its kernels need a compiler that a CPU build of torch does not bring.
    from kintsugi.generation import cuda

    free_bytes, _ = torch.cuda.mem_get_info(device)
    # A new version arrives beside the one that is in use.
    free_bytes -= sum(parameter.nbytes for parameter in model.parameters())
    num_pages = _num_pages(
        num_pages_of(max_length, page_size=cuda.PAGE_SIZE),
        slots=slots,
        page_bytes=cuda.PAGE_SIZE * _token_bytes(architecture, dtype),
        kv_cache_gib=kv_cache_gib,
        most_bytes=max(0, int(SHARE_OF_FREE_MEMORY * free_bytes)),
    )
    cuda_runner = cuda.CudaRunner(
        model, num_slots=slots, max_length=max_length, num_pages=num_pages, deterministic=deterministic
    )
    return Engine(
        cuda_runner,
        end_token_ids=end_token_ids,
        deterministic=deterministic,
        text_of=tokenizer.decode,
        steps_per_visit=STEPS_PER_VISIT,
        overlap=True,
    )


def open_backend(bootstrap: Bootstrap, config: Config, *, device: torch.device) -> Backend:
    """What makes this server's tokens; its weights arrive by `LoadWeights`."""
    generation = config.generation
    if generation.backend != "embedded":
        # Only here: who computes by itself needs nothing that speaks to other servers.
        from kintsugi.generation import backends

        index = int(bootstrap.process.rpartition("-")[2])
        folder = Path(bootstrap.run_dir) / "handed_over" / bootstrap.process
        return backends.open_backend(config, index, folder=folder)
    architecture, tokenizer = plan_model(config)
    dtype = getattr(torch, config.actor.dtype)
    native = None
    if device.type == "cpu":
        reason = why_not_trained_from(architecture, dtype=dtype)
        native = not reason
        if config.deterministic:
            native = agreed_steps(Path(bootstrap.run_dir), reason=reason, process=bootstrap.process)
    return build_engine(
        architecture,
        tokenizer,
        slots=generation.slots,
        max_length=generation.max_length,
        dtype=dtype,
        device=device,
        deterministic=config.deterministic,
        kv_cache_gib=generation.kv_cache_gib,
        native=native,
    )


def why_not_native(architecture: ModelConfig, *, dtype: torch.dtype) -> str:
    """Why the processor's steps can not be compiled; empty where they can."""
    if dtype not in NATIVE_DTYPES:
        return f"there are no compiled steps in {str(dtype).removeprefix('torch.')}"
    if torch.get_num_threads() != 1:
        return f"compiled steps use one thread, not {torch.get_num_threads()}"
    return why_not(head_shape(architecture, dtype=dtype))


def why_not_trained_from(architecture: ModelConfig, *, dtype: torch.dtype) -> str:
    """The same where somebody trains on what is sampled: its log-probabilities have to be the trainer's."""
    if dtype is torch.bfloat16 and not rounds_like_the_trainer():
        return "in bfloat16 compiled steps round like the trainer on processors with AVX512-BF16 only"
    return why_not_native(architecture, dtype=dtype)


def rounds_like_the_trainer() -> bool:
    """Whether this is a processor of the kind on which the order of the trainer's sums is known."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def agreed_steps(folder: Path, *, reason: str, process: str) -> bool:
    """Whether the processor's steps are compiled in a deterministic run: its first server decides, for good.

    Those that could compile leave it where the first could not, which is `reason`; one that can not where the first
    did must not take part.
    """
    path = folder / STEPS_FILE
    with storage_errors(f"could not keep {path}"):
        if not path.exists():
            with NamedTemporaryFile("w", dir=folder, prefix=f".{STEPS_FILE}-") as own:
                own.write(_EAGER if reason else _COMPILED)
                own.flush()
                with suppress(FileExistsError):
                    os.link(own.name, path)
        agreed = path.read_text(encoding="utf-8")
    if agreed == _COMPILED and reason:
        raise UserError(
            f"expected {process} to compile its steps, like the first server of this deterministic run ({path}), "
            f"got: {reason}"
        )
    return agreed == _COMPILED


def note_of(backend: Backend) -> str:
    """What people should know about how a server computes, if anything."""
    if not isinstance(backend, Engine) or not isinstance(backend.runner, CpuRunner):
        return ""
    model = backend.runner.model
    reason = why_not_trained_from(model.config, dtype=model.dtype)
    reason = reason or "the first server of the run could not"
    return f"steps are not compiled, and slower: {reason}"


def verification_of(backend: Backend) -> Callable[[], None]:
    """What a server does before it gives samples out, to be sure of them.

    A card works ahead and would have to be waited for: what it gives is not verified.
    """
    if not isinstance(backend, Engine) or not isinstance(backend.runner, CpuRunner | NativeRunner):
        return lambda: None
    return KnownAnswer(torch.device("cpu"), dtype=torch.float32).check


def memory_of(backend: Backend, *, policy: ShareDevice, device: torch.device) -> Memory | None:
    """What a server leaves on, or takes off, a device that it shares; its weights always stay."""
    check_policy(policy, device=device)
    if policy == "no" or device.type == "cpu" or not isinstance(backend, Engine):
        return None
    if policy == "keep":
        return Kept(device)
    from kintsugi.generation import cuda

    assert isinstance(backend.runner, cuda.CudaRunner)
    return backend.runner.move_pages(backend.used_pages)


def _token_bytes(architecture: ModelConfig, dtype: torch.dtype) -> int:
    """What one token's keys and values take."""
    return architecture.num_layers * 2 * architecture.kv_size * dtype.itemsize


def _num_pages(
    num_longest: int,
    *,
    slots: int,
    page_bytes: int,
    kv_cache_gib: float | None,
    most_bytes: int | None = None,
) -> int:
    """`num_longest` pages hold the longest request."""
    if kv_cache_gib is None:
        num_wanted = slots * num_longest
        return num_wanted if most_bytes is None else min(num_wanted, most_bytes // page_bytes)
    num_pages = int(kv_cache_gib * _GIB) // page_bytes
    if num_pages < num_longest:
        raise UserError(
            f"expected `kv_cache_gib` of at least {num_longest * page_bytes / _GIB:.3g}, which the keys and values of "
            f"one request of `max_length` take, got {kv_cache_gib:g}"
        )
    return num_pages
