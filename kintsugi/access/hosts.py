"""The Host header of a request: a page of another origin must not reach a local server by a name of its own (DNS
rebinding)."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on is reachable from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("")
    (True, True, False, False)
    """
    if host.lower() in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_known_host(header: str | None, *, allowed: Collection[str] = ()) -> bool:
    """Tell whether a Host header names this machine: an address, localhost, its own name, or one of `allowed`.

    Rebinding needs a name that the attacker controls, so addresses are harmless. Browsers always send the header.
    """
    if header is None:
        return True
    name = _without_port(header).lower().rstrip(".")
    if name in LOOPBACK_NAMES or name.endswith(".localhost") or name in {each.lower() for each in allowed}:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        own = socket.gethostname().lower()
        return name in {own, own.partition(".")[0]}
    return True


def _without_port(header: str) -> str:
    """`_without_port("[::1]:80") == "[::1]"`, `_without_port("a:80") == "a"`."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]
