"""Reward functions shipped with the system. Any function with this signature can be named in a recipe."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from types import FrameType
from typing import Any

from kintsugi.errors import ConfigError, DataError
from kintsugi.rollout.sandbox.sandbox import SandboxFailed, SandboxOutcome, run_python, run_tested
from kintsugi.runtime.printable import printable_line

_log = logging.getLogger(__name__)

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_LONGEST_ANSWER = 2000
"""Length limit of a final answer in characters; a longer one is wrong and is not parsed."""
_COMPARISON_CPU_S = 2.0
_ATTEMPTS = 3
"""How often a program is tried that could not be run."""


def exact_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the completion is exactly the answer, else 0.

    >>> exact_answer(["46", "7"], answer=["46", "46"])
    [1.0, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [float(completion.strip() == str(truth).strip()) for completion, truth in pairs]


def gsm8k_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float | Exception]:
    """1 where the last number equals that of the answer, else 0; if there is '####', only the text after it counts.

    GSM8K is usually scored in this way: `answer` may be a worked solution that ends with '#### 72'; thousands
    separators and dollar signs are ignored, and 72 equals 72.00.

    >>> gsm8k_answer(["so 36 * 2 = 72.", "#### 1,072.00"], answer=["… #### 72", "#### 1072"])
    [1.0, 1.0]
    """
    return [_same_number(text, truth) for text, truth in zip(completions, answer, strict=True)]


def _same_number(completion: str, answer: str) -> float | Exception:
    truth = _last_number(str(answer))
    if truth is None:
        return DataError(f"expected a number in column 'answer', got {str(answer)[-80:]!r}")
    return float(_last_number(completion) == truth)


def _last_number(text: str) -> Decimal | None:
    marked = text.rpartition("####")[2] if "####" in text else text
    found: list[str] = _NUMBER.findall(marked)
    try:
        return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
    except InvalidOperation:
        return None


def math_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float | Exception]:
    """1 where the completion's final answer equals `answer` mathematically, else 0; needs the extra `math`.

    The final answer is what follows the last '####', else what is in the last \\boxed{…}, else the last expression;
    `answer` may be given in any of these forms. Math-Verify parses and compares: 0.5 equals \\frac12, x+1 equals 1+x. A
    comparison that takes more than two seconds of CPU time is not decided: its sample is quarantined.
    """
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise ConfigError(
            "reward 'math_answer' needs the library math-verify: `pip install 'kintsugi[math]'`"
        ) from error
    # It warns that its own timeouts are off; `_cpu_time_limit` replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parsed: dict[str, Any] = {}

    def judge(completion: str, truth: str) -> float | Exception:
        if truth not in parsed:
            parsed[truth] = math_verify.parse(_as_latex(_final_answer(truth)), parsing_timeout=None)
        if not parsed[truth]:
            return DataError(f"expected an expression in column 'answer', got {truth[-80:]!r}")
        final = _final_answer(completion)
        if len(final) > _LONGEST_ANSWER:
            return 0.0
        # What follows '####' is often LaTeX without the dollar signs by which the parser finds it.
        for text in (final, _as_latex(final)) if "####" in completion else (final,):
            given = math_verify.parse(text, parsing_timeout=None)
            if given and math_verify.verify(parsed[truth], given, timeout_seconds=None):
                return 1.0
        return 0.0

    return [_decided(judge, text, str(truth)) for text, truth in zip(completions, answer, strict=True)]


def _decided(judge: Any, completion: str, truth: str) -> float | Exception:
    """Score one answer. An answer that makes the parser raise is wrong; one that takes too long is not decided."""
    try:
        with _cpu_time_limit(_COMPARISON_CPU_S):
            verdict: float | Exception = judge(completion, truth)
    except _TooLong:
        return TimeoutError(f"comparing with {truth[-80:]!r} took more than {_COMPARISON_CPU_S:g} s")
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError):
        return 0.0
    return verdict


def _final_answer(text: str) -> str:
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    start = text.rfind("\\boxed{")
    if start < 0:
        return text[-_LONGEST_ANSWER:]
    depth = 0
    for end in range(start + 6, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start : end + 1]
    return text[start:]


def _as_latex(truth: str) -> str:
    """Mark a bare answer such as 3/4 or \\sqrt{2} as one LaTeX expression."""
    return truth if "$" in truth or "\\boxed" in truth else f"${truth}$"


class _TooLong(BaseException):
    """The CPU time limit is over. Not an `Exception`, so that no library catches it as one of its own."""


@contextlib.contextmanager
def _cpu_time_limit(limit_s: float) -> Iterator[None]:
    """Raise `_TooLong` when the process has used this much CPU time. Works in the main thread only, because of signals;
    in other threads the reward's own time limit is the bound."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    # Repeated, because a library that catches everything may swallow the first signal.
    signal.setitimer(signal.ITIMER_PROF, limit_s, 0.1)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        finally:
            # The signal may have arrived just before the line above took effect; the next one is 0.1 s away.
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, before)


