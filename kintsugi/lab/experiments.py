"""Experiments as readable files: a workload, what is done to it, and what is expected to be seen.

`experiments/S1.yaml` at the project's root is one; an installed package has them beside it. Whatever a file says that
can not be carried out (a process that the workload does not have, a phase that it never comes to) is refused before
anything is started.
"""

from __future__ import annotations

import difflib
import re
import sysconfig
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from kintsugi.config import Config
from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.errors import UserError
from kintsugi.lab.injection import Ability, Injection, Trigger
from kintsugi.recipe import Resolved, load
from kintsugi.stages import stages
from kintsugi.types import Role, process_id

BASELINE_STEPS = 10
"""Without a fault, before the first one: what a figure looks like when nothing is wrong."""
FIRST_STEPS = 2
"""Before those: the first steps of a run are slower, they fill caches and compile."""

AMOUNTS: dict[Ability, frozenset[str]] = {
    Ability.CPU: frozenset({"share"}),
    Ability.MEMORY: frozenset({"rate", "limit"}),
    Ability.DISK_FILL: frozenset({"share"}),
    Ability.DISK_LOAD: frozenset({"rate", "block_size"}),
    Ability.NETWORK_DELAY: frozenset({"delay_s", "jitter_s"}),
    Ability.NETWORK_LOSS: frozenset({"share"}),
    Ability.DEVICE_MEMORY: frozenset({"share", "device"}),
    Ability.DEVICE_SLOW: frozenset({"factor", "device"}),
    Ability.DISK_ERROR: frozenset({"share"}),
}
"""The words for the strength of a fault; abilities that are not here have none."""
NETWORK = frozenset({Ability.NETWORK_DELAY, Ability.NETWORK_LOSS, Ability.NETWORK_CUT})
"""What may be aimed at one link of a process."""
OWN_DISK = frozenset({Ability.DISK_FILL, Ability.DISK_LOAD})
"""What is not done to a disk that others use."""


class Phase(StrEnum):
    """Of the master, as in `Trigger.phase`."""

    COLLECTING = "collecting"
    TRAINING = "training"
    COMMITTING = "committing"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    RECOVERING = "recovering"


class Profile(StrEnum):
    """On which system an experiment is made."""

    OURS = "ours"
    FRAGILE = "fragile"
    """A system of the usual make (`lab/fragile`), on the same workload."""
    SFT = "sft"
    """A system of the usual make, fine-tuning instead of reinforcement learning: the contrast."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Workload(_Part, frozen=True):
    """What runs: a recipe, and what is different from it."""

    recipe: str
    """Relative to the experiment's file."""
    set: dict[str, Any] = {}
    """`{"weights.transport": "stream"}`."""
    fragile_set: dict[str, Any] = {}
    """What the fragile system is told besides, which is put together otherwise."""


class Places(_Part, frozen=True):
    """Where it runs."""

    isolated_hosts: bool = False
    """Every host of `cluster.hosts` is a network namespace, so that faults of the network are real packets."""
    named_hosts: bool = False
    """They know each other by name, through a name server."""
    disk_mib: int | None = None
    """The run folder is on a disk of its own, of this size."""


class Truth(_Part, frozen=True):
    """What a right diagnosis says."""

    process: str
    kinds: tuple[FaultKind, ...]
    """Any of them: what begins as a lack of processor may end as a lack of memory."""


class Surface(_Part, frozen=True):
    """Where, and in which words, a fragile system shows it."""

    stage: str
    message: str
    """A regular expression."""


