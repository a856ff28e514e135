"""Episodes run and are scored.

worker.py              the process          group.py         one group on its way through it
single_turn.py         one completion       multi_turn.py    environments and agents
generation_client.py   requests to the manager              trajectory.py    from completions to trajectories
user_code/             the process that runs rewards, environments and agent programs
rewards/ environments/ sandbox/
"""
