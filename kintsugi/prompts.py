"""Which ticket a person means: by its id, by the number of its row, or by the text of its prompt.

The data set says which row a ticket is of. Where it can not be read any more, `samples.jsonl` still has the texts of
what was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kintsugi.config import Config
from kintsugi.data.source import DataSet, open_data
from kintsugi.errors import KintsugiError, UserError
from kintsugi.observe.store import RunStore
from kintsugi.observe.telling import ids_in
from kintsugi.observe.tracing import issued_tickets
from kintsugi.recipe import load_config
from kintsugi.runs import CONFIG_FILE, read_samples
from kintsugi.stages import stages
from kintsugi.types import Ticket

MOST_NAMED = 8


class Named(msgspec.Struct, frozen=True):
    """A ticket, the row that it is of, and what that says."""

    ticket: str
    row: str = ""
    prompt: str = ""


def find_prompt(store: RunStore, given: str) -> Named:
    """The one ticket that is meant. UserError for none, and for several, which are named."""
    wanted = given.partition("/")[0] if ":" in given else given
    for ticket in issued_tickets(store):
        if ticket.id == wanted:
            return _Rows(store.run_dir).named(ticket)
    if ids_in(wanted) == {wanted}:
        raise UserError(
            f"{store.run_dir}: no ticket {wanted} was given out so far; `kintsugi samples` shows some"
        )
    rows = _Rows(store.run_dir)
    if given.isdecimal():
        found = [ticket for ticket in issued_tickets(store) if rows.index(ticket) == int(given)]
    else:
        texts = [(ticket, rows.prompt(ticket)) for ticket in issued_tickets(store)]
        found = [ticket for ticket, text in texts if text == given]
        found = found or [ticket for ticket, text in texts if given and given in text]
    what = f"row {given}" if given.isdecimal() else f"the prompt {given!r}"
    if not found:
        why = f" ({rows.trouble})" if rows.trouble else ""
        raise UserError(
            f"{store.run_dir}: expected a ticket (grpo:0:17:0), the number of a row or the text of a prompt that was "
            f"given out; nothing was for {what}{why}"
        )
    if len(found) > 1:
        names = ", ".join(ticket.id for ticket in found[:MOST_NAMED])
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise UserError(f"{what} was given out {len(found)} times; name one of {names}{more}")
    return rows.named(found[0])


class _Rows:
    """The rows of a run's tickets, as far as its data can still be read."""

    def __init__(self, run_dir: Path) -> None:
        self._config: Config = load_config(run_dir / CONFIG_FILE)
        self._seeds = {stage.name: stage.seed for stage in stages(self._config)}
        self.trouble = ""
        """Why the data can not be read, if it can not."""
        self._data: DataSet | None = None
        self._texts: dict[str, str] = {}
        try:
            self._data = open_data(self._config, run_dir=run_dir)
        except KintsugiError as error:
            self.trouble = str(error)
            self._texts = {sample.ticket: sample.prompt for sample in read_samples(run_dir)}

    def index(self, ticket: Ticket) -> int | None:
        """Counted from 0, among the rows of its source that are trained on."""
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
            self.trouble = str(error)
            return ""

    def named(self, ticket: Ticket) -> Named:
        row = next((f"row {index} of {name}" for name, index in self._places(ticket)), "")
        return Named(ticket.id, row, self.prompt(ticket))

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
