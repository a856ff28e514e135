"""Processes on hosts: the launcher, one node agent per host, how a child is placed and started, shared memory."""
