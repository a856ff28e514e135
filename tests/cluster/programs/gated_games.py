"""A game of two turns that a test can make wait at a chosen step, or fail; its reward varies with what is said."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from gated_rewards import wait_at_gate  # type: ignore[import-not-found]

from kintsugi.rollout.environment import Observation, Step
from kintsugi.types import Row

VICTIMS = {"raises": ("4", "5", "9"), "lies": ("4", "5", "9"), "hangs": ("5",)}
"""How the prompts begin of which something goes wrong: none that is held out is among them. What hangs takes time."""


class Digits:
    """Say odd digits, twice."""

    def __init__(self, *, wrong: str = "") -> None:
        self._wrong = wrong
        self._num_turns = 0

    def reset(self, row: Row, *, seed: int) -> Observation:
        self._row = row
        return Observation(stop=("=",))

    def step(self, action: str) -> Any:
        wait_at_gate(Path(os.environ["KINTSUGI_TEST_RUN"]))
        self._num_turns += 1
        if self._row.prompt.startswith(VICTIMS.get(self._wrong, ())):
            if self._wrong == "raises":
                raise RuntimeError("out of order")
            if self._wrong == "hangs":
                time.sleep(600)
            if self._wrong == "lies":
                return "what?"
        share = sum(character in "13579" for character in action) / (len(action) or 1)
        return Step(f"{self._num_turns}+", share, done=self._num_turns == 2, info={"said": len(action)})

    def demonstrate(self) -> str:
        return "12=" if self._num_turns == 0 else "3"

    def close(self) -> None:
        pass
