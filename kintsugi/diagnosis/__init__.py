"""Root-cause diagnosis of a run, from its records alone.

files of the run ─► evidence ─► findings (events, readings, connections) ─► explanations ─► ranked causes
"""

from kintsugi.diagnosis.diagnose import Follower, diagnose

__all__ = ["Follower", "diagnose"]
