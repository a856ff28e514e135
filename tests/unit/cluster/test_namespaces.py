from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator

import pytest

from kintsugi.cluster.namespaces import HostNamespaces, listening_socket


@pytest.fixture
def elsewhere() -> Iterator[HostNamespaces]:
    """Another network, which has nothing but its loopback interface."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            pytest.skip("no network namespaces here")
        yield HostNamespaces("host-1", namespaces=(f"/proc/{holder.pid}/ns/net",))


def test_a_port_that_is_taken_is_told() -> None:
    place = HostNamespaces("host-0")
    with listening_socket(place, port=0) as listener, pytest.raises(OSError, match="in use") as refused:
        listening_socket(place, port=listener.getsockname()[1])
    assert refused.value.errno == errno.EADDRINUSE


def test_a_socket_of_another_network_is_made_there_and_this_thread_stays_here(
    elsewhere: HostNamespaces,
) -> None:
    here = os.stat("/proc/thread-self/ns/net").st_ino
    with listening_socket(HostNamespaces("host-0"), port=0) as own:
        port = own.getsockname()[1]
        # The same address and port are free over there.
        with listening_socket(elsewhere, port=port) as listener:
            assert listener.getsockname() == own.getsockname()
    assert os.stat("/proc/thread-self/ns/net").st_ino == here


def test_a_network_that_is_gone_is_told() -> None:
    place = HostNamespaces("host-1", namespaces=("/proc/4194303/ns/net",))
    with pytest.raises(FileNotFoundError):
        listening_socket(place, port=0)
