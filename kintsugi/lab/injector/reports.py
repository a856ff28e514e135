"""Reports of the process that carries out a fault, to the laboratory."""

from __future__ import annotations

from typing import Literal

import msgspec


class InjectorReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One JSON object a line."""

    what: Literal["ready", "began", "ended", "failed"]
    wall: float = 0.0
    monotonic: float = 0.0
    why: str = ""
    measured: dict[str, float] = {}
    target_ended: float | None = None
