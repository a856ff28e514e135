"""Mutants of the control plane: every small change that could be a bug, found automatically, drawn from a seed.

Operators: a condition is negated; a comparison becomes its neighbour or opposite; `and` and `or` are exchanged; a `not`
is dropped; the branches of a conditional expression are exchanged; an integer is one more or less; a statement (call,
assignment to an attribute or element, raise, return without value, continue, break) is deleted; a function returns
None or the empty value of its annotation (a negated truth value); a container is empty.

Not eligible: texts for people (f-strings and the choice between two of them, docstrings, errors that are raised,
arguments of `explain` and `Raise` and those named `reason` or `evidence`, `__str__` and `__repr__`); annotations and
imports; assertions; values that are a choice (named limits and times of a module, floats); what the interpreter itself
refuses (a local name or an initial attribute that is never assigned); and what compiles to the same code as the
original or an earlier mutant.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

TARGETS = {
    "control": (
        "decision dispatch due evaluation master membership pending placement processes state step_metrics suspicion "
        "task_queue "
        "phases/evaluate phases/publish phases/recover phases/save phases/train"
    ),
    "model": "seats",
    "samples": "admission batch_selection ledger lifecycle",
    "recovery": "incident_log liveness rank rank_protocol states strategy",
}
"""The shipped decision code."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    function: int | None
    """First line of the function it is in; None outside of functions, which runs at import."""
    operator: str
    start: int
    end: int
    """Bytes of the file that are replaced."""
    original: str
    mutated: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.mutated.encode() + source[self.end :]


OPPOSITE: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
NEIGHBOUR: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
}
EMPTY = {"list": "[]", "tuple": "()", "dict": "{}", "set": "set()", "frozenset": "frozenset()", "str": "''"}
EMPTY_OF_CALL = {**EMPTY, "sorted": "[]", "fromkeys": "{}"}
EMPTY_OF_NODE: dict[type[ast.expr], str] = {
    ast.List: "[]",
    ast.ListComp: "[]",
    ast.Tuple: "()",
    ast.Dict: "{}",
    ast.DictComp: "{}",
    ast.Set: "set()",
    ast.SetComp: "set()",
}
TEXT_CALLS = frozenset({"explain", "Raise"})
TEXT_KEYWORDS = frozenset({"reason", "evidence"})


