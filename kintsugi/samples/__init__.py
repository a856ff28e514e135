"""Samples wait, and are trained exactly once.

ledger.py            state of every sample, a fold over facts     lifecycle.py   its states and transitions
admission.py         how many tickets may be issued: the bound on staleness
batch_selection.py   which groups form the next batch             sharding.py    logical shards of a batch
"""
