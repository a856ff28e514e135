from typing import Any

import pytest

from kintsugi.config.schema import AlgorithmSection, Config, SourceSection, WarmupSection
from kintsugi.data.columns import RequiredColumns, UnusableRow, needs_of, row_of

USER, ASSISTANT = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
WRONG = {"role": "assistant", "content": "3"}
SFT, PAIR = RequiredColumns(completion=True), RequiredColumns(pair=True)


def test_the_stages_say_what_a_row_must_have() -> None:
    warmed_up = Config(name="t", algorithm=AlgorithmSection(name="dpo"), warmup=WarmupSection())
    assert needs_of(Config(name="t")) == RequiredColumns()
    assert needs_of(warmed_up) == RequiredColumns(completion=True, pair=True)


def test_a_conversation_is_a_prompt_of_several_turns() -> None:
    earlier = [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER]
    row = row_of({"turns": earlier}, SourceSection(prompt_column="turns"), needs=RequiredColumns())
    assert list(row.messages) == earlier
    assert row.prompt == "system: Be brief.\nuser: 1+1?\nassistant: 2\nuser: 1+1?"


def test_the_last_turn_of_an_assistant_is_what_is_learned() -> None:
    row = row_of({"messages": [USER, ASSISTANT]}, SourceSection(prompt_column="messages"), needs=SFT)
    assert (row.prompt, row.messages, row.columns) == ("1+1?", (USER,), {"completion": "2"})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [WRONG]},
        {"prompt": "1+1?", "chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, WRONG]},
    ],
)
def test_a_pair_is_given_as_text_or_as_conversations_with_or_without_a_prompt(record: dict[str, Any]) -> None:
    row = row_of(record, SourceSection(), needs=PAIR)
    assert row.prompt == "1+1?"
    assert row.columns == {"chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("record", "needs", "reason"),
    [
        ({"prompt": ""}, RequiredColumns(), "at least one token"),
        ({"prompt": None}, RequiredColumns(), "expected text in column 'prompt', columns there: prompt"),
        (
            {"prompt": ["1+1?"]},
            RequiredColumns(),
            "`role` and `content` of turn 1 in column 'prompt', got '1\\+1\\?'",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, RequiredColumns(), "turn 1"),
        ({"prompt": [ASSISTANT]}, RequiredColumns(), "a turn to answer"),
        ({"prompt": []}, RequiredColumns(), "a turn to answer"),
        ({"prompt": "a", "prompts": 1}, RequiredColumns(), "column 'prompts' has the name of an argument"),
        ({"prompt": "a"}, SFT, "`data.completion_column`"),
        ({"prompt": "a", "chosen": "b"}, PAIR, "expected text in column 'rejected', got nothing"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, PAIR, "two different answers"),
        ({"chosen": [USER, ASSISTANT], "rejected": [ASSISTANT, WRONG]}, PAIR, "the same conversation"),
        (
            {"prompt": "a", "chosen": [USER], "rejected": "b"},
            PAIR,
            "an assistant's turn at the end of column",
        ),
    ],
)
def test_a_record_that_is_no_row_says_why(
    record: dict[str, Any], needs: RequiredColumns, reason: str
) -> None:
    with pytest.raises(UnusableRow, match=reason):
        row_of(record, SourceSection(), needs=needs)
