"""Can be imported by the command line, which checks that, and not by a worker."""

from __future__ import annotations

import os
from typing import Any

if os.getppid() != int(os.environ["KINTSUGI_TEST_PARENT"]):
    raise RuntimeError("a library is missing")


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)
