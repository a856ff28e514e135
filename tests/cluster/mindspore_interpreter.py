"""The interpreter of MindSpore ranks, for tests that need it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kintsugi.config.framework_rules import inspect_interpreter
from kintsugi.config.schema import ActorSection

PYTHON = os.environ.get("KINTSUGI_TEST_MINDSPORE") or ActorSection(framework="mindspore").interpreter
"""That of `make setup-mindspore`, or the one that the environment names."""

IS_INSTALLED = PYTHON is not None and Path(PYTHON).is_file()
needs_mindspore = pytest.mark.skipif(
    not (IS_INSTALLED and inspect_interpreter(str(PYTHON), framework="mindspore").versions.get("mindspore")),
    reason="MindSpore is not installed: make setup-mindspore",
)
