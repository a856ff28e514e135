"""The undisturbed run of `tests/cluster`, to compare with."""

from __future__ import annotations

from tests.cluster.conftest import undisturbed

__all__ = ["undisturbed"]
