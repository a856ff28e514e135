"""One round of checks in a scratch copy, for `mutation.py`: runs planned tests in order, writes down what each did.

    cd <scratch copy> && PYTHONPATH=. python mutation_checks.py plan.json

The plan has `files`, the `tests` of them to run (all when empty) or to `skip`, a limit in seconds per test (`limits`),
whether to `follow` which functions of `targets` each test calls, and where the report goes (`out`, one JSON object a
line). Without `follow` the first failure ends it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

MEMORY_BYTES = 6 << 30
"""A mutant that fills memory is stopped before the machine is."""
LONGEST_TEST_S = 60.0
"""Of a test, or of importing all of them, whose usual time is not known."""
IMPORT = "import"
COLLECTION = "collection"


class Checks:
    """Plugin of pytest: runs the planned tests in the planned order and notes what each one did."""

    def __init__(self, plan: Mapping[str, Any], out: Path) -> None:
        self._limits: dict[str, float] = plan["limits"]
        self._places = {name: place for place, name in enumerate(plan["tests"])}
        self._skipped = frozenset(plan["skip"])
        self._files = {str(Path.cwd() / file): file for file in plan["targets"]}
        self._out = out.open("w", buffering=1)
        self._called: set[tuple[str, int]] = set()
        if plan["follow"]:
            sys.settrace(self._trace)
            threading.settrace(self._trace)
            self._begin(IMPORT)
            for file in plan["targets"]:
                importlib.import_module(file.removesuffix(".py").replace("/", "."))
            self._end(IMPORT)
        self._begin(COLLECTION)

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        file = self._files.get(frame.f_code.co_filename)
        if file is not None:
            self._called.add((file, frame.f_code.co_firstlineno))

    def _write(self, **what: object) -> None:
        self._out.write(json.dumps(what) + "\n")

    def _begin(self, name: str) -> None:
        """What does not end in time ends the process; the report then says where."""
        self._write(running=name)
        self._called.clear()
        faulthandler.dump_traceback_later(self._limits.get(name, LONGEST_TEST_S), exit=True, file=2)
        self._since = time.perf_counter()

    def _end(self, name: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        seconds = time.perf_counter() - self._since
        self._write(ended=name, seconds=seconds, functions=sorted(self._called))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """A module of tests may do something when it is imported, too."""
        self._called.clear()
        try:
            return (yield)
        finally:
            self._write(collected=collector.nodeid, functions=sorted(self._called))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._end(COLLECTION)
        items[:] = [item for item in items if item.nodeid not in self._skipped]
        if self._places:
            items[:] = [item for item in items if item.nodeid in self._places]
            items.sort(key=lambda item: self._places[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(failed=f"collection of {report.nodeid}", how=_last_line(report.longreprtext))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._begin(item.nodeid)
        try:
            return (yield)
        finally:
            self._end(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(failed=report.nodeid, how=_last_line(report.longreprtext))


def _last_line(text: str) -> str:
    errors = re.findall(r"^E +(.+)$", text, flags=re.MULTILINE)
    return (errors[0] if errors else text.strip().splitlines()[-1] if text.strip() else "")[:200]


def main(plan_file: Path) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    plan = json.loads(plan_file.read_text())
    checks = Checks(plan, Path(plan["out"]))
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    first = [] if plan["follow"] else ["-x"]
    status = pytest.main([*options, "-m", "not slow and not gpu", *first, *plan["files"]], plugins=[checks])
    import kintsugi

    assert Path(kintsugi.__file__).is_relative_to(Path.cwd()), "not the scratch copy"
    return int(status)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
