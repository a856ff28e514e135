"""Stack dumps that are read from a log."""

from __future__ import annotations

from pathlib import Path

from kintsugi.telemetry.stack_dump import dumps_in, header, newest_dump, without_dumps

STACKS = """Thread 0x00007f1c2b7fe640 (most recent call first):
  File "/a/kintsugi/kintsugi/runtime/waits.py", line 64 in wait
  File "/usr/lib/python3.11/threading.py", line 995 in run

Current thread 0x00007f1c2c0a1740 (most recent call first):
  File "/a/.venv/lib/python3.11/site-packages/torch/nn/linear.py", line 12 in forward
  File "/a/kintsugi/kintsugi/training/worker.py", line 212 in _forward
"""


def requested(time: float) -> str:
    return header(process="model-0", incarnation="1.4", pid=4711, time=time) + STACKS


def test_the_main_thread_is_quoted_from_the_innermost_frame_with_short_paths() -> None:
    (dump,) = dumps_in(f"before\n{requested(1763.25)}after\n")
    assert dump.main_thread == "forward (torch/nn/linear.py:12) < _forward (kintsugi/training/worker.py:212)"
    assert dump.threads[0][0] == "wait (kintsugi/runtime/waits.py:64)"
    assert (dump.time, dump.reason) == (1763.25, "")


def test_a_long_stack_is_cut() -> None:
    frames = "".join(f'  File "/a/b.py", line {number} in f{number}\n' for number in range(9))
    (dump,) = dumps_in(f"Thread 0x1 (most recent call first):\n{frames}")
    assert dump.main_thread.startswith("f0 (b.py:0) < f1 (b.py:1)") and dump.main_thread.endswith(
        "f4 (b.py:4) < …"
    )


def test_the_newest_dump_since_a_moment_is_found(tmp_path: Path) -> None:
    log = tmp_path / "model-0.log"
    assert newest_dump(log) is None, "there is no log"
    log.write_text(f"{requested(10.0)}words\n{requested(20.5)}more words\n")
    newest = newest_dump(log)
    assert newest is not None and newest.time == 20.5
    assert newest_dump(log, since=20.6) is None


def test_a_dump_that_follows_another_without_words_between_is_one_of_its_own() -> None:
    assert [dump.time for dump in dumps_in(requested(1.5) + requested(2.5))] == [1.5, 2.5]


def test_a_header_without_stacks_is_no_dump() -> None:
    assert dumps_in(header(process="model-0", incarnation="1", pid=1, time=3.0) + "words\n") == []


def test_words_remain_where_dumps_are_removed() -> None:
    assert without_dumps(f"first\n{requested(1.5)}last\n") == "first\n\nlast\n"


def test_a_python_traceback_is_no_dump() -> None:
    text = 'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\n    g()\nKeyError: 1\n'
    assert without_dumps(text) == text and dumps_in(text) == []


def test_a_fatal_error_keeps_its_name_and_its_place() -> None:
    text = f"CUDA error: 700\nFatal Python error: Aborted\n\n{STACKS}\nExtension modules: a, b (total: 2)\n"
    assert without_dumps(text) == (
        "CUDA error: 700\nFatal Python error: Aborted\n"
        "in forward (torch/nn/linear.py:12) < _forward (kintsugi/training/worker.py:212)"
    )
    (dump,) = dumps_in(text)
    assert dump.reason == "Aborted"
