from __future__ import annotations

import os
import socket

from kintsugi.lab.testbed.ports import ports_of


def test_listening_and_connected_ports_of_a_process_are_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as connection:
            wanted = {listener.getsockname()[1], connection.getsockname()[1]}
            assert wanted <= ports_of([os.getpid()])
        assert connection.fileno() == -1


def test_a_process_that_is_gone_has_none() -> None:
    assert ports_of([2**22 - 1]) == frozenset()
