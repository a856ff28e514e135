"""Index over a run's records, search, and the trace of one prompt."""
