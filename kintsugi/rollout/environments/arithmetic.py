"""Evaluation of an untrusted arithmetic expression: integers, + - * / and parentheses, and nothing else."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 100
"""Length limit in characters, which also bounds the nesting."""
_LARGEST = 10**30
_PARTS = re.compile(r"\d+|\S")


class NotAnExpression(ValueError):
    """The text is not a valid expression; the message says why."""


def evaluate(text: str) -> Fraction:
    """Evaluate an expression exactly; NotAnExpression if it has no value.

    >>> str(evaluate("12*(3+4)")), str(evaluate("1 - 4/6"))
    ('84', '1/3')
    """
    if len(text) > LONGEST:
        raise NotAnExpression("too long")
    return _Parser(_PARTS.findall(text)).all()


class _Parser:
    """Recursive-descent parser; each method consumes what it is named after and returns its value."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = [*parts, ""]
        self._place = 0

    def all(self) -> Fraction:
        value = self._sum()
        if self._next:
            raise NotAnExpression(f"unexpected {self._next}")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next in ("+", "-"):
            value += self._product() if self._take() == "+" else -self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next in ("*", "/"):
            sign, factor = self._take(), self._factor()
            if sign == "/" and factor == 0:
                raise NotAnExpression("division by zero")
            value = value * factor if sign == "*" else value / factor
            if max(abs(value.numerator), value.denominator) > _LARGEST:
                raise NotAnExpression("too large")
        return value

    def _factor(self) -> Fraction:
        part = self._take()
        if part.isdecimal() and part.isascii():
            return Fraction(int(part))
        if part == "-":
            return -self._factor()
        if part != "(":
            raise NotAnExpression(f"unexpected {part}" if part else "unexpected end")
        value = self._sum()
        if self._take() != ")":
            raise NotAnExpression("no )")
        return value

    @property
    def _next(self) -> str:
        return self._parts[self._place]

    def _take(self) -> str:
        part = self._next
        self._place += bool(part)
        return part
