"""Whether a process can tell that it computes something else than before."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kintsugi.errors import DeviceError
from kintsugi.lab.faults import fpu_rounding
from kintsugi.model.known_answer import KnownAnswer

CPU = torch.device("cpu")
TOWARDS_ZERO, DOWNWARD, UPWARD = 0xC00, 0x400, 0x800
"""As `fesetround` names them on x86."""

pytestmark = pytest.mark.skipif(fpu_rounding.missing() is not None, reason=str(fpu_rounding.missing()))


@contextmanager
def rounding(mode: int) -> Iterator[None]:
    """Of this thread."""
    library = ctypes.CDLL("libm.so.6")
    before = library.fegetround()
    assert library.fesetround(mode) == 0
    try:
        yield
    finally:
        library.fesetround(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_that_is_as_it_was_passes_every_time(dtype: torch.dtype) -> None:
    known = KnownAnswer(CPU, dtype=dtype)
    for _ in range(200):
        known.check()


@pytest.mark.parametrize("mode", [TOWARDS_ZERO, DOWNWARD, UPWARD])
def test_another_rounding_is_noticed_and_forgotten_when_it_ends(mode: int) -> None:
    known = KnownAnswer(CPU, dtype=torch.float32)
    with rounding(mode), pytest.raises(DeviceError, match="does not compute any more what it did"):
        known.check()
    known.check()
