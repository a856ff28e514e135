"""Arrays of both training frameworks: tensors of torch, and numpy arrays in a rank of another framework.

Code that moves a state (snapshots, transfers, files, digests) treats both alike. torch is imported only where one of
its tensors is given.
"""

from __future__ import annotations

from typing import Any

Array = Any
"""A tensor of torch or a numpy array. They share shape, dtype, nbytes, reshape and indices; the types of both libraries
have no supertype that says so. `str` of the dtype is "torch.float32" or "float32"."""


def dtype_name(array: Array) -> str:
    """Name of an array's dtype in either framework: "float32"."""
    return str(array.dtype).removeprefix("torch.")


def is_tensor(array: Array) -> bool:
    """Whether this is a tensor of torch, which is then imported."""
    return str(array.dtype).startswith("torch.")


def view_of(array: Array) -> memoryview:
    """Bytes of a contiguous array in host memory, writable."""
    flat = flat_bytes(array)
    data: memoryview = flat.numpy().data if is_tensor(array) else flat.data
    return data


def flat_bytes(array: Array) -> Any:
    """Bytes of a contiguous array as an array of the same kind, in the same memory."""
    contiguous: Any = array
    if is_tensor(array):
        import torch

        assert contiguous.is_contiguous()
        return contiguous.detach().reshape(-1).view(torch.uint8)
    assert contiguous.flags.c_contiguous
    return contiguous.reshape(-1).view("uint8")


def from_buffer(memory: memoryview, *, like: Array) -> Any:
    """Memory as a flat array of the kind and dtype of another."""
    if is_tensor(like):
        import torch

        return torch.frombuffer(memory, dtype=like.dtype)
    import numpy as np

    return np.frombuffer(memory, dtype=like.dtype)


def copied(array: Array) -> Any:
    """A copy in memory of its own, on the same device."""
    source: Any = array
    return source.clone() if is_tensor(array) else source.copy()


def is_on_accelerator(array: Array) -> bool:
    """Whether the array is in the memory of an accelerator; numpy arrays never are."""
    return bool(getattr(array, "is_cuda", False))


def zeros(*shape: int, like: Array) -> Any:
    """Zeros of the kind, dtype and device of another array."""
    source: Any = like
    if is_tensor(like):
        return source.new_zeros(shape)
    import numpy as np

    return np.zeros(shape, dtype=source.dtype)


def namespace(array: Array) -> Any:
    """Module with the functions for arrays of this kind that both libraries name alike (`maximum`, `concatenate`)."""
    if is_tensor(array):
        import torch

        return torch
    import numpy as np

    return np
