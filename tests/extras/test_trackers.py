"""Real runs, with the real libraries of the trackers, local or offline: what each of them has of a run, resumed once."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kintsugi.run_folder.reader import read_metrics, read_summary
from tests.cluster.real_runs import RECIPE, Run, finished, play

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
