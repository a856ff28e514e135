from __future__ import annotations

from collections import Counter

import pytest

from kintsugi.config.recipe import load
from kintsugi.errors import UserError
from kintsugi.lab.campaign.cases import EACH, ROLES, Benign, CaseClass, each_once, plan
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.scenarios.experiments import check_faults, experiments_folder
from kintsugi.types import role_of

CONFIG = load(experiments_folder() / "workloads" / "campaign.yaml").config
EVERYTHING = tuple(Ability)


def test_a_plan_of_pairs_has_two_faults_of_different_processes_in_every_case() -> None:
    cases = plan(12, seed=3, config=CONFIG, abilities=EVERYTHING, only=CaseClass.TWO)
    assert [case.what for case in cases] == [CaseClass.TWO] * 12
    for case in cases:
        first, second = case.injections
        assert first.target != second.target
        assert first.ability is not second.ability


def test_a_plan_is_the_same_for_a_seed_and_another_for_another() -> None:
    first = plan(30, seed=1, config=CONFIG, abilities=EVERYTHING)
    assert first == plan(30, seed=1, config=CONFIG, abilities=EVERYTHING)
    assert first != plan(30, seed=2, config=CONFIG, abilities=EVERYTHING)


def test_a_plan_has_faults_pairs_benign_slowness_and_nothing_at_all() -> None:
    counts = Counter(case.what for case in plan(100, seed=3, config=CONFIG, abilities=EVERYTHING))
    assert counts == {
        CaseClass.FAULT: 70,
        CaseClass.TWO: 8,
        CaseClass.BENIGN: 11,
        CaseClass.HEALTHY: 11,
    }


def test_every_fault_of_a_plan_can_be_carried_out_on_its_workload() -> None:
    for case in plan(200, seed=4, config=CONFIG, abilities=EVERYTHING):
        check_faults(case.injections, CONFIG, where=f"case {case.number}")


def test_kinds_and_roles_come_up_evenly() -> None:
    cases = plan(200, seed=5, config=CONFIG, abilities=EVERYTHING)
    hits = Counter(
        (each.ability, role_of(each.target))
        for case in cases
        if case.what is CaseClass.FAULT
        for each in case.injections
    )
    assert set(hits) == {(ability, role) for ability in EVERYTHING for role in ROLES[ability]}


def test_two_faults_at_once_are_of_two_kinds_in_two_processes() -> None:
    for case in plan(300, seed=6, config=CONFIG, abilities=EVERYTHING):
        if case.what is CaseClass.TWO:
            first, second = case.injections
            assert first.target != second.target and first.ability is not second.ability


def test_only_what_the_machine_can_do_is_planned() -> None:
    cases = plan(40, seed=7, config=CONFIG, abilities=(Ability.KILL, Ability.STOP))
    assert {each.ability for case in cases for each in case.injections} == {Ability.KILL, Ability.STOP}


def test_every_kind_of_benign_slowness_comes_up() -> None:
    cases = plan(100, seed=8, config=CONFIG, abilities=EVERYTHING)
    assert {case.benign for case in cases} - {None} == set(Benign)


def test_where_nothing_can_be_injected_there_is_nothing_to_plan() -> None:
    with pytest.raises(UserError, match="kintsugi lab abilities"):
        plan(10, seed=0, config=CONFIG, abilities=())


def test_each_fault_is_tried_once_on_a_process_that_the_run_has_and_the_full_disk_in_a_save() -> None:
    cases = each_once(config=CONFIG, abilities=EVERYTHING, has_accelerator=False)
    assert len(cases) == len(EACH) == 18
    injections = [each for case in cases for each in case.injections]
    check_faults(injections, CONFIG, where="each")
    assert len({(each.ability, each.target) for each in injections}) == 18
    assert {role_of(each.target).value for each in injections if each.ability is Ability.KILL} == {
        "agent", "master", "manager", "model", "rollout", "server"
    }  # fmt: skip
    (full,) = (each for each in injections if each.ability is Ability.DISK_FILL)
    assert full.trigger.phase == "saving"


def test_what_a_machine_can_not_do_is_left_out_and_growth_is_larger_on_an_accelerator() -> None:
    only = each_once(config=CONFIG, abilities=(Ability.GROW, Ability.KILL), has_accelerator=True)
    assert [case.number for case in only] == [1, 2, 3, 4, 5, 6, 7]
    (grow,) = (each for case in only for each in case.injections if each.ability is Ability.GROW)
    assert grow.amount["limit"] > 1e10


def test_a_run_that_never_saves_has_no_full_disk_in_a_save() -> None:
    config = load(experiments_folder() / "workloads" / "campaign.yaml", ["checkpoint.every=0"]).config
    cases = each_once(config=config, abilities=EVERYTHING, has_accelerator=False)
    assert not any(each.ability is Ability.DISK_FILL for case in cases for each in case.injections)
