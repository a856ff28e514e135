"""Which way trajectories take from who made them to who trains them. Pure: it is told who is where and what it took.

Trajectories stay with the rollout worker that made them until a rank fetches them; the master knows only who holds what
and how large it is. Before a step it compares plans by what they would cost (`plan.py`), after the step it corrects
its estimate by what the ranks measured (`cost.py`, `plane.py`). A plan decides who asks whom and which rank computes
which shards, never what is computed: the bits of a step do not depend on it.
"""
