"""Find a ticket by its id, its row number, or the text of its prompt.

The data set maps tickets to rows. If it can no longer be read, `samples.jsonl` has the texts of trained samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config.recipe import load_config
from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.data.dataset import DataSet, open_data
from kintsugi.errors import KintsugiError, UserError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import each_sample
from kintsugi.telemetry.format import ids_in
from kintsugi.telemetry.store.index import RunStore
from kintsugi.telemetry.store.tracing import issued_tickets
from kintsugi.types import Ticket, place_of_ticket

MOST_NAMED = 8
REVERSED = (
    "The task of this data is to write sums with their digits reversed, the last digit first, which a small model "
    "learns quickly: 91+67 is 158, the right answer is '851'."
)


class NamedPrompt(msgspec.Struct, frozen=True):
    """A ticket, its row, and the prompt."""

    ticket: str
    row: str = ""
    prompt: str = ""


def find_prompt(store: RunStore, given: str) -> NamedPrompt:
    """Find the one matching ticket. UserError if there is none, or if there are several, which are listed."""
    wanted = given.partition("/")[0] if ":" in given else given
    for ticket in issued_tickets(store):
        if ticket.id == wanted:
            return RunRows(store.run_dir).named(ticket)
    if ids_in(wanted) == {wanted}:
        raise UserError(
            f"{store.run_dir}: no ticket {wanted} was issued so far; `kintsugi samples` shows some"
        )
    rows = RunRows(store.run_dir)
    if given.isdecimal():
        found = [ticket for ticket in issued_tickets(store) if rows.index(ticket) == int(given)]
    else:
        texts = [(ticket, rows.prompt(ticket)) for ticket in issued_tickets(store)]
        found = [ticket for ticket, text in texts if text == given]
        found = found or [ticket for ticket, text in texts if given and given in text]
    what = f"row {given}" if given.isdecimal() else f"the prompt {given!r}"
    if not found:
        why = f" ({rows.problem})" if rows.problem else ""
        raise UserError(
            f"{store.run_dir}: expected a ticket (grpo:0:17:0), a row number or the text of a prompt that was "
            f"issued; found none for {what}{why}"
        )
    if len(found) > 1:
        names = ", ".join(ticket.id for ticket in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise UserError(f"{what} was issued {len(found)} times; use one of {names}{more}")
    return rows.named(found[0])


class RunRows:
    """Rows of the tickets of a run, if its data can still be read."""

    def __init__(self, run_dir: Path) -> None:
        self._config: Config = load_config(RunFolder(run_dir).config_file)
        self._seeds = {stage.name: stage.seed for stage in stages(self._config)}
        self.problem = ""
        """Reason why the data can not be read; empty if it can."""
        self._data: DataSet | None = None
        self._run_dir = run_dir
        try:
            self._data = open_data(self._config, run_dir=run_dir)
        except KintsugiError as error:
            self.problem = str(error)

    @cached_property
    def _texts(self) -> dict[str, str]:
        """Prompts by ticket, for a run whose data cannot be read."""
        return {sample.ticket: sample.prompt for sample in each_sample(self._run_dir)}

    def index(self, ticket: Ticket) -> int | None:
        """Row number, from 0, among the training rows of its source."""
        places = self._places(ticket)
        return next((index for _, index in places), None)

    def prompt(self, ticket: Ticket) -> str:
        if self._data is None:
            return self._texts.get(ticket.id, "")
        try:
            return self._data.training_row(
                stage=ticket.stage,
                seed=self._seeds.get(ticket.stage, 0),
                epoch=ticket.epoch,
                position=ticket.position,
            ).prompt
        except KintsugiError as error:
            self.problem = str(error)
            return ""

    @property
    def note(self) -> str:
        """Sentence about data that looks wrong at first sight; empty for most."""
        sources = [self._config.data.source, *(each.source for each in self._config.data.sources)]
        return REVERSED if "arithmetic" in sources else ""

    def columns(self, ticket_id: str) -> dict[str, Any]:
        """Columns of the row of a ticket, as rewards get them; empty if the data cannot be read."""
        try:
            stage, epoch, position = place_of_ticket(ticket_id)
        except ValueError:
            return {}
        if self._data is None:
            return {}
        try:
            row = self._data.training_row(
                stage=stage, seed=self._seeds.get(stage, 0), epoch=epoch, position=position
            )
        except KintsugiError as error:
            self.problem = str(error)
            return {}
        return dict(row.columns)

    def named(self, ticket: Ticket) -> NamedPrompt:
        row = next((f"row {index} of {name}" for name, index in self._places(ticket)), "")
        return NamedPrompt(ticket.id, row, self.prompt(ticket))

    def _places(self, ticket: Ticket) -> Iterator[tuple[str, int]]:
        if self._data is None:
            return
        place = self._data.place(
            stage=ticket.stage,
            seed=self._seeds.get(ticket.stage, 0),
            epoch=ticket.epoch,
            position=ticket.position,
        )
        yield self._data.parts[place.part].name, place.index
