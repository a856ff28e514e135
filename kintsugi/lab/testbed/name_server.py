"""Name server of the isolated hosts: resolves the names of its table, and no other name.

python -m kintsugi.lab.testbed.name_server ADDRESS LIFELINE NAME=ADDRESS…
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys

from kintsugi.runtime.waits import wait

PORT = 53
_HEADER = struct.Struct("!6H")
_A, _IN = 1, 1
_ANSWER, _AUTHORITATIVE, _NO_SUCH_NAME = 0x8000, 0x0400, 3
ROUND_S = 3600.0


def answer(query: bytes, table: dict[str, str]) -> bytes | None:
    """Return the reply to one query; None for a packet that is no query."""
    if len(query) < _HEADER.size + 5:
        return None
    number, flags, questions, *_ = _HEADER.unpack_from(query)
    if questions != 1 or flags & _ANSWER:
        return None
    labels, position = [], _HEADER.size
    while position < len(query) and query[position]:
        length = query[position]
        labels.append(query[position + 1 : position + 1 + length])
        position += 1 + length
    question = query[_HEADER.size : position + 5]
    if len(query) < position + 5:
        return None
    kind, _ = struct.unpack_from("!2H", question, len(question) - 4)
    address = table.get(b".".join(labels).decode("ascii", "replace").lower())
    status = _ANSWER | _AUTHORITATIVE | (flags & 0x0100) | (0 if address else _NO_SUCH_NAME)
    records = b""
    if address and kind == _A:
        # 0xC00C: pointer to the name in the question. The time to live is 0, so that every connection sends a
        # query.
        records = struct.pack("!3HIH", 0xC00C, _A, _IN, 0, 4) + socket.inet_aton(address)
    return _HEADER.pack(number, status, 1, bool(records), 0, 0) + question + records


def main(arguments: list[str]) -> int:
    """Answer queries until the lifeline pipe ends, which only the laboratory can write."""
    own, lifeline, *pairs = arguments
    table = dict(pair.split("=", 1) for pair in pairs)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setblocking(False)
    server.bind((own, PORT))
    poller = select.poll()
    poller.register(server, select.POLLIN)
    poller.register(int(lifeline), select.POLLIN)
    while True:
        ready = wait(
            lambda remaining_s: poller.poll(remaining_s * 1000) or None,
            whom="hosts",
            what="a question",
            timeout_s=ROUND_S,
        )
        if any(descriptor == int(lifeline) for descriptor, _ in ready):
            server.close()
            os.close(int(lifeline))
            return 0
        query, sender = server.recvfrom(4096)
        reply = answer(query, table)
        if reply is not None:
            server.sendto(reply, sender)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
