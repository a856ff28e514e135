"""A W&B whose server cannot be reached: its `init` fails, as the real one does after its time-out."""

from __future__ import annotations

import time
from typing import Any

Table = Settings = dict


def init(**options: Any) -> Any:
    time.sleep(0.5)
    raise ConnectionError("no route to host")
