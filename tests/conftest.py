"""One thread per process, as our workers have it: equal bits are promised for that."""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
