"""A recorded run through the same state machines again: the same inputs must give the same facts."""

from __future__ import annotations

from pathlib import Path

from kintsugi.control.inputs import read_inputs
from kintsugi.control.journal import read_facts
from kintsugi.control.master import Master
from kintsugi.control.protocol import Began
from kintsugi.control.shell import new_master, new_state
from kintsugi.facts import Fact
from kintsugi.recipe import load_config


def replay(run_dir: Path) -> tuple[list[Fact], list[Fact]]:
    """(facts that the decisions give on the recorded inputs, facts that the run journaled)."""
    config = load_config(run_dir / "config.yaml")
    state = new_state(config)
    master: Master | None = None
    again: list[Fact] = []
    for record in read_inputs(run_dir / "inputs"):
        if isinstance(record.event, Began):
            master = new_master(config, state, run_dir=run_dir)
        assert master is not None, "a recording starts with a master that begins"
        again.extend(master.decide(record.event, record.now).facts)
    return again, list(read_facts(run_dir / "journal"))
