"""The vocabulary between processes: one module of messages per link, their envelope, and the bootstrap of a process.

messages.py         table of all messages: which process sends which, and how it is answered
wire.py             envelope, encoding, and the roles that may send each message
body.py             base of all messages
bootstrap.py        what a process inherits before it can connect

membership.py       any process ↔ master
agents.py           master ↔ node agents
rollout.py          master ↔ rollout workers ↔ training ranks
generation.py       rollout workers ↔ generation manager ↔ generation servers
training.py         master ↔ training ranks
recovery.py         master ↔ training ranks, and between ranks
weights.py          training ranks ↔ generation servers, by way of manager and agents
sample_transfer.py  between training ranks
device_lease.py     training ranks and generation servers ↔ their agent
"""
