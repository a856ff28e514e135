"""Seeded bugs in the control plane: how many of them do the unit tests and the simulator catch?

    python benchmarks/mutation.py [--mutants N] [--seed S] [--seeds K] [--since COMMIT] [--checks PATH...] [--json FILE]

Mutants are drawn from a seed, uniformly over all eligible sites of the shipped decision code, or of what was changed in
it since a commit; `mutants.py` says which these are. Each one is put into a scratch copy of the project and judged by
the tests of the control plane and by K simulated seeds, every second one with a layout of its own: those that reach the
mutated function, quickest first, until one fails. A test that hangs counts as failed. Which tests reach which function
is measured once, on the unchanged code; a test that fails there, or takes long, is left out and listed, so that it can
not take credit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mutants import Mutant, draw, lines_of_diff, target_files

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (
    "tests/unit/control",
    "tests/unit/samples",
    "tests/unit/recovery",
    "tests/unit/model/test_seats.py",
    "tests/simulation",
)
COPIED = (
    "kintsugi",
    "tests",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "ARCHITECTURE.md",
)
SEEDS_FILE = "tests/simulation/test_seeds.py"
SEEDS_TEST = """
import pytest

from kintsugi.simulation.campaign import Runner

RUNNERS = (Runner(), Runner(draws_layouts=True))


@pytest.mark.parametrize("seed", range({count}))
def test_seed(seed: int) -> None:
    assert RUNNERS[seed % 2].run(seed).violations == []
"""
IMPORT = "import"
COLLECTION = "collection"
NOTHING_COLLECTED = 5
"""Exit status of pytest."""
PARALLEL = 2
SLOWEST_S = 10.0
"""Tests that take longer are left out; those that simulate many seeds do what the seeds do here, one by one."""
LEAST_LIMIT_S = 10.0
LIMIT_FACTOR = 10.0
"""A test hangs when it takes this many times as long as on the unchanged code, and not less than the above."""


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str
    """Test that failed or hung; empty for a survivor."""
    how: str
    """What it said; for a survivor how many checks it survived."""
    seconds: float


@dataclass
class Report:
    """What one process of checks wrote down."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of the tests that passed."""
    functions: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    """Test, or file of tests → (file, first line) of the functions that it called."""
    failed: dict[str, str] = field(default_factory=dict)
    running: str = ""
    """The test that never ended."""

    @staticmethod
    def read(out: Path) -> Report:
        report = Report()
        for line in out.read_text().splitlines():
            match json.loads(line):
                case {"running": test}:
                    report.running = test
                case {"ended": test, "seconds": seconds, "functions": functions}:
                    report.seconds[test], report.running = seconds, ""
                    report.functions[test] = {(file, number) for file, number in functions}
                case {"collected": file, "functions": functions}:
                    report.functions[file] = {(called, number) for called, number in functions}
                case {"failed": test, "how": how}:
                    report.failed.setdefault(test, how)
        if report.running:
            report.failed.setdefault(report.running, "it did not end, or ended the process")
        return report

    def add(self, other: Report) -> None:
        self.seconds.update(other.seconds)
        self.functions.update(other.functions)
        self.failed.update(other.failed)


class Scratch:
    """A copy of the project in which one mutant at a time is checked."""

    def __init__(self, folder: Path, *, num_seeds: int, checks: Sequence[str] = CHECKS) -> None:
        self.folder = folder
        self._checks = [*checks, *([] if "tests/simulation" in checks else [SEEDS_FILE])]
        ignored = shutil.ignore_patterns("__pycache__")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            elif source.exists():
                shutil.copy(source, folder / name)
        (folder / SEEDS_FILE).write_text(SEEDS_TEST.format(count=num_seeds))

    def sources(self) -> dict[str, bytes]:
        return {file: (self.folder / file).read_bytes() for file in target_files()}

    def survey(self) -> Report:
        """Everything, on the unchanged code; after a test that hangs, what is left."""
        whole = Report()
        while True:
            part = self._check(self._checks, follow=True, skip=[*whole.seconds, *whole.failed])
            whole.add(part)
            if not part.running:
                return whole

    def _check(
        self,
        files: Sequence[str],
        *,
        tests: Sequence[str] = (),
        skip: Sequence[str] = (),
        limits: Mapping[str, float] | None = None,
        follow: bool = False,
    ) -> Report:
        out, plan = self.folder / "report.jsonl", self.folder / "plan.json"
        out.unlink(missing_ok=True)
        what = {
            "files": files,
            "tests": tests,
            "skip": skip,
            "limits": limits or {},
            "follow": follow,
            "out": str(out),
            "targets": target_files(),
        }
        plan.write_text(json.dumps(what))
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        if not follow:  # The compiled code of the unchanged files is there; that of a mutant must not stay.
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        child = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "mutation_checks.py"), str(plan)],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate()
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
        if not out.exists():
            raise RuntimeError(f"the checks did not begin: {output.decode(errors='replace')}")
        report = Report.read(out)
        if not report.failed and child.returncode not in (0, NOTHING_COLLECTED):
            raise RuntimeError(f"the checks ended with {child.returncode}: {output.decode(errors='replace')}")
        return report

    def judge(self, mutant: Mutant, survey: Survey) -> Verdict:
        since = time.monotonic()
        tests = survey.reaching(mutant)
        path = self.folder / mutant.file
        source = path.read_bytes()
        compiled = list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))
        kept = {file: file.read_bytes() for file in compiled}
        for file in compiled:
            file.unlink()
        path.write_bytes(mutant.apply(source))
        try:
            files = sorted({test.partition("::")[0] for test in tests})
            report = self._check(files, tests=tests, limits=survey.limits) if tests else Report()
        finally:
            path.write_bytes(source)
            stat = path.stat()
            for file, content in kept.items():
                # The header has the time of the source that it was compiled from.
                file.write_bytes(content[:8] + int(stat.st_mtime).to_bytes(4, "little") + content[12:])
        caught_by, how = next(iter(report.failed.items()), ("", f"survived {len(tests)} checks"))
        return Verdict(mutant, caught_by, how, time.monotonic() - since)


