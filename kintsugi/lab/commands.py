"""Implementation of the `kintsugi lab` commands: validate the request before anything starts, execute, write the
result."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from kintsugi.config.recipe import Resolved, load
from kintsugi.config.schema import Config
from kintsugi.errors import UserError
from kintsugi.lab.injector.injection import Ability
from kintsugi.lab.scenarios import experiments
from kintsugi.lab.scenarios.experiments import LoadedExperiment, Profile, TestbedSpec
from kintsugi.lab.scenarios.records import CAMPAIGN_FILE, check_writable, write_json
from kintsugi.run_folder.creation import create_run_dir, next_run_dir

Say = Callable[[str], None]

BOTH = "both"
CAMPAIGN = "workloads/campaign.yaml"
ENDLESS_STEPS = 100_000
RIGHT_SHARE = 14 / 16
"""Share of right answers that is expected where each fault is tried once."""
FIELD = re.compile(r"[a-z_]+(\.\w+)+=")
"""Begin of an override among names of experiments."""
CAMPAIGN_PLACES = TestbedSpec(isolated_hosts=True, named_hosts=True, disk_mib=2048)


def chosen(names: Sequence[str], *, profile: str) -> list[tuple[LoadedExperiment, Profile]]:
    """Select experiments and systems; UserError for invalid names, profiles and files."""
    wanted = [BOTH, Profile.OURS.value, Profile.FRAGILE.value]
    if profile not in wanted:
        raise UserError(f"--profile: expected {', '.join(wanted)}, got {profile!r}")
    if not names:
        raise UserError("expected the name of an experiment, got none (see `kintsugi lab list`)")
    found: list[tuple[LoadedExperiment, Profile]] = []
    for name in names:
        loaded = experiments.find(name)
        if any(loaded.experiment.name == other.experiment.name for other, _ in found):
            raise UserError(f"expected every experiment once, got {loaded.experiment.name} twice")
        profiles = [
            each
            for each in loaded.experiment.profiles
            if profile == BOTH or each == profile or each is Profile.SFT
        ]
        if not profiles:
            raise UserError(f"{name} is not made on the {profile} system")
        found += [(loaded, each) for each in profiles]
    return found


def new_folder(folder: Path | None, *, name: str, json: Path | None) -> Path:
    """Create the folder of a command; `json` is checked to be writable before the work starts."""
    if json is not None:
        check_writable(json)
    folder = (folder or next_run_dir(name)).resolve()
    create_run_dir(folder)
    return folder


def run_experiments(
    names: Sequence[str],
    *,
    profile: str,
    folder: Path | None,
    json: Path | None,
    say: Say,
    on: str | None = None,
    place: Callable[[Resolved], Resolved] = lambda resolved: resolved,
) -> bool:
    """Run experiments, with `on` on other machines; return whether all results are as their files expect. Names of the
    form FIELD=VALUE are fields of `cluster`, for `on`."""
    from kintsugi.lab.scenarios.runner import run_all
    from kintsugi.lab.testbed.remote_hosts import check_reach

    overrides = [name for name in names if FIELD.match(name)]
    _check_overrides(overrides, on=on)
    pairs = chosen([name for name in names if name not in overrides], profile=profile)
    if on is not None:
        pairs = [
            (experiments.placed_elsewhere(loaded, each, on=on, place=place, overrides=overrides), each)
            for loaded, each in pairs
        ]
        check_reach(pairs[0][0].config)
        _check_abilities_elsewhere([loaded for loaded, _ in pairs], on=on)
    else:
        _check_abilities(pairs)
    for loaded, _ in pairs:
        check_places(loaded.experiment.places, name=loaded.experiment.name, folder=folder)
    folder = new_folder(folder, name="lab", json=json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = run_all(pairs, folder=folder, say=say)
    if json is not None:
        write_json(result, json)
    unexpected = [f"{record.scenario} ({record.profile})" for record in result.runs if not record.as_expected]
    say(f"{folder}: `kintsugi lab report {folder}` writes the report")
    if unexpected:
        say(f"not as expected: {', '.join(unexpected)}")
    return not unexpected


def _check_overrides(overrides: Sequence[str], *, on: str | None) -> None:
    """Raise UserError for a field that an experiment has decided: what is expected of it holds for its workload."""
    for override in overrides:
        if on is None or not override.startswith("cluster."):
            raise UserError(
                f"{override}: expected the name of an experiment, or with --on a field of `cluster`; other fields are "
                "those of its file"
            )


def _check_abilities(pairs: Sequence[tuple[LoadedExperiment, Profile]]) -> None:
    """Raise UserError for faults that this machine can not inject, before the first experiment starts."""
    from kintsugi.lab.injector.checks import NETWORK
    from kintsugi.lab.probing import choose

    for loaded, profile in pairs:
        name, places = loaded.experiment.name, loaded.experiment.places
        try:
            for fault in loaded.experiment.faults_in(profile):
                # Without isolated hosts, the run is in the network namespace of this process.
                shared = fault.ability in NETWORK and not places.isolated_hosts
                choose(fault, pid=os.getpid() if shared else None)
        except UserError as error:
            raise UserError(f"{name}: {error} (see `kintsugi lab abilities`)") from error


def _check_abilities_elsewhere(chosen: Sequence[LoadedExperiment], *, on: str) -> None:
    """Raise UserError with the machine and the reason for every experiment with a fault that can not be injected there,
    before anything starts; it names those that can be made."""
    refused = {loaded.experiment.name: why for loaded in chosen if (why := _refusal_elsewhere(loaded))}
    if not refused:
        return
    others = [loaded.experiment.name for loaded in chosen if loaded.experiment.name not in refused]
    lines = [f"{name}: --on {on}: {why}" for name, why in refused.items()]
    raise UserError("\n".join([*lines, *([f"without them: {' '.join(others)}"] if others else [])]))


def _refusal_elsewhere(loaded: LoadedExperiment) -> str:
    """Return which machine can not have a fault of an experiment, and why; empty if all can."""
    from kintsugi.control.placement import plan_layout
    from kintsugi.lab.injector.checks import NETWORK
    from kintsugi.lab.probing import choose
    from kintsugi.lab.testbed.remote_hosts import HERE, refusals

    hosts = {plan.process: plan.host for plan in plan_layout(loaded.config)}
    faults = [(hosts[fault.target], fault) for fault in loaded.experiment.faults]
    try:
        for host, fault in faults:
            if host == HERE:
                choose(fault, pid=os.getpid() if fault.ability in NETWORK else None, may_share_network=True)
    except UserError as error:
        return f"{HERE}: {error}"
    found = refusals(loaded.config, [(host, fault) for host, fault in faults if host != HERE])
    return "; ".join(f"{host}: {why}" for host, why in found.items())


def check_places(places: TestbedSpec, *, name: str, folder: Path | None) -> None:
    """Raise UserError for hosts and disks that this machine can not provide."""
    from kintsugi.lab.testbed import hosts
    from kintsugi.lab.testbed.testbed import missing_for_disk

    if places.isolated_hosts and (why := hosts.missing()) is not None:
        raise UserError(f"{name}: hosts of their own can not be made here: {why}")
    if places.disk_mib is None:
        return
    if (why := missing_for_disk()) is not None:
        raise UserError(f"{name}: a disk of its own can not be mounted here: {why}")
    path = next(path for path in ((folder or Path()) / "new").resolve().parents if path.exists())
    free_mib = shutil.disk_usage(path).free >> 20
    if places.disk_mib > free_mib:
        raise UserError(
            f"{name}: `places.disk_mib`: expected at most what is free in {path}, {free_mib}, got {places.disk_mib}"
        )


def run_campaign(
    count: int,
    *,
    seed: int,
    folder: Path | None,
    json: Path | None,
    say: Say,
    recipe: Path | None = None,
    overrides: Sequence[str] = (),
    each: bool = False,
    pairs: bool = False,
    disk_folder: Path | None = None,
) -> bool:
    """Run a campaign on its own workload or on any recipe, with random cases, `pairs` of faults only or `each` fault
    once; return whether the diagnosis was right often enough for `each`."""
    from kintsugi.lab.campaign.campaign import Campaign
    from kintsugi.lab.campaign.cases import CaseClass, each_once, plan
    from kintsugi.lab.campaign.records import num_right, table_lines
    from kintsugi.lab.faults.cuda import FullGpuMemory

    if each and pairs:
        raise UserError("expected --each or --pairs, got both")
    config, places = _campaign_workload(recipe, overrides, disk_folder=disk_folder)
    able = _campaign_abilities(places)
    if each:
        cases = each_once(config=config, abilities=able, has_accelerator=FullGpuMemory.missing() is None)
    else:
        only = CaseClass.TWO if pairs else None
        cases = plan(count, seed=seed, config=config, abilities=able, only=only)
    check_places(places, name="campaign", folder=folder)
    folder = new_folder(folder, name="campaign", json=json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = Campaign(config, places=places, folder=folder, seed=seed, say=say).run(cases)
    if json is not None:
        write_json(result, json)
    for line in table_lines(result):
        say(line)
    right, counted = num_right(result)
    say(f"right at the first answer: {right} of {counted}")
    say(f"{folder / CAMPAIGN_FILE}: {result.seconds / 60:.1f} minutes, {result.clusters} clusters")
    return not each or right >= RIGHT_SHARE * counted


def _campaign_workload(
    recipe: Path | None, overrides: Sequence[str], *, disk_folder: Path | None
) -> tuple[Config, TestbedSpec]:
    """Return the configuration, without an end, and where it runs: a recipe of the user's on this machine as it is."""
    if recipe is None:
        config = load(experiments.experiments_folder() / CAMPAIGN, overrides).config
        return config, CAMPAIGN_PLACES
    config = load(recipe, [f"algorithm.steps={ENDLESS_STEPS}", *overrides]).config
    return config, TestbedSpec(disk_folder=None if disk_folder is None else str(disk_folder))


