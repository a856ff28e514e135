"""Environments shipped with the system, by the paths that recipes name: `kintsugi.rollout.environments.Calculator`."""

from kintsugi.rollout.environments.builtin import Calculator, NumberGame, ReasoningGym

__all__ = ["Calculator", "NumberGame", "ReasoningGym"]
