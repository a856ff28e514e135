from __future__ import annotations

import struct

from kintsugi.lab.testbed.name_server import answer

TABLE = {"host-1.lab": "10.77.0.11"}


def question(name: str, *, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)


def test_a_known_name_is_answered_with_its_address() -> None:
    reply = answer(question("Host-1.lab"), TABLE)
    assert reply is not None
    assert reply[:2] == b"\0\7"
    assert reply.endswith(bytes([10, 77, 0, 11]))


def test_an_unknown_name_does_not_exist() -> None:
    reply = answer(question("host-9.lab"), TABLE)
    assert reply is not None
    _, flags, _, answers, *_ = struct.unpack_from("!6H", reply)
    assert (flags & 0xF, answers) == (3, 0)


def test_another_kind_of_address_of_a_known_name_is_answered_with_none() -> None:
    reply = answer(question("host-1.lab", kind=28), TABLE)
    assert reply is not None
    _, flags, _, answers, *_ = struct.unpack_from("!6H", reply)
    assert (flags & 0xF, answers) == (0, 0)


def test_what_is_no_question_is_not_answered() -> None:
    whole = question("host-1.lab")
    assert answer(b"", TABLE) is None
    assert answer(whole[:14], TABLE) is None
    assert answer(b"\xff" * 40, TABLE) is None
    assert answer(whole[:-3], TABLE) is None
