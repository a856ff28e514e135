"""Blind campaigns: random faults on a live run, each diagnosed from the run folder alone, and scored."""
