"""Experiments as readable files: a workload, what is done to it, and what is expected to be seen.

`experiments/S1.yaml` at the project's root is one; an installed package has them beside it. Whatever a file says that
can not be carried out (a process that the workload does not have, a phase that it never comes to) is refused before
anything is started.
"""

from __future__ import annotations

import difflib
import math
import socket
import sysconfig
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from kintsugi.config import Config
from kintsugi.control.phases import Phase as MasterPhase
from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.errors import UserError
from kintsugi.lab.fault_checks import check_injection, check_pattern
from kintsugi.lab.injection import Ability, Injection, Trigger
from kintsugi.recipe import Resolved, load
from kintsugi.stages import stages
from kintsugi.types import Role, process_id

BASELINE_STEPS = 10
"""Without a fault, before the first one: what a figure looks like when nothing is wrong."""
FIRST_STEPS = 2
"""Before those: the first steps of a run are slower, they fill caches and compile."""

OWN_DISK = frozenset({Ability.DISK_FILL, Ability.DISK_LOAD})
"""What is not done to a disk that others use."""
HURTS = frozenset(
    {
        *(Ability.KILL, Ability.STOP, Ability.MEMORY, Ability.DEVICE_MEMORY),
        *(Ability.NETWORK_CUT, Ability.CORRUPT, Ability.NUMERIC),
    }
)
"""After which a run has something to recover from."""
LEAST_DISK_MIB = 32
"""What a small run writes, with room for its next checkpoint."""
MOST_DISK_MIB = 1 << 20
HOST_DEVICES = ("lo", "eth0")
"""Of a host that is a network namespace."""


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
        _check_finite(tree, where=f"{path}: the file")
        experiment = msgspec.convert(tree, Experiment)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected a text file in UTF-8: {error}") from error
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
    if Profile.OURS in experiment.profiles:
        check_faults(experiment.faults, resolved.config, where=f"{path}: `faults`")
    if experiment.fragile_faults:
        where = f"{path}: `fragile_faults`"
        check_faults(experiment.fragile_faults, fragile.config, where=where, fragile=True)
    elif experiment.profiles != (Profile.OURS,):
        check_faults(experiment.faults, fragile.config, where=f"{path}: `faults`", fragile=True)
    _check_places(experiment, where=str(path))
    _check_expectation(experiment, resolved.config, path=path)
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


def fragile_processes_of(config: Config) -> frozenset[str]:
    """Every process that the fragile system has on this configuration; in fine-tuning nobody generates."""
    counts = {
        Role.MODEL: config.actor.workers,
        Role.ROLLOUT: 0 if config.algorithm.name == "sft" else config.rollout.workers,
    }
    workers = {process_id(role, index) for role, count in counts.items() for index in range(count)}
    return frozenset(workers | {process_id(Role.MASTER, 0), "scheduler-0"})


def check_faults(faults: Iterable[Injection], config: Config, *, where: str, fragile: bool = False) -> None:
    """UserError for a fault that this workload can not have. A fragile system has processes of its own."""
    faults = tuple(faults)
    there = fragile_processes_of(config) if fragile else processes_of(config)
    for number, fault in enumerate(faults):
        at = f"{where}[{number}]"
        for field, process in (("target", fault.target), ("peer", fault.peer)):
            if process is not None:
                _check_process(process, there, where=f"{at}.{field}")
        check_injection(fault, where=f"{at}.")
        if fault.ramp_s > fault.duration_s:
            raise UserError(
                f"{at}.ramp_s: expected at most duration_s, which is {fault.duration_s:g}, got {fault.ramp_s:g}"
            )
        if fault.expected_phase:
            _check_stage(fault.expected_phase, where=f"{at}.expected_phase")
        _check_moment(fault.trigger, config, where=f"{at}.trigger")
        _check_recovery(fault, faults, fragile=fragile, where=f"{at}.trigger.phase")


def _check_process(process: str, there: frozenset[str], *, where: str) -> None:
    if process in there:
        return
    alike = difflib.get_close_matches(process, sorted(there), n=2, cutoff=0.5)
    raise UserError(
        f"{where}: the workload has no process {process!r}; "
        f"{'did you mean ' + ' or '.join(alike) + '?' if alike else 'it has ' + ', '.join(sorted(there))}"
    )


def _check_stage(stage: str, *, where: str) -> None:
    if stage not in set(MasterPhase):
        raise UserError(f"{where}: expected one of {', '.join(MasterPhase)}, got {stage!r}")


