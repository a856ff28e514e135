"""Import of user code: by dotted path, `package.module.name`, or from a file, `rewards.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from types import ModuleType
from typing import Any

from kintsugi.errors import ConfigError

IN_A_FILE = ".py:"
_IMPORTING = RLock()
"""Held while a file is imported: a second thread must not see a module that is only half there."""


def function_name(path: str) -> str:
    """`function_name("package.module.brevity") == function_name("folder/rewards.py:brevity") == "brevity"`."""
    return path.rpartition(":" if IN_A_FILE in path else ".")[2]


def import_function(path: str, *, field: str = "algorithm.reward") -> Callable[..., Any]:
    """Import the function or class at a path. ConfigError names the field, the module and the reason of a failure."""
    function = import_object(path, field=field)
    if not callable(function):
        name = function_name(path)
        found = "nothing" if function is None else type(function).__name__
        raise ConfigError(
            f"`{field}`: expected a function {name!r} in {_module(path)}, found {found} at {path}"
        )
    loaded: Callable[..., Any] = function
    return loaded


def import_object(path: str, *, field: str) -> Any:
    """Import whatever stands at a path; None where the module has no such name."""
    name, where = function_name(path), _module(path)
    if not where:
        raise ConfigError(
            f"`{field}`: expected dotted paths like `package.module.function` or files like "
            f"`rewards.py:function`, got {path!r}"
        )
    if IN_A_FILE not in path and not _is_found(where.partition(".")[0]):
        _search_current_folder(field, path)
    try:
        module = _import_file(Path(where)) if IN_A_FILE in path else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # A user's module may do anything while it is imported.
        raise ConfigError(
            f"`{field}`: expected {path} to be importable; {where} gives {type(error).__name__}: {error}"
            f"{_hint(where, error)}"
        ) from error
    return getattr(module, name, None)


def _is_found(package: str) -> bool:
    """Whether a module is found without the current folder."""
    return package in sys.modules or (
        package.isidentifier() and importlib.util.find_spec(package) is not None
    )


def _search_current_folder(field: str, path: str) -> None:
    """Let modules of the current folder be found, after all others, so that none of them replaces a library.

    ConfigError for root in a folder that other users can write: they could put the module there.
    """
    here = Path.cwd()
    if str(here) in sys.path:
        return
    found = here.stat()
    if os.geteuid() == 0 and (found.st_uid != 0 or found.st_mode & 0o022):
        raise ConfigError(
            f"`{field}`: {path} is not installed, and as root nothing is imported from {here}, which other users can "
            f"write. Start in a folder of root's own (`chmod go-w`), or name the file: `path/to/file.py:name`"
        )
    sys.path.append(str(here))


def _module(path: str) -> str:
    """Dotted path or file of the module that a path names: `_module("rewards.py:brevity") == "rewards.py"`."""
    return path.removesuffix(function_name(path)).rstrip(".:")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder for files that are imported on trial; remove it and its entry of the search path afterwards."""
    with TemporaryDirectory(prefix="kintsugi-") as scratch:
        folder = Path(scratch).resolve()
        try:
            yield folder
        finally:
            sys.path[:] = [entry for entry in sys.path if entry != str(folder)]


def _import_file(file: Path) -> ModuleType:
    """Import a module from its file, once. It can import the modules next to it, as a script can."""
    with _IMPORTING:
        return _import_file_once(file.resolve())


def _import_file_once(file: Path) -> ModuleType:
    name = f"{file.stem}_{blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python file"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _hint(where: str, error: BaseException) -> str:
    """Return advice for a module that was not found; nothing for one that was found and failed."""
    if not isinstance(error, ModuleNotFoundError) or error.name != where.partition(".")[0]:
        return ""
    return (
        f"; modules are looked for in {', '.join(entry or 'the current folder' for entry in sys.path)}: start in the "
        f"folder of the module, install it, or name its file: `{where.rpartition('.')[2]}.py:…`"
    )
