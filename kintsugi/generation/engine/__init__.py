"""Continuous batching without torch: decides, while a `Runner` computes.

engine.py      iterations          scheduler.py   admission and preemption   kv_blocks.py   KV cache blocks
slots.py       the runner's slots  requests.py    requests and outputs       runner.py      interface of a runner
sampler.py     logits to tokens    rng.py         noise keyed by request     factory.py     engine of a model
"""
