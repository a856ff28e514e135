"""One thread per process, as our workers have it: equal bits are promised for that.

Audit logs and tokens go to a folder of the tests.
"""

import atexit
import os
import shutil
import tempfile

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["KINTSUGI_HOME"] = tempfile.mkdtemp(prefix="kintsugi-tests-")
atexit.register(shutil.rmtree, os.environ["KINTSUGI_HOME"], ignore_errors=True)
