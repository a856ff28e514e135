"""Experiments described by files, run on this system and on the conventional one."""
