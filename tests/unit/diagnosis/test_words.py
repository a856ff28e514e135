"""What messages mean."""

from __future__ import annotations

import pytest

from kintsugi.diagnosis.words import kind_of, kind_of_fault
from kintsugi.errors import Fault


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("OSError: [Errno 5] Input/output error: 'journal'", "disk_error"),
        ("write failed: Read-only file system", "disk_error"),
        ("[Errno -3] Temporary failure in name resolution", "dns"),
        ("OSError: [Errno 24] Too many open files: 'checkpoints/.lock'", "descriptors"),
        ("loss is not finite", "numeric"),
        ("different states after actor_train: model-0 a1, model-1 b2", "numeric"),
        ("piece lm_head: checksum differs", "corruption"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "device_memory"),
        ("RuntimeError: unable to mmap: Cannot allocate memory", "memory"),
    ],
)
def test_words_that_name_what_broke_say_its_kind(message: str, kind: str) -> None:
    assert kind_of(message) == kind


@pytest.mark.parametrize(
    "message", ["waited 3.0 s for model-1: an answer", "step 7 took 3 s", "it is informed"]
)
def test_words_of_those_who_waited_name_nothing_that_broke(message: str) -> None:
    assert kind_of(message) is None


def test_a_device_that_computes_something_else_is_a_wrong_number_and_no_slow_device() -> None:
    message = "the cpu of this process does not compute any more what it did: 9 of 64 numbers differ"
    assert kind_of_fault(Fault("f", "DeviceError", "model-0", message, 0.0)) == "numeric"
    assert kind_of_fault(Fault("f", "DeviceError", "model-0", "CUDA error: illegal access", 0.0)) == "device"


def test_a_storage_error_whose_words_name_the_room_is_a_full_disk() -> None:
    fault = Fault("f", "StorageError", "model-0", "could not save: No space left on device", 0.0)
    assert kind_of_fault(fault) == "disk_full"
