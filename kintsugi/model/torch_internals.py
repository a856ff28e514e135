"""Every private function of torch that the package uses, behind typed functions of our own.

torch may rename or remove a private function in any release. They are collected here so that an upgrade is checked in
one place: `tests/unit/model/test_torch_internals.py` calls each of them, another test there finds private names
elsewhere in the package, and `pyproject.toml` admits only torch releases for which these tests have passed.

* `torch._C._distributed_c10d`: stores and process groups without the global state of `torch.distributed`. A group that
  hangs can be abandoned and replaced within the same process.
* `torch._fused_adamw_`: AdamW without `torch.optim`, the import of which takes over a second.
* `torch._foreach_copy_`: many copies in one launch.
* `torch.cpu._is_avx512_bf16_supported`: the instruction set that decides how CPU kernels round bfloat16.
* `torch.ops.mkldnn._…`: matrix products on the CPU with weights that oneDNN has reordered into blocks.
* `torch.ops.aten._flash_attention_forward` and `…_backward`: attention over packed sequences. The public `varlen_attn`
  calls them, but in torch 2.11 it refuses fewer key than query heads, and it imports torch's compiler (seconds).
* `torch.UntypedStorage._share_cuda_` and `_new_shared_cuda`: GPU memory shared between processes (CUDA IPC).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch._C._distributed_c10d
from torch import Tensor

_c10d: Any = torch._C._distributed_c10d
"""Untyped: torch's annotations lack most of this module."""


class Work(Protocol):
    """A collective in progress."""

    def is_completed(self) -> bool: ...

    def wait(self) -> bool: ...


class Store(Protocol):
    """Key-value store at which the ranks of a group meet."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...


class Backend(Protocol):
    """Methods that the gloo and NCCL groups of torch share. gloo's `abort` does nothing."""

    def abort(self) -> None: ...

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work: ...

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any) -> Work: ...

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], options: Any
    ) -> Work: ...


def serve_store(host: str, port: int, *, listener: int) -> Store:
    """Serve a store on a listening socket, given as a descriptor that the store takes over."""
    return cast(
        Store,
        _c10d.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener),
    )


def connect_store(host: str, port: int, *, timeout: timedelta) -> Store:
    """Connect to a store that another process, or this one, serves; blocks up to `timeout`."""
    return cast(Store, _c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))


def prefix_store(prefix: str, store: Store) -> Store:
    """View of a store in which every key has a prefix."""
    return cast(Store, _c10d.PrefixStore(prefix, store))


def gloo_group(store: Store, *, rank: int, size: int, interface: str, timeout: timedelta) -> Backend:
    """Connect a gloo group over the network interface with this address; blocks until all ranks are connected."""
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=interface)]
    return cast(Backend, _c10d.ProcessGroupGloo(store, rank, size, options))


def nccl_group(store: Store, *, rank: int, size: int, timeout: timedelta) -> Backend:
    """Create an NCCL group; its ranks connect in their first collective."""
    return cast(Backend, _c10d.ProcessGroupNCCL(store, rank, size, timeout))


def start_all_reduce(backend: Backend, tensor: Tensor, *, timeout: timedelta) -> Work:
    """Start to sum a tensor over all ranks, in place."""
    options = _c10d.AllreduceOptions()
    options.timeout = timeout
    return backend.allreduce([tensor], options)


def start_all_gather(backend: Backend, tensor: Tensor, *, into: Tensor, timeout: timedelta) -> Work:
    """Start to gather the flat tensors of all ranks, in rank order, into one flat tensor."""
    options = _c10d.AllgatherOptions()
    options.timeout = timeout
    return backend._allgather_base(into, tensor, options)


def start_all_to_all(
    backend: Backend,
    tensor: Tensor,
    *,
    into: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    timeout: timedelta,
) -> Work:
    """Start to exchange consecutive parts of flat tensors, one part per rank, of the given sizes."""
    options = _c10d.AllToAllOptions()
    options.timeout = timeout
    return backend.alltoall_base(into, tensor, list(received), list(sent), options)


def start_broadcast(backend: Backend, tensor: Tensor, *, timeout: timedelta) -> Work:
    """Start to send rank 0's tensor to all other ranks, which receive it in place."""
    options = _c10d.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timeout
    return backend.broadcast([tensor], options)


def fused_adamw(
    weights: Tensor,
    gradient: Tensor,
    *,
    first_moment: Tensor,
    second_moment: Tensor,
    count: Tensor,
    learning_rate: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    epsilon: float,
) -> None:
    """Apply one AdamW update in place, as `torch.optim.AdamW(fused=True)` does; `count` is its number, from 1."""
    torch._fused_adamw_(
        [weights],
        [gradient],
        [first_moment],
        [second_moment],
        [],
        [count],
        lr=learning_rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
    )


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in as few launches as possible."""
    torch._foreach_copy_(list(targets), list(sources))


def cpu_has_avx512_bf16() -> bool:
    """Whether this CPU has the AVX512-BF16 instructions."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def mkldnn_has_bf16() -> bool:
    """Whether oneDNN computes in bfloat16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def blocked_weight(weight: Tensor) -> Tensor:
    """Reorder the weight of a linear layer into the block layout of oneDNN."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight))


def blocked_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer with a `blocked_weight`."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], ""))


def blocked_linear_add(rows: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer with a `blocked_weight` and add a residual in the same kernel."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise.binary(rows, residual, weight, bias, "add"))


def flash_attention(
    query: Tensor, *, key: Tensor, value: Tensor, starts: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Causal attention within packed sequences, and the logarithms of its normalisers, which the gradient needs.

    `starts` are the sequences' first tokens and the end of the last one, int32; `longest` is their largest length.
    """
    output, normalizers, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        False,
        window_size_left=-1,
        window_size_right=0,
    )
    return output, normalizers


def flash_attention_gradient(
    gradient: Tensor,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    starts: Tensor,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; deterministic if torch is told to be."""
    # The state of random numbers, for dropout: there is none, so neither tensor is read.
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty(0, device=query.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        output,
        normalizers,
        starts,
        starts,
        longest,
        longest,
        0.0,
        True,
        seed,
        offset,
        window_size_left=-1,
        window_size_right=0,
    )
    return found


class SharedGpuMemory(NamedTuple):
    """Handle of GPU memory of another process, as CUDA IPC and torch's reference counting need it."""

    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_is_needed: bool


def share_gpu_memory(tensor: Tensor) -> SharedGpuMemory:
    """Export the storage of a CUDA tensor for other processes."""
    _, handle, size, offset, counter, counter_offset, event, event_is_needed = (
        tensor.untyped_storage()._share_cuda_()
    )
    return SharedGpuMemory(
        bytes(handle),
        int(size),
        int(offset),
        bytes(counter),
        int(counter_offset),
        bytes(event or b""),
        bool(event_is_needed),
    )


def map_gpu_memory(shared: SharedGpuMemory, *, device: torch.device) -> Tensor:
    """Map memory that another process exported, as bytes; RuntimeError if that process has ended."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *shared)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (shared.size,), (1,))
