"""Requests to the store at which the processes of a collective group meet (`transport/store.py`), and its replies."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class StoreOperation(StrEnum):
    """Operations of the store. The last two wait until all keys exist, or until their time is over."""

    SET = "set"
    ADD = "add"
    CHECK = "check"
    COMPARE_AND_SET = "compare_and_set"
    DELETE = "delete"
    COUNT = "count"
    GET = "get"
    AWAIT = "await"


class StoreRequest(msgspec.Struct, frozen=True):
    """One operation: `StoreRequest(3, StoreOperation.SET, ("generation-1/here-0",), b"cpu")`."""

    number: int
    """Number among the requests of its connection; the reply repeats it."""
    operation: StoreOperation
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 0.0
    """How long the store may hold back its reply; only for operations that wait."""


class StoreReply(msgspec.Struct, frozen=True):
    """Reply to one request. `error` is empty unless the operation failed."""

    number: int
    value: bytes = b""
    amount: int = 0
    error: str = ""
