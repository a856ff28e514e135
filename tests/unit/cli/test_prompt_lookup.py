from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kintsugi.cli.prompt_lookup import find_prompt
from kintsugi.config.recipe import dump, load
from kintsugi.data.dataset import open_data
from kintsugi.errors import UserError
from kintsugi.journal.facts import TicketsIssued
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.store.index import RunStore
from kintsugi.types import Ticket, ticket_id
from tests.unit.telemetry.recorded_run import RecordedRun

RECIPE = Path(__file__).parents[3] / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    """A run of which the first prompts of two stages were given out, the second one twice."""
    run = RecordedRun(tmp_path / "run")
    config = load(RECIPE).config
    dump(config, run.folder / "config.yaml")
    open_data(config, run_dir=run.folder)
    issued = [(stage, position, 0) for stage in ("warmup", "grpo") for position in range(3)] + [
        ("grpo", 1, 1)
    ]
    run.decide(
        TicketsIssued(
            tuple(
                Ticket(ticket_id(stage, epoch=0, position=place, round=round), stage, 0, place, round, 8)
                for stage, place, round in issued
            )
        ),
        at=1.0,
    )
    with RunStore(run.folder) as store:
        store.refresh()
        yield store


def row_of(store: RunStore, stage: str, position: int) -> tuple[int, str]:
    config = load(RECIPE).config
    data = open_data(config)
    place = data.place(stage=stage, seed=0, epoch=0, position=position)
    return place.index, data.row_at(place).prompt


def test_a_ticket_or_a_sample_of_it_names_itself(store: RunStore) -> None:
    index, prompt = row_of(store, "grpo", 2)
    for given in ("grpo:0:2:0", "grpo:0:2:0/5"):
        named = find_prompt(store, given)
        assert (named.ticket, named.row, named.prompt) == ("grpo:0:2:0", f"row {index} of arithmetic", prompt)


def test_a_prompt_is_found_by_its_text_and_by_the_number_of_its_row(store: RunStore) -> None:
    index, prompt = row_of(store, "grpo", 2)
    assert find_prompt(store, prompt).ticket == "grpo:0:2:0"
    assert find_prompt(store, str(index)).ticket == "grpo:0:2:0"


def test_several_tickets_of_one_prompt_are_named_for_the_user_to_choose(store: RunStore) -> None:
    _, prompt = row_of(store, "grpo", 1)
    with pytest.raises(UserError, match="issued 2 times; use one of grpo:0:1:0, grpo:0:1:1"):
        find_prompt(store, prompt)


@pytest.mark.parametrize("given", ["99999999", "no such prompt", "²", "1:2"])
def test_what_was_never_given_out_is_the_users_mistake(store: RunStore, given: str) -> None:
    with pytest.raises(UserError, match="found none for"):
        find_prompt(store, given)


def test_a_ticket_that_was_never_given_out_is_the_users_mistake(store: RunStore) -> None:
    with pytest.raises(UserError, match="no ticket grpo:0:999:0 was issued"):
        find_prompt(store, "grpo:0:999:0")


def test_texts_of_what_was_trained_are_known_without_the_data(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = {
        "step": 1,
        "ticket": "grpo:0:2:0",
        "sample": 0,
        "version": 0,
        "prompt": "8+8=",
        "completion": "61",
    }
    sample |= {"reward": 1.0, "reward_components": {}, "finish": "eos", "advantage": None}
    RunFolder(store.run_dir).samples_file.write_bytes(msgspec.json.encode(sample) + b"\n")

    def gone(*_: object, **__: object) -> None:
        raise UserError("data.jsonl: no such file")

    monkeypatch.setattr("kintsugi.cli.prompt_lookup.open_data", gone)
    named = find_prompt(store, "8+8=")
    assert (named.ticket, named.row, named.prompt) == ("grpo:0:2:0", "", "8+8=")
    with pytest.raises(UserError, match="no such file"):
        find_prompt(store, "7")
