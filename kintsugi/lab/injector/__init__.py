"""Injections as values, their execution in processes of their own, and the undo of every change."""
