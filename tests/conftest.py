"""One thread per process, as our workers have it: equal bits are promised for that.

Audit logs and tokens go to a folder of the tests. Processes of the package do not search the current folder, so
programs of the tests are found by PYTHONPATH.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
)
os.environ["KINTSUGI_HOME"] = tempfile.mkdtemp(prefix="kintsugi-tests-")
atexit.register(shutil.rmtree, os.environ["KINTSUGI_HOME"], ignore_errors=True)