class Experiment(_Part, frozen=True, kw_only=True):
    """One file."""

    name: str
    title: str
    about: str
    """Why it is hard, for people."""
    challenges: tuple[Literal["A", "B", "C"], ...]
    """Of the user's plan: A faults couple stages, B logs mislead, C exists in RL only."""
    workload: Workload
    places: Places = Places()
    faults: tuple[Injection, ...]
    fragile_faults: tuple[Injection, ...] = ()
    """The same faults where a fragile system has another process for the part; empty: the same names."""
    cause: Truth
    fragile: Surface | None = None
    """None: is not made on the fragile system."""
    contrast_of: str = ""
    """The experiment that this one is the fine-tuning counterpart of."""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        if self.contrast_of:
            return (Profile.SFT,)
        return (Profile.OURS, Profile.FRAGILE) if self.fragile is not None else (Profile.OURS,)

    def faults_in(self, profile: Profile) -> tuple[Injection, ...]:
        return self.fragile_faults or self.faults if profile is Profile.FRAGILE else self.faults


class Loaded(msgspec.Struct, frozen=True):
    """An experiment that was read and can be carried out."""

    path: Path
    experiment: Experiment
    resolved: Resolved
    fragile: Resolved

    @property
    def config(self) -> Config:
        return self.resolved.config

    def config_in(self, profile: Profile) -> Config:
        return self.config if profile is Profile.OURS else self.fragile.config


def experiments_folder() -> Path:
    """Where the experiments are: at the project's root, or where an installed package has put them."""
    beside = Path(__file__).parents[2] / "experiments"
    installed = Path(sysconfig.get_path("data")) / "share" / "kintsugi" / "experiments"
    return beside if beside.is_dir() else installed


def names(folder: Path | None = None) -> list[str]:
    return sorted(path.stem for path in (folder or experiments_folder()).glob("*.yaml"))


def find(name: str, *, folder: Path | None = None) -> Loaded:
    """By name, or by the path of a file of one's own."""
    folder = folder or experiments_folder()
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(names(folder)) or "none"
        raise UserError(f"unknown experiment {name!r}; there are {known} (see `kintsugi lab list`)")
    return read(path)


