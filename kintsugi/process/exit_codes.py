"""Exit codes of every process of a run; `runtime/shortages.py` has those for what the host did not give."""

from __future__ import annotations

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_ORPHANED = 70
"""The process ended because its agent and launcher had ended."""
