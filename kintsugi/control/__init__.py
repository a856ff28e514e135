"""The master: one process that decides what the run does.

process.py            the process: events in, facts to the journal, effects out
master.py             `decide(event, now)`; phases/ has one module per phase and the table of transitions
protocol.py           events and effects
decision.py           facts, effects and reasons of one decision
pending.py            outstanding requests and their deadlines
state.py              durable state, a fold over facts
processes.py          start, registration, loss, restart and retirement of processes
membership.py         registry of workers; book_sharing.py sends each the changes of the address book
dispatch.py           groups of episodes on rollout workers; task_queue.py decides which worker
due.py                what is due after a step
failure_detector.py   heartbeats and answers to suspicions; suspicion.py from a suspicion to a replacement
records.py            metrics, samples and reports for people
"""
