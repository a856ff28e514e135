import time
from threading import Thread
from typing import Any

import pytest

from kintsugi.errors import DataError
from kintsugi.rollout.rewards import builtin
from kintsugi.rollout.rewards.builtin import (
    exact_answer,
    gsm8k_answer,
    math_answer,
    program_of,
    program_output,
)
from kintsugi.rollout.sandbox.sandbox import SandboxFailed, SandboxOutcome


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("Half of 144 is 72.\n#### 72", "Natalia sold 48/2 = 24.\n#### 72", 1.0),
        ("#### 72 clips, 3 more", "#### 72", 0.0),
        ("It costs $1,234.50 in all", "#### 1234.5", 1.0),
        ("the answer is -3", "-3", 1.0),
        ("72", "#### 73", 0.0),
        ("no idea", "#### 72", 0.0),
        ("", "#### 72", 0.0),
        ("9" * 5000, "#### 72", 0.0),
    ],
)
def test_gsm8k_compares_the_last_number(completion: str, answer: str, reward: float) -> None:
    assert gsm8k_answer([completion], answer=[answer]) == [reward]


def test_an_answer_without_a_number_is_the_datas_fault_and_no_zero() -> None:
    (verdict,) = gsm8k_answer(["72"], answer=["unknown"])
    assert isinstance(verdict, DataError) and "column 'answer', got 'unknown'" in str(verdict)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("So we get \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("\\boxed{3}, no: \\boxed{1+x}", "x+1", 1.0),
        ("First 5. #### 1,072", "long solution\n#### 1072", 1.0),
        ("the sum is 3 + 4 = 7, so 72", "72", 1.0),
        ("the answer is 7", "\\boxed{8}", 0.0),
        ("\\boxed{\\sqrt{8}}", "$2\\sqrt{2}$", 1.0),
        ("\\boxed{", "72", 0.0),
        ("}{\\frac{", "72", 0.0),
        ("(" * 3000, "72", 0.0),
        ("\\boxed{" + "x" * 5000 + "}", "72", 0.0),
        ("", "72", 0.0),
        ("\x00\ud7ff nonsense $$", "72", 0.0),
    ],
)
def test_a_final_answer_is_compared_mathematically_and_nonsense_is_wrong(
    completion: str, answer: str, reward: float
) -> None:
    assert math_answer([completion], answer=[answer]) == [reward]


@pytest.mark.parametrize("answer", ["46", " 46\n", 46])
def test_an_exact_answer_may_stand_in_the_data_as_text_or_number(answer: Any) -> None:
    assert exact_answer(["46", "46 ", "4"], answer=[answer] * 3) == [1.0, 1.0, 0.0]


# An alarm that goes off in another library's callback of the garbage collector is swallowed there, and pytest notices.
# The next one, a tenth of a second later, ends the comparison.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_comparison_that_does_not_end_is_set_aside_and_the_others_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builtin, "_COMPARISON_CPU_S", 0.2)
    since = time.process_time()
    monster, right = math_answer(["\\boxed{9^{9^{9^9}}}", "72"], answer=["72", "72"])
    assert isinstance(monster, TimeoutError) and "took more than 0.2 s" in str(monster)
    assert right == 1.0
    assert time.process_time() - since < 2.0


def test_math_is_compared_outside_of_the_main_thread_too() -> None:
    verdicts: list[Any] = []
    thread = Thread(target=lambda: verdicts.extend(math_answer(["\\boxed{72}"], answer=["72"])))
    thread.start()
    thread.join(10)
    assert verdicts == [1.0]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("First\n```\nx\n```\nbetter:\n```py\nprint(2)\n```\nDone", "print(2)\n"),
        ("```python\nprint(3)", "print(3)"),
    ],
)
def test_the_program_is_between_the_last_fences(completion: str, program: str) -> None:
    assert program_of(completion) == program


def test_programs_are_judged_by_what_they_print() -> None:
    fenced = "```python\na, b = map(int, input().split())\nprint(a + b)  \n```"
    given: dict[str, Any] = {"stdin": [["1 2", "3 4"]] * 3, "expected_output": [["3\n", "7"]] * 3}
    assert program_output([fenced, "print(3)", "raise SystemExit(1)"], **given) == [1.0, 0.0, 0.0]


def test_a_program_that_prints_what_is_expected_and_then_fails_is_wrong_and_the_expected_may_be_a_number() -> (
    None
):
    programs = [
        "print(42)",
        "print(42); raise SystemExit(1)",
        "import os; os.write(1, b'42'); os.kill(2, 40)",
    ]
    assert program_output(programs, expected_output=[42] * 3) == [1.0, 0.0, 0.0]


