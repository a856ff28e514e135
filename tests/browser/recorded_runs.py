"""Runs that the browser looks at: the recorded ones of the package, and copies with something wrong in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kintsugi.diagnosis.learning_watch import LearningWatch
from kintsugi.page.demo import FAULTS, SLOW, unpack
from kintsugi.telemetry.events import EventLog

DEAD, EMPTY, HOSTILE, DAMAGED, WIDE = "dead", "empty", "hostile", "damaged", "wide"
CONSTANT = "constant-reward"
TEXTS = (
    "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'>",
    "\x1b[31mred\x1b[0m \x07 \x9b2J",
    "x" * 1_000_000,
    "\u202eright to left\u202c שלום مرحبا",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
)
"""Completions as a hostile model writes them."""


def make(folder: Path) -> Path:
    """Write all runs into a folder."""
    unpack(folder)
    shutil.copytree(folder / SLOW, folder / DEAD)
    # A launcher that was killed leaves no summary.
    (folder / DEAD / "summary.json").unlink()
    (folder / EMPTY).mkdir()
    shutil.copy(folder / SLOW / "config.yaml", folder / EMPTY)
    shutil.copytree(folder / SLOW, folder / HOSTILE)
    samples = folder / HOSTILE / "samples.jsonl"
    records = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    for text, record in zip(TEXTS, records[-len(TEXTS) :], strict=True):
        record |= {"completion": text, "prompt": text[:200]}
    samples.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    shutil.copytree(folder / SLOW, folder / DAMAGED)
    metrics = folder / DAMAGED / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines()
    lines.insert(5, '{"step": 5, "ti')
    metrics.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (folder / DAMAGED / "config.yaml").open("a", encoding="utf-8") as file:
        file.write("field_of_a_later_version: 1\n")
    shutil.copytree(folder / FAULTS, folder / WIDE)
    for number in range(2, 40):
        for kind in ("jsonl", "spans.jsonl"):
            events = folder / WIDE / "events"
            shutil.copy(events / f"server-{number % 2}.{kind}", events / f"server-{number}.{kind}")
    _make_constant_reward(folder)
    (folder / "no_run").mkdir()
    return folder


def _make_constant_reward(folder: Path) -> None:
    """Copy a run with metrics as of a reward function that returns a constant; the watcher has read them."""
    run = folder / CONSTANT
    shutil.copytree(folder / SLOW, run)
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if "reward/mean" in line:
            line |= {"reward/mean": 0.7, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    log = EventLog(run / "events" / "watcher-0.jsonl", process="watcher-0")
    watch = LearningWatch(run, log=log)
    watch.look()
    watch.close()
    log.close()


__all__ = ["CONSTANT", "DAMAGED", "DEAD", "EMPTY", "FAULTS", "HOSTILE", "SLOW", "TEXTS", "WIDE", "make"]
