"""Tokens are sampled: a `Generate` comes in, `Completion`s go out.

`server` runs the `engine` in one process and `manager` spreads requests over the servers by the rule of `router`.
Manager and router import no torch.
"""
