"""Mechanisms of faults, one module per kind; `catalogue.py` lists them, the preferred ones first."""
