"""Experiments as YAML files: a workload, the faults injected into it, and the expected observations.

The files of the package are in `kintsugi/experiments/` (`S1.yaml`). A file that can not be carried out (a process that
the workload does not have, a phase that it never enters) is rejected before anything starts.
"""

from __future__ import annotations

import difflib
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

import kintsugi
from kintsugi.config.recipe import Resolved, load
from kintsugi.config.schema import Config
from kintsugi.config.stages import stages
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import host_index, plan_layout
from kintsugi.diagnosis.verdict import FaultKind
from kintsugi.errors import UserError
from kintsugi.lab.injector.checks import check_injection, check_pattern
from kintsugi.lab.injector.injection import Ability, Injection, Trigger
from kintsugi.types import Role, process_id

BASELINE_STEPS = 10
"""Steps without a fault before the first one: the baseline of every metric."""
FIRST_STEPS = 2
"""Steps before the baseline: they are slower, because caches are filled and kernels compiled."""

OWN_DISK = frozenset({Ability.DISK_FILL, Ability.DISK_LOAD})
"""Fault types that are not injected into a disk that others use."""
CAUSES_RECOVERY = frozenset(
    {
        *(Ability.KILL, Ability.STOP, Ability.MEMORY, Ability.DEVICE_MEMORY, Ability.HOST_LOSS),
        *(Ability.NETWORK_CUT, Ability.CORRUPT, Ability.NUMERIC),
    }
)
"""Fault types after which a run has to recover."""
ANYWHERE = frozenset(
    {
        *(Ability.KILL, Ability.STOP, Ability.HOST_LOSS),
        *(Ability.CPU, Ability.MEMORY, Ability.DEVICE_MEMORY, Ability.DEVICE_SLOW),
        *(Ability.NETWORK_DELAY, Ability.NETWORK_LOSS, Ability.NETWORK_CUT),
        *OWN_DISK,
    }
)
"""Fault types that can be injected on other machines. A disk is always that of the run folder, on this machine."""
LEAST_DISK_MIB = 32
"""Space that a small run needs, including its next checkpoint."""
MOST_DISK_MIB = 1 << 20
HOST_DEVICES = ("lo", "eth0")
"""Network devices of an isolated host."""


class Profile(StrEnum):
    """System that an experiment runs on."""

    OURS = "ours"
    FRAGILE = "fragile"
    """Conventional RL system (`lab/fragile`) on the same workload."""
    SFT = "sft"
    """Conventional system for supervised fine-tuning instead of RL, for contrast."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Workload(_Part, frozen=True):
    """Recipe and overrides."""

    recipe: str
    """Path relative to the experiment's file."""
    set: dict[str, Any] = {}
    """`{"weights.transport": "stream"}`."""
    fragile_set: dict[str, Any] = {}
    """Additional overrides for the fragile system, which has a different architecture."""


class TestbedSpec(_Part, frozen=True):
    """RunTestbed that the experiment runs on."""

    isolated_hosts: bool = False
    """Every host of `cluster.hosts` is a network namespace, so that network faults affect real packets."""
    named_hosts: bool = False
    """Hosts address each other by name, through a name server."""
    disk_mib: int | None = None
    """Size of a disk of its own for the run folder."""
    disk_folder: str | None = None
    """Folder on a disk of the machine that may be filled, for the run folder, where no disk of its own can be
    mounted."""


class GroundTruth(_Part, frozen=True):
    """Right diagnosis."""

    process: str
    kinds: tuple[FaultKind, ...]
    """Fault kinds that are right: a CPU shortage can end as a memory shortage."""


class ExpectedSurface(_Part, frozen=True):
    """Stage and message in which the fault becomes visible on the fragile system."""

    stage: str
    message: str
    """Regular expression."""


class Experiment(_Part, frozen=True, kw_only=True):
    """One experiment file."""

    name: str
    title: str
    about: str
    """Explanation for the reader why the fault is hard to diagnose."""
    challenges: tuple[Literal["A", "B", "C"], ...]
    """Challenges that it shows: A, faults couple stages; B, logs mislead; C, exists in RL only."""
    workload: Workload
    places: TestbedSpec = TestbedSpec()
    faults: tuple[Injection, ...]
    fragile_faults: tuple[Injection, ...] = ()
    """The same faults for the fragile system, where its processes have other names; empty when the names are the
    same."""
    cause: GroundTruth
    fragile: ExpectedSurface | None = None
    """None when the experiment does not run on the fragile system."""
    contrast_of: str = ""
    """Experiment that this one is the fine-tuning counterpart of."""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        if self.contrast_of:
            return (Profile.SFT,)
        return (Profile.OURS, Profile.FRAGILE) if self.fragile is not None else (Profile.OURS,)

    def faults_in(self, profile: Profile) -> tuple[Injection, ...]:
        return self.fragile_faults or self.faults if profile is Profile.FRAGILE else self.faults


