"""Record the runs of `kintsugi page --demo` and pack them into `kintsugi/page/demo/runs.tar.xz`.

    python benchmarks/record_demo.py FOLDER            record both runs below FOLDER/runs, then pack them
    python benchmarks/record_demo.py FOLDER --pack     pack what was recorded there before

Faults are injected by signals at fixed steps; about two minutes on two cores. Numbers are rounded and spans of
evaluations are left out, so that the archive stays below 1 MB. Paths and the name of the host are replaced.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from kintsugi.page.demo import ARCHIVE, FAULTS, SLOW
from kintsugi.run_folder.reader import living_launcher, read_journal, read_metrics

LARGEST_SIZE = 1 << 20
LONGEST_S = 300.0
LEFT_OUT = re.compile(r"(inputs|.*\.lock|launcher\.json|steps|store\.db.*|checkpoints/.*|tensorboard/.*)")
RECIPE = ("multi_turn_tool", "cluster.hosts=2", "eval.every=4", "checkpoint.every=20")
RUNS: dict[str, tuple[str, ...]] = {
    FAULTS: ("algorithm.steps=14",),
    SLOW: ("algorithm.steps=10", "algorithm.batch_size=16", "actor.learning_rate=2e-4"),
}
INJECTED = (
    (54, "model-1", signal.SIGKILL),
    (57, "server-1", signal.SIGKILL),
    (60, "master-0", signal.SIGKILL),
    (63, "server-0", signal.SIGSTOP),
)
"""Step, process and signal of each fault; the warm-up ends with step 52."""


def record(folder: Path, name: str, faults: Sequence[tuple[int, str, signal.Signals]]) -> None:
    """Train one run to its end, with faults."""
    command = [sys.executable, "-m", "kintsugi", "train", *RECIPE, *RUNS[name], f"run_dir=runs/{name}"]
    run_dir = folder / "runs" / name
    process = subprocess.Popen(command, cwd=folder)
    for step, target, number in faults:
        deadline = time.monotonic() + LONGEST_S
        while last_step(run_dir) < step:
            assert process.poll() is None and time.monotonic() < deadline, f"{name} did not reach step {step}"
            time.sleep(0.05)
        pid = pid_of(run_dir, target)
        os.kill(pid, number)
        print(f"step {step}: {number.name} to {target}, pid {pid}")
    assert process.wait(LONGEST_S) == 0, f"{name} ended with {process.returncode}"


def last_step(run_dir: Path) -> int:
    lines, _ = read_metrics(run_dir)
    return max((int(line["step"] or 0) for line in lines), default=0)


def pid_of(run_dir: Path, process: str) -> int:
    """Pid of a process of a running job; the journal does not have that of the master."""
    found = read_journal(run_dir).processes.get(process)
    if found is not None:
        return found
    launcher = living_launcher(run_dir)
    assert launcher is not None
    below = psutil.Process(launcher.pid).children(recursive=True)
    (pid,) = [each.pid for each in below if f"spawn {process}" in " ".join(each.cmdline())]
    return pid


def pack(folder: Path) -> None:
    """Write the archive from the recorded runs."""
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for name in RUNS:
            run_dir = folder / "runs" / name
            for path in sorted(path for path in run_dir.rglob("*") if path.is_file()):
                inner = path.relative_to(run_dir).as_posix()
                if LEFT_OUT.fullmatch(inner) or (name == SLOW and ".spans." in inner):
                    continue
                content = packed(path, folder)
                entry = tarfile.TarInfo(f"{name}/{inner}")
                entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
                archive.addfile(entry, io.BytesIO(content))
    size = ARCHIVE.stat().st_size
    print(f"{ARCHIVE}: {size / 1e3:.0f} kB")
    assert size <= LARGEST_SIZE


def packed(path: Path, folder: Path) -> bytes:
    """Content of one file, without paths and names of this machine; lines of JSON with rounded numbers."""
    content = path.read_bytes()
    if path.name == "journal":
        return content
    if path.suffix == ".jsonl":
        content = b"".join(thinned(content.splitlines(), is_spans=".spans." in path.name))
    for private, public in (
        (str(folder.resolve()), "."),
        (sys.prefix, "/usr"),
        (str(Path(__file__).parents[1]), "/usr"),
        (f'"{socket.gethostname()}"', '"demo"'),
    ):
        content = content.replace(private.encode(), public.encode())
    return content


def thinned(lines: Sequence[bytes], *, is_spans: bool) -> Iterator[bytes]:
    for line in lines:
        record = json.loads(line)
        if is_spans and str(record.get("attributes", {}).get("ticket", "")).startswith("eval:"):
            continue
        yield json.dumps(rounded(record), separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def rounded(value: Any) -> Any:
    """`rounded({"a": [1.23456789e9, 0.000123456789]}) == {"a": [1234567890.0, 0.000123457]}`."""
    if isinstance(value, float):
        return round(value, 4) if abs(value) >= 1.0 else float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pack", action="store_true", help="do not record")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.pack:
        record(folder, FAULTS, INJECTED)
        record(folder, SLOW, ())
    pack(folder)


if __name__ == "__main__":
    main()
