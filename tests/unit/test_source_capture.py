"""Functions of a script or notebook as files. The cells stand in for both: code of `__main__` whose source is known."""

from __future__ import annotations

import asyncio
import linecache
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kintsugi.errors import UserError
from kintsugi.rollout.rewards.builtin import exact_answer
from kintsugi.runtime.user_modules import import_function
from kintsugi.source_capture import import_path, standalone_source


def cell(source: str) -> dict[str, Any]:
    """What a notebook's namespace holds after a cell was run."""
    source = textwrap.dedent(source)
    name = f"<cell {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)  # noqa: S102
    return namespace


def loaded(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """The function as a worker gets it."""
    file = folder / "rewards.py"
    file.write_text(standalone_source([function]))
    return import_function(f"{file}:{function.__name__}")


def refusal(function: Callable[..., Any]) -> str:
    with pytest.raises(UserError) as refused:
        standalone_source([function])
    assert "put it into a file" in str(refused.value)
    return str(refused.value)


def test_a_function_of_a_module_is_known_by_its_path() -> None:
    assert import_path(exact_answer) == "kintsugi.rollout.rewards.builtin.exact_answer"


def test_what_no_other_process_can_import_has_no_path() -> None:
    def inner(completions: list[str]) -> list[float]:
        return []

    in_a_cell = cell("def reward(completions): return []")["reward"]
    assert import_path(inner) is import_path(in_a_cell) is import_path(lambda completions: []) is None


def test_a_function_comes_with_the_imports_constants_patterns_functions_and_classes_it_uses(
    tmp_path: Path,
) -> None:
    reward = cell(
        """
        import json
        import os.path as paths
        import re
        from math import sqrt as root

        NUMBER = re.compile(r"\\d+", re.ASCII)
        LIMITS = {"low": 1, "high": [2, 3]}
        UNUSED = object()

        class Scale:
            factor = 2.0
            def apply(self, value):
                return self.factor * root(value)

        def count(text):
            return len(NUMBER.findall(text)) + LIMITS["low"]

        def reward(completions, **columns):
            json = 3  # Shadows the module, which is not needed then.
            return [Scale().apply(count(paths.basename(text))) for text in completions]
        """
    )["reward"]
    assert loaded(reward, tmp_path)(["a/1 2 3", ""]) == [4.0, 2.0]
    text = (tmp_path / "rewards.py").read_text()
    assert "import os.path" not in text and "import posixpath as paths" in text
    assert "UNUSED" not in text and "import json" not in text


def test_annotations_need_not_be_importable(tmp_path: Path) -> None:
    reward = cell(
        """
        Texts = object()
        def reward(completions: Texts, **columns: dict) -> Texts:
            return [1.0 for _ in completions]
        """
    )["reward"]
    assert loaded(reward, tmp_path)(["a"]) == [1.0]


def test_an_asynchronous_function_stays_one(tmp_path: Path) -> None:
    reward = cell("async def reward(completions, **columns): return [0.5]")["reward"]
    assert "async def reward" in standalone_source([reward])
    assert asyncio.run(loaded(reward, tmp_path)(["a"])) == [0.5]


def test_several_functions_share_what_they_use(tmp_path: Path) -> None:
    names = cell("K = 2\ndef first(completions): return [K]\ndef second(completions): return [K + 1]\n")
    text = standalone_source([names["first"], names["second"]])
    assert text.count("K = 2") == 1 and "def first" in text and "def second" in text


def test_functions_that_mean_different_things_by_a_name_are_refused() -> None:
    first = cell("K = [1]\ndef first(completions): return K\n")["first"]
    second = cell("K = [1]\ndef second(completions): return K\n")["second"]
    with pytest.raises(UserError, match="`K` means two different things"):
        standalone_source([first, second])


def test_a_recursive_function_is_written_once() -> None:
    fact = cell("def fact(n): return 1 if n < 2 else n * fact(n - 1)")["fact"]
    assert standalone_source([fact]).count("def fact") == 1


def test_what_can_not_be_written_down_is_named() -> None:
    reward = cell("client = open('/dev/null')\ndef reward(completions): return client.read()")
    reward["client"].close()
    assert "uses `client`, a TextIOWrapper" in refusal(reward["reward"])


def test_a_name_that_is_not_there_is_named() -> None:
    assert "`reward` uses `nothing`" in refusal(cell("def reward(c): return nothing(c)")["reward"])


def test_a_lambda_is_refused() -> None:
    assert "a lambda has no name" in refusal(lambda completions: [])


def test_a_closure_is_refused_with_what_it_captures() -> None:
    scale = 2.0

    def reward(completions: list[str]) -> list[float]:
        return [scale]

    assert "captures `scale`" in refusal(reward)


def test_an_object_that_can_be_called_is_refused() -> None:
    class Reward:
        def __call__(self, completions: list[str]) -> list[float]:
            return []

    assert "it is a Reward, not a function" in refusal(Reward())


def test_a_function_whose_source_is_lost_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(completions): return []", namespace)  # noqa: S102
    assert "has not kept the source" in refusal(namespace["reward"])
