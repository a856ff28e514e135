from __future__ import annotations

from typing import get_args

import pytest

from kintsugi import messages, operations, supervision
from kintsugi.messages import Body
from kintsugi.types import Role
from kintsugi.wire import SPOKEN_BY


def test_it_is_said_of_every_message_who_may_say_it() -> None:
    assert set(SPOKEN_BY) == set(get_args(Body))


@pytest.mark.parametrize("reply", [messages.Ok, operations.RankReady, messages.SamplesFetched])
def test_a_reply_is_nobodys_to_say_unasked(reply: type[Body]) -> None:
    assert SPOKEN_BY[reply] == set()


def test_what_changes_weights_or_processes_is_the_masters_word_alone() -> None:
    orders = (messages.RunCall, messages.Save, operations.Repair, supervision.StartProcess, messages.Shutdown)
    assert {SPOKEN_BY[order] for order in orders} == {frozenset({Role.MASTER})}
