"""One long run of a real model that is struck again and again: is each cause named, how long until the next committed
step, and are the bits those of an undisturbed run?

    python benchmarks/real_model_faults.py --model FOLDER --data GSM8K_FOLDER --out DIR --twin RUN [--disk-mib 60000]
    python benchmarks/real_model_faults.py --recipe grpo_arithmetic --set warmup=null --out DIR [--twin RUN]

The faults are those of `kintsugi lab campaign --each`, one after the other in one run: kill and stop of every role, a
reward that hangs, host memory, a growing server, a slow accelerator, full accelerator memory, a disk that is full
during a save. A fault begins at a healthy moment: a step was committed since the last one, and the diagnosis names
nothing. A diagnosis that still names something after some steps delays the next fault no longer (`alarm_before`). The
diagnosis is a process that knows nothing of the faults and reads the run folder (`kintsugi/lab/campaign/blind.py`); its
first answer after the fault counts. A fault that this machine can not inject is listed with the reason, and so is one
for which no time is left: no fault begins that may outlast `--budget` seconds after the start of this program.

`--twin RUN` is the folder of an undisturbed run of the same recipe, for example `DIR/none` of `real_model.py`. The
state digest of every step that both have committed is compared; configuration fields that differ are listed.

A full disk needs a disk that may be filled: one of `--disk-mib` that is mounted for the run folder (root; a file of
that size in --out, or a tmpfs), or a folder on a disk of the machine (`--disk-folder`). Without one that fault is left
out. Results: DIR/faults.json and DIR/faults.md, written after every fault; the run folder is in DIR/cluster/run at the
end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks import real_model
from kintsugi.config.recipe import fields_of, load, load_config
from kintsugi.config.schema import Config
from kintsugi.control.phases.table import Phase
from kintsugi.errors import KintsugiError, StorageError
from kintsugi.journal.facts import RolledBack, StepCommitted
from kintsugi.journal.journal import read_facts
from kintsugi.lab.campaign import log_readers, scoring
from kintsugi.lab.campaign.campaign import CampaignCluster
from kintsugi.lab.campaign.cases import LEAST_FAULT_S, each_once
from kintsugi.lab.campaign.fault_effect import effect_of
from kintsugi.lab.campaign.records import ExclusionReason, named
from kintsugi.lab.commands import check_places
from kintsugi.lab.faults.catalogue import shares_device
from kintsugi.lab.faults.cuda import FullGpuMemory
from kintsugi.lab.injector.injection import Ability, Injected, Injection, Trigger
from kintsugi.lab.probing import abilities
from kintsugi.lab.scenarios.experiments import TestbedSpec
from kintsugi.run_folder.layout import RunFolder
from kintsugi.types import Role, role_of

SAVE_EVERY = 10
STEPS = 100_000
"""More steps than fit into the time; the run is ended."""
SETTLED_STEPS, LEAST_SETTLED_S = 5.0, 20.0
"""Steps, and seconds, after which the next fault does not wait for the diagnosis to name nothing."""
CASE_STEPS, LEAST_CASE_S = 6.0, 30.0
"""Time that a fault may take, in steps and seconds: it does not begin when less is left."""
PHASES: dict[Role, Phase] = {
    Role.MODEL: Phase.TRAINING,
    Role.MASTER: Phase.TRAINING,
    Role.AGENT: Phase.TRAINING,
    Role.SERVER: Phase.COLLECTING,
    Role.MANAGER: Phase.COLLECTING,
    Role.ROLLOUT: Phase.COLLECTING,
}
"""Phase in which a process is killed or stopped: the one in which it has something to do."""
MOMENT_STEPS, LEAST_MOMENT_S = 3.0, 15.0
"""Longest wait for that phase."""
NOT_COMPARED = frozenset({"run_dir", "name"})


@dataclass
class Row:
    """One fault and what came of it; seconds after its begin."""

    fault: str
    """`kill model-0`."""
    fired: bool = False
    why_not: str = ""
    mechanism: str = ""
    phase: str = ""
    step: int = 0
    had_effect: bool | None = None
    kind: str = ""
    process: str = ""
    confidence: float | None = None
    verdict_s: float | None = None
    summary: str = ""
    right: bool | None = None
    said: list[str] = field(default_factory=list)
    """All causes that were named until the next fault, each once, in order."""
    next_step_s: float | None = None
    undone_s: float | None = None
    """When the fault was ended; a kill ends itself."""
    healthy_s: float | None = None
    """When the next fault could begin."""
    alarm_before: list[str] = field(default_factory=list)
    """Causes of the fault before that were still named when this one began."""
    trouble: str = ""


def planned(config: Config, *, able: set[Ability], names: Sequence[str]) -> list[Injection]:
    """The faults in their order, those of `names` if there are any; signals come in the phase of the process's work."""
    cases = each_once(config=config, abilities=able, has_accelerator=FullGpuMemory.missing() is None)
    faults = [_at_its_moment(case.injections[0]) for case in cases]
    return [fault for fault in faults if not names or name_of(fault) in names]


