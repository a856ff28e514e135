"""The whole control plane on virtual time in one thread, from a seed.

cluster.py      a simulated run          world.py        queue, time, randomness
master.py       the real decisions       hosts.py network.py workers.py ranks.py   everything around them
faults.py       faults drawn from a seed targeted_faults.py   faults aimed at a state
invariants.py   checked at every event   coverage.py     pairs of state and event that were met
campaign.py     many seeds               replay.py       a recorded run again
"""
