from __future__ import annotations

import pytest

from kintsugi.messages import Envelope, MessageKind
from kintsugi.transport.directory import Directory
from kintsugi.types import Peer


@pytest.mark.parametrize(
    ("process", "accepted"), [("master-0", True), ("model-0", False), ("agent-0", False)]
)
def test_only_a_master_may_show_up_as_another_incarnation_under_its_old_key(
    process: str, accepted: bool
) -> None:
    directory = Directory(job="job", process="server-0")
    directory.add(Peer(process, "a", "host-0", "", b"key"))
    newer = Envelope("job", 7, process, "b", 1, MessageKind.REQUEST)
    assert (directory.why_refused("key", newer, epoch=1) == "") is accepted
    assert directory.peers[process].incarnation == ("b" if accepted else "a")


def test_a_master_of_the_same_epoch_is_no_other_incarnation() -> None:
    directory = Directory(job="job", process="server-0")
    directory.add(Peer("master-0", "a", "host-0", "", b"key"))
    same_epoch = Envelope("job", 1, "master-0", "b", 1, MessageKind.REQUEST)
    assert directory.why_refused("key", same_epoch, epoch=1) == "master-0 b is not a"
