"""Recorded runs of `kintsugi page --demo`, as one archive in the package: `benchmarks/record_demo.py` makes it.

`calculator-faults` learns to use a tool while a rank, a generation server and the master are killed and another server
is stopped; `calculator-slow` is undisturbed and has a smaller learning rate, so that the two can be compared.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from kintsugi.errors import StorageError

ARCHIVE = Path(__file__).with_name("runs.tar.xz")
FAULTS, SLOW = "calculator-faults", "calculator-slow"


def unpack(folder: Path) -> Path:
    """Write the recorded runs into an existing folder, one folder each, and return it: `kintsugi page` shows them."""
    try:
        with tarfile.open(ARCHIVE, "r:xz") as archive:
            archive.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise StorageError(
            f"could not unpack the recorded runs of {ARCHIVE} into {folder}: {error}"
        ) from error
    return folder
