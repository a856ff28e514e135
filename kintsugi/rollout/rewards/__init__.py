"""Rewards shipped with the system, by the paths that recipes name: `kintsugi.rollout.rewards.exact_answer`."""

from kintsugi.rollout.rewards.builtin import exact_answer, gsm8k_answer, math_answer, program_output

__all__ = ["exact_answer", "gsm8k_answer", "math_answer", "program_output"]
