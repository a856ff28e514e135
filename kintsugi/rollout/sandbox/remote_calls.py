"""Tests of a program, apart from it. A stand-alone program: `sandbox.py` executes this file in two jails.

    tests (python remote_calls.py tests)  ── requests ──►  program (python remote_calls.py program)
                                          ◄── replies ──

The two have no process, user, file or interpreter in common, only two pipes. The tests see the program's global names:
plain values are copied, functions and objects are stand-ins that call by name. What a program returns arrives as plain
values of builtin types, so comparisons are those of builtins: a program can neither read the tests, nor end them early,
nor return a value that claims to equal everything. Each request and reply is a line of JSON.

Lists, dictionaries and sets that a call changes are changed on the side of the tests too. Functions of the tests can be
passed as arguments. Objects of classes that the program defines stay there; they have methods, attributes, length,
items and text, but two of them are equal only if they are the same object. A global of the program that has the name of
a builtin or of a common module is not seen by the tests: else it could decide what `abs` or `math` means to them.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # Importing `typing` takes longer than the rest of this file.
    from collections.abc import Callable, Iterator
    from typing import Any

MOST_BYTES = 64 << 20
"""Longest line; a longer one ends the tests."""
ENDED_EARLY = "the program ended before its tests were done"
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MODULES = frozenset(
    {"bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"}
    | {"itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing"}
)
"""Modules that tests may use without an import if the program imported them: the tests' own, not the program's."""
_SPECIAL = (
    "__len__",
    "__iter__",
    "__next__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__str__",
    "__repr__",
)


class ProgramError(Exception):
    """The program ended, or sent something that is not a reply."""


def encode(value: Any, *, refer: Callable[[Any], Any]) -> Any:
    """Return a value as JSON: builtin types by value, all others as what `refer` returns for them."""
    if value is None or value is True or value is False:
        return value
    match value:
        case int():
            return int.__index__(value)
        case float():
            return float.__float__(value)
        case str():
            return str.__getitem__(value, slice(None))
        case bytes() | bytearray():
            return {"bytes": bytes(value).hex()}
        case complex():
            return {"complex": [value.real, value.imag]}
        case dict():
            pairs = dict.items(value)
            return {"dict": [[encode(key, refer=refer), encode(each, refer=refer)] for key, each in pairs]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(each, refer=refer) for each in kind.__iter__(value)]}
    return refer(value)


def decode(value: Any, *, resolve: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value of its JSON; only exact builtin types, and what `resolve` returns for references."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ProgramError("expected a value, got a bare list")
        return value
    for name, kind in _SEQUENCES.items():
        if name in value:
            return kind(decode(each, resolve=resolve) for each in value[name])
    if "dict" in value:
        pairs = value["dict"]
        return {decode(key, resolve=resolve): decode(each, resolve=resolve) for key, each in pairs}
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "complex" in value:
        return complex(*value["complex"])
    return resolve(value)


class Channel:
    """Lines of JSON in both directions."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = os.fdopen(reader, "rb")
        self._writer = os.fdopen(writer, "wb")

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except BrokenPipeError:
            raise ProgramError(ENDED_EARLY) from None

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end."""
        line = self._reader.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ProgramError("expected a message, got something else")
        return message


class Program:
    """The program's side: its namespace, and the objects that the tests hold stand-ins of."""

    def __init__(self, channel: Channel, space: dict[str, Any]) -> None:
        self._channel = channel
        self._space = space
        self._objects: list[Any] = []

    def serve(self) -> None:
        while (request := self._channel.receive()) is not None:
            self._channel.send(self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "names":
                return {"names": [each for each in map(self._name, list(self._space.items())) if each]}
            target = self._objects[request["object"]]
            arguments = [self._decoded(each) for each in request.get("args", [])]
            keywords = {name: self._decoded(each) for name, each in request.get("kwargs", {}).items()}
            name = request.get("name")
            function = target if name is None else _member(target, name)
            if request["do"] == "get":
                return {"value": self._encoded(function)}
            value = function(*arguments, **keywords)
            return {"value": self._encoded(value), "args": [self._encoded(each) for each in arguments]}
        except BaseException as error:  # noqa: BLE001 - whatever the program raises is its answer
            return {"raised": _described(error)}

    def _name(self, item: tuple[str, Any]) -> list[Any] | None:
        name, value = item
        if name.startswith("__"):
            return None
        if isinstance(value, types.ModuleType):
            return [name, {"module": value.__name__}]
        if isinstance(value, type) and issubclass(value, BaseException):
            return [name, {"exception": _builtin_base(value).__name__}]
        return [name, self._encoded(value)]

    def _encoded(self, value: Any) -> Any:
        return encode(value, refer=self._refer)

    def _refer(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Callback):
            return {"callback": value.number}
        for number, known in enumerate(self._objects):
            if known is value:
                return {"object": number, "name": type(value).__name__}
        self._objects.append(value)
        return {"object": len(self._objects) - 1, "name": type(value).__name__}

    def _decoded(self, value: Any) -> Any:
        return decode(value, resolve=self._resolve)

    def _resolve(self, reference: dict[str, Any]) -> Any:
        if "callback" in reference:
            return Callback(self, reference["callback"])
        return self._objects[reference["object"]]

    def call_back(self, number: int, arguments: tuple[Any, ...]) -> Any:
        """Call a function of the tests; they may call the program meanwhile."""
        self._channel.send({"callback": number, "args": [self._encoded(each) for each in arguments]})
        while (message := self._channel.receive()) is not None:
            if "do" in message:
                self._channel.send(self._answer(message))
            elif "raised" in message:
                raise RuntimeError(message["raised"])
            else:
                return self._decoded(message["value"])
        os._exit(1)


def _member(target: Any, name: str) -> Any:
    functions: dict[str, Callable[[Any], Any]] = {
        "__len__": len,
        "__iter__": iter,
        "__next__": next,
        "__str__": str,
        "__repr__": repr,
    }
    return (lambda: functions[name](target)) if name in functions else getattr(target, name)


class Callback:
    """A function of the tests, as the program sees it."""

    def __init__(self, program: Program, number: int) -> None:
        self.program = program
        self.number = number

    def __call__(self, *arguments: Any) -> Any:
        return self.program.call_back(self.number, arguments)


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    return next(each for each in kind.__mro__ if each.__module__ == "builtins")


def _described(error: BaseException) -> dict[str, str]:
    return {
        "type": _builtin_base(type(error)).__name__,
        "own": type(error).__name__,
        "text": "".join(traceback.format_exception_only(error))[-500:],
    }


class Remote:
    """Stand-in for a function or object of the program. Comparisons are not passed on."""

    def __init__(self, tests: Tests, number: int, name: str) -> None:
        self._kintsugi = tests, number, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_kintsugi"):
            raise AttributeError(name)
        tests, number, _ = self._kintsugi
        return tests.ask({"do": "get", "object": number, "name": name})

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        tests, number, _ = self._kintsugi
        return tests.call({"do": "call", "object": number}, arguments, keywords)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and other._kintsugi[1] == self._kintsugi[1]

    def __hash__(self) -> int:
        return hash(self._kintsugi[1])

    def __contains__(self, wanted: object) -> bool:
        return any(each == wanted for each in self)

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError  # Replaced below, as all of `_SPECIAL`.


def _special(name: str) -> Callable[..., Any]:
    def call(self: Remote, *arguments: Any) -> Any:
        tests, number, kind = self._kintsugi
        try:
            return tests.call({"do": "call", "object": number, "name": name}, arguments, {})
        except AttributeError as error:
            raise TypeError(f"an object of type {kind} has no {name}") from error

    return call


for _name in _SPECIAL:
    setattr(Remote, _name, _special(_name))


class Tests:
    """The side of the tests: requests to the program, and the functions that were passed to it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._callbacks: list[Callable[..., Any]] = []
        self._exceptions: dict[str, type[Exception]] = {}

    def names(self) -> dict[str, Any]:
        """Return the program's global names with their values."""
        self._channel.send({"do": "names"})
        reply = self._reply()
        return {
            str(name): self._global(str(name), value)
            for name, value in reply["names"]
            if name not in dir(builtins)
        }

    def _global(self, name: str, value: Any) -> Any:
        if name in _MODULES:
            return __import__(name)
        if isinstance(value, dict) and "module" in value:
            return __import__(value["module"]) if value["module"] in _MODULES else None
        if isinstance(value, dict) and "exception" in value:
            self._exceptions[name] = type(name, (_exception(value["exception"]),), {})
            return self._exceptions[name]
        return self._decoded(value)

    def ask(self, request: dict[str, Any]) -> Any:
        self._channel.send(request)
        return self._decoded(self._reply()["value"])

    def call(self, request: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        sent = {name: self._encoded(each) for name, each in keywords.items()}
        self._channel.send(request | {"args": [self._encoded(each) for each in arguments], "kwargs": sent})
        reply = self._reply()
        for argument, after in zip(arguments, reply.get("args", ()), strict=False):
            _change(argument, self._decoded(after))
        return self._decoded(reply["value"])

    def _reply(self) -> dict[str, Any]:
        """Return the reply to the request that was just sent; raise what the program raised."""
        while (message := self._channel.receive()) is not None:
            if "callback" in message:
                self._channel.send(self._called_back(message))
            elif "raised" in message:
                raised = message["raised"]
                kind = self._exceptions.get(raised["own"]) or _exception(raised["type"])
                raise kind(raised["text"])
            else:
                return message
        raise ProgramError(ENDED_EARLY)

    def _called_back(self, message: dict[str, Any]) -> dict[str, Any]:
        function = self._callbacks[message["callback"]]
        arguments = [self._decoded(each) for each in message["args"]]
        try:
            return {"value": self._encoded(function(*arguments))}
        except Exception as error:  # noqa: BLE001 - raised again by the program, on whose behalf it is called
            return {"raised": str(error)}

    def _encoded(self, value: Any) -> Any:
        return encode(value, refer=self._refer)

    def _refer(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"object": value._kintsugi[1]}
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise TypeError(f"expected a plain value as an argument, got a {type(value).__name__}")

    def _decoded(self, value: Any) -> Any:
        return decode(value, resolve=self._resolve)

    def _resolve(self, reference: dict[str, Any]) -> Any:
        if "callback" in reference:
            return self._callbacks[reference["callback"]]
        return Remote(self, int(reference["object"]), str(reference["name"]))


def _exception(name: str) -> type[Exception]:
    """Return the builtin exception of this name; one that would end the tests becomes RuntimeError."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else RuntimeError


def _change(argument: Any, after: Any) -> None:
    """Give a mutable argument the value that it has after a call."""
    if type(argument) is not type(after) or argument == after:
        return
    match argument:
        case list():
            argument[:] = after
        case dict() | set():
            argument.clear()
            argument.update(after)


def run_program() -> None:
    """Execute the program, then serve the tests; its standard input is empty and its output goes to standard error."""
    channel = Channel(os.dup(0), os.dup(1))
    empty = os.open("/dev/null", os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    space: dict[str, Any] = {"__name__": "__main__"}
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    exec(compile(source, "program.py", "exec"), space)  # noqa: S102 - this is the jail
    Program(channel, space).serve()


def run_tests() -> None:
    """Execute the tests on the program's names; the exit code is the verdict."""
    channel = Channel(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    space = Tests(channel).names() | {"__name__": "__main__"}
    with open("tests.py", encoding="utf-8") as file:
        source = file.read()
    exec(compile(source, "tests.py", "exec"), space)  # noqa: S102 - this is the jail


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    {"program": run_program, "tests": run_tests}[sys.argv[1]]()
