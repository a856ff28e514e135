"""A reward that varies with the answer, and that a test can make wait at a chosen step of its run.

While the file `<run>.gates/5` exists, nothing is scored once step 5 is committed; `<run>.gates/5.reached` says that a
worker stands there. An asynchronous run may have committed step 6 before the next group is scored.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def odd_digits(completions: list[str], **columns: Any) -> list[float]:
    """The share of odd digits; a model that knows nothing yet already has some."""
    wait_at_gate(Path(os.environ["KINTSUGI_TEST_RUN"]))
    return [sum(character in "13579" for character in text) / (len(text) or 1) for text in completions]


def wait_at_gate(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    step = json.loads(lines[-1])["step"] if lines else 0
    gates = run_dir.with_suffix(".gates")
    passed = [gate for gate in gates.glob("*") if gate.name.isdecimal() and int(gate.name) <= step]
    for gate in passed:
        gate.with_suffix(".reached").touch()
        while gate.exists():
            time.sleep(0.005)


def begins_odd(completions: list[str], **columns: Any) -> list[float]:
    """1 for an odd first digit, else 0: whole groups often earn the same."""
    wait_at_gate(Path(os.environ["KINTSUGI_TEST_RUN"]))
    return [float(text[:1] in set("13579")) for text in completions]


def constant(completions: list[str], **columns: Any) -> list[float]:
    """The same for every completion: nothing can be learned from it."""
    wait_at_gate(Path(os.environ["KINTSUGI_TEST_RUN"]))
    return [0.7] * len(completions)
