"""`kernels.cpp`, compiled for this CPU and one shape of attention head, and its functions.

Compiling takes a second, once: the library is kept in the user's cache folder, under a name that depends on all its
inputs. Where that folder can not be used, or other users could write to it, it is compiled at every start.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kintsugi.errors import CompileFailed, DeadlineExceeded
from kintsugi.runtime.processes import SystemProcesses

_SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILERS = ("c++", "g++")
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fno-exceptions"),
    # Allow fused multiply-add, and no optimisation that assumes the absence of NaN.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_COMPILE_TIMEOUT_S = 120.0
_KILLED_TIMEOUT_S = 10.0
_FOLDER = "~/.cache/kintsugi/native"
_DIGEST_SIZE = hashlib.sha256().digest_size
PAGE_SIZE = 16
_MOST_SUMS = 16
"""Vectors that attention accumulates together; a CPU has twice as many registers."""

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
        *((name, _Size) for name in ("true_hidden", "num_pages")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
        ("layers", ctypes.POINTER(Layer)),
        *((name, Address) for name in ("embedding", "to_vocabulary", "last_norm", "turns", "pages")),
    ]


class Work(ctypes.Structure):
    _fields_ = [(name, Address) for name in ("hidden", "heads", "gate_up", "normed", "attended", "activated")]


@dataclass(frozen=True)
class HeadShape:
    head_dim: int
    group: int
    """Number of query heads that share a kv head."""
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
    """Load the library, and compile it if needed; CompileFailed gives the reason."""
    program = compiler()
    if program is None:
        raise CompileFailed(f"expected a C++ compiler ({', '.join(_COMPILERS)}), found none")
    flags = (
        *_FLAGS,
        *(f"-DHEAD_DIM={shape.head_dim}", f"-DHEAD_SIZE={shape.size}"),
        *(f"-DQUERIES={shape.num_queries}", f"-DHALF={int(shape.is_half)}"),
    )
    try:
        name = _name_of(program, flags)
        folder = _own_folder()
        if folder is not None:
            # The folder may be full, or on a file system mounted noexec.
            with suppress(OSError):
                return _library_in(folder, name, program=program, flags=flags)
        with tempfile.TemporaryDirectory() as scratch:
            return _library_in(Path(scratch), name, program=program, flags=flags)
    except OSError as error:
        raise CompileFailed(
            f"expected {_SOURCE.name} compiled by {program} and loaded, got: {error}"
        ) from error


@cache
def why_not(shape: HeadShape) -> str:
    """Reason why there is no library; empty if there is one. Cached, because a failing compiler takes time too."""
    try:
        library_of(shape)
    except CompileFailed as error:
        return str(error)
    return ""


def _name_of(program: str, flags: tuple[str, ...]) -> str:
    """Name by all inputs of a library; a replaced compiler has another size or time."""
    status = Path(program).resolve().stat()
    made_by = [program, str(status.st_size), str(status.st_mtime_ns), *flags, _processor()]
    sources = [_SOURCE, *sorted(_SOURCE.parent.glob(f"{_SOURCE.stem}_*.h"))]
    identity = "\n".join([*made_by, *(source.read_text(encoding="utf-8") for source in sources)])
    return f"native-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"


def _own_folder() -> Path | None:
    """Folder of the libraries, if only this user can write there: a library is code that runs as this user."""
    folder = Path(os.path.expanduser(_FOLDER))
    # Not every user has a home folder.
    if not folder.is_absolute():
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return folder if is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _library_in(folder: Path, name: str, *, program: str, flags: tuple[str, ...]) -> Library:
    path = folder / name
    if not _is_whole(path):
        _compile(program, flags=flags, target=path)
    return Library(path)


def _is_whole(path: Path) -> bool:
    """Whether the file ends with the digest of its contents: a crash of the host may lose part of a file."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return False
    return found[-_DIGEST_SIZE:] == hashlib.sha256(found[:-_DIGEST_SIZE]).digest()


def _compile(program: str, *, flags: tuple[str, ...], target: Path) -> None:
    """Compile to `target`. Concurrent processes write the same contents; the last one wins."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [program, *flags, str(_SOURCE), "-o", str(made)]
        with tempfile.TemporaryFile() as complaints:
            child = SystemProcesses().spawn(command, stdout=complaints, stderr=complaints)
            try:
                status = child.wait_ended(whom="the compiler", timeout_s=_COMPILE_TIMEOUT_S)
            except DeadlineExceeded as error:
                child.send_signal(signal.SIGKILL)
                child.wait_ended(whom="the compiler", timeout_s=_KILLED_TIMEOUT_S)
                raise CompileFailed(f"{program} could not compile {_SOURCE.name}: {error}") from error
            finally:
                child.send_signal(signal.SIGKILL)
                child.close()
            complaints.seek(0)
            said = complaints.read().decode(errors="replace").strip()
        if status != 0:
            raise CompileFailed(f"{program} could not compile {_SOURCE.name}: {said[-2000:]}")
        # The dynamic loader ignores what follows the library.
        made.write_bytes((code := made.read_bytes()) + hashlib.sha256(code).digest())
        made.replace(target)


def _processor() -> str:
    """CPU model and features, as `-march=native` uses them; a home folder may be shared by different hosts."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
