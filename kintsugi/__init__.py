"""Kintsugi: distributed RL post-training that mends itself."""

__version__ = "0.1.0"
