"""What stands in for a launcher where only its processes matter."""

from __future__ import annotations

ASLEEP = "import time; time.sleep(60)"
TWO_SLEEPERS = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{ASLEEP}']); {ASLEEP}"
"""Has a child, and takes the launcher's arguments without looking at them."""
