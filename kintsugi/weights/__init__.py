"""A new version of the weights travels from the ranks to the servers.

manifest.py    pieces, positions, checksums      selection.py   which transports, and why
publish.py     a rank's side                     fetch.py       a server's side
transports/    shared memory, stream, relay, collective, disk, device memory
"""
