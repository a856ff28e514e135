"""Replay of a recorded run through the same state machines: the same inputs must give the same facts."""

from __future__ import annotations

from pathlib import Path

from kintsugi.config.recipe import load_config
from kintsugi.control.master import Master
from kintsugi.control.process import new_master, new_state
from kintsugi.control.protocol import Began
from kintsugi.errors import UserError
from kintsugi.journal.facts import Fact
from kintsugi.journal.inputs import are_complete, read_inputs
from kintsugi.journal.journal import read_facts
from kintsugi.run_folder.layout import RunFolder


def replay(run_dir: Path) -> tuple[list[Fact], list[Fact]]:
    """Return (facts of the decisions on the recorded inputs, facts that the run journaled). UserError if the run is so
    long that its first inputs are not kept.

    A master that dies after it has recorded an input may not have journaled its decision: such inputs are left out, as
    the next master knows nothing of them.
    """
    inputs = RunFolder(run_dir).inputs_file
    if not are_complete(inputs):
        raise UserError(f"{inputs}: expected all inputs of the run, the first ones are not kept")
    config = load_config(RunFolder(run_dir).config_file)
    state = new_state(config)
    master: Master | None = None
    again: list[Fact] = []
    found_by_masters = [record.after for record in read_inputs(inputs) if isinstance(record.event, Began)]
    """Last record of the journal that each master found when it began."""
    for record in read_inputs(inputs):
        if isinstance(record.event, Began):
            found_by_masters.pop(0)
            master = new_master(config, state, run_dir=run_dir)
        if found_by_masters and 0 < found_by_masters[0] <= record.after:
            continue
        assert master is not None, "a recording starts with a master that begins"
        again.extend(master.decide(record.event, record.now).facts)
    return again, list(read_facts(RunFolder(run_dir).journal_file))
