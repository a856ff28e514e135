"""Phases of a run: one module per phase, and the table of transitions (`table.py`)."""
