"""Detectors, by subject: pure functions from the history of a stage to a finding, or to None when it is healthy."""