def _check_recovery(fault: Injection, faults: Sequence[Injection], *, fragile: bool, where: str) -> None:
    """A run that nothing has hurt does not recover, and a fragile one never does."""
    if fault.trigger.phase != Phase.RECOVERING:
        return
    if fragile:
        raise UserError(
            f"{where}: expected a phase that the fragile system has, got {Phase.RECOVERING.value!r}"
        )
    earlier = [each for each in faults if each.trigger.phase != Phase.RECOVERING]
    if not any(each.ability in HURTS for each in earlier):
        raise UserError(
            f"{where}: expected another fault that brings a recovery about ({', '.join(sorted(HURTS))}), "
            f"got {Phase.RECOVERING.value!r} alone: impossible"
        )


def _check_moment(trigger: Trigger, config: Config, *, where: str) -> None:
    """UserError for a step or a phase that the workload does not come to."""
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
    every = {Phase.SAVING.value: config.checkpoint.every, Phase.EVALUATING.value: config.eval.every}
    period = every.get(trigger.phase) if trigger.phase is not None else None
    step = trigger.step
    # What follows a commit is done while the next step is already the one that is worked on.
    if period is not None and step is not None and (not period or (step - 1) % period):
        at = f"after every {period} steps" if period else "only at the end"
        raise UserError(f"{where}: the workload is {trigger.phase} {at}, not before step {step}: impossible")


# What an experiment says besides.


def _check_finite(value: Any, *, where: str) -> None:
    """No number of a file is infinite, or none at all."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: expected a finite number, got {value}")
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        parts = ((f".{key}", each) for key, each in value.items())
    elif isinstance(value, list):
        parts = ((f"[{index}]", each) for index, each in enumerate(value))
    for name, each in parts:
        _check_finite(each, where=f"{where}{name}")


def _check_places(experiment: Experiment, *, where: str) -> None:
    """UserError for a fault of something that the place has not."""
    places = experiment.places
    if places.named_hosts and not places.isolated_hosts:
        raise UserError(f"{where}: `places.named_hosts`: expected `isolated_hosts: true` with it")
    if places.disk_mib is not None and not LEAST_DISK_MIB <= places.disk_mib <= MOST_DISK_MIB:
        raise UserError(
            f"{where}: `places.disk_mib`: expected {LEAST_DISK_MIB} (a run needs as much) to {MOST_DISK_MIB}, "
            f"got {places.disk_mib}"
        )
    for fault in (*experiment.faults, *experiment.fragile_faults):
        if fault.ability is Ability.DNS and not places.named_hosts:
            raise UserError(
                f"{where}: {fault.ability} needs `places.named_hosts`: nobody asks for names else"
            )
        if fault.ability in OWN_DISK and places.disk_mib is None:
            raise UserError(f"{where}: {fault.ability} needs `places.disk_mib`: others use the disk else")
        devices = HOST_DEVICES if places.isolated_hosts else [name for _, name in socket.if_nameindex()]
        if fault.interface is not None and fault.interface not in devices:
            raise UserError(
                f"{where}: `interface`: expected a network device of the target's host ({', '.join(devices)}), "
                f"got {fault.interface!r}"
            )


def _check_expectation(experiment: Experiment, config: Config, *, path: Path) -> None:
    """What is to be found, and where it is to be seen."""
    for field, value in (
        ("challenges", experiment.challenges),
        ("faults", experiment.faults),
        ("cause.kinds", experiment.cause.kinds),
    ):
        if not value:
            raise UserError(f"{path}: `{field}`: expected at least one, got none")
    hit = Profile.OURS in experiment.profiles
    there = processes_of(config) if hit else fragile_processes_of(config)
    _check_process(experiment.cause.process, there, where=f"{path}: `cause.process`")
    if experiment.fragile is not None:
        _check_stage(experiment.fragile.stage, where=f"{path}: `fragile.stage`")
        check_pattern(experiment.fragile.message, where=f"{path}: `fragile.message`")
    elif experiment.fragile_faults:
        raise UserError(f"{path}: `fragile_faults`: expected `fragile` with it, which says what they show")
    contrast = experiment.contrast_of
    known = {*names(path.parent), *names()}
    if contrast and contrast not in known:
        raise UserError(
            f"{path}: `contrast_of`: expected an experiment ({', '.join(sorted(known))}), got {contrast!r}"
        )
