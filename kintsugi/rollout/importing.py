"""How the user's code is found: by the dotted path of something importable, or in a file, `rewards.py:my_reward`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from kintsugi.errors import ConfigError

IN_A_FILE = ".py:"


def function_name(path: str) -> str:
    """`function_name("package.module.brevity") == function_name("folder/rewards.py:brevity") == "brevity"`."""
    return path.rpartition(":" if IN_A_FILE in path else ".")[2]


def import_function(path: str, *, field: str = "algorithm.reward") -> Callable[..., Any]:
    """The function or class at a path; ConfigError says the field that names it, what was imported, and why that did
    not work."""
    name = function_name(path)
    where = path.removesuffix(name).rstrip(".:")
    if not where:
        raise ConfigError(
            f"`{field}`: expected dotted paths like `package.module.function` or files like "
            f"`rewards.py:function`, got {path!r}"
        )
    try:
        module = _import_file(Path(where)) if IN_A_FILE in path else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # Somebody else's module may do anything while it is imported.
        raise ConfigError(
            f"`{field}`: expected {path} to be importable; {where} gives {type(error).__name__}: {error}"
            f"{_hint(where, error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise ConfigError(f"`{field}`: expected a function {name!r} in {where}, found {found} at {path}")
    loaded: Callable[..., Any] = function
    return loaded


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for files that are imported on trial; afterwards neither it nor its place on the search path is left."""
    with TemporaryDirectory(prefix="kintsugi-") as scratch:
        folder = Path(scratch).resolve()
        try:
            yield folder
        finally:
            sys.path[:] = [entry for entry in sys.path if entry != str(folder)]


def _import_file(file: Path) -> ModuleType:
    """A module from its file, once; what lies beside the file can be imported by it, as with a script."""
    file = file.resolve()
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
    """What to do about a module that is not found, as opposed to one that is found and breaks."""
    if not isinstance(error, ModuleNotFoundError) or error.name != where.partition(".")[0]:
        return ""
    return (
        f"; modules are looked for in {', '.join(entry or 'the current folder' for entry in sys.path)}: start in the "
        f"folder of the module, install it, or name its file: `{where.rpartition('.')[2]}.py:…`"
    )
