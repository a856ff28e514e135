from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from kintsugi.cluster.spawn import StartOrder, apply, child_environment, load
from kintsugi.errors import StartFailed
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.types import Peer, Placement, Role

MakeHost = Callable[..., Any]
GROUPS = [path for path in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")) if path.is_dir()]


def start_with(*, report: int, lifeline: int, listener: int = -1) -> StartOrder:
    bootstrap = Bootstrap(
        job="j",
        run_dir="r",
        process="model-0",
        role=Role.MODEL,
        host="host-0",
        incarnation="i",
        public_key=b"",
        secret_key=b"",
        master=Peer("master-0", "m", "host-0", "", b""),
        lifeline=lifeline,
        listener=listener,
    )
    return StartOrder(program="a:b", placement=Placement(), bootstrap=bootstrap, report=report)


def test_descriptors_keep_their_meaning_under_other_numbers() -> None:
    passed = start_with(report=5, lifeline=6, listener=7).with_descriptors((15, 16, 17))
    assert (passed.report, passed.bootstrap.lifeline, passed.bootstrap.listener) == (15, 16, 17)
    passed = start_with(report=5, lifeline=6).with_descriptors((15, 16))
    assert (passed.report, passed.bootstrap.lifeline, passed.bootstrap.listener) == (15, 16, -1)


def test_a_start_crosses_a_descriptor_unchanged() -> None:
    start = start_with(report=5, lifeline=6)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=StartOrder) == start


def test_one_computing_thread_unless_somebody_says_otherwise() -> None:
    assert child_environment({}, Placement())["OMP_NUM_THREADS"] == "1"
    assert child_environment({"OMP_NUM_THREADS": "4"}, Placement())["OMP_NUM_THREADS"] == "4"
    placement = Placement(environment={"OMP_NUM_THREADS": "2"})
    assert child_environment({"OMP_NUM_THREADS": "4"}, placement)["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            Placement(limits={"MOON": 1}),
            "placing: limit MOON=1: no such resource limit; expected one of AS, ",
        ),
        (Placement(cgroup="/no/such/group"), "placing: cgroup /no/such/group: No such file or directory"),
        (
            Placement(network_namespace="../x"),
            r"placing: network namespace \.\./x: a namespace is given by its",
        ),
        (Placement(network_namespace="none"), "placing: network namespace none: No such file or directory"),
    ],
)
def test_a_part_that_cannot_hold_is_named(placement: Placement, message: str) -> None:
    with pytest.raises(StartFailed, match=f"model-0 failed to start while {message}"):
        apply(placement, process="model-0")


def test_a_folder_that_is_no_control_group_gets_no_file(tmp_path: Path) -> None:
    with pytest.raises(StartFailed):
        apply(Placement(cgroup=str(tmp_path)), process="model-0")
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_not_there_is_a_failed_start() -> None:
    with pytest.raises(StartFailed, match="while importing json:no_such: AttributeError"):
        load("json:no_such", process="model-0")


@pytest.fixture
def control_group() -> Iterator[Path]:
    folder = GROUPS[0] / f"kintsugi-test-{uuid4().hex[:8]}"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.fixture
def network_namespace() -> Iterator[str]:
    name = f"kintsugi-{uuid4().hex[:8]}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.skipif(not GROUPS or os.getuid() != 0, reason="control groups are made by root")
@pytest.mark.parametrize("preload", [(), ("json",)], ids=["executed", "forked"])
def test_a_child_runs_in_its_control_group(
    control_group: Path, make_host: MakeHost, preload: tuple[str, ...]
) -> None:
    host = make_host(preload=preload, model="idle")
    started = host.start("model-0", placement=Placement(cgroup=str(control_group)))
    assert (control_group / "cgroup.procs").read_text().split() == [str(started.pid)]
    host.stop(started)


@pytest.mark.skipif(
    shutil.which("ip") is None or os.getuid() != 0, reason="namespaces are made by root with ip"
)
def test_a_child_runs_in_its_network_namespace(network_namespace: str, make_host: MakeHost) -> None:
    host = make_host(model="idle")
    started = host.start("model-0", placement=Placement(network_namespace=network_namespace))
    assert os.stat(f"/proc/{started.pid}/ns/net").st_ino == os.stat(f"/run/netns/{network_namespace}").st_ino
    host.stop(started)
