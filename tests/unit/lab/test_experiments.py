from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kintsugi.config.recipe import Resolved
from kintsugi.config.validation import validate
from kintsugi.control.placement import plan_layout
from kintsugi.errors import UserError
from kintsugi.lab.scenarios import experiments
from kintsugi.lab.scenarios.experiments import Profile

RECIPE = {
    "name": "small",
    "model": {"new": {"hidden_size": 32}},
    "algorithm": {"name": "grpo", "steps": 20},
    "checkpoint": {"every": 5},
}


def written(folder: Path, **changes: Any) -> Path:
    """A valid experiment with some fields different."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    experiment = {
        "name": "mine",
        "title": "a title",
        "about": "why",
        "challenges": ["A"],
        "workload": {"recipe": "recipe.yaml"},
        "faults": [{"ability": "cpu", "target": "rollout-1", "amount": {"share": 0.9}}],
        "cause": {"process": "rollout-1", "kinds": ["cpu"]},
        **changes,
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(experiment))
    return path


def fault(**changes: Any) -> dict[str, Any]:
    return {"ability": "cpu", "target": "rollout-1", **changes}


def link(**changes: Any) -> dict[str, Any]:
    return fault(ability="network_delay", **changes)


INFINITE, NAN = float("inf"), float("nan")
SURFACE = {"stage": "training", "message": "x"}
SFT = {"recipe": "recipe.yaml", "set": {"algorithm.name": "sft"}}


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_of_the_project_is_valid_and_its_workload_too(name: str) -> None:
    loaded = experiments.find(name)
    validate(loaded.config, origins=loaded.resolved.origins)


def test_the_five_scenarios_are_made_on_both_systems() -> None:
    for name in ("S1", "S2", "S3", "S4", "S5"):
        assert experiments.find(name).experiment.profiles == (Profile.OURS, Profile.FRAGILE)


def test_an_experiment_of_ones_own_is_found_by_its_path(tmp_path: Path) -> None:
    loaded = experiments.find(str(written(tmp_path, workload={"recipe": "recipe.yaml", "set": {"seed": 7}})))
    assert (loaded.experiment.name, loaded.config.seed) == ("mine", 7)


def test_an_unknown_experiment_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match="unknown experiment 'S9'; there are S1, S1_loss, S2"):
        experiments.find("S9")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"faults": [fault(target="rollout-7")]}, "no process 'rollout-7'; did you mean rollout-"),
        ({"faults": [fault(target="reward-0")]}, "no process 'reward-0'"),
        ({"faults": [fault(ability="gremlin")]}, "Invalid enum value 'gremlin'"),
        ({"faults": [fault(amount={"percent": 90})]}, "cpu knows share, got percent"),
        ({"faults": [fault(amount={"share": 95})]}, "amount.share: expected a number from 0 to 1, got 95"),
        ({"faults": [fault(duration_s=0)]}, "duration_s: expected seconds above 0, at most 3600, got 0"),
        ({"faults": [fault(peer="model-0")]}, "peer: cpu is done to a process, not to a link"),
        ({"faults": [fault(duration_s=INFINITE)]}, r"duration_s: expected a finite number, got inf"),
        ({"faults": [fault(amount={"share": NAN})]}, r"amount.share: expected a finite number, got nan"),
        ({"workload": {"recipe": "recipe.yaml", "set": {"seed": INFINITE}}}, "expected a finite number"),
        ({"faults": [fault(duration_s=1e5)]}, "at most 3600, got 100000"),
        ({"faults": [fault(ramp_s=20)]}, "ramp_s: expected at most duration_s, which is 10, got 20"),
        ({"faults": [link(port=0)]}, "port: expected 1 to 65535, got 0"),
        ({"faults": [link(port=65536)]}, "port: expected 1 to 65535, got 65536"),
        (
            {"faults": [link(peer="rollout-1")]},
            "peer: expected another process than the target, got 'rollout-1'",
        ),
        (
            {"faults": [link(interface="nosuch0")]},
            "`interface`: expected a network device of the target's host",
        ),
        (
            {"faults": [link(interface="wlan0")], "places": {"isolated_hosts": True}},
            "network device of the target's host (lo, eth0), got 'wlan0'",
        ),
        (
            {"faults": [link(amount={"delay_s": 0.1, "jitter_s": 0.2})]},
            "amount.jitter_s: expected at most delay_s, which is 0.1, got 0.2",
        ),
        (
            {"faults": [fault(ability="memory", amount={"limit": 0})]},
            "amount.limit: expected at least 4194304 bytes, got 0",
        ),
        (
            {"faults": [fault(ability="device_slow", amount={"factor": 0})]},
            "amount.factor: expected a number from 1 to 1000, got 0",
        ),
        ({"places": {"disk_mib": -5}}, "`places.disk_mib`: expected 32 .* to 1048576, got -5"),
        ({"places": {"disk_mib": 8}}, "`places.disk_mib`: expected 32 .* to 1048576, got 8"),
        ({"places": {"disk_mib": 10**9}}, "`places.disk_mib`: expected 32 .* got 1000000000"),
        ({"faults": [fault(trigger={"after_s": 1e4})]}, "after_s: expected seconds not below 0, at most 60"),
        (
            {"cause": {"process": "rolout-1", "kinds": ["cpu"]}},
            "`cause.process`: .* 'rolout-1'; did you mean",
        ),
        ({"cause": {"process": "rollout-1", "kinds": []}}, "`cause.kinds`: expected at least one, got none"),
        ({"challenges": []}, "`challenges`: expected at least one, got none"),
        ({"faults": [fault(expected_phase="trainin")]}, "expected_phase: expected one of .*, got 'trainin'"),
        (
            {"fragile": {"stage": "trainin", "message": "x"}},
            "`fragile.stage`: expected one of .*, got 'trainin'",
        ),
        ({"fragile_faults": [fault()]}, "`fragile_faults`: expected `fragile` with it"),
        (
            {"fragile": SURFACE, "fragile_faults": [fault(target="server-0")]},
            "`fragile_faults`.0..target: the workload has no process 'server-0'",
        ),
        (
            {"fragile": SURFACE, "faults": [fault(target="manager-0")]},
            "`faults`.0..target: the workload has no process 'manager-0'",
        ),
        ({"contrast_of": "S77"}, "`contrast_of`: expected an experiment .*, got 'S77'"),
        (
            {"contrast_of": "S2", "workload": SFT},
            "`faults`.0..target: the workload has no process 'rollout-1'",
        ),
        (
            {"faults": [fault(trigger={"phase": "recovering"})]},
            "trigger.phase: expected another fault that brings a recovery about .* alone: impossible",
        ),
        ({"faults": [fault(ramp_s=-1)]}, "ramp_s: expected seconds not below 0, at most 3600, got -1"),
        ({"faults": [fault(port=80)]}, "port: cpu is done to a process, not to a link"),
        (
            {"faults": [fault(ability="corrupt", peer="model-0")]},
            "corrupt is done to a process, not to a link",
        ),
        (
            {"faults": [fault(trigger={"after_s": -1})]},
            "after_s: expected seconds not below 0, at most 60, got -1",
        ),
        (
            {"faults": [fault(trigger={"timeout_s": 0})]},
            "timeout_s: expected seconds above 0, at most 3600, got 0",
        ),
        ({"faults": [fault(ability="dns")]}, "dns needs `places.named_hosts`"),
        ({"faults": [fault(ability="disk_fill")]}, "disk_fill needs `places.disk_mib`"),
        ({"places": {"named_hosts": True}}, "expected `isolated_hosts: true` with it"),
        ({"faults": [fault(trigger={"step": 21})]}, "has the steps 1 to 20, got 21: impossible"),
        ({"faults": [fault(trigger={"step": 9})]}, "expected 13 or later, got 9"),
        ({"faults": [fault(trigger={"phase": "sleeping"})]}, "expected one of collecting, training"),
        (
            {"faults": [fault(trigger={"phase": "saving", "step": 18})]},
            "after every 5 steps, not before step 18",
        ),
        ({"faults": [fault(trigger={"event": "("})]}, "expected a regular expression"),
        ({"faults": []}, "expected at least one"),
        ({"fautls": []}, "unknown field `fautls`"),
        ({"name": "yours"}, "expected 'mine' as the file is called, got 'yours'"),
    ],
)
def test_what_can_not_be_carried_out_is_refused_and_named(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says.replace("(", r"\(").replace(")", r"\)")):
        experiments.read(written(tmp_path, **changes))


def test_a_fragile_system_may_have_processes_of_its_own(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        fragile={"stage": "training", "message": "x"},
        fragile_faults=[{"ability": "network_delay", "target": "master-0", "peer": "scheduler-0"}],
    )
    experiment = experiments.read(path).experiment
    assert experiment.faults_in(Profile.FRAGILE)[0].peer == "scheduler-0"
    assert experiment.faults_in(Profile.OURS)[0].target == "rollout-1"


def test_a_recovery_that_another_fault_brings_about_may_be_waited_for(tmp_path: Path) -> None:
    faults = [fault(ability="kill"), fault(target="model-0", trigger={"phase": "recovering"})]
    assert len(experiments.read(written(tmp_path, faults=faults)).experiment.faults) == 2


def test_a_contrast_is_judged_by_the_same_kinds_as_what_it_is_the_contrast_of() -> None:
    for name in experiments.names():
        contrast = experiments.find(name).experiment
        if contrast.contrast_of:
            original = experiments.find(contrast.contrast_of).experiment
            assert contrast.cause.kinds == original.cause.kinds, name
            abilities = [{each.ability for each in one.faults} for one in (contrast, original)]
            assert abilities[0] <= abilities[1], name


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + b"# \xff\n")
    with pytest.raises(UserError, match=r"mine\.yaml: expected a text file in UTF-8"):
        experiments.read(path)


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: [1")
    with pytest.raises(UserError, match=r"mine\.yaml: expected YAML"):
        experiments.read(path)


def elsewhere(name: str, *, num_machines: int) -> experiments.LoadedExperiment:
    """Return an experiment whose hosts beside the launcher's are other machines."""

    def place(resolved: Resolved) -> Resolved:
        slots = (0, *[1] * num_machines)
        cluster = msgspec.structs.replace(resolved.config.cluster, hosts=1 + num_machines, slots=slots)
        return msgspec.structs.replace(
            resolved, config=msgspec.structs.replace(resolved.config, cluster=cluster)
        )

    return experiments.placed_elsewhere(experiments.find(name), Profile.OURS, on="hosts.txt", place=place)


@pytest.mark.parametrize("num_machines", [2, 3])
@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("S1", [("model-1", "agent-0")]),
        ("S2", [("rollout-1", None), ("rollout-1", None)]),
        ("S3", [("model-1", None), ("master-0", "agent-2")]),
        ("S4", [("server-0", "agent-1")]),
        ("S5", [("agent-0", None), ("agent-0", None)]),
        ("node_loss", [("agent-1", None)]),
    ],
)
def test_on_other_machines_a_fault_is_of_the_same_link_and_the_disk_is_that_of_the_run(
    name: str, links: list[tuple[str, str | None]], num_machines: int
) -> None:
    placed = elsewhere(name, num_machines=num_machines)
    assert [(fault.target, fault.peer) for fault in placed.experiment.faults] == links
    assert not placed.experiment.places.isolated_hosts
    assert placed.experiment.places.disk_mib == experiments.find(name).experiment.places.disk_mib


def test_processes_that_share_a_device_are_on_one_of_the_other_machines() -> None:
    hosts = {plan.process: plan.host for plan in plan_layout(elsewhere("S4", num_machines=3).config)}
    assert {hosts[process] for process in ("model-0", "server-0", "rollout-0")} == {"host-1"}
