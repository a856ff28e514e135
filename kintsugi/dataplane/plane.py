"""The master's side: plans every batch, and learns from what the ranks say it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kintsugi.dataplane.cost import Links, Load, Timing
from kintsugi.dataplane.plan import Plan, choose_plan
from kintsugi.transfers import Transfer
from kintsugi.types import LogicalShard, Role, role_of

SHORTEST_S = 1e-5
"""What is taken for no time at all."""


class DataPlane:
    """What was measured so far, and which kind of plan is in use. A new master begins anew with what is assumed."""

    def __init__(self, *, bytes_per_s: float | None = None) -> None:
        """`bytes_per_s` is what one host may take from others at most."""
        self.links = Links()
        self._bytes_per_s = bytes_per_s
        self._last = ""

    def plan(
        self, shards: Sequence[LogicalShard], *, ranks: Sequence[str], hosts: Mapping[str, str]
    ) -> tuple[Plan, bool]:
        """The plan of a batch, and whether it is of another kind than the last one."""
        plan = choose_plan(
            shards,
            ranks=ranks,
            hosts=hosts,
            links=self.links,
            last=self._last,
            bytes_per_s=self._bytes_per_s,
        )
        changed = plan.name != self._last
        self._last = plan.name
        return plan, changed

    def learn(self, plan: Plan, transfers: Mapping[str, Sequence[Transfer]]) -> dict[str, float]:
        """Take in what the ranks measured in a step; gives its figures, none where nothing was fetched."""
        every = [transfer for sent in transfers.values() for transfer in sent]
        if not every:
            return {}
        fetched: dict[tuple[str, str], list[Transfer]] = {}
        passed_on: dict[str, list[Transfer]] = {}
        for rank, sent in transfers.items():
            for transfer in sent:
                host = plan.hosts[rank]
                if role_of(transfer.source) is Role.MODEL:
                    passed_on.setdefault(host, []).append(transfer)
                else:
                    fetched.setdefault((plan.hosts[transfer.source], host), []).append(transfer)
        for (source, target), parts in fetched.items():
            self.links.streamed(source, target, timing=_together(parts))
        for host, parts in passed_on.items():
            entered = [
                part.seconds for (_, target), sent in fetched.items() if target == host for part in sent
            ]
            self.links.passed_on(host, timing=_together(parts, after_s=max(entered, default=0.0)))
        remote = [part for (source, target), sent in fetched.items() if source != target for part in sent]
        return {
            "dataplane/bytes": float(sum(part.size for sent in fetched.values() for part in sent)),
            "dataplane/bytes_between_hosts": float(sum(part.size for part in remote)),
            "dataplane/bytes_passed_on": float(
                sum(part.size for sent in passed_on.values() for part in sent)
            ),
            "dataplane/seconds": max(transfer.seconds for transfer in every),
            "dataplane/estimated_seconds": plan.estimated_s,
            "dataplane/repeated": float(sum(transfer.repeated for transfer in every)),
        }


def _together(parts: Sequence[Transfer], *, after_s: float = 0.0) -> Timing:
    """Transfers that shared a link, as one load of it. The ranks begin at about the same time; requests count at the
    process that had to answer most. `after_s`: they could not begin before."""
    requests: dict[str, int] = {}
    for part in parts:
        requests[part.source] = requests.get(part.source, 0) + part.requests
    first = min(parts, key=lambda part: part.first_s)
    return Timing(
        Load(max(requests.values()), sum(part.size for part in parts)),
        max(SHORTEST_S, max(part.seconds for part in parts) - after_s),
        first.size // first.requests,
        max(SHORTEST_S, first.first_s - after_s),
    )