def _at_its_moment(injection: Injection) -> Injection:
    if injection.ability not in (Ability.KILL, Ability.STOP):
        return injection
    trigger = Trigger(phase=PHASES[role_of(injection.target)])
    return msgspec.structs.replace(injection, trigger=trigger)


def name_of(injection: Injection) -> str:
    return f"{injection.ability.value}-{injection.target}"


def is_for_a_save(injection: Injection) -> bool:
    return injection.trigger.phase == Phase.SAVING


class Strikes:
    """Strikes one run with all faults, and keeps the results."""

    def __init__(self, cluster: CampaignCluster, *, save_every: int, until: float, out: Path) -> None:
        self._cluster, self._save_every, self._until, self._out = cluster, save_every, until, out
        self.rows: list[Row] = []
        self._named: list[str] = []

    def all_of(self, faults: Sequence[Injection], *, written: dict[str, Any]) -> None:
        """Strike until none is left, the time is over or the run has ended; results are written after each."""
        left = list(faults)
        while left:
            fault = self._next(left)
            left.remove(fault)
            if why_not := self._why_not():
                self.rows.append(Row(name_of(fault), why_not=why_not))
                continue
            self.rows.append(self._one(fault))
            print(line_of(self.rows[-1]), flush=True)
            write(self._out, self.rows, written)

    def _next(self, left: Sequence[Injection]) -> Injection:
        """The one for a save when the next step is saved, else the first of the others."""
        saves = [fault for fault in left if is_for_a_save(fault)]
        others = [fault for fault in left if not is_for_a_save(fault)]
        is_saved_next = (self._cluster.watch.step + 1) % self._save_every == 0 if self._save_every else False
        return saves[0] if saves and (is_saved_next or not others) else others[0]

    def _why_not(self) -> str:
        if not self._cluster.system.run.running:
            return "the run has ended"
        needed_s = max(LEAST_CASE_S, CASE_STEPS * self._step_s)
        return "no time is left" if time.monotonic() + needed_s > self._until else ""

    @property
    def _step_s(self) -> float:
        return self._cluster.pace.window_s / 4

    def _one(self, fault: Injection) -> Row:
        cluster, row = self._cluster, Row(name_of(fault), alarm_before=self._named)
        cluster.looks()
        logs = log_readers.log_sizes(cluster.run_dir)
        moment_s = max(LEAST_MOMENT_S, MOMENT_STEPS * self._step_s)
        if is_for_a_save(fault):
            moment_s += self._save_every * self._step_s
        moment_s = max(1.0, min(moment_s, self._until - time.monotonic()))
        trigger = msgspec.structs.replace(fault.trigger, timeout_s=moment_s)
        injector = cluster.injector(0)
        try:
            injected = injector.begin(msgspec.structs.replace(fault, trigger=trigger))
        except KintsugiError as error:
            return replace(row, why_not=str(error))
        row = replace(row, fired=True, mechanism=injected.mechanism, phase=injected.phase, step=injected.step)
        try:
            self._answer(row, injected)
        finally:
            try:
                injected = injector.end(injected)
            except KintsugiError as error:
                row.trouble = f"{type(error).__name__}: {error}"
        row.undone_s = round((injected.end or time.time()) - injected.start, 1)
        self._settle(row, injected)
        effect = effect_of(cluster.run_dir, [injected], start=injected.start, end=time.time(), beyond=logs)
        row.had_effect = effect["real"]
        return row

    def _answer(self, row: Row, injected: Injected) -> None:
        """Wait for the first cause that is named, and at least until the fault can have shown."""
        since = injected.start

        def said() -> bool:
            self._take(row, injected)
            return row.verdict_s is not None and time.time() - since >= LEAST_FAULT_S

        self._cluster.until(said, timeout_s=min(self._cluster.pace.window_s, self._remaining_s()))

    def _take(self, row: Row, injected: Injected) -> None:
        for look in self._cluster.looks():
            causes = look.diagnosis.causes if look.diagnosis is not None else ()
            self._named = list(map(named, causes))
            if look.t <= injected.start:
                continue
            row.said += [each for each in self._named if each not in row.said]
            if causes and row.verdict_s is None:
                first = causes[0]
                row.kind, row.process, row.summary = first.kind.value, first.process, first.summary
                row.confidence = round(first.confidence, 2)
                row.verdict_s = round(look.t - injected.start, 1)
                row.right = scoring.is_right(first.process, first.kind, [self._expected(injected)])

    def _expected(self, injected: Injected) -> scoring.ExpectedCause:
        return scoring.expected_cause(
            injected.injection.ability,
            target=injected.process,
            start=injected.start,
            host_of=self._cluster.system.host_of(),
            shares_device=shares_device(injected.injection.ability, injected.mechanism),
        )

    def _settle(self, row: Row, injected: Injected) -> None:
        """Wait for a committed step after the end of the fault, and for a while that the diagnosis names nothing."""
        watch = self._cluster.watch
        ended = time.monotonic()
        quiet_by = ended + max(LEAST_SETTLED_S, SETTLED_STEPS * self._step_s)

        def is_healthy() -> bool:
            self._take(row, injected)
            makes_steps = watch.committed_after(ended) is not None
            return not self._cluster.system.run.running or (
                makes_steps and (not self._named or time.monotonic() > quiet_by)
            )

        if self._cluster.until(is_healthy, timeout_s=self._remaining_s()):
            row.healthy_s = round(time.time() - injected.start, 1)
        if not self._cluster.system.run.running:
            row.trouble = row.trouble or "the run has ended"
        after = watch.committed_after(injected.monotonic)
        row.next_step_s = None if after is None else round(after.at - injected.monotonic, 1)
        if row.verdict_s is None:
            row.right = False

    def _remaining_s(self) -> float:
        return max(1.0, self._until - time.monotonic())


