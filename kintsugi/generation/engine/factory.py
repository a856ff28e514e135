"""Builds the engine for a model, a device and an amount of memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
import torch

from kintsugi.config.schema import Config, ShareDevice
from kintsugi.device_lease.client import DeviceMemory
from kintsugi.device_lease.memory import KeptMemory, check_policy
from kintsugi.errors import DeviceOutOfMemory, UserError
from kintsugi.generation.backend import Backend
from kintsugi.generation.cpu.runner import PAGE_SIZE, CpuRunner
from kintsugi.generation.engine.engine import Engine
from kintsugi.generation.engine.kv_blocks import num_pages_of
from kintsugi.generation.native.library import why_not
from kintsugi.generation.native.runner import NATIVE_DTYPES, NativeRunner, head_shape
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.device import identity, initialize, usable_gpus
from kintsugi.model.known_answer import KnownAnswer
from kintsugi.model.memory import DeviceReading, RunMemory
from kintsugi.model.plan import plan_companions, plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.model.torch_internals import cpu_has_amx, cpu_has_avx512_bf16
from kintsugi.model.transformer import Transformer
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import storage_errors
from kintsugi.runtime.waits import join

_GIB = 2**30
SHARE_OF_FREE_MEMORY = 0.5
"""Share of a device's free memory, next to two versions of the weights, for the KV cache. The rest is for activations
and other processes."""
SHARE_OF_OWN_MEMORY = 0.8
"""Share of what the other processes of a run leave free; the rest is for this server's own activations."""
STEPS_PER_ITERATION = 8
"""Decode steps per iteration on an accelerator; new weights wait for an iteration to end."""
PLAN_TIMEOUT_S = 600.0
"""Limit for reading the description of a model; the folder may be on a slow file system."""
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
    most_cache_bytes: int | None = None,
    native: bool | None = None,
) -> Engine:
    """Build an engine; its weights are loaded later.

    `native` selects the compiled CPU runner or the eager one; if unset, the compiled one is used where possible. The
    two differ in their bits, so the servers of a deterministic run follow `agreed_steps`.

    `kv_cache_gib` is the memory of the KV cache. By default there is enough for all slots at full length, on an
    accelerator as far as its memory allows: with less, requests wait for each other. `most_cache_bytes` is what other
    processes of the run leave of the accelerator (`model/memory.py`).
    """
    model = Transformer(architecture, packed=True, dtype=dtype, device=device)
    end_token_ids = tuple({*architecture.eos_token_ids, tokenizer.eos_token_id})
    if device.type == "cpu":
        if native is None:
            native = not why_not_native(architecture, dtype=dtype)
        cpu_runner = _cpu_runner(
            model,
            architecture,
            slots=slots,
            max_length=max_length,
            dtype=dtype,
            deterministic=deterministic,
            kv_cache_gib=kv_cache_gib,
            native=native,
        )
        return Engine(
            cpu_runner,
            end_token_ids=end_token_ids,
            # The bits of the compiled runner depend only on a request's own tokens in any mode.
            deterministic=deterministic and not native,
            text_of=tokenizer.decode,
        )
    # Imported here: the kernels need Triton, which a CPU build of torch does not include.
    from kintsugi.generation.cuda import runner

    free_bytes, _ = torch.cuda.mem_get_info(device)
    # A new version is staged next to the one in use.
    free_bytes -= sum(parameter.nbytes for parameter in model.parameters())
    num_pages = _num_pages(
        num_pages_of(max_length, page_size=runner.PAGE_SIZE),
        slots=slots,
        page_bytes=runner.PAGE_SIZE * _token_bytes(architecture, dtype),
        kv_cache_gib=kv_cache_gib,
        most_bytes=_most_bytes(free_bytes, most_cache_bytes),
    )
    cuda_runner = runner.CudaRunner(
        model, num_slots=slots, max_length=max_length, num_pages=num_pages, deterministic=deterministic
    )
    return Engine(
        cuda_runner,
        end_token_ids=end_token_ids,
        deterministic=deterministic,
        text_of=tokenizer.decode,
        steps_per_iteration=STEPS_PER_ITERATION,
        overlap=True,
    )


