"""What the commands of `kintsugi lab` do: check what was asked for before anything starts, do it, write it down."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from kintsugi.errors import UserError
from kintsugi.lab import experiments
from kintsugi.lab.experiments import Loaded, Places, Profile
from kintsugi.lab.records import CAMPAIGN_FILE, check_writable, write_json
from kintsugi.recipe import load
from kintsugi.runs import create_run_dir, next_run_dir

Say = Callable[[str], None]

BOTH = "both"
CAMPAIGN = "workloads/campaign.yaml"
CAMPAIGN_PLACES = Places(isolated_hosts=True, named_hosts=True, disk_mib=2048)


def chosen(names: Sequence[str], *, profile: str) -> list[tuple[Loaded, Profile]]:
    """Which experiment on which system; UserError for names, profiles and files that make no sense."""
    wanted = [BOTH, Profile.OURS.value, Profile.FRAGILE.value]
    if profile not in wanted:
        raise UserError(f"--profile: expected {', '.join(wanted)}, got {profile!r}")
    found: list[tuple[Loaded, Profile]] = []
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
    """`json`: where the result is to go as well, which is better known before than after."""
    if json is not None:
        check_writable(json)
    folder = (folder or next_run_dir(name)).resolve()
    create_run_dir(folder)
    return folder


def run_experiments(
    names: Sequence[str], *, profile: str, folder: Path | None, json: Path | None, say: Say
) -> bool:
    """Whether all came out as their files expect."""
    from kintsugi.lab.scenarios import run_all

    pairs = chosen(names, profile=profile)
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


def _check_abilities(pairs: Sequence[tuple[Loaded, Profile]]) -> None:
    """What this machine can not do is said before the first experiment, and not after an hour of them."""
    from kintsugi.lab.fault_checks import NETWORK
    from kintsugi.lab.probing import choose

    for loaded, profile in pairs:
        name, places = loaded.experiment.name, loaded.experiment.places
        try:
            for fault in loaded.experiment.faults_in(profile):
                # Without hosts of their own, the run is in the network that this process is in.
                shared = fault.ability in NETWORK and not places.isolated_hosts
                choose(fault, pid=os.getpid() if shared else None)
        except UserError as error:
            raise UserError(f"{name}: {error} (see `kintsugi lab abilities`)") from error


def check_places(places: Places, *, name: str, folder: Path | None) -> None:
    """UserError for hosts and disks that this machine can not have."""
    from kintsugi.lab import hosts
    from kintsugi.lab.places import missing_for_disk

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


def run_campaign(count: int, *, seed: int, folder: Path | None, json: Path | None, say: Say) -> None:
    from kintsugi.lab.campaign import Campaign
    from kintsugi.lab.campaign_records import table_lines
    from kintsugi.lab.cases import plan
    from kintsugi.lab.probing import abilities

    config = load(experiments.experiments_folder() / CAMPAIGN).config
    able = {each.ability for each in abilities() if each.missing is None}
    cases = plan(count, seed=seed, config=config, abilities=able)
    check_places(CAMPAIGN_PLACES, name="campaign", folder=folder)
    folder = new_folder(folder, name="campaign", json=json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = Campaign(config, places=CAMPAIGN_PLACES, folder=folder, seed=seed, say=say).run(cases)
    if json is not None:
        write_json(result, json)
    for line in table_lines(result):
        say(line)
    say(f"{folder / CAMPAIGN_FILE}: {result.seconds / 60:.0f} minutes, {result.clusters} clusters")


def write_report(folder: Path, *, say: Say) -> None:
    from kintsugi.lab.report.writing import write_report as write

    say(str(write(folder)))


def tell_abilities(*, say: Say) -> None:
    from kintsugi.lab.probing import abilities

    for each in abilities():
        acts = f" (stands for {each.stands_for})" if each.stands_for else ""
        why = f": not here: {each.missing}" if each.missing is not None else ""
        say(f"{each.ability:16} {each.mechanism}{acts}{why}")


def run_residue(count: int, *, seed: int, folder: Path | None, json: Path | None, say: Say) -> bool:
    from kintsugi.lab.residue import run_residue as run_it

    folder = new_folder(folder, name="residue", json=json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = run_it(count, seed=seed, folder=folder, say=say)
    if json is not None:
        write_json(result, json)
    return result.proves_it
