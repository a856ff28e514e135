"""The usual reward of the tests, while programs that want to do harm run in the sandbox of the same process."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import gated_rewards  # type: ignore[import-not-found]

from kintsugi.rollout.sandbox.sandbox import SandboxLimits, run_python


def odd_digits(completions: list[str], **columns: Any) -> list[float]:
    _suffer_attacks()
    rewards: list[float] = gated_rewards.odd_digits(completions, **columns)
    return rewards


@cache
def _suffer_attacks() -> None:
    """Once in each reward process: `<run>.gates/attacks.json` has the programs, what came of them is told beside."""
    gates = Path(os.environ["KINTSUGI_TEST_RUN"]).with_suffix(".gates")
    attacks: dict[str, str] = json.loads((gates / "attacks.json").read_text())
    aims = json.dumps(
        ["127.0.0.1", 80, "\0none", str(gates.parent), str(gates / "attacks.json"), os.getpid()]
    )
    limits = SandboxLimits(cpu_s=1, idle_s=1.0)
    outcomes = {name: run_python(source, stdin=aims, limits=limits) for name, source in attacks.items()}
    told = {name: [outcome.reason, outcome.stdout[:10_000]] for name, outcome in outcomes.items()}
    (gates / f"attacked.{os.getpid()}").write_text(json.dumps(told))
