"""Token generation: a `Generate` request comes in, `Completion`s go out.

`server` runs a `backend` (the `engine`, or one of `backends`) in one process. `manager` distributes requests over the
servers by the rule of `router` and keeps the tokens that each has produced in a `transcript`, so that another server
can continue. `weight_distribution` sends new weights to the servers of `server_fleet`. No module of the manager imports
torch.
"""
