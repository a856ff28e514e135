"""Transfer planner of the master: plans every batch and corrects its estimates by the measurements of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kintsugi.dataplane.link_cost import LinkCosts, LinkLoad, TransferTiming
from kintsugi.dataplane.plan import TransferPlan, choose_plan
from kintsugi.protocol.sample_transfer import Transfer
from kintsugi.types import LogicalShard, Role, role_of

SHORTEST_S = 1e-5
"""Lower bound of measured times."""


class TransferPlanner:
    """Link costs measured so far, and the kind of plan in use. A new master starts from the assumptions."""

    def __init__(self, *, bytes_per_s: float | None = None) -> None:
        """`bytes_per_s` limits the samples that one host receives from others."""
        self.links = LinkCosts()
        self._bytes_per_s = bytes_per_s
        self._last = ""

    def plan(
        self,
        shards: Sequence[LogicalShard],
        *,
        ranks: Sequence[str],
        hosts: Mapping[str, str],
        model_ranks: int = 1,
    ) -> tuple[TransferPlan, bool]:
        """Plan a batch; also return whether the plan is of another kind than the last one. `model_ranks` ranks in a
        row compute the same samples."""
        plan = choose_plan(
            shards,
            ranks=ranks,
            hosts=hosts,
            links=self.links,
            last=self._last,
            bytes_per_s=self._bytes_per_s,
            model_ranks=model_ranks,
        )
        changed = plan.name != self._last
        self._last = plan.name
        return plan, changed

    def learn(self, plan: TransferPlan, transfers: Mapping[str, Sequence[Transfer]]) -> dict[str, float]:
        """Record the measurements of a step; return its metrics, none if nothing was fetched."""
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


def _together(parts: Sequence[Transfer], *, after_s: float = 0.0) -> TransferTiming:
    """Combine transfers over one link into one load. The ranks start at about the same time; requests count at the
    process that had to answer most. `after_s`: earliest possible start of the transfers."""
    requests: dict[str, int] = {}
    for part in parts:
        requests[part.source] = requests.get(part.source, 0) + part.requests
    first = min(parts, key=lambda part: part.first_s)
    return TransferTiming(
        LinkLoad(max(requests.values()), sum(part.size for part in parts)),
        max(SHORTEST_S, max(part.seconds for part in parts) - after_s),
        first.size // first.requests,
        max(SHORTEST_S, first.first_s - after_s),
    )