class LoadedExperiment(msgspec.Struct, frozen=True):
    """Experiment that was read and validated."""

    path: Path
    experiment: Experiment
    resolved: Resolved
    fragile: Resolved

    @property
    def config(self) -> Config:
        return self.resolved.config

    def config_in(self, profile: Profile) -> Config:
        return self.config if profile is Profile.OURS else self.fragile.config


def placed_elsewhere(
    loaded: LoadedExperiment,
    profile: Profile,
    *,
    on: str,
    place: Callable[[Resolved], Resolved],
    overrides: Sequence[str] = (),
) -> LoadedExperiment:
    """Return an experiment whose run is on other machines; UserError for one that can only be made on this machine.
    `place` derives the hosts from `cluster.on`; `overrides` are fields of `cluster`."""
    experiment = loaded.experiment
    why = ""
    if profile is not Profile.OURS:
        why = f"the {profile} system runs on one machine; expected --profile ours"
    elif experiment.places.named_hosts:
        why = "it needs hosts that resolve names (`places.named_hosts`); other machines are known by their addresses"
    elif other := [fault.ability.value for fault in experiment.faults if fault.ability not in ANYWHERE]:
        why = f"{other[0]} is done to a process of this machine; elsewhere there are {', '.join(sorted(ANYWHERE))}"
    if why:
        raise UserError(f"{experiment.name}: --on {on}: {why}")
    workload = experiment.workload
    resolved = place(
        load(
            loaded.path.parent / workload.recipe,
            [*_overrides(workload.set), *overrides, f"cluster.on={on}"],
        )
    )
    if resolved.config.cluster.share_device != "no":
        resolved = msgspec.structs.replace(resolved, config=_on_one_host(resolved.config))
    faults = _moved(experiment, before=loaded.config, after=resolved.config)
    check_faults(faults, resolved.config, where=f"{experiment.name}: --on {on}: `faults`")
    # The machines are the hosts; the disk of the run folder is still one of this machine.
    places = msgspec.structs.replace(experiment.places, isolated_hosts=False)
    experiment = msgspec.structs.replace(experiment, faults=faults, places=places)
    return msgspec.structs.replace(loaded, experiment=experiment, resolved=resolved)


def _on_one_host(config: Config) -> Config:
    """Return the configuration with all processes on the first host that has slots: they share its device."""
    slots = config.cluster.slots or (1,) * config.cluster.hosts
    first = next((index for index, count in enumerate(slots) if count), 0)
    alone = tuple(count if index == first else 0 for index, count in enumerate(slots))
    return msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, slots=alone))


def _moved(experiment: Experiment, *, before: Config, after: Config) -> tuple[Injection, ...]:
    """Return the faults for the machines. The agent beside the process that is the cause stays the one beside it, and
    the disk of the run folder is that of `agent-0`, which writes the checkpoints of ranks on other machines."""
    cause = experiment.cause.process

    def agent_beside(config: Config) -> str:
        hosts = {plan.process: plan.host for plan in plan_layout(config)}
        return process_id(Role.AGENT, host_index(hosts[cause]))

    names = {agent_beside(before): agent_beside(after)}
    writer = process_id(Role.AGENT, 0)
    return tuple(
        msgspec.structs.replace(
            fault,
            target=writer if fault.ability in OWN_DISK else fault.target,
            peer=None if fault.peer is None else names.get(fault.peer, fault.peer),
        )
        for fault in experiment.faults
    )


def experiments_folder() -> Path:
    """Return the folder of the experiments that are part of the package."""
    return Path(kintsugi.__file__).parent / "experiments"


def names(folder: Path | None = None) -> list[str]:
    return sorted(path.stem for path in (folder or experiments_folder()).glob("*.yaml"))


def find(name: str, *, folder: Path | None = None) -> LoadedExperiment:
    """Load an experiment by name, or by the path of a user's file."""
    folder = folder or experiments_folder()
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(names(folder)) or "none"
        raise UserError(f"unknown experiment {name!r}; there are {known} (see `kintsugi lab list`)")
    return read(path)