class Survey:
    """What the unchanged code does: which tests pass, how long they take, which functions each one reaches."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.left_out: dict[str, str] = {}
        for report in reports:
            self.left_out.update(report.failed)
        seconds = {t: s for t, s in reports[0].seconds.items() if t not in (IMPORT, COLLECTION)}
        self.left_out |= {test: f"takes {s:.0f} s" for test, s in seconds.items() if s > SLOWEST_S}
        self.tests = sorted(seconds.keys() - self.left_out.keys(), key=lambda test: seconds[test])
        self.limits = {test: LEAST_LIMIT_S + LIMIT_FACTOR * seconds[test] for test in self.tests}
        self._functions = reports[0].functions

    def reaching(self, mutant: Mutant) -> list[str]:
        """Quickest first; what runs when the package is imported is reached by all."""
        function = (mutant.file, mutant.function)
        if mutant.function is None or function in self._functions[IMPORT]:
            return self.tests
        reached = {name for name, called in self._functions.items() if function in called}
        return [test for test in self.tests if test in reached or test.partition("::")[0] in reached]


def short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def line_of(verdict: Verdict) -> str:
    mutant = verdict.mutant
    change = f"{short(mutant.original)}  →  {short(mutant.mutated)}"
    by = f"{verdict.caught_by} ({short(verdict.how)})" if verdict.caught_by else f"SURVIVED ({verdict.how})"
    return f"{mutant.file}:{mutant.line}  {mutant.operator}:  {change}\n    {verdict.seconds:5.1f} s  {by}"


def judge_all(mutants: Sequence[Mutant], survey: Survey, scratches: Sequence[Scratch]) -> list[Verdict]:
    """In parallel, one mutant per scratch copy at a time; given back in the order of drawing."""
    free: SimpleQueue[Scratch] = SimpleQueue()
    for scratch in scratches:
        free.put(scratch)

    def judge(mutant: Mutant) -> Verdict:
        scratch = free.get()
        try:
            return scratch.judge(mutant, survey)
        finally:
            free.put(scratch)

    verdicts = []
    with ThreadPoolExecutor(len(scratches)) as pool:
        try:
            for number, verdict in enumerate(pool.map(judge, mutants), start=1):
                print(f"{number:4} {line_of(verdict)}", flush=True)
                verdicts.append(verdict)
        finally:  # Whoever interrupts this does not want to wait for the rest.
            pool.shutdown(cancel_futures=True)
    return verdicts


def report_of(
    verdicts: Sequence[Verdict], survey: Survey, *, num_sites: int, seed: int, num_seeds: int, wall_s: float
) -> dict[str, Any]:
    survivors = [verdict for verdict in verdicts if not verdict.caught_by]
    share = 100.0 * (len(verdicts) - len(survivors)) / len(verdicts)
    case = {"what": "seeded bugs caught", "mutants": len(verdicts), "seed": seed, "sites": num_sites}
    host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    listed = [
        {
            "file": v.mutant.file,
            "line": v.mutant.line,
            "operator": v.mutant.operator,
            "original": v.mutant.original,
            "mutated": v.mutant.mutated,
            "caught_by": v.caught_by,
            "how": v.how,
            "seconds": round(v.seconds, 2),
        }
        for v in verdicts
    ]
    return {
        "host": host,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [{"case": case, "unit": "%", "ours": round(share, 1), "peers": {}, "ratio": {}}],
        "caught": len(verdicts) - len(survivors),
        "survived": len(survivors),
        "simulated_seeds": num_seeds,
        "checks": len(survey.tests),
        "left_out": survey.left_out,
        "wall_s": round(wall_s, 1),
        "mutants": listed,
    }


def changed_lines(commit: str) -> dict[str, set[int]]:
    """File → lines that were changed since a commit."""
    command = ["git", "diff", "--unified=0", commit, "--", *target_files()]
    return lines_of_diff(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=60, help="simulated seeds that a mutant has to survive")
    parser.add_argument("--since", metavar="COMMIT", help="only lines that were changed since this commit")
    parser.add_argument("--checks", nargs="+", default=CHECKS, metavar="PATH", help="tests beside the seeds")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PARALLEL) as pool:
        copies = [Path(folder) / str(number) for number in range(PARALLEL)]
        scratches = [Scratch(copy, num_seeds=arguments.seeds, checks=arguments.checks) for copy in copies]
        survey = Survey(list(pool.map(Scratch.survey, scratches)))
        for test, why in survey.left_out.items():
            print(f"left out on the unchanged code: {test}: {why}")
        mutants, num_sites = draw(
            scratches[0].sources(),
            count=arguments.mutants,
            seed=arguments.seed,
            lines=None if arguments.since is None else changed_lines(arguments.since),
        )
        print(f"{len(survey.tests)} checks, {len(mutants)} mutants of {num_sites} sites\n", flush=True)
        verdicts = judge_all(mutants, survey, scratches)
    report = report_of(
        verdicts,
        survey,
        num_sites=num_sites,
        seed=arguments.seed,
        num_seeds=arguments.seeds,
        wall_s=time.monotonic() - since,
    )
    print(
        f"\ncaught {report['caught']} of {len(verdicts)}: {report['rows'][0]['ours']} %, {report['wall_s']} s"
    )
    for verdict in verdicts:
        if not verdict.caught_by:
            print(f"SURVIVED {line_of(verdict)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
