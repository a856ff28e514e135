"""`native.cpp`, compiled for this processor and one shape of attention head, and its functions.

Compiling takes a second, once: the library is kept under the user's cache folder, by everything it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kintsugi.errors import UserError
from kintsugi.runtime import wait

_SOURCE = Path(__file__).with_name("native.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fno-exceptions"),
    # What rounds once where it could round twice, and nothing that takes a NaN for impossible.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILE_TIMEOUT_S = 120.0
PAGE_SIZE = 16
_MOST_SUMS = 16
"""Vectors that attention adds up at once; a processor has twice as many registers for them."""

Address = ctypes.c_void_p
_Size = ctypes.c_int64


LAYER_FIELDS = (
    *("qkv", "output", "gate_up", "down"),
    *("qkv_bias", "output_bias", "gate_up_bias", "down_bias"),
    *("first_norm", "second_norm", "query_norm", "key_norm"),
)


class Layer(ctypes.Structure):
    _fields_ = [(name, Address) for name in LAYER_FIELDS]


class Model(ctypes.Structure):
    _fields_ = [
        *((name, _Size) for name in ("num_layers", "num_heads", "num_kv_heads")),
        *((name, _Size) for name in ("hidden", "inner", "vocabulary", "heads")),
        *((name, _Size) for name in ("true_hidden", "true_head", "num_pages", "max_length")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
        ("layers", ctypes.POINTER(Layer)),
        *((name, Address) for name in ("embedding", "to_vocabulary", "last_norm", "turns", "pages")),
    ]


class Work(ctypes.Structure):
    _fields_ = [
        (name, Address)
        for name in ("hidden", "heads", "gate_up", "normed", "attended", "activated", "scores")
    ]


@dataclass(frozen=True)
class HeadShape:
    head_dim: int
    group: int
    """Heads that share a key-value head."""
    is_half: bool

    @property
    def size(self) -> int:
        """Entries of a head in memory: whole vectors."""
        return -(-self.head_dim // PAGE_SIZE) * PAGE_SIZE

    @property
    def num_queries(self) -> int:
        """Heads computed together: as many of a group as there are registers for."""
        most = max(1, _MOST_SUMS // (self.size // PAGE_SIZE))
        return max(count for count in range(1, self.group + 1) if self.group % count == 0 and count <= most)


class Library:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.panel.restype = library.rows_at_once.restype = _Size
        library.forward.argtypes = [
            *(ctypes.POINTER(Model), ctypes.POINTER(Work), _Size),
            *(Address, Address, Address, Address, _Size, Address),
        ]
        library.draw.argtypes = [_Size, _Size, _Size, *[Address] * 10]
        library.forward.restype = library.draw.restype = None
        self.panel: int = library.panel()
        self.rows_at_once: int = library.rows_at_once()
        self.forward = library.forward
        self.draw = library.draw


def compiler() -> str | None:
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


@cache
def library_of(shape: HeadShape) -> Library:
    """Compiled now, if it has not been before."""
    program = compiler()
    if program is None:
        raise UserError(f"expected a C++ compiler ({', '.join(_COMPILERS)}), found none")
    flags = (
        *_FLAGS,
        *(f"-DHEAD_SIZE={shape.size}", f"-DQUERIES={shape.num_queries}", f"-DHALF={int(shape.is_half)}"),
    )
    identity = "\n".join([program, *flags, _processor(), _SOURCE.read_text(encoding="utf-8")])
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    folder = Path("~/.cache/kintsugi/native").expanduser()
    path = folder / f"native-{name}.so"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(program, flags=flags, target=path)
    return Library(path)


def _compile(program: str, *, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        done = wait(
            lambda remaining_s: _finished([program, *flags, str(_SOURCE), "-o", str(made)], remaining_s),
            whom="the compiler",
            what=f"{_SOURCE.name} compiled",
            timeout_s=_COMPILE_TIMEOUT_S,
        )
        if done.returncode != 0:
            raise UserError(f"{program} could not compile {_SOURCE.name}: {done.stderr.strip()[-2000:]}")
        made.replace(target)


def _finished(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return None


def _processor() -> str:
    """What `-march=native` looks at; a home folder may be shared by hosts that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
