"""A probe of a server's weights: log-probabilities after a fixed prompt, against those that the trainer would compute.

Digests show that bytes have arrived. The probe shows that the server computes with them, also where it keeps copies in
a layout of its own, which no digest covers. How closely a server agrees depends on its arithmetic, so the limits are
what was found for versions before: a server that keeps the weights of one layer, or of all, agrees less than it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kintsugi.model.architecture import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

PROMPT_LENGTH = 8
NUM_COMPARED = 16
"""The most likely tokens, by the server."""
MAX_DIFFERENCE = 0.5
"""Mean difference of log-probabilities at which a server does not compute this model, in any arithmetic. In bfloat16
0.03 is usual."""
_CLEARLY = 4.0
"""Two versions can be told apart if they differ by this many times the difference that arithmetic makes."""
_USUALLY = 8.0
"""The difference that arithmetic makes stays below this many times the largest one before."""
_ROUNDING = 2e-4
"""A smaller difference is always taken for one of arithmetic."""


class Accepted(NamedTuple):
    """The last version that passed, and the largest difference of all that have."""

    answer: Sequence[float]
    difference: float


class Verdict(NamedTuple):
    difference: float
    reason: str
    """Empty if the server computes with the new weights, as far as can be told."""


def prompt(vocab_size: int) -> list[int]:
    """Tokens all over the vocabulary."""
    return [(number + 1) * vocab_size // (PROMPT_LENGTH + 1) for number in range(PROMPT_LENGTH)]


def judge(found: Mapping[int, float], expected: Sequence[float], *, before: Accepted | None) -> Verdict:
    """Compare the log-probabilities of a server, by token, with those of the new weights and of the ones before."""
    difference = _mean_difference(found, expected)
    if not difference <= MAX_DIFFERENCE:
        return Verdict(
            difference,
            f"log-probabilities after a fixed prompt differ by {difference:.2g} on average from what these weights "
            f"give, expected at most {MAX_DIFFERENCE:g}",
        )
    if before is not None:
        change = _mean_difference({token: expected[token] for token in found}, before.answer)
        to_before = _mean_difference(found, before.answer)
        if change > _CLEARLY * before.difference and to_before < difference:
            return Verdict(
                difference,
                f"log-probabilities after a fixed prompt differ by {to_before:.2g} from what the weights before give "
                f"and by {difference:.2g} from what the new ones give",
            )
        limit = max(_ROUNDING, _USUALLY * before.difference)
        if difference > limit:
            return Verdict(
                difference,
                f"log-probabilities after a fixed prompt differ by {difference:.2g} on average from what these weights "
                f"give, expected at most {limit:.2g}, since versions before differed by up to {before.difference:.2g}: "
                "it has not taken all of them",
            )
    return Verdict(difference, "")


def answer(architecture: ModelConfig, tensors: Mapping[str, Tensor]) -> list[float]:
    """Log-probabilities of the vocabulary after the prompt, as the trainer computes them."""
    import torch

    from kintsugi.model.attention import PackedLayout
    from kintsugi.model.rotary import inverse_frequencies
    from kintsugi.model.transformer import Transformer

    device = tensors["model.embed_tokens.weight"].device
    dtype = tensors["model.embed_tokens.weight"].dtype
    model = Transformer(architecture, dtype=dtype, device="meta")
    model.check_weights(tensors)
    model.load_state_dict(dict(tensors), assign=True)
    model.frequencies = inverse_frequencies(architecture, device=device)
    tokens = torch.tensor(prompt(architecture.vocab_size), device=device)
    layout = PackedLayout.from_lengths([len(tokens)], device=device)
    with torch.inference_mode():
        hidden = model.forward_packed(tokens, layout.positions, layout)
        logprobs: list[float] = torch.log_softmax(model.logits(hidden[-1:]), dim=-1)[0].tolist()
    return logprobs


def _mean_difference(found: Mapping[int, float], expected: Sequence[float]) -> float:
    return sum(abs(value - expected[token]) for token, value in found.items()) / len(found)
