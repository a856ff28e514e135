"""Detectors: from evidence to findings. Only `foreign_errors.py` reads texts, those of other programs."""
