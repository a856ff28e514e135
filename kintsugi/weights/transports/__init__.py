"""Transports of weights, one module each."""
