"""Launches that overlap: a kernel's programs take their places while those of the one before it still run.

Where the device can, each of our kernels is launched early and waits, before it reads or writes anything that others
write, until the one before it has ended and its writes are seen; then it lets the next one come. Every kernel waits, so
what a kernel sees is what it would see without any of this. Meanwhile only parameters may be read: they change between
steps, never within one.
"""

# What a kernel's arguments are, Triton finds out at each launch; it refuses annotations of them.
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def can_start_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """For a kernel that begins with `await_predecessor`."""
    return {"starts_early": True, "launch_pdl": True} if can_start_early(device) else {"starts_early": False}


@triton.jit
def await_predecessor(starts_early: tl.constexpr):
    if starts_early:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
