from __future__ import annotations

import pytest

from kintsugi.diagnosis.verdict import Cause, FaultKind, Hop
from kintsugi.lab.campaign import scoring
from kintsugi.lab.campaign.scoring import (
    ExpectedCause,
    ScoredAnswer,
    expected_cause,
    is_right_path,
    num_hops,
    row,
    score,
)
from kintsugi.lab.faults.catalogue import MECHANISMS, shares_memory
from kintsugi.lab.injector.injection import Ability

HOSTS = {"model-0": "host-0", "model-1": "host-1", "server-1": "host-1"}


def cause(process: str, kind: FaultKind, *, onset: float = 10.0, path: tuple[str, ...] = ()) -> Cause:
    return Cause(
        process=process,
        host="",
        kind=kind,
        onset=onset,
        confidence=0.9,
        summary="",
        path=tuple(Hop(each, "", onset) for each in path or (process, "master-0")),
        evidence=(),
    )


def slow_link() -> ExpectedCause:
    return expected_cause(Ability.NETWORK_DELAY, target="model-1", start=10.0, host_of=HOSTS)


@pytest.mark.parametrize("ability", Ability)
def test_every_ability_has_a_kind_by_which_it_is_found(ability: Ability) -> None:
    assert scoring.KINDS[ability]


def test_a_right_cause_names_the_process_and_the_kind() -> None:
    right = score([cause("model-1", FaultKind.NETWORK_DELAY)], [slow_link()], t=12.5, start=10.0)
    assert (right.top1, right.top3, right.path, right.onset_error_s, right.verdict_s) == (
        True,
        True,
        True,
        0.0,
        2.5,
    )


@pytest.mark.parametrize(
    "said", [cause("model-0", FaultKind.NETWORK_DELAY), cause("model-1", FaultKind.NETWORK_LOSS)]
)
def test_the_right_kind_of_another_process_and_another_kind_of_the_right_one_are_wrong(said: Cause) -> None:
    assert not score([said], [slow_link()], t=11.0, start=10.0).top1


def test_a_cause_in_second_place_is_among_the_first_three_and_not_the_first() -> None:
    said = [cause("server-0", FaultKind.CPU), cause("model-1", FaultKind.NETWORK_DELAY)]
    scored = score(said, [slow_link()], t=11.0, start=10.0)
    assert (scored.top1, scored.top3) == (False, True)


def test_of_two_faults_one_has_to_be_first_and_whether_both_are_named_is_told() -> None:
    both = [slow_link(), expected_cause(Ability.CPU, target="rollout-0", start=10.0, host_of=HOSTS)]
    one = [cause("rollout-0", FaultKind.CPU)]
    assert score(one, both, t=11.0, start=10.0).top1
    assert not score(one, both, t=11.0, start=10.0).every
    two = [*one, cause("model-1", FaultKind.NETWORK_DELAY)]
    assert score(two, both, t=11.0, start=10.0).every
    assert score(one, both, t=11.0, start=10.0, at_the_end=two).every
    assert not score(two, both, t=11.0, start=10.0, at_the_end=one).every


def test_a_full_disk_is_found_at_whoever_uses_it_and_a_broken_name_service_at_its_host() -> None:
    full = expected_cause(Ability.DISK_FILL, target="model-1", start=0.0, host_of=HOSTS)
    assert full.processes == {"model-0", "model-1", "server-1"}
    nameless = expected_cause(Ability.DNS, target="model-1", start=0.0, host_of=HOSTS)
    assert nameless.processes == {"model-1", "server-1"}


def test_naming_a_cause_where_there_is_none_is_a_misdiagnosis() -> None:
    quiet = score([cause("model-1", FaultKind.CPU)], [], t=11.0, start=10.0)
    assert quiet.said and not quiet.top1 and not quiet.top3
    assert score([], [], t=None, start=10.0) == ScoredAnswer(said=False)


@pytest.mark.parametrize(
    ("path", "right"),
    [
        (("model-1", "agent-0", "server-0", "master-0"), True),
        (("model-1", "model-0", "master-0"), True),
        (("model-0", "master-0"), False),  # does not begin with who did it
        (("model-1",), False),  # says nothing of how it showed
        (("model-1", "agent-0", "server-0"), False),  # ends with somebody whom nobody looks at
        (("model-1", "agent-0", "step 14"), True),  # ends with what is no process
        (("model-1", "master-0", "model-1"), False),  # goes in a circle
        (("model-1", "rollout-0", "master-0"), False),  # nobody who samples waits for a rank
        ((), False),
    ],
)
def test_a_path_goes_from_the_culprit_along_who_waits_for_whom(path: tuple[str, ...], right: bool) -> None:
    assert is_right_path([Hop(each, "", 0.0) for each in path], cause="model-1") is right


def test_of_two_faults_the_path_begins_with_the_one_that_was_named() -> None:
    both = [slow_link(), expected_cause(Ability.CPU, target="rollout-0", start=10.0, host_of=HOSTS)]
    crossed = cause("model-1", FaultKind.NETWORK_DELAY, path=("rollout-0", "master-0"))
    assert not score([crossed], both, t=11.0, start=10.0).path


def test_hops_are_counted_between_processes() -> None:
    assert num_hops(["model-1", "model-1", "agent-0", "server-0"]) == 2
    assert num_hops([]) == 0


def test_a_table_row_adds_up_right_wrong_and_silent() -> None:
    faulty = [
        ScoredAnswer(said=True, top1=True, top3=True, path=True, onset_error_s=0.5, verdict_s=2.0),
        ScoredAnswer(said=True, verdict_s=4.0),
        ScoredAnswer(said=False),
    ]
    quiet = [ScoredAnswer(said=False), ScoredAnswer(said=True)]
    summed = row(faulty, quiet)
    assert (summed.cases, summed.top1, summed.abstained) == (3, 1 / 3, 0.5)
    assert summed.misdiagnosed == 2 / 5
    assert (summed.onset_error_s, summed.verdict_s) == (0.5, 3.0)


def test_a_table_without_cases_has_no_shares_and_does_not_fail() -> None:
    nothing = row([], [])
    assert (nothing.verdict_s, nothing.top1, nothing.abstained, nothing.misdiagnosed) == (None,) * 4


def test_bytes_of_shared_memory_are_found_at_every_process_that_has_it_mapped() -> None:
    hosts = {**HOSTS, "rollout-1": "host-1"}
    (mechanism,) = [each for each in MECHANISMS[Ability.CORRUPT] if each.shares_memory]
    assert shares_memory(Ability.CORRUPT, mechanism.name)
    inverted = expected_cause(
        Ability.CORRUPT, target="server-1", start=0.0, host_of=hosts, shares_memory=True
    )
    assert inverted.processes == {"model-1", "server-1"}
    other = expected_cause(Ability.CORRUPT, target="server-1", start=0.0, host_of=hosts)
    assert other.processes == {"server-1"}


def test_a_neighbour_on_an_accelerator_is_found_at_every_rank_and_server_of_its_host() -> None:
    hosts = {**HOSTS, "rollout-1": "host-1"}
    full = expected_cause(
        Ability.DEVICE_MEMORY, target="model-1", start=0.0, host_of=hosts, shares_device=True
    )
    assert full.processes == {"model-1", "server-1"}