def program_output(completions: list[str], **columns: Any) -> list[float | Exception]:
    """1 where the completion is a Python program that passes the tests of its row, else 0; each runs in a sandbox.

    The program is the text between the last pair of ``` fences, else the whole completion. Column `tests` has Python
    code, typically assertions (text, or a list of texts), that runs in a sandbox of its own and calls the program's
    functions by name. Alternatively column `expected_output` has the text that the program must print, given `stdin`
    (texts, or lists of equal length, all of which must pass); white space at the end of lines is ignored. The worker's
    log has the reason for each score of 0. A program that this machine failed to run, several times, is quarantined;
    the others of its group count.
    """
    rows = [{name: values[index] for name, values in columns.items()} for index in range(len(completions))]
    # One program per CPU, because they compute and would slow each other down.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="sandbox") as pool:
        return list(pool.map(_try_to_judge, completions, rows))


def _try_to_judge(completion: str, row: dict[str, Any]) -> float | Exception:
    """Judge one program; the error if it could not be run, which is never the program's doing."""
    for attempt in range(_ATTEMPTS):
        try:
            return _judge_program(completion, row)
        except SandboxFailed as error:
            _log.warning("program_output: attempt %d: %s", attempt + 1, error)
            failure = error
    return failure


def _judge_program(completion: str, row: dict[str, Any]) -> float:
    source = program_of(completion)
    if row.get("tests") is not None:
        why = _why_tests_fail(source, "\n".join(_texts(row["tests"])))
    elif row.get("expected_output") is not None:
        expected = _texts(row["expected_output"])
        given = _texts(row.get("stdin") or [""] * len(expected))
        if len(given) != len(expected):
            raise DataError(
                f"reward 'program_output': expected as many of `stdin` as of `expected_output`={len(expected)}, "
                f"got {len(given)}"
            )
        tried = (_why_output_differs(source, each, out) for each, out in zip(given, expected, strict=True))
        why = next((reason for reason in tried if reason), "")
    else:
        raise DataError(
            "reward 'program_output': expected a column `tests` or `expected_output`, found neither"
        )
    if why:
        _log.info("program_output: %s", why)
    return float(not why)


def program_of(completion: str) -> str:
    """Extract the code of a completion.

    >>> program_of("Here it is:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    fenced: list[str] = _FENCE.findall(completion)
    return fenced[-1] if fenced else completion


def _texts(value: Any) -> Sequence[str]:
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


def _why_output_differs(source: str, stdin: str, expected: str) -> str:
    outcome = run_python(source, stdin=stdin)
    if outcome.reason:
        return _why(outcome)
    got, wanted = _lines(outcome.stdout), _lines(expected)
    return "" if got == wanted else f"expected the output {expected[:100]!r}, got {outcome.stdout[:100]!r}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _why_tests_fail(source: str, tests: str) -> str:
    """Run a program and its tests, apart from each other; return why they fail, or nothing."""
    outcome = run_tested(source, tests)
    return _why(outcome) if outcome.reason else ""


def _why(outcome: SandboxOutcome) -> str:
    last_line = outcome.stderr.strip().rpartition("\n")[2][:200]
    return f"{outcome.reason}: {printable_line(last_line)}" if last_line else outcome.reason
