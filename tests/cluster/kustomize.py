"""`kubectl kustomize`, which builds the objects of a folder without a cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes"


def missing() -> str | None:
    """Why nothing can be built here."""
    return None if shutil.which("kubectl") else "kubectl is not installed"


def build(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `kubectl apply -k` would create."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
