from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

from kintsugi.runtime.secrecy import private_process

CRASH = (
    "import os, resource; open('file', 'w'); "
    "print(resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True); os.abort()"
)


def test_a_process_with_secrets_dumps_no_core_and_writes_files_for_its_user_only(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    before = resource.getrlimit(resource.RLIMIT_CORE), os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        with private_process():
            child = subprocess.run(
                [sys.executable, "-c", CRASH], cwd=tmp_path, capture_output=True, text=True, check=False
            )
        after = resource.getrlimit(resource.RLIMIT_CORE), os.umask(0o022)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before[0])
        os.umask(before[1])
    assert (child.returncode, child.stdout) == (-6, "0\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "the abort left a core dump"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert after == ((hard, hard), 0o022)
