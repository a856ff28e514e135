import os
import subprocess
import sys
import threading

import pytest

from kintsugi.cluster.orphans import children_of


def test_children_are_found_while_threads_of_their_parent_come_and_go() -> None:
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    churning = threading.Thread(target=churn)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        churning.start()
        try:
            looks = [children_of(os.getpid()) for _ in range(200)]
        finally:
            over.set()
            churning.join()
        assert all(child.pid in children for children in looks)


def test_a_process_that_is_gone_has_no_children_to_tell() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    with pytest.raises(ProcessLookupError):
        children_of(gone.pid)
