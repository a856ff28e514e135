from __future__ import annotations

import msgspec
import pytest

from kintsugi.lab.report import measures
from kintsugi.lab.report.measures import Share
from kintsugi.lab.scenarios.records import RunsFile


def test_an_interval_holds_the_share_and_never_leaves_0_to_1() -> None:
    for part in range(11):
        low, high = Share(part, 10).interval
        assert 0.0 <= low <= part / 10 <= high <= 1.0
        assert low < high


def test_an_interval_is_wilsons() -> None:
    assert Share(90, 100).interval == pytest.approx((0.8256, 0.9448), abs=1e-4)


def test_a_share_of_nothing_is_not_measured() -> None:
    assert str(Share(0, 0)) == "not measured"


def test_only_time_outs_of_the_fragile_system_are_lengthened(runs: RunsFile) -> None:
    by_name = {(run.scenario, run.profile): run for run in runs.runs}

    assert measures.unscaled(6.0, by_name["S1", "fragile"], scale=600.0) == 3600.0
    assert measures.unscaled(3.0, by_name["S3", "fragile"], scale=600.0) == 30.0
    assert measures.unscaled(7.2, by_name["S1", "fragile"], scale=600.0) == pytest.approx(3601.2)
    assert measures.unscaled(0.1, by_name["S1", "fragile"], scale=600.0) is None
    assert measures.unscaled(6.0, by_name["S2", "fragile"], scale=600.0) is None
    assert measures.unscaled(6.0, by_name["S1", "ours"], scale=600.0) is None


def test_the_last_error_is_right_only_if_it_names_process_and_kind(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S1" and run.profile == "ours")
    said = run.diagnosed
    assert said is not None

    assert measures.says_right(run, said)
    assert not measures.says_right(run, msgspec.structs.replace(said, kind="cpu"))
    assert not measures.says_right(run, msgspec.structs.replace(said, process="model-0"))
    assert not measures.says_right(run, None)


def test_what_was_injected_elsewhere_to_hide_the_cause_is_not_the_cause(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S1" and run.profile == "fragile")
    hiding = msgspec.structs.replace(run.injected[0], target="master-0")
    both = msgspec.structs.replace(run, injected=(*run.injected, hiding))
    assert run.diagnosed is not None

    assert not measures.says_right(both, msgspec.structs.replace(run.diagnosed, process="master-0"))
    assert measures.says_right(both, msgspec.structs.replace(run.diagnosed, process="model-1"))


def test_every_time_is_counted_from_the_fault_that_is_to_be_named(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S5" and run.profile == "fragile")
    first = run.injected[0]
    culprit = msgspec.structs.replace(first, start=first.start + 1.0, culprit=True)
    both = msgspec.structs.replace(run, injected=(first, culprit))
    assert run.surfaced is not None

    assert measures.start_of(run) == first.start, "an older record does not say which"
    assert measures.start_of(both) == first.start + 1.0
    assert measures.error_delay_s(both) == run.surfaced.t - first.start - 1.0


def test_a_run_that_did_not_go_on_was_without_a_step_until_its_error(runs: RunsFile) -> None:
    run = next(run for run in runs.runs if run.scenario == "S1" and run.profile == "fragile")
    start = run.injected[0].start
    assert run.surfaced is not None
    steps = {"timing/step": [(start - 2.0, 1.0), (start - 1.0, 1.0)]}
    stuck = msgspec.structs.replace(run, series=steps)
    slow = {"timing/step": [(start - 1.0, 1.0), (start + 3.0, 4.0), (start + 4.0, 1.0)]}

    assert measures.stalled_s(stuck) == run.surfaced.t - start + 1.0
    assert measures.stalled_s(msgspec.structs.replace(run, series=slow, recovered=True)) == 4.0
    assert measures.stalled_s(msgspec.structs.replace(run, series={})) is None


def test_the_series_that_the_fault_moved_is_the_most_anomalous(runs: RunsFile) -> None:
    run = runs.runs[0]

    assert measures.anomaly(run, "model-1>agent-0 rtt_s") > 100 * measures.anomaly(run, "timing/step") / 2
