"""A rank with weights between two steps never counts as a holder of a step, whatever step it reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kintsugi.errors import RefusedError
from kintsugi.protocol.recovery import BoxCopies, RankReady, RebuildGroup, Repair
from kintsugi.recovery.rank import Flow, Processor

SOUND = RankReady(3, "digest")


class Unsure:
    """Stands as it is told; a repair changes it only where it is told to help."""

    flow = Flow.ROLLBACK

    def __init__(self, standing: RankReady, *, helps: str = "") -> None:
        self._standing = standing
        self._helps = helps
        self.tried: list[str] = []

    def standing(self) -> RankReady:
        return self._standing

    def repair(self, step: int, *, source: str, digest: str) -> None:
        self.tried.append(source)
        if source == self._helps:
            self._standing = SOUND

    def assemble(self, step: int, *, boxes: Sequence[BoxCopies], digest: str, begun: str) -> None: ...
    def stop(self, generation: int) -> None: ...
    def clean(self) -> None: ...
    def rebuild(self, request: RebuildGroup) -> None: ...
    def rollback(self, step: int) -> None: ...


UNFIT = pytest.mark.parametrize(
    "standing",
    [
        RankReady(3, "digest", half_updated=True),
        RankReady(3, "digest", prepared_step=4),
        RankReady(3, "digest", prepared_step=0),
        RankReady(2, "digest"),
        RankReady(3, "another"),
    ],
)


@UNFIT
def test_an_unfit_rank_is_repaired_though_it_seems_to_stand_where_it_should(standing: RankReady) -> None:
    adapter = Unsure(standing, helps="good")
    ready = Processor(adapter).carry_out(Repair(3, ("bad", "good", "unused"), 1, "digest"))
    assert (adapter.tried, ready.source) == (["bad", "good"], "good")


@UNFIT
def test_a_source_that_leaves_the_rank_unfit_is_no_good_source(standing: RankReady) -> None:
    with pytest.raises(RefusedError, match="no source has the state of step 3"):
        Processor(Unsure(standing)).carry_out(Repair(3, ("bad",), 1, "digest"))
