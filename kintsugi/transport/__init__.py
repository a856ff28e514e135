"""Requests, replies and one-way messages between processes: ZeroMQ with CURVE, in one thread.

endpoint.py    requests, replies and one-way messages of one process; its connections and its loop
rpc.py         one request and its reply; bulk data and its checksum
directory.py   authentication: which process a key belongs to
store.py       the store at which the processes of a collective group meet
sockets.py     set-up of the ZeroMQ sockets; frames in and out of them
"""

from kintsugi.transport.endpoint import Endpoint
from kintsugi.transport.rpc import (
    Blob,
    Delivery,
    PendingReply,
    Reply,
    bulk_digest,
    chunks,
    subject,
    verify_bulk,
)
from kintsugi.transport.sockets import most_peers, new_key_pair

__all__ = [
    "Blob",
    "Delivery",
    "Endpoint",
    "PendingReply",
    "Reply",
    "bulk_digest",
    "chunks",
    "most_peers",
    "new_key_pair",
    "subject",
    "verify_bulk",
]
