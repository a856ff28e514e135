import pytest

from kintsugi.rollout.environments.arithmetic import LONGEST, NotAnExpression, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*(3+4)", "84"),
        ("2+3*4-5", "9"),
        (" 10 / 4 ", "5/2"),
        ("--3", "3"),
        ("-(2-5)*-1", "-3"),
        ("007", "7"),
        ("8/4/2", "1"),
        (f"{'(' * 49}1{')' * 49}", "1"),
    ],
)
def test_an_expression_has_its_exact_value(text: str, value: str) -> None:
    assert str(evaluate(text)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unexpected end"),
        ("12*", "unexpected end"),
        ("1 2", "unexpected 2"),
        ("12)", "unexpected )"),
        ("(12", "no )"),
        ("1//2", "unexpected /"),
        ("2**9", "unexpected *"),
        ("1/(2-2)", "division by zero"),
        ("9" * 20 + "*" + "9" * 20, "too large"),
        ("1" * (LONGEST + 1), "too long"),
        ("__import__('os')", "unexpected _"),
        ("٣+1", "unexpected ٣"),
        ("()", "unexpected )"),
    ],
)
def test_whatever_else_is_written_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(NotAnExpression) as caught:
        evaluate(text)
    assert str(caught.value) == reason