def read(path: Path) -> LoadedExperiment:
    """Read and validate a file: unknown fields, processes, phases and parameters are rejected before anything runs."""
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
    return LoadedExperiment(path, experiment, resolved, fragile)


def _overrides(fields: dict[str, Any]) -> list[str]:
    return [f"{field}={_as_yaml(value)}" for field, value in fields.items()]


def _as_yaml(value: Any) -> str:
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10_000)).strip().removesuffix("...").strip()
    )


# Faults that a workload can have.


def processes_of(config: Config) -> frozenset[str]:
    """Return all processes of a run of this configuration."""
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
    """Return all processes of the fragile system for this configuration; fine-tuning has no process that generates."""
    counts = {
        Role.MODEL: config.actor.workers,
        Role.ROLLOUT: 0 if config.algorithm.name == "sft" else config.rollout.workers,
    }
    workers = {process_id(role, index) for role, count in counts.items() for index in range(count)}
    return frozenset(workers | {process_id(Role.MASTER, 0), "scheduler-0"})


def check_faults(faults: Iterable[Injection], config: Config, *, where: str, fragile: bool = False) -> None:
    """Raise UserError for a fault that this workload can not have; the fragile system has processes of its own."""
    faults = tuple(faults)
    there = fragile_processes_of(config) if fragile else processes_of(config)
    for number, fault in enumerate(faults):
        at = f"{where}[{number}]"
        for field, process in (("target", fault.target), ("peer", fault.peer)):
            if process is not None:
                _check_process(process, there, where=f"{at}.{field}")
        if fault.ability is Ability.HOST_LOSS and not fault.target.startswith(f"{Role.AGENT.value}-"):
            raise UserError(f"{at}.target: expected an agent, whose host is lost, got {fault.target!r}")
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
    if stage not in set(Phase):
        raise UserError(f"{where}: expected one of {', '.join(Phase)}, got {stage!r}")


def _check_recovery(fault: Injection, faults: Sequence[Injection], *, fragile: bool, where: str) -> None:
    """Reject `recovering` without an earlier fault that causes a recovery; the fragile system never recovers."""
    if fault.trigger.phase != Phase.RECOVERING:
        return
    if fragile:
        raise UserError(
            f"{where}: expected a phase that the fragile system has, got {Phase.RECOVERING.value!r}"
        )
    earlier = [each for each in faults if each.trigger.phase != Phase.RECOVERING]
    if not any(each.ability in CAUSES_RECOVERY for each in earlier):
        raise UserError(
            f"{where}: expected another fault that brings a recovery about ({', '.join(sorted(CAUSES_RECOVERY))}), "
            f"got {Phase.RECOVERING.value!r} alone: impossible"
        )


def _check_moment(trigger: Trigger, config: Config, *, where: str) -> None:
    """Raise UserError for a step or phase that the workload never reaches."""
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
    # Evaluation and checkpoint follow a commit, when the next step is already the current one.
    if period is not None and step is not None and (not period or (step - 1) % period):
        at = f"after every {period} steps" if period else "only at the end"
        raise UserError(f"{where}: the workload is {trigger.phase} {at}, not before step {step}: impossible")


# Other fields of an experiment.


def _check_finite(value: Any, *, where: str) -> None:
    """Reject infinite numbers and NaN."""
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
    """Raise UserError for a fault that the testbed does not support."""
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
                f"{where}: {fault.ability} needs `places.named_hosts`: otherwise no name is resolved"
            )
        if fault.ability in OWN_DISK and places.disk_mib is None:
            raise UserError(f"{where}: {fault.ability} needs `places.disk_mib`: otherwise the disk is shared")
        devices = HOST_DEVICES if places.isolated_hosts else [name for _, name in socket.if_nameindex()]
        if fault.interface is not None and fault.interface not in devices:
            raise UserError(
                f"{where}: `interface`: expected a network device of the target's host ({', '.join(devices)}), "
                f"got {fault.interface!r}"
            )


def _check_expectation(experiment: Experiment, config: Config, *, path: Path) -> None:
    """Validate the expected cause and its visible symptom."""
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
        raise UserError(f"{path}: `fragile_faults`: expected `fragile` with it, with the expected symptom")
    contrast = experiment.contrast_of
    known = {*names(path.parent), *names()}
    if contrast and contrast not in known:
        raise UserError(
            f"{path}: `contrast_of`: expected an experiment ({', '.join(sorted(known))}), got {contrast!r}"
        )
