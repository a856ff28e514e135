"""Names of hosts that can not be resolved: questions to the name server that get no answer, or a refusal."""

from __future__ import annotations

from kintsugi.lab.abilities.fault import Impossible
from kintsugi.lab.abilities.network import PORTS_S, Cut, FilteredLoss

_QUESTIONS = "meta l4proto { tcp, udp } th dport 53"


def _rules(table: str, consequence: str) -> str:
    """On the whole host of the target: questions come from a new port each time, so nobody's are told apart."""
    chain = (
        f"  chain output {{ type filter hook output priority mangle;\n    {_QUESTIONS} {consequence}\n  }}"
    )
    return f"table inet {table} {{\n{chain}\n}}\n"


class LostQuestions(Cut):
    """Questions disappear: whoever asks waits for an answer until it gives up."""

    name = "questions to the name server dropped by a program (NFQUEUE)"
    incoming = False

    def prepare(self) -> None:
        _check(named=self.scene.named)
        super().prepare()

    def rules(self) -> str:
        return _rules(self.table, self.consequence(incoming=False))

    def refresh_ports(self) -> None:
        """Not by the target's ports."""


class RefusedQuestions(FilteredLoss):
    """Questions are refused at once."""

    name = "questions to the name server refused (nftables)"
    words = frozenset()

    def prepare(self) -> None:
        _check(named=self.scene.named)
        super().prepare()

    def rules(self) -> str:
        return _rules(self.table, "counter reject")

    def refresh_ports(self) -> None:
        """Not by the target's ports."""

    def tick(self, strength: float) -> float:
        return PORTS_S


def _check(*, named: bool) -> None:
    if not named:
        raise Impossible(
            "the processes of this run know each other by address, nobody asks for names: "
            "give the run a place with named hosts"
        )
