"""Bad input at the size of a real model: what is said, after how many seconds, and what is left behind.

    python benchmarks/real_model_bad_input.py --model FOLDER --gguf FILE --data GSM8K_FOLDER --out DIR [--cases …]
    python benchmarks/real_model_bad_input.py --recipe grpo_arithmetic --tokenizer FOLDER --disk-mib 1 --out DIR …

    too-large          `check` and `train` of a model of 14 billion parameters, whose weight file is a hole
    card-full          `train` while another process leaves 5 GB of the card
    card-without-room  `train` while another process leaves room for the rank and half of what its server needs
    disk-full          `train` with the run folder on a tmpfs of `--disk-mib`
    family             `import` of a GGUF file of a family that is not supported
    cut                `import` of a GGUF file of which a half arrived
    half-folder        `train` with a model folder whose weights are cut
    killed-import      SIGKILL in the middle of an import, then `train` with its folder, then the import again

Every command must end by itself within `--timeout` seconds; all but the last one must refuse. Left are processes that
name DIR on their command line, files in /dev/shm, the run folder, and folders of imports. Cases that this machine can
not do (no card, no root) are listed with the reason. Results: DIR/bad_input.md and the output of each command.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from benchmarks import real_model
from benchmarks.real_model_watch import shared_memory_files
from kintsugi.cli import capacity
from kintsugi.cluster.device_memory import read_devices
from kintsugi.config.recipe import load
from kintsugi.errors import KintsugiError
from kintsugi.model.architecture import ModelConfig, parameter_shapes
from kintsugi.model.folder import CONFIG_FILE, WEIGHTS_FILE, importing_folder
from kintsugi.model.memory import RunMemory
from kintsugi.model.tokenizer import TOKENIZER_FILES
from kintsugi.types import Role, process_id

LEFT_BYTES = 5 * 10**9
GONE_S = 5.0
"""Time for the processes of a command to be gone after it."""
KILL_DELAY_S = 0.5
"""Time that an import of more than a gigabyte writes before it is killed."""
FOURTEEN_B = ModelConfig(
    family="qwen2",
    vocab_size=152_064,
    hidden_size=5120,
    intermediate_size=13_824,
    num_layers=48,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    max_positions=32_768,
    attention_bias=True,
)
HOLDER = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Row:
    """One command, or a case that was left out."""

    case: str
    said: str
    seconds: float | None = None
    code: int | None = None
    left: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        seconds = "–" if self.seconds is None else f"{self.seconds:.1f}"
        return (
            self.case,
            self.said,
            seconds,
            "–" if self.code is None else str(self.code),
            self.left or "nothing",
        )


class Cases:
    """Commands of `kintsugi` with bad input, one after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._given = arguments
        self._out: Path = arguments.out
        self._run_dir = self._out / "run"

    def too_large(self) -> Iterator[Row]:
        folder = self._out / "model-14b"
        write_hollow_model(FOURTEEN_B, folder=folder, tokenizer=self._given.tokenizer or self._given.model)
        own = [f"model.path={folder}", "model.new=null"]
        if read_devices():
            yield self._command("too-large: check", "check", *self._recipe(*own))
        yield self._command("too-large: train", "train", *self._recipe(*own))

    def card_full(self) -> Iterator[Row]:
        with held_card(LEFT_BYTES):
            yield self._command("card-full", "train", *self._recipe())

    def card_without_room(self) -> Iterator[Row]:
        memory = self._memory()
        server = memory.server_bytes + memory.request_bytes
        rank = memory.of_process(process_id(Role.MODEL, 0)).device_bytes
        with held_card(rank + server // 2):
            yield self._command("card-without-room", "train", *self._recipe())

    def disk_full(self) -> Iterator[Row]:
        with small_disk(self._out / "disk", mib=self._given.disk_mib) as disk:
            yield self._command("disk-full", "train", *self._recipe(f"run_dir={disk / 'run'}"))

    def family(self) -> Iterator[Row]:
        path = self._out / "foreign.gguf"
        write_hollow_gguf(self._given.gguf, path, family="gemma")
        yield self._command("family", "import", str(path), str(self._out / "imported"))

    def cut(self) -> Iterator[Row]:
        path = self._out / "cut.gguf"
        write_hollow_gguf(self._given.gguf, path, share=0.5)
        yield self._command("cut", "import", str(path), str(self._out / "imported"))

    def half_folder(self) -> Iterator[Row]:
        folder = self._out / "half-folder"
        write_hollow_model(FOURTEEN_B, folder=folder, tokenizer=self._given.tokenizer or self._given.model)
        os.truncate(folder / WEIGHTS_FILE, (folder / WEIGHTS_FILE).stat().st_size // 2)
        yield self._command("half-folder", "train", *self._recipe(f"model.path={folder}", "model.new=null"))

    def killed_import(self) -> Iterator[Row]:
        destination = self._out / "imported"
        yield self._kill_import(destination)
        own = [f"model.path={destination}", "model.new=null"]
        yield self._command("killed-import: train", "train", *self._recipe(*own))
        yield self._command("killed-import: again", "import", str(self._given.gguf), str(destination))
        shutil.rmtree(destination, ignore_errors=True)

    def _kill_import(self, destination: Path) -> Row:
        name = "killed-import: killed"
        log, files, names = self._log(name), shared_memory_files(), self._names()
        began = time.monotonic()
        process = self._start("import", str(self._given.gguf), str(destination), log=log)
        weights = importing_folder(destination) / "model" / WEIGHTS_FILE
        while process.poll() is None and not weights.exists():
            time.sleep(0.001)
        if self._given.gguf.stat().st_size > 10**9:
            time.sleep(KILL_DELAY_S)
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        said = "killed while weights were written" if code < 0 else f"NOT STRUCK: {last_line(log)}"
        return Row(name, said, time.monotonic() - began, code, self._left(files, names))

    def _memory(self) -> RunMemory:
        return capacity.run_memory(load(self._given.recipe, self._recipe()[1:]).config, num_devices=1)

    def _recipe(self, *more: str) -> list[str]:
        return [self._given.recipe, *real_model.overrides(self._given, run_dir=self._run_dir), *more]

    def _command(self, name: str, *words: str) -> Row:
        """Run a command to its end; one that does not end has begun what it should refuse."""
        log, files, names = self._log(name), shared_memory_files(), self._names()
        began = time.monotonic()
        process = self._start(*words, log=log)
        try:
            process.wait(self._given.timeout)
            said = last_line(log)
        except subprocess.TimeoutExpired:
            said = (
                f"NOT REFUSED, {real_model._ended(process, timeout_s=self._given.timeout)}: {last_line(log)}"
            )
        seconds = time.monotonic() - began
        return Row(name, said, seconds, process.returncode, self._left(files, names))

    def _start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "kintsugi", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "1000"},
            )

    def _log(self, name: str) -> Path:
        return self._out / f"{name.replace(': ', '-')}.log"

    def _names(self) -> set[str]:
        """Names in the folder of this program, but for the logs."""
        return {each.name for each in self._out.iterdir() if each.suffix != ".log"}

    def _left(self, files: set[str], names: set[str]) -> str:
        """What a command has left, once its processes had time to end; `files` and `names` were there before."""
        until = time.monotonic() + GONE_S
        while (processes := processes_that_name(self._out)) and time.monotonic() < until:
            time.sleep(0.05)
        found = [f"process {name}" for name in processes]
        found += [f"/dev/shm/{name}" for name in sorted(shared_memory_files() - files)]
        return ", ".join([*found, *sorted(self._names() - names)])


