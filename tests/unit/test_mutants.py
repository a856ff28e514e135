"""The mutants of `benchmarks/mutants.py`: what is changed, what is left alone, and that a draw can be repeated."""

import textwrap
from pathlib import Path

import pytest

from benchmarks.mutants import Finder, Mutant, code_of, draw, lines_of_diff, target_files

ROOT = Path(__file__).parent.parent.parent


def mutants_of(text: str) -> list[Mutant]:
    return Finder("f.py", textwrap.dedent(text).encode()).found


def changes_of(text: str) -> list[tuple[str, str]]:
    return [(mutant.operator, mutant.mutated) for mutant in mutants_of(text)]


@pytest.mark.parametrize(
    ("text", "operator", "mutated"),
    [
        ("if ready: go()", "negate condition", "(not ready)"),
        ("late = a < b", "other comparison", "(a <= b)"),
        ("late = a == b", "other comparison", "(a != b)"),
        ("late = a and b", "and/or", "(a or b)"),
        ("late = not a", "drop not", "(a)"),
        ("late = a if b else c", "swap branches", "(c if b else a)"),
        ("why = '' if b else 'no rank lives'", "swap branches", "('no rank lives' if b else '')"),
        ("count = 3", "one more", "4"),
        ("count = 3", "one less", "(2)"),
        ("self.decision.add_fact(fact)", "delete call", "pass"),
        ("self.epoch = epoch", "delete assignment", "pass"),
        ("del table[key]", "delete statement", "pass"),
        ("raise LedgerError('no')", "delete raise", "pass"),
        ("names = [a, b]", "empty container", "[]"),
        ("names = sorted(a)", "empty container", "[]"),
        ("def f() -> int | None: return x", "empty result", "None"),
        ("def f() -> list[int]: return x", "empty result", "[]"),
        ("def f() -> bool: return x", "empty result", "(not x)"),
        ("def f() -> None:\n    if a: return\n    go()", "delete return", "pass"),
    ],
)
def test_every_operator_changes_what_it_is_named_for(text: str, operator: str, mutated: str) -> None:
    assert (operator, mutated) in changes_of(text)


@pytest.mark.parametrize(
    "text",
    [
        '"""Three is 3."""',
        "import a",
        "assert a < 3",
        "text = f'{a + 3}'",
        "text = f'state {a}' if a else 'no such process'",
        "self.decision.explain(why or 3)",
        "TIMEOUT_S = 3",
        "MOST_WORKERS = 1 << 4",
        "share = 0.5",
        "def __str__(self) -> str: return a or b",
        "def f(a: Literal[3]) -> Literal[3]: ...",
        "def __init__(self): self.a = a",
        "local = value",
        "if __name__ == '__main__': main()",
    ],
)
def test_texts_annotations_assertions_and_choices_are_left_alone(text: str) -> None:
    assert changes_of(text) == []


def test_a_mutant_replaces_only_its_own_bytes_also_behind_letters_of_several_bytes() -> None:
    source = "note = 'ü → ö'; late = a < b  # why\n".encode()
    (mutant,) = Finder("f.py", source).found
    assert mutant.apply(source).decode() == "note = 'ü → ö'; late = (a <= b)  # why\n"


def test_a_mutant_knows_the_line_at_which_its_function_begins() -> None:
    (mutant,) = mutants_of("@property\ndef f(self):\n    go()\n")
    assert (mutant.line, mutant.function) == (3, 1)
    assert mutants_of("go()")[0].function is None


def test_mutants_that_compile_to_the_same_code_are_drawn_once() -> None:
    source = b"late = a in b if c else d\nif not (a in b): go()\nif a not in b: go()\n"
    drawn, num_sites = draw({"f.py": source}, count=100, seed=1)
    codes = {code_of(mutant.apply(source)) for mutant in drawn}
    assert len(codes) == len(drawn) <= num_sites
    assert code_of(source) not in codes


def test_only_lines_that_a_diff_adds_or_changes_are_drawn_where_one_is_given() -> None:
    diff = "--- a/f.py\n+++ b/f.py\n@@ -1 +1,2 @@\n-x\n+a\n+b\n@@ -9,2 +11 @@\n@@ -20,3 +19,0 @@\n"
    assert lines_of_diff(diff) == {"f.py": {1, 2, 11}}
    source = b"first = a < b\nsecond = a < b\n"
    drawn, num_sites = draw({"f.py": source}, count=9, seed=1, lines={"f.py": {2}})
    assert [mutant.line for mutant in drawn] == [2] * num_sites


def test_every_eligible_mutant_of_the_shipped_code_compiles_and_the_draw_depends_on_the_seed_alone() -> None:
    sources = {file: (ROOT / file).read_bytes() for file in target_files()}
    drawn, num_sites = draw(sources, count=60, seed=3)
    assert len(drawn) == 60 < num_sites
    assert drawn == draw(sources, count=60, seed=3)[0]
    assert drawn != draw(sources, count=60, seed=4)[0]
    assert {mutant.file for mutant in drawn} <= set(sources)
