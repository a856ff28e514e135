"""Proof that injected faults leave nothing on the host."""
