from __future__ import annotations

from typing import get_args

import pytest

from kintsugi.protocol import agents, membership, recovery, rollout, training
from kintsugi.protocol.messages import Body
from kintsugi.protocol.wire import ALLOWED_SENDERS
from kintsugi.types import Role


def test_it_is_said_of_every_message_who_may_say_it() -> None:
    assert set(ALLOWED_SENDERS) == set(get_args(Body))


@pytest.mark.parametrize("reply", [membership.Ok, recovery.RankReady, rollout.SamplesFetched])
def test_a_reply_is_nobodys_to_say_unasked(reply: type[Body]) -> None:
    assert ALLOWED_SENDERS[reply] == set()


def test_what_changes_weights_or_processes_is_the_masters_word_alone() -> None:
    orders = (training.RunCall, training.Save, recovery.Repair, agents.StartProcess, membership.Shutdown)
    assert {ALLOWED_SENDERS[order] for order in orders} == {frozenset({Role.MASTER})}