# The undisturbed run.


def digests(run_dir: Path) -> dict[int, str]:
    """State digest of every committed step that was not rolled back for good."""
    found: dict[int, str] = {}
    for fact in read_facts(RunFolder(run_dir).journal_file):
        match fact:
            case StepCommitted(step=step, state_digest=digest):
                found[step] = digest
            case RolledBack(step=step):
                found = {each: digest for each, digest in found.items() if each <= step}
            case _:
                pass
    return found


def compared(run_dir: Path, twin: Path | None) -> dict[str, Any]:
    """Steps that both runs have committed, and those whose states differ."""
    if twin is None:
        return {"why_not": "no --twin was given"}
    try:
        ours, theirs = digests(run_dir), digests(twin)
        fields, other = (fields_of(load_config(RunFolder(folder).config_file)) for folder in (run_dir, twin))
    except (OSError, StorageError, KintsugiError) as error:
        return {"why_not": str(error)}
    common = sorted(ours.keys() & theirs.keys())
    different = [step for step in common if ours[step] != theirs[step]]
    return {
        "twin": str(twin),
        "steps": len(ours),
        "steps_of_twin": len(theirs),
        "compared": len(common),
        "last_compared": common[-1] if common else None,
        "different": different,
        "fields_that_differ": sorted(
            name
            for name in (fields.keys() | other.keys()) - NOT_COMPARED
            if fields.get(name) != other.get(name)
        ),
    }


