from __future__ import annotations

import errno
import resource
import subprocess
import sys

import pytest
import zmq

from kintsugi.errors import DataError, StorageError
from kintsugi.runtime.shortages import (
    EXIT_ADDRESS_TAKEN,
    EXIT_FILE_LIMIT,
    EXIT_NO_DESCRIPTORS,
    EXIT_NO_MEMORY,
    EXIT_NO_THREADS,
    EXIT_UNFIT,
    describe_exit,
    shortage_code,
    start_shortage,
)


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), EXIT_NO_MEMORY),
        (OSError(errno.ENOMEM, "no memory"), EXIT_NO_MEMORY),
        (OSError(errno.EMFILE, "too many"), EXIT_NO_DESCRIPTORS),
        (zmq.ZMQError(errno.EMFILE), EXIT_NO_DESCRIPTORS),
        (RuntimeError("can't start new thread"), EXIT_NO_THREADS),
        (OSError(errno.EADDRINUSE, "in use"), EXIT_ADDRESS_TAKEN),
        (OSError(errno.EIO, "disk"), EXIT_UNFIT),
        (caused_by(StorageError("journal"), OSError(errno.EROFS, "read-only")), EXIT_UNFIT),
        (StorageError("damaged"), None),
        (caused_by(DataError("no such file"), FileNotFoundError()), None),
        (AssertionError("a bug"), None),
    ],
    ids=str,
)
def test_what_the_host_did_not_give_has_an_exit_code_of_its_own(error: Exception, code: int | None) -> None:
    assert shortage_code(error) == code


def test_a_file_that_is_too_large_is_a_shortage_of_the_process_only_at_its_own_limit() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert shortage_code(OSError(errno.EFBIG, "too large")) == EXIT_UNFIT
    program = (
        "import errno, resource, sys; from kintsugi.runtime.shortages import shortage_code; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); sys.exit(shortage_code(OSError(errno.EFBIG, '')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == EXIT_FILE_LIMIT


def test_an_exit_code_of_a_shortage_is_described() -> None:
    assert describe_exit(EXIT_NO_MEMORY) == "exited with code 72 (it got no memory)"
    assert describe_exit(1) == "exited with code 1"
    assert describe_exit(-9) == "killed by SIGKILL"


def test_the_interpreter_says_so_when_no_thread_can_be_started() -> None:
    """The text is the interpreter's: it has no class for this error."""
    program = (
        "import os, resource, sys, threading; from kintsugi.runtime.shortages import shortage_code\n"
        # Less than the stack, so that it does not depend on whether the host overcommits memory.
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "threading.stack_size(1 << 46)\n"
        "try:\n    threading.Thread(target=print).start()\n"
        "except RuntimeError as error:\n    sys.exit(shortage_code(error))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == EXIT_NO_THREADS


def test_a_process_that_cannot_be_made_names_what_the_host_lacks() -> None:
    assert "limit of processes" in start_shortage(BlockingIOError(errno.EAGAIN, "again"))
    assert start_shortage(OSError(errno.ENOMEM, "memory")) == "it got no memory"
    assert start_shortage(FileNotFoundError(errno.ENOENT, "no interpreter")) == ""
