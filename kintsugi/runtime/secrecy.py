"""Files and core dumps of processes that hold secret keys, prompts and completions."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def private_process() -> Iterator[None]:
    """Make files that this process and those that it starts create readable for their user only, and let none of them
    dump core: a core dump would hold secret keys. The former settings are restored afterwards."""
    mask = os.umask(0o077)
    cores = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, cores[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, cores)
        os.umask(mask)