# What the cases are made of.


def write_hollow_model(config: ModelConfig, *, folder: Path, tokenizer: Path) -> None:
    """A model folder whose weight file has a header and no data: a hole of the right size."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(config.to_huggingface()))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    header, position = {}, 0
    for name, shape in parameter_shapes(config).items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (position, end)}
        position = end
    encoded = msgspec.json.encode(header)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + position)


def write_hollow_gguf(source: Path, path: Path, *, family: str = "", share: float = 1.0) -> None:
    """The first 16 MiB of a GGUF file, which hold its metadata, then a hole, up to a share of its size; another family
    has as many letters as that of the file."""
    with source.open("rb") as file:
        head = file.read(16 << 20)
    if family:
        key = b"general.architecture"
        start = head.index(key) + len(key) + 4
        length = int.from_bytes(head[start : start + 8], "little")
        assert length == len(family), f"expected a family of {length} letters"
        head = head[: start + 8] + family.encode() + head[start + 8 + length :]
    with path.open("wb") as file:
        file.write(head)
        file.truncate(int(source.stat().st_size * share))


@contextmanager
def held_card(left: int) -> Iterator[None]:
    """Another process holds the memory of the first card, but for `left` bytes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n", "the memory of the card could not be held"
        yield
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def small_disk(folder: Path, *, mib: int) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], check=True)
    except (subprocess.CalledProcessError, OSError):
        folder.rmdir()
        raise
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def processes_that_name(folder: Path) -> list[str]:
    """Other processes with the folder on their command line, but for this program and its ancestors."""
    own = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    return [
        f"{each.pid} {' '.join(each.info['cmdline'])[:60]}"
        for each in psutil.process_iter(["cmdline"])
        if each.pid not in own
        and any(str(folder) in word for word in each.info["cmdline"] or ())
        and each.status() != psutil.STATUS_ZOMBIE
    ]


