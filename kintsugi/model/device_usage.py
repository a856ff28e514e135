"""Memory of an accelerator that this process has taken for itself, for its heartbeats."""

from __future__ import annotations

import torch


def device_gauges() -> dict[str, float]:
    """Return the bytes that torch's allocator holds on the current CUDA device; empty without one.

    Call it from the thread that computes: the allocator may be locked while the device frees memory, and a heartbeat
    must not wait for that.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    return {"device_reserved_bytes": float(torch.cuda.memory_reserved())}