class Finder(ast.NodeVisitor):
    """Collects every eligible mutant of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.found: list[Mutant] = []
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._functions: list[ast.FunctionDef] = []
        self._settled: set[int] = set()
        """Nodes whose mutation is another one's, too."""
        self.visit(ast.parse(source))

    def _add(self, node: ast.AST, operator: str, mutated: str | ast.expr) -> None:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset
        original = self.source[start:end].decode()
        text = mutated if isinstance(mutated, str) else f"({ast.unparse(mutated)})"
        function = None
        if self._functions:
            owner = self._functions[-1]
            function = min([owner.lineno, *(decorator.lineno for decorator in owner.decorator_list)])
        self.found.append(Mutant(self.file, node.lineno, function, operator, start, end, original, text))

    def _each(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _condition(self, test: ast.expr) -> None:
        self._add(test, "negate condition", ast.UnaryOp(ast.Not(), test))
        if isinstance(test, ast.UnaryOp | ast.Compare):
            self._settled.add(id(test))
        self.visit(test)

    # Definitions and statements.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__str__", "__repr__"):
            return
        self._functions.append(node)
        self._each(*node.args.defaults, *node.args.kw_defaults, *node.body)
        self._functions.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._each(*node.body)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _name(node.value.func) not in TEXT_CALLS:
            self._add(node, "delete call", "pass")
            self.visit(node.value)
        elif isinstance(node.value, ast.Yield):
            self._add(node, "delete yield", "pass")
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._functions and any(_is_choice(target, node.value) for target in node.targets):
            return
        if self._changes_state(node.targets):
            self._add(node, "delete assignment", "pass")
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            self._each(*node.value.elts)
        else:
            self._each(*node.targets, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.value, ast.JoinedStr):
            self._add(node, "delete assignment", "pass")
        self._each(node.target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not _is_choice(node.target, node.value):
            self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add(node, "delete statement", "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "delete raise", "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "delete continue", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "delete break", "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add(node, "delete return", "pass")
            return
        empty = _empty_result(self._functions[-1].returns, node.value)
        if empty is not None:
            self._add(node.value, "empty result", empty)
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Compare) and _name(node.test.left) == "__name__":
            return
        self._condition(node.test)
        self._each(*node.body, *node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self._each(*node.body, *node.orelse)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._condition(node.guard)
        self._each(*node.body)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for test in node.ifs:
            self._condition(test)

    def _changes_state(self, targets: Sequence[ast.expr]) -> bool:
        """In `__init__` an attribute that is not assigned is an error at once."""
        flat = [
            part
            for target in targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
        is_initial = bool(self._functions) and self._functions[-1].name == "__init__"
        return not is_initial and any(isinstance(target, ast.Attribute | ast.Subscript) for target in flat)

    # Expressions.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """A check, not a decision."""

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name in TEXT_CALLS:
            return
        if name in EMPTY_OF_CALL and name != "str" and node.args:
            self._add(node, "empty container", EMPTY_OF_CALL[name])
        self._each(node.func, *node.args)
        self._each(*(keyword.value for keyword in node.keywords if keyword.arg not in TEXT_KEYWORDS))

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            other = NEIGHBOUR.get(type(operator))
            if other is None and not (id(node) in self._settled and len(node.ops) == 1):
                other = OPPOSITE[type(operator)]
            if other is not None:
                ops = [*node.ops[:index], other, *node.ops[index + 1 :]]
                self._add(node, "other comparison", ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, "and/or", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not) and id(node) not in self._settled:
            self._add(node, "drop not", node.operand)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if _is_text(node.body) and _is_text(node.orelse):
            return
        self._add(node, "swap branches", ast.IfExp(node.test, node.orelse, node.body))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add(node, "one more", str(node.value + 1))
            self._add(node, "one less", f"({node.value - 1})")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        self._each(*parts)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.expr) and type(node) in EMPTY_OF_NODE and self._can_be_empty(node):
            self._add(node, "empty container", EMPTY_OF_NODE[type(node)])
        super().generic_visit(node)

    @staticmethod
    def _can_be_empty(node: ast.expr) -> bool:
        is_target = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        parts = getattr(node, "elts", getattr(node, "keys", None))
        return not is_target and parts != []


def _name(node: ast.expr) -> str:
    """`explain` of `self._decision.explain`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_text(node: ast.expr) -> bool:
    """A sentence for people: an f-string, or words with a space between them."""
    is_sentence = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    return isinstance(node, ast.JoinedStr) or is_sentence


def _is_choice(target: ast.expr, value: ast.expr) -> bool:
    """A named limit or time of a module, or a float: another value would be another choice, not a bug."""
    is_float = isinstance(value, ast.Constant) and isinstance(value.value, float)
    is_number = all(isinstance(part, ast.Constant | ast.BinOp | ast.operator) for part in ast.walk(value))
    return is_float or (_name(target).isupper() and is_number)


def _empty_result(annotation: ast.expr | None, value: ast.expr) -> str | ast.expr | None:
    """What a function of this type returns when it returns nothing; None if that is what it returns, or a text."""
    declared = ast.unparse(annotation) if annotation is not None else ""
    is_text = isinstance(value, ast.JoinedStr) and declared == "str"
    if declared == "bool":
        return ast.UnaryOp(ast.Not(), value)
    empty = EMPTY.get(declared.partition("[")[0], "None")
    return None if is_text or ast.unparse(value) == empty else empty


def code_of(source: bytes) -> tuple[Any, ...]:
    """What the interpreter runs, without positions."""
    return _content(compile(source, "mutant", "exec"))


def _content(code: CodeType) -> tuple[Any, ...]:
    constants = tuple(_content(c) if isinstance(c, CodeType) else (type(c), repr(c)) for c in code.co_consts)
    return code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def target_files() -> list[str]:
    return [f"kintsugi/{folder}/{name}.py" for folder, names in TARGETS.items() for name in names.split()]


def lines_of_diff(diff: str) -> dict[str, set[int]]:
    """File → lines that are new or changed, from the output of `git diff --unified=0`."""
    found: dict[str, set[int]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif line.startswith("@@ "):
            first, _, count = line.split("+")[1].split(" ")[0].partition(",")
            found.setdefault(file, set()).update(range(int(first), int(first) + int(count or 1)))
    return found


def draw(
    sources: Mapping[str, bytes], *, count: int, seed: int, lines: Mapping[str, Container[int]] | None = None
) -> tuple[list[Mutant], int]:
    """`count` mutants that differ from the original and from each other, and how many there were to draw from. `lines`:
    those of each file that may be changed; None: all."""
    every = [mutant for file, source in sources.items() for mutant in Finder(file, source).found]
    if lines is not None:
        every = [mutant for mutant in every if mutant.line in lines.get(mutant.file, ())]
    originals = {file: code_of(source) for file, source in sources.items()}
    drawn: list[Mutant] = []
    seen: set[tuple[Any, ...]] = set()
    for mutant in random.Random(seed).sample(every, len(every)):
        if len(drawn) == count:
            break
        code = (mutant.file, code_of(mutant.apply(sources[mutant.file])))
        if code[1] != originals[mutant.file] and code not in seen:
            seen.add(code)
            drawn.append(mutant)
    return drawn, len(every)