def _campaign_abilities(places: TestbedSpec) -> set[Ability]:
    """Return the fault types that can be injected here: network faults need isolated hosts, disk faults a disk."""
    from kintsugi.lab.injector.checks import NETWORK
    from kintsugi.lab.probing import abilities

    able = {each.ability for each in abilities() if each.missing is None}
    if not places.isolated_hosts:
        able -= {*NETWORK, Ability.DNS}
    if places.disk_mib is None and places.disk_folder is None:
        able -= experiments.OWN_DISK
    return able


def write_report(folder: Path, *, say: Say) -> None:
    from kintsugi.lab.report.write import write_report as write

    say(str(write(folder)))


def list_abilities(*, say: Say) -> None:
    from kintsugi.lab.probing import abilities

    for each in abilities():
        imitates = f" (imitates {each.stands_for})" if each.stands_for else ""
        why = f": not available: {each.missing}" if each.missing is not None else ""
        say(f"{each.ability:16} {each.mechanism}{imitates}{why}")


def run_residue(count: int, *, seed: int, folder: Path | None, json: Path | None, say: Say) -> bool:
    from kintsugi.lab.residue.residue import run_residue as run_it

    folder = new_folder(folder, name="residue", json=json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = run_it(count, seed=seed, folder=folder, say=say)
    if json is not None:
        write_json(result, json)
    return result.proves_it
