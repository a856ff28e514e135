"""Patterns of texts that others write, and the only place of such patterns."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kintsugi.diagnosis
from kintsugi.diagnosis.detectors.fault_kinds import kind_of_fault
from kintsugi.diagnosis.detectors.foreign_errors import is_closed_by_peer, kind_of
from kintsugi.errors import Fault, Miscomputed


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("OSError: [Errno 5] Input/output error: 'journal'", "disk_error"),
        ("write failed: Read-only file system", "disk_error"),
        ("[Errno -3] Temporary failure in name resolution", "dns"),
        ("OSError: [Errno 24] Too many open files: 'checkpoints/.lock'", "descriptors"),
        ("loss is not finite", "numeric"),
        ("piece lm_head: checksum differs", "corruption"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "device_memory"),
        ("RuntimeError: unable to mmap: Cannot allocate memory", "memory"),
    ],
)
def test_words_that_name_what_broke_say_its_kind(message: str, kind: str) -> None:
    assert kind_of(message) == kind


@pytest.mark.parametrize(
    "message",
    [
        "waited 3.0 s for model-1: an answer",
        "step 7 took 3 s",
        "it is informed",
        "different states after actor_train: model-0 a1, model-1 b2",
        "server-0 has not answered LeaseRecalled 7 of cuda:0 for 1.1 s",
        "lm_head of version 9 from stream of model-0: expected xxh3 a8e336, got c9371f",
    ],
)
def test_words_of_those_who_waited_name_nothing_that_broke(message: str) -> None:
    assert kind_of(message) is None


def test_a_device_that_computes_something_else_is_a_wrong_number_and_no_slow_device() -> None:
    message = "the cpu of this process does not compute any more what it did: 9 of 64 numbers differ"
    fault = Fault("f", "DeviceError", "model-0", message, 0.0, detail=Miscomputed("known answer"))
    assert kind_of_fault(fault) == "numeric"
    assert kind_of_fault(Fault("f", "DeviceError", "model-0", "CUDA error: illegal access", 0.0)) == "device"


def test_a_storage_error_whose_words_name_the_room_is_a_full_disk() -> None:
    fault = Fault("f", "StorageError", "model-0", "could not save: No space left on device", 0.0)
    assert kind_of_fault(fault) == "disk_full"


def test_a_connection_that_the_other_end_closed_is_told_from_one_that_this_end_lost() -> None:
    assert is_closed_by_peer("Read error: Connection closed by peer")
    assert not is_closed_by_peer("Software caused connection abort")


def test_only_the_patterns_of_foreign_errors_search_texts() -> None:
    """Our own processes report by typed events: no other module of the diagnosis has regular expressions."""
    folder = Path(kintsugi.diagnosis.__file__).parent
    imports = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import) and any(alias.name == "re" for alias in node.names)
    }
    assert imports == {"detectors/foreign_errors.py"}


def test_no_part_of_the_diagnosis_or_the_master_looks_into_a_message() -> None:
    """`… in fault.message`, `message.startswith(…)`: the sentence is for people."""
    package = Path(kintsugi.diagnosis.__file__).parents[1]
    found = []
    for folder in ("diagnosis", "control", "recovery", "run_folder"):
        for path in (package / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare) and any(
                    isinstance(op, ast.In | ast.NotIn) for op in node.ops
                ):
                    searched = node.comparators[0]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    searched = (
                        node.func.value if node.func.attr in ("startswith", "endswith", "find") else node
                    )
                else:
                    continue
                if isinstance(searched, ast.Attribute) and searched.attr in ("message", "reason", "evidence"):
                    found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert found == []
