"""Failure handling as pure state machines: no clock, no torch, no sockets.

liveness.py        silence and lack of progress      straggler.py      slowness against peers and past
strategy.py        impact, options and choice        incident_log.py   faults, actions and durations
states.py          table of the ranks' recovery      rank_protocol.py  the master's side of it
rank.py            a rank's side of it
"""
