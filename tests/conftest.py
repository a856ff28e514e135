"""One thread per process, as our workers have it: equal bits are promised for that.

Audit logs and tokens go to a folder of the tests. Processes of the package do not search the current folder, so
programs of the tests are found by PYTHONPATH. Ctrl-C is not ignored, as it is in what a shell starts in the background:
commands under test inherit that.
"""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
)
os.environ["KINTSUGI_HOME"] = tempfile.mkdtemp(prefix="kintsugi-tests-")
atexit.register(shutil.rmtree, os.environ["KINTSUGI_HOME"], ignore_errors=True)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
