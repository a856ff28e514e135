from __future__ import annotations

import struct

from kintsugi.lab.testbed import packets


def message(number: int, *, kind: int = 3 << 8) -> bytes:
    """As the kernel writes one: a time stamp before the number, which nobody asked for."""
    stamp = struct.pack("=HH", 20, 3) + b"\0" * 16
    header = struct.pack("=HH", 11, 1) + struct.pack("!IHB", number, 0x0800, 3) + b"\0"
    body = struct.pack("!BBH", 2, 0, 7) + stamp + header
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def test_the_numbers_of_all_packets_of_a_read_are_found() -> None:
    assert list(packets._packets(message(5) + message(6))) == [5, 6]


def test_messages_of_another_kind_are_passed_over() -> None:
    assert list(packets._packets(message(5, kind=2) + message(6))) == [6]


def test_what_is_cut_off_gives_nothing() -> None:
    assert list(packets._packets(message(5)[:10])) == []
