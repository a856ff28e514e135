"""Hosts of their own on this machine with a Ray node each: network, processes, /tmp/ray and /dev/shm are private.

The launcher's machine is the head of the cluster and offers no CPU. A token is asked for everywhere.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib import util
from pathlib import Path
from uuid import uuid4

from kintsugi.lab.testbed import hosts, tools
from kintsugi.lab.testbed.process_tags import carriers
from tests.cluster.ssh_hosts import ROOT, SshHosts

OURS = re.compile(r"-m kintsugi|kintsugi\.[a-z_.]+ ")
PORT = 6379
START_S = 400.0
"""Time for a Ray node to start on a busy machine; 10 s on a quiet one."""
HEALTH = {"period_ms": 1000, "timeout_ms": 1000, "failure_threshold": 2, "initial_delay_ms": 1000}
"""How soon Ray notices a dead node: after 2 to 3 s instead of 13."""
NODE = """
set -e
mount -t tmpfs tmpfs "$1"
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp/ray
mkdir -p "$1/scratch"
shift
"$@" || while :; do sleep 1; done
"""
"""A machine stays when its Ray node has ended by a fault, with everything else that runs there."""


def missing() -> str | None:
    """Why hosts with a Ray node can not be had here."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    if util.find_spec("ray") is None:
        return "Ray is not installed"
    absent = [program for program in ("unshare", "nsenter", "ip", "nft") if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else hosts.missing()


class RayHosts(SshHosts):
    """`count` hosts with a Ray node each, beside the head."""

    def __init__(self, folder: Path, *, count: int) -> None:
        self.mark = uuid4().hex
        self.runs = folder / "runs"
        self.keys = folder / "keys"
        for each in (self.runs, self.keys):
            each.mkdir(parents=True, mode=0o700)
        self.token = self._token("token")
        self._stack = ExitStack()
        self._network = hosts.Hosts(count + 1, folder=folder / "etc")
        self._stack.callback(self._network.close)
        self.head, *self.places = self._network.places
        self._commands: list[subprocess.Popen[str]] = []
        self._machines: dict[str, subprocess.Popen[bytes]] = {}
        Path("/tmp/ray").mkdir(exist_ok=True)  # A place to mount on; Ray's own name for it.
        for target in ("/tmp/ray", "/dev/shm"):
            tools.call(*self._in(self.head.name, "mount"), "mount", "-t", "tmpfs", "tmpfs", target)
        try:
            self._start_cluster()
        except BaseException:
            self.close()
            raise

    def _start_cluster(self) -> None:
        head = ("--head", f"--port={PORT}", f"--dashboard-host={self.head.address}", "--num-cpus=0")
        self._start_node(self.head.name, *head)
        self.wait_for_node(self.head.name)
        for place in self.places:
            self.power_on(place.name)
        for place in self.places:
            self.wait_for_node(place.name)

    def _token(self, name: str) -> Path:
        path = self.keys / name
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
        return path

    @property
    def address_of_cluster(self) -> str:
        return f"{self.head.address}:{PORT}"

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            **{f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()},
            "COLUMNS": "200",
            "HOME": str(self.keys),
            "KINTSUGI_TEST_MARK": self.mark,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "XDG_CACHE_HOME": f"{self.runs}/scratch",
            **more,
        }

    def power_on(self, host: str) -> None:
        self._start_node(host, f"--address={self.address_of_cluster}", "--num-cpus=2")

    def _start_node(self, host: str, *options: str) -> None:
        alone = ["unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"]
        ray += [f"--node-ip-address={self.address(host)}", "--object-store-memory=80000000"]
        ray += ["--disable-usage-stats"]
        # The head's own folders are those of the launcher's machine, where a driver looks for its raylet.
        own = ["sh", "-c", 'shift; exec "$@"' if host == self.head.name else NODE, "node", str(self.runs)]
        named = ["sh", "-c", 'hostname "$1"; shift; exec "$@"', "node", f"{host}-machine", *own]
        with (self.keys / f"{host}.log").open("ab") as log:
            self._machines[host] = subprocess.Popen(
                [*self._in(host, "net", "mount"), *alone, *named, *ray],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self.environment(),
            )

    def wait_for_node(self, host: str) -> None:
        log = self.keys / f"{host}.log"
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and self._machines[host].poll() is None, log.read_text()
            time.sleep(0.1)

    def power_off(self, host: str) -> None:
        super().power_off(host)
        (self.keys / f"{host}.log").unlink()

    def run_python(self, program: str, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run a program at the launcher's machine; return what it printed."""
        command = [*self._in(self.head.name, "net", "mount"), sys.executable, "-c", program, *arguments]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A `kintsugi` command at the launcher's machine."""
        inside = [*self._in(self.head.name, "net", "mount"), f"--wdns={self.runs}"]
        command = subprocess.Popen(
            [*inside, sys.executable, "-m", "kintsugi", *arguments],
            env=self.environment(**(environment or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._commands.append(command)
        return command

    def ask(
        self, *arguments: str, timeout_s: float = 120.0, environment: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        command = self.start(*arguments, environment=environment)
        output, errors = command.communicate(timeout=timeout_s)
        return command.returncode, output + errors

    def pids(self) -> dict[int, str]:
        """Every process of Kintsugi on these hosts; those of Ray carry the mark too."""
        found = {}
        for pid in carriers(self.mark):
            with suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if OURS.search(command) and "default_worker.py" not in command:
                    found[pid] = command
        return found

    def pids_of_ray(self, host: str, name: str) -> list[int]:
        """Processes of Ray on a host whose command contains `name`."""
        namespace = os.readlink(f"/proc/{self._inner(host)}/ns/pid")
        found = []
        for pid in carriers(self.mark):
            with suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if name in command and os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                    found.append(pid)
        return found

    def pids_on(self, host: str) -> set[int]:
        """Processes of Kintsugi on one host."""
        namespace = os.readlink(f"/proc/{self._inner(host)}/ns/pid")
        found = set()
        for pid in self.pids():
            with suppress(FileNotFoundError, ProcessLookupError):
                if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                    found.add(pid)
        return found

    def _inner(self, host: str) -> int:
        machine = self._machines[host]
        (inner,) = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
        return int(inner)

    def scratch_of(self, host: str) -> list[str]:
        """Scratch folders on a host."""
        if host == self.head.name:
            return []
        folder = Path(f"/proc/{self._inner(host)}/root{self.runs}/scratch/kintsugi/hosts")
        return os.listdir(folder) if folder.exists() else []

    def left_in_ray(self) -> str:
        """Placement groups and detached actors that the cluster still has."""
        return self.run_python(
            "import ray, os\n"
            f"ray.init({self.address_of_cluster!r}, log_to_driver=False, logging_level='ERROR')\n"
            "from ray.util import list_named_actors, placement_group_table\n"
            "groups = [each['name'] for each in placement_group_table().values() if each['state'] != 'REMOVED']\n"
            "print(groups + list_named_actors(all_namespaces=True))\n",
            timeout_s=90.0,
        ).strip()

    def assert_nothing_left(self, *, timeout_s: float = 40.0) -> None:
        super().assert_nothing_left(timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while (left := self.left_in_ray()) != "[]":
            assert time.monotonic() < deadline, left

    def kill_ray(self, host: str, name: str) -> None:
        """Kill processes of Ray on a host; what else runs there goes on."""
        for pid in self.pids_of_ray(host, name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
