"""Segments that were damaged on their way. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kintsugi.diagnosis.evidence import EvidenceBundle
from kintsugi.diagnosis.findings import Finding, intervals
from kintsugi.diagnosis.verdict import Evidence, FaultKind
from kintsugi.run_folder.layout import RELATIVE

GAP_S = 10.0
"""Samples with wrong checksums this close to each other are one finding: only a part of the segments is damaged."""
LEAST_MOMENTS = 2
"""Samples, a second apart, in which a host counted wrong checksums."""


def damaged_on_the_way(bundle: EvidenceBundle, *, since: float, until: float) -> Iterator[Finding]:
    """Yield hosts that segments reach with a wrong checksum. The kernel drops and counts them; to the sender they are
    lost. The checksum is also of the addresses, so the kernel can not tell from which connection they are."""
    for host, tracks in bundle.hosts.items():
        if "checksum_errors" not in tracks or host not in bundle.observer_of:
            continue
        bad = [point for point in tracks["checksum_errors"].points(since, until) if point[1] > 0]
        for group in intervals(bad, gap_s=GAP_S):
            if len(group) < LEAST_MOMENTS:
                continue
            agent = bundle.observer_of[host]
            most = max(value for _, value in group)
            what = f"up to {most:.1f} segments a second reach its host with a wrong checksum"
            yield Finding(
                process=agent,
                kind=FaultKind.CORRUPTION,
                onset=group[0][0] - 1.0,
                until=group[-1][0],
                strength=0.85,
                what=what,
                evidence=(Evidence(str(RELATIVE.readings_file(agent)), group[-1][0], f"{host}: {what}"),),
                is_fact=True,
                of_host=True,
                rules_out=("a loss: the segments arrived, with other bytes",),
            )
