"""Requests, replies and one-way messages between processes: ZeroMQ with CURVE, in one thread.

endpoint.py    requests, replies and one-way messages of one process; its connections and its loop
rpc.py         one request and its reply
directory.py   authentication: which process a key belongs to
store.py       the store at which the processes of a collective group meet
sockets.py     set-up of the ZeroMQ sockets; frames in and out of them
"""

from kintsugi.transport.endpoint import Endpoint
from kintsugi.transport.rpc import Delivery, PendingReply, Reply, subject
from kintsugi.transport.sockets import most_peers, new_key_pair

__all__ = [
    "Delivery",
    "Endpoint",
    "PendingReply",
    "Reply",
    "most_peers",
    "new_key_pair",
    "subject",
]