def _cpu_runner(
    model: Transformer,
    architecture: ModelConfig,
    *,
    slots: int,
    max_length: int,
    dtype: torch.dtype,
    deterministic: bool,
    kv_cache_gib: float | None,
    native: bool,
) -> NativeRunner | CpuRunner:
    """Build the compiled runner or the eager one, with the pages of its KV cache."""
    page_bytes = PAGE_SIZE * _token_bytes(architecture, dtype)
    if native:
        # The compiled runner rounds heads up to whole vectors.
        page_bytes = page_bytes // architecture.head_dim * head_shape(architecture, dtype=dtype).size
    num_pages = _num_pages(
        num_pages_of(max_length, page_size=PAGE_SIZE),
        slots=slots,
        page_bytes=page_bytes,
        kv_cache_gib=kv_cache_gib,
    )
    if native:
        return NativeRunner(model, num_slots=slots, max_length=max_length, num_pages=num_pages)
    return CpuRunner(
        model, num_slots=slots, max_length=max_length, num_pages=num_pages, deterministic=deterministic
    )


def open_backend(bootstrap: Bootstrap, config: Config, *, device: torch.device) -> Backend:
    """Open the back end that generates this server's tokens; its weights arrive by `LoadWeights`."""
    generation = config.generation
    if generation.backend != "embedded":
        # Imported here: only a remote back end needs an HTTP client.
        from kintsugi.generation import backends

        index = int(bootstrap.process.rpartition("-")[2])
        folder = RunFolder(bootstrap.run_dir).external_weights_folder(bootstrap.process)
        return backends.open_backend(config, index, folder=folder)
    architecture, tokenizer = plan_beside(config, lambda: initialize(device))
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
        most_cache_bytes=_cache_limit(bootstrap, config, device=device),
        native=native,
    )


