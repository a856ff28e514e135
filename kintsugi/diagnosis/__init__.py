"""Names the true cause of what goes wrong in a run, from what the run recorded and nothing else.

files of the run ─► evidence ─► findings (facts, figures, connections) ─► what explains what ─► ranked causes
"""

from kintsugi.diagnosis.diagnosing import Follower, diagnose

__all__ = ["Follower", "diagnose"]