def read(path: Path) -> Loaded:
    """Strict: unknown words, processes, phases and amounts are named before anything runs."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        experiment = msgspec.convert(tree, Experiment)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: expected YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {error}") from error
    if experiment.name != path.stem:
        raise UserError(
            f"{path}: `name`: expected {path.stem!r} as the file is called, got {experiment.name!r}"
        )
    workload = experiment.workload
    recipe = path.parent / workload.recipe
    resolved = load(recipe, _overrides(workload.set))
    fragile = load(recipe, _overrides({**workload.set, **workload.fragile_set}))
    check_faults(experiment.faults, resolved.config, where=f"{path}: `faults`")
    check_faults(experiment.fragile_faults, resolved.config, where=f"{path}: `fragile_faults`", fragile=True)
    _check_places(experiment, where=str(path))
    for surface in filter(None, (experiment.fragile,)):
        _check_pattern(surface.message, where=f"{path}: `fragile.message`")
    if not experiment.faults:
        raise UserError(f"{path}: `faults`: expected at least one")
    return Loaded(path, experiment, resolved, fragile)


def _overrides(fields: dict[str, Any]) -> list[str]:
    return [f"{field}={_as_yaml(value)}" for field, value in fields.items()]


def _as_yaml(value: Any) -> str:
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10_000)).strip().removesuffix("...").strip()
    )


# What can be done to a workload.


def processes_of(config: Config) -> frozenset[str]:
    """Every process that a run of this configuration has."""
    counts = {
        Role.MASTER: 1,
        Role.MANAGER: 1,
        Role.AGENT: config.cluster.hosts,
        Role.MODEL: config.actor.workers,
        Role.ROLLOUT: config.rollout.workers,
        Role.SERVER: config.generation.servers,
    }
    return frozenset(process_id(role, index) for role, count in counts.items() for index in range(count))


def check_faults(faults: Iterable[Injection], config: Config, *, where: str, fragile: bool = False) -> None:
    """UserError for a fault that this workload can not have. A fragile system has processes of its own besides."""
    for number, fault in enumerate(faults):
        _check_fault(fault, config, where=f"{where}[{number}]", fragile=fragile)


def _check_fault(fault: Injection, config: Config, *, where: str, fragile: bool) -> None:
    there = processes_of(config)
    for field, process in (("target", fault.target), ("peer", fault.peer)):
        if process is not None and process not in there and not fragile:
            alike = difflib.get_close_matches(process, sorted(there), n=2, cutoff=0.5)
            raise UserError(
                f"{where}.{field}: the workload has no process {process!r}; "
                f"{'did you mean ' + ' or '.join(alike) + '?' if alike else 'it has ' + ', '.join(sorted(there))}"
            )
    for field in ("peer", "port"):
        if getattr(fault, field) is not None and fault.ability not in NETWORK:
            raise UserError(f"{where}.{field}: {fault.ability} is done to a process, not to a link of it")
    words = AMOUNTS.get(fault.ability, frozenset())
    if unknown := sorted(set(fault.amount) - words):
        expected = ", ".join(sorted(words)) or "none"
        raise UserError(f"{where}.amount: {fault.ability} knows {expected}, got {', '.join(unknown)}")
    for name, value in fault.amount.items():
        if value < 0 or (name == "share" and value > 1):
            between = "from 0 to 1" if name == "share" else "not below 0"
            raise UserError(f"{where}.amount.{name}: expected a number {between}, got {value:g}")
    if fault.duration_s <= 0:
        raise UserError(f"{where}.duration_s: expected seconds above 0, got {fault.duration_s:g}")
    if fault.ramp_s < 0:
        raise UserError(f"{where}.ramp_s: expected seconds not below 0, got {fault.ramp_s:g}")
    _check_trigger(fault.trigger, config, where=f"{where}.trigger")


def _check_places(experiment: Experiment, *, where: str) -> None:
    """UserError for a fault of something that the place has not."""
    places = experiment.places
    if places.named_hosts and not places.isolated_hosts:
        raise UserError(f"{where}: `places.named_hosts`: expected `isolated_hosts: true` with it")
    for fault in (*experiment.faults, *experiment.fragile_faults):
        if fault.ability is Ability.DNS and not places.named_hosts:
            raise UserError(
                f"{where}: {fault.ability} needs `places.named_hosts`: nobody asks for names else"
            )
        if fault.ability in OWN_DISK and places.disk_mib is None:
            raise UserError(f"{where}: {fault.ability} needs `places.disk_mib`: others use the disk else")


def _check_trigger(trigger: Trigger, config: Config, *, where: str) -> None:
    if trigger.after_s < 0:
        raise UserError(f"{where}.after_s: expected seconds not below 0, got {trigger.after_s:g}")
    if trigger.timeout_s <= 0:
        raise UserError(f"{where}.timeout_s: expected seconds above 0, got {trigger.timeout_s:g}")
    last_step = stages(config)[-1].last_step
    first_step = FIRST_STEPS + BASELINE_STEPS + 1
    if trigger.step is not None and trigger.step < first_step <= last_step:
        raise UserError(
            f"{where}.step: expected {first_step} or later, got {trigger.step}: the steps before are the baseline"
        )
    if trigger.step is not None and not 1 <= trigger.step <= last_step:
        raise UserError(
            f"{where}.step: the workload has the steps 1 to {last_step}, got {trigger.step}: impossible"
        )
    if trigger.phase is not None:
        if trigger.phase not in set(Phase):
            raise UserError(f"{where}.phase: expected one of {', '.join(Phase)}, got {trigger.phase!r}")
        every = {Phase.SAVING: config.checkpoint.every, Phase.EVALUATING: config.eval.every}
        period = every.get(Phase(trigger.phase))
        step = trigger.step
        # What follows a commit is done while the next step is already the one that is worked on.
        if period is not None and step is not None and (not period or (step - 1) % period):
            at = f"after every {period} steps" if period else "only at the end"
            raise UserError(
                f"{where}: the workload is {trigger.phase} {at}, not before step {step}: impossible"
            )
    if trigger.event is not None:
        _check_pattern(trigger.event, where=f"{where}.event")


def _check_pattern(pattern: str, *, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{where}: expected a regular expression, got {pattern!r}: {error}") from error
