"""A game of two turns that a test can make wait at a chosen step, or fail; its reward varies with what is said."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from gated_rewards import wait_at_gate  # type: ignore[import-not-found]

from kintsugi.rollout.environments.protocol import Observation, Step
from kintsugi.types import Row

MISTAKES = {"4": "raises", "5": "hangs", "9": "lies"}
"""First digit of a prompt → what goes wrong with it, where mistakes are wanted; no held-out prompt begins so."""


class Digits:
    """Say odd digits, twice."""

    def __init__(self, *, mistakes: bool = False) -> None:
        self._mistakes = MISTAKES if mistakes else {}
        self._num_turns = 0

    def reset(self, row: Row, *, seed: int) -> Observation:
        self._row = row
        return Observation(stop=("=",))

    def step(self, action: str) -> Any:
        wait_at_gate(Path(os.environ["KINTSUGI_TEST_RUN"]))
        self._num_turns += 1
        match self._mistakes.get(self._row.prompt[:1]):
            case "raises":
                raise RuntimeError("out of order")
            case "hangs":
                time.sleep(600)
            case "lies":
                return "what?"
        share = sum(character in "13579" for character in action) / (len(action) or 1)
        return Step(f"{self._num_turns}+", share, done=self._num_turns == 2, info={"said": len(action)})

    def demonstrate(self) -> str:
        return "12=" if self._num_turns == 0 else "3"

    def close(self) -> None:
        pass
