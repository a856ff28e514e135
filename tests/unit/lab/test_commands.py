from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kintsugi.cli.hosts import placed
from kintsugi.cli.lab import app
from kintsugi.errors import UserError
from kintsugi.lab import commands, probing
from kintsugi.lab.faults import network
from kintsugi.lab.faults.catalogue import MECHANISMS
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.scenarios.experiments import Profile, TestbedSpec, experiments_folder
from kintsugi.lab.testbed import hosts, remote_hosts, tools

DELAYS = [mechanism.name for mechanism in MECHANISMS[Ability.NETWORK_DELAY]]


def names_of(*arguments: str, profile: str = "both") -> list[tuple[str, Profile]]:
    return [(loaded.experiment.name, each) for loaded, each in commands.chosen(arguments, profile=profile)]


def test_both_systems_are_the_rule_and_one_can_be_chosen() -> None:
    assert names_of("S1", "S2") == [
        ("S1", Profile.OURS),
        ("S1", Profile.FRAGILE),
        ("S2", Profile.OURS),
        ("S2", Profile.FRAGILE),
    ]
    assert names_of("S3", profile="fragile") == [("S3", Profile.FRAGILE)]
    assert names_of("sft_S1", profile="ours") == [("sft_S1", Profile.SFT)]


def test_an_unknown_experiment_and_an_unknown_profile_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "lab"
    for names, profile in ((["S7"], "both"), (["S1"], "robust")):
        with pytest.raises(UserError, match=r"unknown experiment|--profile: expected both, ours, fragile"):
            commands.run_experiments(names, profile=profile, folder=folder, json=None, say=lambda line: None)
    assert not folder.exists()


def test_an_experiment_that_was_asked_for_twice_is_refused() -> None:
    with pytest.raises(UserError, match="every experiment once, got S1 twice"):
        names_of("S1", "S2", "S1")


def test_without_root_an_experiment_says_what_it_needs_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hosts, "missing", lambda: "expected root, to make network namespaces")
    folder = tmp_path / "lab"
    with pytest.raises(UserError, match="root"):
        commands.run_experiments(["S4"], profile="ours", folder=folder, json=None, say=lambda line: None)
    assert not folder.exists()


def test_without_root_a_campaign_says_what_it_needs_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    folder = tmp_path / "campaign"
    with pytest.raises(UserError, match="campaign: hosts of their own can not be made here: expected root"):
        commands.run_campaign(3, seed=0, folder=folder, json=None, say=lambda line: None)
    assert not folder.exists()


def test_a_program_that_is_missing_and_a_disk_that_does_not_fit_are_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UserError, match=r"expected at most what is free in .*, got 1000000000"):
        commands.check_places(TestbedSpec(disk_mib=10**9), name="mine", folder=tmp_path / "new" / "lab")
    monkeypatch.setattr(tools, "has", lambda program: program != "mount")
    with pytest.raises(
        UserError, match="mine: a disk of its own can not be mounted here: mount not installed"
    ):
        commands.check_places(TestbedSpec(disk_mib=64), name="mine", folder=None)


def test_a_fault_of_packets_without_hosts_of_their_own_is_refused_where_the_mechanism_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(probing, "_found", dict.fromkeys(DELAYS))
    monkeypatch.setattr(network, "queue_rule", lambda: "iptables")
    text = Path(experiments_folder(), "S1.yaml").read_text()
    text = text.replace("isolated_hosts: true", "isolated_hosts: false").replace("name: S1", "name: mine")
    text = text.replace("workloads/grpo.yaml", str(experiments_folder() / "workloads" / "grpo.yaml"))
    (tmp_path / "mine.yaml").write_text(text)
    names = [str(tmp_path / "mine.yaml")]
    with pytest.raises(UserError, match="only on hosts of their own"):
        commands.run_experiments(
            names, profile="ours", folder=tmp_path / "lab", json=None, say=lambda line: None
        )
    assert not (tmp_path / "lab").exists()


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist yet"):
        commands.new_folder(tmp_path, name="lab", json=None)


def test_the_list_names_every_experiment_with_its_faults() -> None:
    shown = CliRunner().invoke(app, ["lab", "list"]).output
    assert "S1" in shown and "network_delay on model-1" in shown and "sft_S5" in shown


def test_where_a_result_can_not_be_written_is_told_before_anything_is_made(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with pytest.raises(UserError, match="can not be written"):
        commands.new_folder(tmp_path / "new", name="lab", json=blocked / "result.json")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "it needs hosts that resolve names"),
        (
            {"places": {"disk_mib": 64}, "faults": [{"ability": "disk_error", "target": "server-0"}]},
            "disk_error is",
        ),
    ],
)
def test_an_experiment_that_needs_this_machine_is_refused_by_name_on_others(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    folder = experiments_folder()
    own = yaml.safe_load((folder / "S4_dns.yaml").read_text())
    own["workload"]["recipe"] = str(folder / own["workload"]["recipe"])
    own = {key: value for key, value in (own | {"name": "mine"} | changes).items() if key != "fragile"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    with pytest.raises(UserError, match=f"mine: --on hosts.txt: {why}"):
        run_on("hosts.txt", str(tmp_path / "mine.yaml"))


def run_on(hosts_file: str, *names: str) -> bool:
    """Run experiments on other machines."""
    return commands.run_experiments(
        [*names, "cluster.address=198.51.100.1"],
        profile="ours",
        folder=None,
        json=None,
        say=lambda line: None,
        on=hosts_file,
        place=placed,
    )


def test_an_experiment_whose_fault_a_machine_can_not_inject_is_refused_with_machine_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts_file = tmp_path / "hosts.txt"
    hosts_file.write_text("a 198.51.100.2\nb 198.51.100.3\n")
    why = "network_delay can not be done on this machine: expected CAP_NET_ADMIN"
    refuses = ["sh", "-c", f"""while read order; do echo '{{"why": "{why}"}}'; done"""]
    commands_of = dict.fromkeys(("host-1", "host-2"), refuses)
    monkeypatch.setattr(remote_hosts, "commands_of", lambda config: commands_of)
    with pytest.raises(UserError) as refused:
        run_on(str(hosts_file), "S1", "node_loss", "S4")
    assert str(refused.value).splitlines() == [
        f"S1: --on {hosts_file}: host-2: {why}",
        f"S4: --on {hosts_file}: host-1: {why}",
        "without them: node_loss",
    ]


def test_the_fragile_system_and_an_engine_without_machines_are_refused_by_name() -> None:
    for names, profile, on, why in (
        (["S2"], "fragile", "hosts.txt", "the fragile system runs on one machine"),
        (["node_loss"], "ours", "slurm", "--on slurm: expected an allocation"),
    ):
        with pytest.raises(UserError, match=why):
            commands.run_experiments(
                names, profile=profile, folder=None, json=None, say=lambda line: None, on=on
            )
