"""Write a function of a script, notebook or REPL to a file that other processes can import.

Workers import reward functions by path; nothing is pickled. A function of `__main__` can not be imported: that would
run the program again in each worker. Its source is written to a file instead, with the imports, constants and
functions of `__main__` that it uses. UserError names what can not be written, and a remedy.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from kintsugi.errors import UserError

HEADER = "# The reward functions that this run was given, with what they use, as they were when it began.\n"
FUTURE = "from __future__ import annotations\n"
REMEDY = (
    "put it into a file, for example my_rewards.py, and give `my_rewards.{name}` or the imported function"
)


def import_path(function: Callable[..., Any]) -> str | None:
    """Dotted path by which another process can import this object; None if there is none.

    >>> import_path(textwrap.dedent), import_path(lambda completions: [])
    ('textwrap.dedent', None)
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    return f"{module}.{name}" if _found(str(module), name) is function else None


def _found(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def standalone_source(functions: Iterable[Callable[..., Any]]) -> str:
    """Return the source of a module that defines these functions; UserError says why if that is not possible."""
    module = _Module()
    for function in functions:
        module.add_function(function, is_requested=True)
    return module.text()


class _Module:
    """Module under construction: imports, then values, then definitions, each after its dependencies."""

    def __init__(self) -> None:
        self._imports: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._definitions: dict[str, str] = {}
        self._objects: dict[str, Any] = {}
        self._requested = ""
        """Name of the requested function, for messages."""

    def text(self) -> str:
        parts = [HEADER + FUTURE, *map("".join, (self._imports.values(), self._values.values()))]
        return "\n".join(filter(None, parts)) + "".join(f"\n\n{text}" for text in self._definitions.values())

    def add_function(self, function: Callable[..., Any], *, is_requested: bool = False) -> None:
        if is_requested:
            self._requested = getattr(function, "__name__", type(function).__name__)
        if not isinstance(function, FunctionType):
            self._refuse(f"it is a {type(function).__name__}, not a function defined with `def`")
        if function.__name__ == "<lambda>":
            self._refuse("a lambda has no name that it could be imported by; define it with `def`")
        if function.__code__.co_freevars:
            captured = ", ".join(f"`{name}`" for name in function.__code__.co_freevars)
            self._refuse(f"it captures {captured} of the function around it; define it at the top level")
        self._add_definition(function.__name__, function, namespace=function.__globals__)

    def _add_definition(self, name: str, defined: Any, *, namespace: dict[str, Any]) -> None:
        if not self._claim(name, defined):
            return
        try:
            source = textwrap.dedent(_source_of(defined))
        except (OSError, TypeError):
            self._refuse(f"Python has not kept the source of `{name}`, as in a plain interactive session")
        for used in sorted(_globals_of(source) - {name}):
            if used in namespace:
                self._add_value(used, namespace[used], namespace=namespace)
            elif not hasattr(builtins, used):
                self._refuse(f"`{name}` uses `{used}`, which is not defined")
        self._definitions[name] = source

    def _claim(self, name: str, value: Any) -> bool:
        """Reserve a name; return whether it is new. Two different objects can not share one."""
        if name in self._objects and self._objects[name] is not value:
            self._refuse(f"`{name}` means two different things in what it uses")
        is_new = name not in self._objects
        self._objects[name] = value
        return is_new

    def _add_value(self, name: str, value: Any, *, namespace: dict[str, Any]) -> None:
        """Add an object that a function refers to by a global name."""
        path = _path_of(value)
        if path is not None:
            if self._claim(name, value):
                self._imports[name] = _import_line(path, name)
        elif isinstance(value, FunctionType) and value.__name__ == name:
            self.add_function(value)
        elif isinstance(value, type) and value.__name__ == name:
            self._add_definition(name, value, namespace=namespace)
        elif isinstance(value, re.Pattern):
            if self._claim(name, value):
                self._imports["re"] = "import re\n"
                self._values[name] = f"{name} = re.compile({value.pattern!r}, {int(value.flags)})\n"
        elif _is_literal(value):
            if self._claim(name, value):
                self._values[name] = f"{name} = {value!r}\n"
        else:
            self._refuse(f"it uses `{name}`, a {type(value).__name__} that can not be written into a file")

    def _refuse(self, why: str) -> NoReturn:
        raise UserError(
            f"reward `{self._requested}`: expected a function that workers can import or that stands alone, but {why}; "
            + REMEDY.format(name=self._requested if self._requested.isidentifier() else "my_reward")
        )


def _source_of(defined: Any) -> str:
    """Source of a function or class. Classes of notebook cells, unknown to `inspect`, are found by their methods."""
    methods = (
        [each for each in vars(defined).values() if isinstance(each, FunctionType)]
        if isinstance(defined, type)
        else []
    )
    for method in methods:
        text = "".join(linecache.getlines(method.__code__.co_filename))
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == defined.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"
    return inspect.getsource(defined)


def _globals_of(source: str) -> set[str]:
    """Global names that a definition uses, including decorators, defaults and bases, without annotations."""
    table = symtable.symtable(FUTURE + source, "<reward>", "exec")
    outside = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    inside = {
        symbol.get_name()
        for scope in _scopes(table)
        for symbol in scope.get_symbols()
        if symbol.is_global() and symbol.is_referenced()
    }
    return outside | inside


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _scopes(child)


def _path_of(value: Any) -> tuple[str, str] | None:
    """Module and name of an importable object; the name is empty for a module."""
    if isinstance(value, ModuleType):
        return (value.__name__, "") if value.__name__ in sys.modules else None
    path = import_path(value) if callable(value) else None
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    return module, name


def _import_line(path: tuple[str, str], name: str) -> str:
    module, member = path
    if member:
        return f"from {module} import {member}{'' if member == name else f' as {name}'}\n"
    return f"import {module}{'' if module == name else f' as {name}'}\n"


def _is_literal(value: Any) -> bool:
    """Whether `repr` is a literal of the value: numbers, texts, and tuples, lists, sets and dicts of these."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