# Results.


def line_of(row: Row) -> str:
    if not row.fired:
        return f"{row.fault:<24} not injected: {row.why_not}"
    said = f"{row.kind} {row.process} ({row.confidence:.0%})" if row.kind else "nothing"
    return (
        f"{row.fault:<24} {said:<36} after {_number(row.verdict_s)} s, right: {row.right}; "
        f"next step after {_number(row.next_step_s)} s{'; ' + row.trouble if row.trouble else ''}"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def table(rows: Sequence[Row], result: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "| fault | mechanism, phase | first verdict | after s | right | next step s | other causes named |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row.fired:
            lines.append(f"| {row.fault} | not injected: {row.why_not} | | | | | |")
            continue
        said = f"{row.kind} {row.process} {row.confidence:.0%}" if row.kind else "none"
        others = ", ".join(each for each in row.said if each != f"{row.kind} {row.process}")
        faint = "" if row.had_effect else " (no effect was measured)"
        lines.append(
            f"| {row.fault}{faint} | {row.mechanism}, {row.phase} | {said} | {_number(row.verdict_s)} | "
            f"{'yes' if row.right else 'no'} | {_number(row.next_step_s)} | {others} |"
        )
    fired = [row for row in rows if row.fired]
    num_right = sum(bool(row.right) for row in fired)
    lines += [
        "",
        f"{num_right} of {len(fired)} right at the first answer; {len(rows) - len(fired)} not injected.",
        "",
    ]
    return "\n".join([*lines, _equality(result.get("equal", {})), ""])


def _equality(equal: dict[str, Any]) -> str:
    if "compared" not in equal:
        return f"Not compared with an undisturbed run: {equal.get('why_not', 'the run has not ended')}."
    if equal["different"]:
        said = f"{len(equal['different'])} DIFFER, the first at step {equal['different'][0]}"
    else:
        said = "all equal"
    fields = ", ".join(equal["fields_that_differ"]) or "none"
    return (
        f"State digests of {equal['compared']} steps (up to {equal['last_compared']}) against the undisturbed run: "
        f"{said}. Configuration fields that differ: {fields}."
    )


def write(out: Path, rows: Sequence[Row], result: dict[str, Any]) -> None:
    body = {**result, "rows": [asdict(row) for row in rows]}
    (out / "faults.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (out / "faults.md").write_text(table(rows, result), encoding="utf-8")


# The program.


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    real_model.add_run_arguments(parser)
    parser.set_defaults(save_every=SAVE_EVERY)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the run, which is ended earlier")
    parser.add_argument("--faults", default="", help="names of faults with commas between; all if empty")
    parser.add_argument("--list", action="store_true", help="list the faults that can be injected, and end")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything, from the start")
    parser.add_argument("--twin", type=Path, metavar="RUN", help="folder of an undisturbed run")
    parser.add_argument("--disk-mib", type=int, help="size of a disk for the run folder, which is filled")
    parser.add_argument("--disk-folder", type=Path, help="folder on a disk that may be filled")
    arguments = parser.parse_args(words)
    real_model.check_run_arguments(arguments, parser)
    arguments.faults = [name for name in arguments.faults.split(",") if name]
    if arguments.disk_mib is not None and arguments.disk_folder is not None:
        parser.error("expected --disk-mib or --disk-folder, got both")
    return arguments


def possible(places: TestbedSpec) -> tuple[set[Ability], dict[str, str]]:
    """Fault types that can be injected here, and why the others can not."""
    by_ability: dict[Ability, list[str | None]] = {}
    for each in abilities():
        by_ability.setdefault(each.ability, []).append(each.missing)
    why = {
        ability.value: "; ".join(filter(None, missing))
        for ability, missing in by_ability.items()
        if None not in missing
    }
    if places.disk_mib is None and places.disk_folder is None:
        why[Ability.DISK_FILL.value] = "expected --disk-mib or --disk-folder: a disk that may be filled"
    return {ability for ability in by_ability if ability.value not in why}, why


def left_out(config: Config, why: dict[str, str], *, names: Sequence[str]) -> list[Row]:
    """Faults that can not be injected here."""
    every = each_once(config=config, abilities=set(Ability), has_accelerator=False)
    faults = [case.injections[0] for case in every]
    rows = [
        Row(name_of(fault), why_not=why[fault.ability.value])
        for fault in faults
        if fault.ability.value in why and (not names or name_of(fault) in names)
    ]
    unknown = sorted(set(names) - set(map(name_of, faults)))
    return rows + [Row(name, why_not="there is no fault of this name") for name in unknown]


def struck(arguments: argparse.Namespace, config: Config, places: TestbedSpec, *, until: float) -> bool:
    """The run and its faults; whether the run was still going at the end."""
    able, why = possible(places)
    faults = planned(config, able=able, names=arguments.faults)
    folder = arguments.out / "cluster"
    if folder.exists():
        shutil.rmtree(folder)
    result: dict[str, Any] = {"recipe": arguments.recipe, "step_s": None, "not_possible": why}
    cluster = CampaignCluster(config, places=places, folder=folder)
    strikes = Strikes(cluster, save_every=config.checkpoint.every, until=until, out=arguments.out)
    ran = False
    try:
        result["warm_s"] = round(arguments.budget - (until - time.monotonic()), 1)
        unwell = cluster.until_healthy()
        if unwell is not None and unwell[0] in (ExclusionReason.ENDED, ExclusionReason.NO_STEPS):
            result["trouble"] = f"before the first fault: {unwell[0].value}"
        times = [commit.at for commit in cluster.watch.commits]
        result["step_s"] = round((times[-1] - times[1]) / max(1, len(times) - 2), 2)
        strikes.rows += left_out(config, why, names=arguments.faults)
        strikes.all_of(faults, written=result)
        ran = cluster.system.run.running
        result["equal"] = compared(cluster.run_dir, arguments.twin)
    finally:
        cluster.close()
        result["seconds"] = round(arguments.budget - (until - time.monotonic()), 1)
        write(arguments.out, strikes.rows, result)
    print(table(strikes.rows, result))
    return ran and not result["equal"].get("different")


def main() -> None:
    arguments = parsed(sys.argv[1:])
    until = time.monotonic() + arguments.budget
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.out = arguments.out.resolve()
    real_model.make_random_model(arguments)
    path = [str(real_model.HERE.parent), str(real_model.HERE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    overrides = real_model.overrides(arguments, run_dir=arguments.out / "run")
    config = load(arguments.recipe, overrides).config
    places = TestbedSpec(
        disk_mib=arguments.disk_mib,
        disk_folder=None if arguments.disk_folder is None else str(arguments.disk_folder.resolve()),
    )
    if arguments.list:
        able, why = possible(places)
        for fault in planned(config, able=able, names=arguments.faults):
            print(name_of(fault))
        for row in left_out(config, why, names=arguments.faults):
            print(line_of(row))
        return
    check_places(places, name="faults", folder=arguments.out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(0 if struck(arguments, config, places, until=until) else 1)


if __name__ == "__main__":
    main()
