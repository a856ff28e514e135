"""The master's memory on disk.

facts.py     every fact, one struct each
journal.py   the append-only file
inputs.py    the master's inputs, recorded for replay
"""
