"""Figures of the samples of one step that its metrics do not have: answers in texts, signs of advantages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite, sqrt

import msgspec

from kintsugi.telemetry.step_metrics import SampleRecord

MARK = "####"
"""Worked solutions have their final answer after this mark, as in GSM8K."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class SampleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step, over those of its samples that were read."""

    samples: int
    lowest: float
    highest: float
    """Lowest and highest reward."""
    with_answer: int = 0
    """Samples whose expected answer is known …"""
    answered: int = 0
    """… of these, completions that contain it, …"""
    answered_by_chance: int = 0
    """… completions that contain the expected answer of another prompt, …"""
    leaked: int = 0
    """… prompts that contain it, …"""
    leaked_by_chance: int = 0
    """… and prompts that contain the expected answer of another prompt."""
    prompts: int = 0
    """Different prompts."""
    agreement: float | None = None
    """Mean over groups of the correlation of reward and advantage; None where no group has different ones."""
    garbled: int = 0
    """Completions with characters that could not be decoded."""


def final_answer(answer: str) -> str:
    """Return the part of an expected answer that a completion would have to contain.

    >>> final_answer("2 + 2 = 4 #### 4")
    '4'
    """
    return answer.rpartition(MARK)[2].strip()


def contains(text: str, answer: str) -> bool:
    """Return whether a text has an answer as words of its own; 151 does not have the answer 15.

    >>> contains("so <answer>15</answer>", "15"), contains("151", "15")
    (True, False)
    """
    start = text.find(answer)
    while start >= 0:
        end = start + len(answer)
        begins = start == 0 or not (text[start - 1].isalnum() and answer[0].isalnum())
        ends = end == len(text) or not (text[end].isalnum() and answer[-1].isalnum())
        if begins and ends:
            return True
        start = text.find(answer, start + 1)
    return False


def figures_of(samples: Sequence[SampleRecord]) -> SampleFigures | None:
    """Summarise the scored samples of a step; None if there are none, as in SFT."""
    scored = [each for each in samples if each.reward_components and isfinite(each.reward)]
    if not scored:
        return None
    known = [(each, answer) for each in scored if (answer := final_answer(each.answer))]
    others = _of_another_prompt(known)
    return SampleFigures(
        samples=len(scored),
        lowest=min(each.reward for each in scored),
        highest=max(each.reward for each in scored),
        with_answer=len(known),
        answered=sum(contains(each.completion, answer) for each, answer in known),
        answered_by_chance=sum(contains(each.completion, answer) for each, answer in others),
        leaked=sum(contains(each.prompt, answer) for each, answer in known),
        leaked_by_chance=sum(contains(each.prompt, answer) for each, answer in others),
        prompts=len({each.prompt for each in scored}),
        agreement=_agreement(scored),
        garbled=sum(REPLACEMENT in each.completion for each in scored),
    )


def _of_another_prompt(known: Sequence[tuple[SampleRecord, str]]) -> list[tuple[SampleRecord, str]]:
    """Pair every sample with the answer of the next prompt, which shows what is found by chance."""
    answers = {each.ticket: answer for each, answer in known}
    tickets = list(answers)
    following = {ticket: answers[tickets[index - 1]] for index, ticket in enumerate(tickets)}
    return [(each, following[each.ticket]) for each, _ in known] if len(tickets) > 1 else []


def _agreement(scored: Sequence[SampleRecord]) -> float | None:
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in scored:
        if each.advantage is not None and isfinite(each.advantage):
            groups[each.ticket].append((each.reward, each.advantage))
    found = [value for group in groups.values() if (value := correlation(group)) is not None]
    return sum(found) / len(found) if found else None


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Pearson's correlation; None where one of the two does not vary."""
    count = len(pairs)
    if count < 2:
        return None
    first_mean, second_mean = (sum(column) / count for column in zip(*pairs, strict=True))
    covariance = sum((first - first_mean) * (second - second_mean) for first, second in pairs)
    first_square = sum((first - first_mean) ** 2 for first, _ in pairs)
    second_square = sum((second - second_mean) ** 2 for _, second in pairs)
    if first_square == 0 or second_square == 0:
        return None
    return float(covariance / sqrt(first_square * second_square))
