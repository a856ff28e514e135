"""Processes on hosts: the launcher, one node agent per host, the start of a process, and the host's shared memory.

launcher.py           `kintsugi train`: starts one agent per host and the diagnosis process, forwards signals
agent.py              node agent: starts, watches and stops the processes of its host
handover.py           what the launcher hands to an agent, and an agent to its children
namespaces.py         network and mount namespaces of a host

child.py              one child process of an agent, and the table of all of them on disk
process_factory.py    starts a child: from a spare, from the fork server, or by executing an interpreter
fork_server.py        process that has imported everything and forks
spares.py             prepared processes without an identity
spawn.py              entry point of every child: session, log, placement, program
orphans.py            subreaper: children of dead parents
restart_policy.py     restart limits, stopped processes

host_monitor.py       readings of processes, host, links and accelerators, once a second
exit_recorder.py      exit status and OOM attribution
accelerators.py       health of accelerators
diagnosis_process.py  the launcher's handle of the diagnosis process (`diagnosis/watcher.py` is its program)

shared_memory.py      memory segments of the host, held by its agent
peer_snapshots.py     training states of ranks of other hosts, held by an agent
weight_relay.py       published weights on their way to other hosts, held by an agent
device_arbiter.py     lease of devices that ranks and servers share
"""