def test_programs_are_judged_by_tests_that_really_ran() -> None:
    tests = ["assert f(2) == 4", "assert f(0) == 0"]
    right, wrong = "def f(x): return x * 2", "def f(x): return 4"
    noisy = f"import atexit, sys; sys.stdout = None; atexit.register(sys.stderr.write, 'bye')\n{right}"
    cheats = ["import sys; sys.exit(0)", "import os; os._exit(0)"]
    assert program_output([right, noisy, wrong, *cheats], tests=[tests] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


READ_THE_INPUT_AGAIN = "import os; os.lseek(0, 0, 0); os.write(2, os.read(0, 64)); os._exit(0)"
LOOK_INTO_THE_CALLER = (
    "import os, sys\nos.write(2, sys._getframe(1).f_locals['last_word'].encode())\nos._exit(0)"
)
EQUAL_TO_EVERYTHING = "class E(int):\n    __eq__ = lambda *_: True\ndef add(a, b): return E()"
NO_DIFFERENCE = "class E(float):\n    __sub__ = lambda *_: 0.0\ndef add(a, b): return E()"
OWN_BUILTIN = "def abs(x): return 0.0\ndef add(a, b): return 7"
READ_THE_TESTS = (
    "def add(a, b):\n    for name in ('tests.py', '/tmp/tests.py'):\n        open(name)\n    return a + b"
)
EXIT_IN_A_CALL = "def add(a, b): raise SystemExit(0)"


@pytest.mark.parametrize(
    "cheat",
    [
        READ_THE_INPUT_AGAIN,
        LOOK_INTO_THE_CALLER,
        EQUAL_TO_EVERYTHING,
        NO_DIFFERENCE,
        OWN_BUILTIN,
        READ_THE_TESTS,
        EXIT_IN_A_CALL,
    ],
)
def test_a_program_written_to_deceive_its_tests_scores_nothing(cheat: str) -> None:
    tests = ["assert add(2, 3) == 5", "assert abs(add(2, 3) - 5) < 1e-6"]
    assert program_output([cheat], tests=[tests]) == [0.0]


MANY_THINGS = """
import math
from collections import Counter, namedtuple
Point = namedtuple("Point", "x y")
LIMIT = {"a": (1, 2.5), 3: {4}, b"x": None}
class Odd(ValueError): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
def sort(values): values.sort()
def apply(function, value): return function(value)
def count(text): return Counter(text)
def squares():
    number = 0
    while True:
        yield number ** 2
        number += 1
def fail(value): raise Odd(value)
def point(): return Point(1, 2)
def large(): return 10 ** 5000
"""
TESTS_OF_MANY_THINGS = [
    "values = [3, 1, 2]; sort(values); assert values == [1, 2, 3]",
    "assert apply(lambda x: x + 1, 3) == 4 and apply(function=len, value='abc') == 3",
    "assert count('aab') == {'a': 2, 'b': 1} and point() == (1, 2) and large() == 10 ** 5000",
    "import itertools; assert list(itertools.islice(squares(), 4)) == [0, 1, 4, 9]",
    "stack = Stack(); assert stack.push(7) == stack and len(stack) == 1 and 7 in stack and stack[0] == 7",
    "assert stack.items == [7] and Stack() != Stack()",
    "assert LIMIT == {'a': (1, 2.5), 3: {4}, b'x': None} and math.isclose(1, 1)",
    "def caught(kind):\n    try: fail(1)\n    except kind as error: return str(error)",
    "assert '1' in caught(Odd) and '1' in caught(ValueError)",
]


def test_tests_use_functions_objects_exceptions_and_callbacks_of_a_program() -> None:
    assert program_output([MANY_THINGS], tests=[TESTS_OF_MANY_THINGS]) == [1.0]


def test_a_program_that_could_not_be_run_does_not_void_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def run(source: str, **_: Any) -> SandboxOutcome:
        tried.append(source)
        if source == "unlucky":
            raise SandboxFailed("the machine ran out of memory while a program ran")
        return SandboxOutcome("1", "", 0, "")

    monkeypatch.setattr(builtin, "run_python", run)
    found = program_output(["print(1)", "unlucky", "print(2)"], expected_output=["1"] * 3)
    assert [found[0], found[2]] == [1.0, 1.0] and isinstance(found[1], SandboxFailed)
    assert tried.count("unlucky") == 3


def test_why_a_program_scored_nothing_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SandboxOutcome("", "", -24, "used more than 2 s of processor time")
    monkeypatch.setattr(builtin, "run_python", lambda *_, **__: slow)
    with caplog.at_level("INFO", logger="kintsugi"):
        assert program_output(["while True: pass"], expected_output=["1"]) == [0.0]
    assert caplog.messages == ["program_output: used more than 2 s of processor time"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, "expected a column `tests` or `expected_output`"),
        (
            {"expected_output": [["1", "2"]], "stdin": [["a"]]},
            "as many of `stdin` as of `expected_output`=2, got 1",
        ),
    ],
)
def test_a_row_that_can_not_judge_a_program_is_refused(columns: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        program_output(["print(1)"], **columns)
    assert expected in str(caught.value)


def test_the_traceback_of_an_error_is_logged_once_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    from kintsugi.rollout.user_code.failures import TracebackLog

    log = TracebackLog(most=1)
    for message in ("first", "second"):
        try:
            raise ValueError(message)
        except ValueError as error:
            log.write(error)
    try:
        raise KeyError("a third kind is too many")
    except KeyError as error:
        log.write(error)
    text = capsys.readouterr().err
    assert text.count("Traceback (most recent call last):") == 1
    assert "ValueError: first" in text and "second" not in text and "KeyError" not in text
