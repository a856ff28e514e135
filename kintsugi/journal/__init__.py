"""The master's memory on disk.

facts.py     every fact, one struct each
format.py    bytes of the file: header, records, torn tail and damage
journal.py   the append-only file: its writer, takeovers, compaction
inputs.py    the master's inputs, recorded for replay
"""