def plan_beside(config: Config, work: Callable[[], object]) -> tuple[ModelConfig, Tokenizer]:
    """Plan the model in a thread beside other work: reading a vocabulary of 150 thousand tokens takes tenths of a
    second, without the interpreter's lock."""
    found: list[tuple[ModelConfig, Tokenizer]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(plan_model(config))
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: raised by the caller of this function.
            errors.append(error)

    planning = threading.Thread(target=run, name="plan-model", daemon=True)
    planning.start()
    try:
        work()
    finally:
        join(planning, whom="this process", what="its model's plan", timeout_s=PLAN_TIMEOUT_S)
    if errors:
        raise errors[0]
    return found[0]


def why_not_native(architecture: ModelConfig, *, dtype: torch.dtype) -> str:
    """Reason why the CPU runner can not be compiled; empty if it can."""
    if dtype not in NATIVE_DTYPES:
        return f"there are no compiled steps in {str(dtype).removeprefix('torch.')}"
    if torch.get_num_threads() != 1:
        return f"compiled steps use one thread, not {torch.get_num_threads()}"
    return why_not(head_shape(architecture, dtype=dtype))


def why_not_trained_from(architecture: ModelConfig, *, dtype: torch.dtype) -> str:
    """Reason why the compiled runner can not sample for training, where its log-probabilities must equal the trainer's;
    empty if it can."""
    if dtype is torch.bfloat16 and not rounds_like_the_trainer():
        return (
            "in bfloat16 compiled steps round like the trainer only on CPUs with AVX512-BF16 and without AMX"
        )
    return why_not_native(architecture, dtype=dtype)


def rounds_like_the_trainer() -> bool:
    """Whether this is a CPU on which the order of the trainer's sums is known: on CPUs with AMX it is another one from
    500 keys on, also where AMX is not used."""
    return cpu_has_avx512_bf16() and not cpu_has_amx()


def agreed_steps(folder: Path, *, reason: str, process: str) -> bool:
    """Decide whether the servers of a deterministic run use the compiled runner: the first server decides for all.

    If the first server could not compile, for which `reason` is given, the others do not either. A server that can not
    compile where the first one did must not take part.
    """
    path = RunFolder(folder).decode_step_file
    with storage_errors(f"could not keep {path}"):
        if not path.exists():
            with NamedTemporaryFile("w", dir=folder, prefix=f".{path.name}-") as own:
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
    """Note for the log on how a server computes, possibly empty."""
    if not isinstance(backend, Engine):
        from kintsugi.generation.backends.remote import RemoteBackend

        return backend.note if isinstance(backend, RemoteBackend) else ""
    if not isinstance(backend.runner, CpuRunner):
        return ""
    model = backend.runner.model
    reason = why_not_trained_from(model.config, dtype=model.dtype)
    reason = reason or "the first server of the run could not"
    return f"steps are not compiled, and slower: {reason}"


def verification_of(backend: Backend) -> Callable[[], None]:
    """Check that runs before a server returns samples.

    An accelerator computes asynchronously and would have to be synchronised: its results are not verified.
    """
    if not isinstance(backend, Engine) or not isinstance(backend.runner, CpuRunner | NativeRunner):
        return lambda: None
    return KnownAnswer(torch.device("cpu"), dtype=torch.float32).check


def warm_up(backend: Backend, *, policy: ShareDevice, device: torch.device) -> None:
    """Prepare an engine on an accelerator for its first request while the server waits for weights. A shared device
    belongs to another process until it is this one's turn."""
    if device.type == "cpu" or policy != "no" or not isinstance(backend, Engine):
        return
    from kintsugi.generation.cuda import runner

    assert isinstance(backend.runner, runner.CudaRunner)
    backend.runner.warm_up()


def memory_of(backend: Backend, *, policy: ShareDevice, device: torch.device) -> DeviceMemory | None:
    """Memory policy of a server on a shared device; its weights always stay on the device."""
    check_policy(policy, device=device)
    if policy == "no" or device.type == "cpu" or not isinstance(backend, Engine):
        return None
    if policy == "keep":
        return KeptMemory(device)
    from kintsugi.generation.cuda import runner

    assert isinstance(backend.runner, runner.CudaRunner)
    return backend.runner.move_pages(backend.used_pages)


def _most_bytes(free_bytes: int, most_cache_bytes: int | None) -> int:
    """Bytes for the KV cache on an accelerator with this much free memory. If it is known what others will need, that
    is left to them, and only that; else a share is."""
    if most_cache_bytes is None:
        return max(0, int(SHARE_OF_FREE_MEMORY * free_bytes))
    return max(0, min(most_cache_bytes, int(SHARE_OF_OWN_MEMORY * free_bytes)))


def _cache_limit(bootstrap: Bootstrap, config: Config, *, device: torch.device) -> int | None:
    """Bytes that this server may use for its KV cache beside the ranks and servers that will be on its accelerator,
    whichever of them starts first."""
    if device.type == "cpu":
        return None
    architecture, _ = plan_model(config)
    num_devices = len(usable_gpus(bootstrap.broken_chips))
    memory = RunMemory(config, architecture, plan_companions(config), num_devices)
    _, total_bytes = torch.cuda.mem_get_info(device)
    foreign_bytes, path = 0, RunFolder(bootstrap.run_dir).devices_file
    if path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=tuple[DeviceReading, ...])
        foreign_bytes = sum(each.used_bytes for each in found if each.identity == identity(device))
    return memory.most_cache_bytes(bootstrap.process, total_bytes=total_bytes, foreign_bytes=foreign_bytes)


def _token_bytes(architecture: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the KV cache per token."""
    return architecture.num_layers * 2 * architecture.kv_size * dtype.itemsize


def _num_pages(
    num_longest: int,
    *,
    slots: int,
    page_bytes: int,
    kv_cache_gib: float | None,
    most_bytes: int | None = None,
) -> int:
    """Number of KV pages; `num_longest` pages hold the longest request."""
    if kv_cache_gib is None:
        num_wanted = slots * num_longest
        num_pages = num_wanted if most_bytes is None else min(num_wanted, most_bytes // page_bytes)
        if num_pages < num_longest:
            raise DeviceOutOfMemory(
                f"expected {num_longest * page_bytes / _GIB:.3g} GiB of device memory for the KV cache of one request "
                f"of `max_length`, got {(most_bytes or 0) / _GIB:.3g} GiB beside weights and other processes"
            )
        return num_pages
    num_pages = int(kv_cache_gib * _GIB) // page_bytes
    if num_pages < num_longest:
        raise UserError(
            f"expected `kv_cache_gib` of at least {num_longest * page_bytes / _GIB:.3g}, which the KV cache of "
            f"one request of `max_length` takes, got {kv_cache_gib:g}"
        )
    return num_pages
