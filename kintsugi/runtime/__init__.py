"""The interface to the machine: clock, randomness, disk, processes, signals, and the one function that blocks.

Everything above takes these as arguments, so that the simulator (`simulation/`) runs the same code on virtual time with
a disk that fails on demand.

clock.py      clocks and seeded random streams
waits.py      `wait`, the only function that blocks; the table of what this process waits for
deadlines.py  request deadlines from observed durations
counters.py   progress counters and idle time
spans.py      recording of durations
disk.py       files by path, with explicit durability
processes.py  child processes, held by pidfd
shortages.py  exit codes of processes that the host did not give what they need
secrecy.py    private files and no core dumps of processes that hold keys
proc.py       processes as /proc shows them
signals.py    signals as readable descriptors
stacks.py     stack dumps of hung and crashed processes
"""
