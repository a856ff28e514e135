"""Every private function of torch that the package uses, behind typed functions of our own.

torch may rename or remove a private function in any release. They are collected here so that an upgrade is checked in
one place: `tests/unit/model/test_torch_internals.py` calls each of them, another test there finds private names
elsewhere in the package, and `pyproject.toml` admits only torch releases for which these tests have passed.

* `torch._C._distributed_c10d`: stores and process groups without the global state of `torch.distributed`. A group that
  hangs can be abandoned and replaced within the same process.
* `torch._fused_adamw_`: AdamW without `torch.optim`, the import of which takes over a second.
* `torch._foreach_copy_`: many copies in one launch.
* `torch.cpu._is_avx512_bf16_supported` and `_is_amx_tile_supported`: the instruction sets that decide how CPU kernels
  round bfloat16.
* `torch.ops.mkldnn._…`: matrix products on the CPU with weights that oneDNN has reordered into blocks.
* `torch.ops.aten._flash_attention_forward` and `…_backward`: attention over packed sequences. The public `varlen_attn`
  calls them, but in torch 2.11 it refuses fewer key than query heads, and it imports torch's compiler (seconds).
* `torch.UntypedStorage._share_cuda_` and `_new_shared_cuda`: GPU memory shared between processes (CUDA IPC).
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch._C._distributed_c10d
from torch import Tensor

from kintsugi.model.listeners import listening_sockets, refuse_connections

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
"""oneDNN reads it at its first product. With AMX, the bits of attention in bfloat16 depend on its padding, and sampler
and trainer differ by 0.015 per log-probability; without, by 4e-6 (135 M parameters). A value of the user's stays."""

_c10d: Any = torch._C._distributed_c10d
"""Untyped: torch's annotations lack most of this module."""
PROOF_BYTES = 32
_creating_device = threading.Lock()
"""Held while a gloo device is created, so that its listening socket can be told from those of other devices."""


class Work(Protocol):
    """A collective in progress."""

    def is_completed(self) -> bool: ...

    def wait(self) -> bool: ...


class Store(Protocol):
    """Key-value store at which the ranks of a group meet, as torch sees it."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...


class KeyValues(Protocol):
    """The operations that a store needs from `transport.store.StoreClient`."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def compare_and_set(self, key: str, *, expected: bytes, value: bytes) -> bytes: ...

    def delete(self, key: str) -> bool: ...

    def num_values(self) -> int: ...

    def await_keys(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None: ...


class Backend(Protocol):
    """Methods that the gloo and NCCL groups of torch share. gloo's `abort` does nothing."""

    def abort(self) -> None: ...

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work: ...

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any) -> Work: ...

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], options: Any
    ) -> Work: ...


class GroupStore(_c10d.Store):
    """Store of torch whose operations our own store carries out.

    torch calls these methods from the thread that builds a group, with NCCL also later. It does not keep the Python
    object alive: keep a reference as long as the group.
    """

    def __init__(self, values: KeyValues) -> None:
        super().__init__()
        self._values = values

    def set(self, key: str, value: bytes | str) -> None:
        self._values.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._values.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._values.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._values.add(key, amount)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        return self._values.compare_and_set(key, expected=bytes(expected), value=bytes(value))

    def delete_key(self, key: str) -> bool:
        return self._values.delete(key)

    def num_keys(self) -> int:
        return self._values.num_values()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._values.await_keys(keys, timeout_s=None if timeout is None else timeout.total_seconds())

    def has_extended_api(self) -> bool:
        return False


def prefix_store(prefix: str, store: GroupStore) -> Store:
    """View of a store in which every key has a prefix."""
    return cast(Store, _c10d.PrefixStore(prefix, store))


def gloo_group(
    store: Store, *, rank: int, size: int, interface: str, timeout: timedelta, secret: bytes
) -> Backend:
    """Connect a gloo group over the network interface with this address; blocks until all ranks are connected.

    gloo accepts every connection, so each rank then proves to each other one, over the connection between the two, that
    it has the group's secret; RuntimeError if one does not. Afterwards no further connection is accepted.
    """
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 1
    with _creating_device:
        others = listening_sockets()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=interface)]
        own = listening_sockets() - others
    backend = cast(Backend, _c10d.ProcessGroupGloo(store, rank, size, options))
    for listener in own:
        refuse_connections(listener)
    _prove_membership(backend, secret, rank=rank, size=size, timeout=timeout)
    return backend


def _prove_membership(backend: Backend, secret: bytes, *, rank: int, size: int, timeout: timedelta) -> None:
    """Exchange proofs between each two ranks. A proof is bound to the secret and to its direction, so one that was
    received can not be sent back or to another rank."""

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(secret, b"rank %d to rank %d of %d" % (sender, receiver, size), "sha256")

    sent = torch.frombuffer(
        bytearray(b"".join(proof(rank, other) for other in range(size))), dtype=torch.uint8
    )
    received = torch.empty_like(sent)
    lengths = [PROOF_BYTES] * size
    start_all_to_all(backend, sent, into=received, sent=lengths, received=lengths, timeout=timeout).wait()
    proofs = received.numpy().tobytes()
    for other in range(size):
        shown = proofs[other * PROOF_BYTES : (other + 1) * PROOF_BYTES]
        if not hmac.compare_digest(shown, proof(other, rank)):
            raise RuntimeError(f"the connection of rank {other} does not belong to it: its proof is wrong")


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


def cpu_has_amx() -> bool:
    """Whether this CPU has the AMX instructions for tiles."""
    return bool(torch.cpu._is_amx_tile_supported())


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
