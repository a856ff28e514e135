"""Requests, replies and one-way messages between processes: ZeroMQ with CURVE, in one thread.

directory.py   who may speak, and as whom
exchange.py    one request and its reply; bulk data and its checksum
endpoint.py    the sockets and the loop
"""

from kintsugi.transport.endpoint import Endpoint
from kintsugi.transport.exchange import (
    Blob,
    Delivery,
    PendingReply,
    Reply,
    bulk_digest,
    chunks,
    subject,
    verify_bulk,
)
from kintsugi.transport.sockets import new_key_pair

__all__ = [
    "Blob",
    "Delivery",
    "Endpoint",
    "PendingReply",
    "Reply",
    "bulk_digest",
    "chunks",
    "new_key_pair",
    "subject",
    "verify_bulk",
]
