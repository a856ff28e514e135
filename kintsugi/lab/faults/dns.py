"""Failing host name resolution: queries to the name server are dropped or refused."""

from __future__ import annotations

from kintsugi.lab.faults.mechanism import FaultImpossible
from kintsugi.lab.faults.network import PORTS_S, FilteredLoss, NetworkCut

_QUERIES = "meta l4proto { tcp, udp } th dport 53"


def _rules(table: str, consequence: str) -> str:
    """Match the queries of the whole host of the target: every query uses a new port, so processes are not
    distinguished."""
    chain = f"  chain output {{ type filter hook output priority mangle;\n    {_QUERIES} {consequence}\n  }}"
    return f"table inet {table} {{\n{chain}\n}}\n"


class DroppedDnsQueries(NetworkCut):
    """Drops queries: the process that resolves a name waits until its resolver times out."""

    name = "questions to the name server dropped by a program (NFQUEUE)"
    incoming = False

    def prepare(self) -> None:
        _check(named=self.context.named)
        super().prepare()

    def rules(self) -> str:
        return _rules(self.table, self.consequence(incoming=False))

    def refresh_ports(self) -> None:
        """Do nothing: the rules do not match by the target's ports."""


class RefusedDnsQueries(FilteredLoss):
    """Refuses queries immediately."""

    name = "questions to the name server refused (nftables)"
    supported_parameters = frozenset()

    def prepare(self) -> None:
        _check(named=self.context.named)
        super().prepare()

    def rules(self) -> str:
        return _rules(self.table, "counter reject")

    def refresh_ports(self) -> None:
        """Do nothing: the rules do not match by the target's ports."""

    def tick(self, strength: float) -> float:
        return PORTS_S


def _check(*, named: bool) -> None:
    if not named:
        raise FaultImpossible(
            "the processes of this run address each other by IP address and resolve no names: "
            "run it on a testbed with named hosts"
        )
