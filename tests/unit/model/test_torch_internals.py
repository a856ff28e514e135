"""The private functions of torch that the package uses still exist and do what the package expects of them."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Condition

import pytest
import torch
from torch import Tensor

from kintsugi.model import torch_internals
from kintsugi.model.listeners import listening_sockets
from kintsugi.model.torch_internals import (
    Backend,
    GroupStore,
    SharedGpuMemory,
    blocked_linear,
    blocked_linear_add,
    blocked_weight,
    copy_all,
    cpu_has_amx,
    cpu_has_avx512_bf16,
    fused_adamw,
    gloo_group,
    map_gpu_memory,
    mkldnn_has_bf16,
    prefix_store,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
)

PACKAGE = Path(torch_internals.__file__).parents[1]
TIMEOUT = timedelta(seconds=20)
HOST = "127.0.0.1"


class Values(dict[str, bytes]):
    """The operations of a store that gloo uses, within one process."""

    def __init__(self) -> None:
        self._changed = Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self for key in keys)

    def add(self, key: str, amount: int) -> int:
        self[key] = str(int(dict.get(self, key, b"0")) + amount).encode()
        return int(self[key])

    def await_keys(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.check(keys), timeout_s), keys

    def compare_and_set(self, key: str, *, expected: bytes, value: bytes) -> bytes:
        raise NotImplementedError

    def delete(self, key: str) -> bool:
        return self.pop(key, None) is not None

    def num_values(self) -> int:
        return len(self)


@pytest.fixture
def store() -> GroupStore:
    return GroupStore(Values())


def connect(store: GroupStore, *, rank: int, secret: bytes = b"secret") -> Backend:
    view = prefix_store("group", store)
    return gloo_group(view, rank=rank, size=2, interface=HOST, timeout=TIMEOUT, secret=secret)


def on_two_ranks(store: GroupStore, work: Callable[[Backend, int], Tensor]) -> list[list[float]]:
    """Run a collective on two ranks of one process; return the result of each."""
    both_connected, both_done = Barrier(2), Barrier(2)

    def run(rank: int) -> list[float]:
        group = connect(store, rank=rank)
        both_connected.wait(30)
        found: list[float] = work(group, rank).tolist()
        both_done.wait(30)  # A rank that leaves early breaks the other's connection.
        return found

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_a_store_keeps_keys_counts_and_tells_which_keys_exist(store: GroupStore) -> None:
    store.set("here-0", "cpu")
    assert store.get("here-0") == b"cpu"
    assert store.check(["here-0"]) and not store.check(["here-0", "here-1"])
    assert [store.add("servers", 1), store.add("servers", 1)] == [1, 2]


def test_a_prefix_separates_the_keys_of_two_groups(store: GroupStore) -> None:
    first, second = prefix_store("first", store), prefix_store("second", store)
    first.set("here-0", "cpu")
    assert first.check(["here-0"]) and not second.check(["here-0"])


def test_a_rank_without_the_secret_of_the_group_is_refused_by_name(store: GroupStore) -> None:
    with ThreadPoolExecutor(2) as pool:
        honest = pool.submit(connect, store, rank=0)
        stranger = pool.submit(connect, store, rank=1, secret=b"guessed")
        with pytest.raises(RuntimeError, match="the connection of rank 1 does not belong to it"):
            honest.result(30)
        assert isinstance(stranger.exception(30), RuntimeError)


def test_a_connected_group_accepts_no_further_connection(store: GroupStore) -> None:
    before = listening_sockets()

    def work(backend: Backend, rank: int) -> Tensor:
        doors = listening_sockets() - before if rank == 0 else set()
        assert len(doors) == (2 if rank == 0 else 0)
        for door in doors:
            with socket.socket(fileno=os.dup(door.descriptor)) as listener, socket.socket() as stranger:
                stranger.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    stranger.connect(listener.getsockname())
        tensor = torch.ones(1)
        start_all_reduce(backend, tensor, timeout=TIMEOUT).wait()
        return tensor

    assert on_two_ranks(store, work) == [[2.0]] * 2


def test_an_all_reduce_sums_in_place_and_can_be_polled(store: GroupStore) -> None:
    def work(backend: Backend, rank: int) -> Tensor:
        tensor = torch.tensor([1.0, rank])
        running = start_all_reduce(backend, tensor, timeout=TIMEOUT)
        assert running.is_completed() in (True, False)
        running.wait()
        assert running.is_completed()
        return tensor

    assert on_two_ranks(store, work) == [[2.0, 1.0]] * 2


def test_an_all_gather_puts_the_tensors_into_rank_order(store: GroupStore) -> None:
    def work(backend: Backend, rank: int) -> Tensor:
        gathered = torch.empty(4)
        start_all_gather(backend, torch.full((2,), float(rank)), into=gathered, timeout=TIMEOUT).wait()
        return gathered

    assert on_two_ranks(store, work) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_an_all_to_all_exchanges_parts_of_different_sizes(store: GroupStore) -> None:
    def work(backend: Backend, rank: int) -> Tensor:
        received = torch.empty(2 if rank == 0 else 4)
        part = 1 if rank == 0 else 2
        outgoing = torch.arange(3.0) + 10 * rank
        start_all_to_all(
            backend, outgoing, into=received, sent=[1, 2], received=[part, part], timeout=TIMEOUT
        ).wait()
        return received

    assert on_two_ranks(store, work) == [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]]


def test_a_broadcast_sends_the_tensor_of_rank_0(store: GroupStore) -> None:
    def work(backend: Backend, rank: int) -> Tensor:
        tensor = torch.full((2,), 5.0 if rank == 0 else 0.0)
        start_broadcast(backend, tensor, timeout=TIMEOUT).wait()
        return tensor

    assert on_two_ranks(store, work) == [[5.0, 5.0]] * 2


def test_aborting_a_gloo_group_does_nothing(store: GroupStore) -> None:
    def work(backend: Backend, rank: int) -> Tensor:
        backend.abort()
        return torch.zeros(1)

    assert on_two_ranks(store, work) == [[0.0]] * 2


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this build of torch has no NCCL")
def test_the_nccl_group_exists_in_builds_with_nccl() -> None:
    assert callable(torch_internals._c10d.ProcessGroupNCCL)


def test_the_fused_adamw_equals_the_optimizer_class() -> None:
    settings = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "epsilon": 1e-8, "learning_rate": 0.01}
    weights = torch.linspace(-1, 1, 32)
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    moments = torch.zeros(2, 32)
    for number in (1, 2, 3):
        gradient = torch.sin(torch.arange(32.0) * number)
        parameter.grad = gradient.clone()
        optimizer.step()
        fused_adamw(
            weights,
            gradient,
            first_moment=moments[0],
            second_moment=moments[1],
            count=torch.tensor(float(number)),
            **settings,
        )
    assert torch.equal(weights, parameter.detach())


def test_many_tensors_are_copied_in_one_call() -> None:
    targets = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.bfloat16)]
    copy_all(targets, [torch.ones(3), torch.full((2, 2), 2.0)])
    assert targets[0].tolist() == [1.0] * 3 and targets[1].tolist() == [[2.0] * 2] * 2


def test_the_cpu_reports_whether_it_has_avx512_bf16_and_amx() -> None:
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or "flags" not in flags.read_text(encoding="utf-8"):
        pytest.skip("needs the CPU flags of an x86 Linux host")
    found = flags.read_text(encoding="utf-8").split()
    assert cpu_has_avx512_bf16() == ("avx512_bf16" in found)
    assert cpu_has_amx() == ("amx_tile" in found)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_blocked_products_equal_plain_ones_and_add_a_residual() -> None:
    weight, bias = torch.linspace(-1, 1, 64 * 32).view(64, 32), torch.ones(64)
    rows, residual = torch.linspace(0, 1, 4 * 32).view(4, 32), torch.full((4, 64), 2.0)
    plain, blocked = torch.nn.functional.linear(rows, weight, bias), blocked_weight(weight)
    torch.testing.assert_close(blocked_linear(rows, blocked, bias), plain)
    torch.testing.assert_close(blocked_linear_add(rows, residual, blocked, bias), plain + residual)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_onednn_reports_whether_it_computes_in_bfloat16() -> None:
    assert mkldnn_has_bf16() in (True, False)


COMMON = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"


@pytest.mark.parametrize(
    ("operator", "positional"),
    [
        ("_flash_attention_forward", f"query key value {COMMON} return_debug_mask"),
        (
            "_flash_attention_backward",
            f"grad_out query key value out logsumexp {COMMON} rng_state unused",
        ),
    ],
)
def test_attention_over_packed_sequences_takes_these_arguments(operator: str, positional: str) -> None:
    """The calls need a GPU: `tests/gpu/test_layer_kernels.py`."""
    arguments = getattr(torch.ops.aten, operator).default._schema.arguments
    assert [each.name for each in arguments if not each.kwarg_only] == positional.split()
    keywords = {each.name for each in arguments if each.kwarg_only}
    assert {"window_size_left", "window_size_right"} <= keywords


def test_gpu_memory_can_be_exported_and_mapped() -> None:
    """The calls need two processes on a GPU; here the functions exist and the CPU build refuses to map."""
    assert callable(torch.UntypedStorage._share_cuda_)
    assert callable(torch.UntypedStorage._new_shared_cuda)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            map_gpu_memory(SharedGpuMemory(b"", 1, 0, b"", 0, b"", False), device=torch.device("cuda", 0))


def private_names(path: Path) -> list[str]:
    """Attribute chains and imports that name something private of torch."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            names.append(ast.unparse(node))
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    private = re.compile(
        r"torch(\.\w+)*\.(?!__)_\w+(\.\w+)*|.*\b_(share_cuda_|new_shared_cuda|allgather_base)"
    )
    return [f"{path.relative_to(PACKAGE)}: {name}" for name in names if private.fullmatch(name)]


def test_private_names_of_torch_are_used_in_this_module_only() -> None:
    others = [path for path in sorted(PACKAGE.rglob("*.py")) if path != Path(torch_internals.__file__)]
    assert [name for path in others for name in private_names(path)] == []
    assert private_names(Path(torch_internals.__file__)), "the check finds those that there are"