def last_line(log: Path) -> str:
    """The message of a command: its line with `error:`, else its last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["nothing"])[-1]


def why_not(case: str, arguments: argparse.Namespace) -> str:
    """Why a case can not be tried here; empty if it can."""
    if case.startswith("card") and not read_devices():
        return "no card"
    if case == "disk-full" and os.geteuid() != 0:
        return "no root, which mounts the disk"
    if case in ("family", "cut", "killed-import") and arguments.gguf is None:
        return "no --gguf"
    if case in ("too-large", "half-folder") and arguments.model is None and arguments.tokenizer is None:
        return "no --model or --tokenizer"
    return ""


def tried(name: str, case: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Rows of a case; one that could not be set up is listed with the reason."""
    try:
        yield from case()
    except (subprocess.CalledProcessError, OSError, KintsugiError, AssertionError) as error:
        yield Row(name, f"left out: {type(error).__name__}: {error}")


def table(rows: list[Row]) -> str:
    lines = ["| case | said | after s | exit code | left |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.cells)} |" for row in rows), ""])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    real_model.add_run_arguments(parser)
    parser.set_defaults(warmup=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--gguf", type=Path, help="GGUF file of a supported family")
    parser.add_argument("--disk-mib", type=int, default=8192, help="size of the disk without room")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each command")
    parser.add_argument("--cases", default="", help="some of the cases with commas between; all if empty")
    arguments = parser.parse_args()
    real_model.check_run_arguments(arguments, parser)
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.out = arguments.out.resolve()
    return arguments


def main() -> None:
    arguments = parsed()
    real_model.make_random_model(arguments)
    cases = Cases(arguments)
    every: dict[str, Callable[[], Iterator[Row]]] = {
        "too-large": cases.too_large,
        "card-full": cases.card_full,
        "card-without-room": cases.card_without_room,
        "disk-full": cases.disk_full,
        "family": cases.family,
        "cut": cases.cut,
        "half-folder": cases.half_folder,
        "killed-import": cases.killed_import,
    }
    rows: list[Row] = []
    for name in filter(None, arguments.cases.split(",")) if arguments.cases else every:
        missing = why_not(name, arguments)
        for row in iter([Row(name, f"left out: {missing}")]) if missing else tried(name, every[name]):
            rows.append(row)
            print(" · ".join(row.cells), flush=True)
            (arguments.out / "bad_input.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
