"""Can not be imported."""

raise RuntimeError("a library is missing")
