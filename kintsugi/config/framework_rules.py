"""Rules for `actor.framework` and `actor.python`: what an adapter can train, and whether its library is installed.

`framework_problems` is pure; `inspect_interpreter` runs the interpreter of the model workers once.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

import kintsugi
from kintsugi.config.schema import COMPARE_SAMPLES, Config
from kintsugi.config.stages import Stage

MINDSPORE_VERSION = "2.10"
"""The version whose operators and behaviour after a fault are known."""
MINDSPORE_ALGORITHMS = COMPARE_SAMPLES | {"sft", "rollout"}
"""Algorithms of the MindSpore adapter."""
INSPECT_TIMEOUT_S = 60.0

Problem = tuple[str, str]
"""A field and the expected value."""

_INSPECTION = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
found = {name: version(name) for name in sys.argv[1:]}
try:
    import kintsugi
    found["kintsugi"] = kintsugi.__version__
except ImportError:
    found["kintsugi"] = ""
sys.stdout.write(json.dumps(found))
"""


class Interpreter(msgspec.Struct, frozen=True):
    """Findings at the path of an interpreter."""

    path: str
    versions: Mapping[str, str] = {}
    """Distribution → version; empty if it is not installed there."""
    why_unusable: str = ""


def framework_problems(config: Config, stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yield what the framework of this configuration can not do."""
    if config.actor.framework == "torch":
        return
    for stage in stages:
        if stage.algorithm.name not in MINDSPORE_ALGORITHMS:
            known = ", ".join(sorted(MINDSPORE_ALGORITHMS))
            yield "algorithm.name", f"one that the MindSpore adapter has ({known})"
        if stage.algorithm.custom is not None:
            yield "algorithm.custom", "nothing: a custom algorithm is a function of torch tensors"
        if stage.reward_model is not None:
            yield "reward_model", "nothing: the MindSpore adapter runs no reward model"
    if config.actor.dtype != "float32":
        yield "actor.dtype", "float32: the MindSpore adapter computes in no other type"
    if config.actor.recompute:
        yield "actor.recompute", "false: the MindSpore adapter keeps all activations"
    if config.actor.logical_slices > 1:
        yield "actor.logical_slices", "1: the MindSpore adapter computes whole models"
    if config.weights.transport == "collective":
        yield (
            "weights.transport",
            "another one: MindSpore ranks and torch servers share no collective library",
        )


def interpreter_problems(config: Config, found: Interpreter) -> Iterator[Problem]:
    """Yield why the model workers could not run under this interpreter."""
    name = config.actor.framework
    how = (
        "`make setup-mindspore` makes one" if name == "mindspore" else f"`{found.path} -m pip install {name}`"
    )
    if found.why_unusable:
        yield "actor.python", f"an interpreter with {name} at {found.path} ({how}); {found.why_unusable}"
        return
    versions = found.versions
    if not versions.get(name):
        yield "actor.python", f"an interpreter with {name} ({how}), which {found.path} does not have"
    elif name == "mindspore" and not f"{versions[name]}.".startswith(f"{MINDSPORE_VERSION}."):
        yield (
            "actor.python",
            f"an interpreter with mindspore {MINDSPORE_VERSION}, {found.path} has {versions[name]}",
        )
    if versions.get("kintsugi") != kintsugi.__version__:
        other = versions.get("kintsugi") or "none"
        yield (
            "actor.python",
            f"an interpreter with kintsugi {kintsugi.__version__} ({how}), {found.path} has {other}",
        )


def inspect_interpreter(path: str, *, framework: str) -> Interpreter:
    """Ask an interpreter for the versions of what its processes need."""
    if not Path(path).is_file():
        return Interpreter(path, why_unusable="there is no such file")
    command = [path, "-P", "-c", _INSPECTION, framework]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=INSPECT_TIMEOUT_S
        )
        versions = msgspec.json.decode(answer.stdout, type=dict[str, str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        return Interpreter(path, why_unusable=f"it could not be run: {error}")
    return Interpreter(path, versions)
