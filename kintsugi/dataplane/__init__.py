"""Planning of the transfer of trajectories from rollout workers to ranks. Pure: measurements go in, plans come out.

Trajectories stay with the rollout worker that made them until a rank fetches them; the master knows only their holders
and sizes. Before a step it compares plans by their estimated cost (`plan.py`). After the step it corrects the estimate
by the measurements of the ranks (`link_cost.py`, `planner.py`). A plan decides which rank requests samples from which
process, and which rank computes which shards. It does not change what is computed: the bits of a step do not depend on
it.
"""
