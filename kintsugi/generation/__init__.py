"""Tokens are sampled: a `Generate` comes in, `Completion`s go out.

`server` runs a `backend` (the `engine`, or one of `backends`) in one process. `manager` spreads requests over servers
by the rule of `router`, keeps what each has produced in a `transcript`, so that another can go on, and lets
`distribution` bring the weights to the `fleet`. All of the manager's side imports no torch.
"""
