"""A Slurm cluster on this machine: slurmctld and several slurmd of Debian's packages, each on a host of its own.

A host has a private network, processes, mounts, shared memory and a name of its own. Host 0 runs slurmctld and is the
login node, on which commands are given. The folder of the runs is shared by all, as the home folders of a site are.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.lab.testbed import hosts, tools
from kintsugi.lab.testbed.process_tags import carriers
from tests.cluster.tiny_runs import until

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "unshare", "nsenter", "ip")
ROOT = Path(__file__).parents[2]
HOST = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
shift
exec "$@"
"""
CONF = """
ClusterName=test
SlurmctldHost=n0({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType={proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=2{scheduling}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SlurmdTimeout={node_timeout_s}
SlurmctldTimeout=30
MessageTimeout=5
KillWait=5
MinJobAge=300
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PropagateResourceLimits=NONE
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes=n[1-{count}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=small Nodes=n[1-{count}] MaxTime=10 MaxNodes=1 State=UP PriorityTier=1
"""
NODE = (
    "NodeName=n{number} NodeAddr={address} CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 "
    "RealMemory=2000 State=UNKNOWN"
)


def missing() -> str | None:
    """Why a Slurm cluster can not be had here."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else hosts.missing()


def _path_of(program: str) -> str:
    return shutil.which(program, path="/usr/bin:/usr/sbin:/usr/local/bin") or program


class SlurmCluster:
    """`count` nodes n1, n2, … and the login node n0 with slurmctld."""

    def __init__(
        self, folder: Path, *, count: int, proctrack: str = "proctrack/linuxproc", node_timeout_s: int = 30
    ) -> None:
        """`set_preemption` changes what a job of a higher priority does to others."""
        self.mark = uuid4().hex
        self.runs = folder / "runs"
        self._folder = folder / "slurm"
        for each in (self.runs, self._folder, self._folder / "spool", self._folder / "state"):
            each.mkdir(parents=True, mode=0o755)
        self.nodes = tuple(f"n{number}" for number in range(1, count + 1))
        self._stack = ExitStack()
        self._network = hosts.Hosts(count + 1, folder=folder / "etc")
        self._stack.callback(self._network.close)
        self._commands: list[subprocess.Popen[str]] = []
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        """Host → the process that is the whole of it."""
        addresses = {f"n{number}": place.address for number, place in enumerate(self._network.places)}
        self.addresses = addresses
        nodes = "\n".join(
            NODE.format(number=number, address=addresses[f"n{number}"]) for number in range(1, count + 1)
        )
        self.conf = self._folder / "slurm.conf"
        self._settings = {
            "head": addresses["n0"],
            "folder": self._folder,
            "nodes": nodes,
            "count": count,
            "proctrack": proctrack,
            "node_timeout_s": node_timeout_s,
        }
        self._write_conf(grace_s=60, warns_script=True)
        (self._folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
        )
        try:
            self._start_munge()
            self.start_controller()
            for node in self.nodes:
                self.power_on(node)
            self.wait_for_nodes("IDLE", count=count)
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> tuple[HostNamespaces, ...]:
        """The networks of the login node and of all nodes."""
        return self._network.places

    # Daemons.

    def _start_munge(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "log-file": "munge.log",
            "pid-file": "munge.pid",
        }
        files |= {"seed-file": "munge.seed"}
        options = [f"--{option}={self._folder / name}" for option, name in files.items()]
        self._munge = subprocess.Popen(
            ["munged", "--foreground", "--force", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._stack.callback(self._munge.wait)
        self._stack.callback(self._munge.kill)
        until((self._folder / "munge.socket").exists, "munged")

    def _power_on(self, host: str, *daemon: str) -> None:
        place = self._network.places[int(host[1:])]
        paths = {path.rpartition("/")[2]: path for path in place.namespaces}
        there = ["nsenter", f"--net={paths['net']}", f"--mount={paths['mnt']}"]
        alone = ["unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with (self._folder / f"{host}.out").open("ab") as log:
            self._daemons[host] = subprocess.Popen(
                [*there, *alone, "sh", "-c", HOST, "host", host, *daemon],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "SLURM_CONF": str(self.conf)},
                start_new_session=True,
            )

    def _write_conf(self, *, grace_s: int, warns_script: bool) -> None:
        scheduling = ",preempt_send_user_signal" if warns_script else ""
        self.conf.write_text(CONF.format(**self._settings, grace_s=grace_s, scheduling=scheduling))

    def set_preemption(self, *, grace_s: int, warns_script: bool) -> None:
        """Change what a job of a higher priority does to the others. `warns_script`: the signal that a job has asked
        for comes at the beginning of the grace time, instead of SIGTERM to all of its steps."""
        self._write_conf(grace_s=grace_s, warns_script=warns_script)
        self.slurm("scontrol", "reconfigure")

    def start_controller(self) -> None:
        self._power_on("n0", "slurmctld", "-D")

    def power_on(self, node: str) -> None:
        # Everything of the node belongs to this slurmd's namespaces, as the daemons of a site belong to its boot.
        self._power_on(node, "sh", "-c", 'slurmd -D -N "$0" & exec sleep infinity', node)

    def power_off(self, host: str) -> None:
        """End everything on a host at once."""
        machine = self._daemons.pop(host)
        machine.kill()
        machine.wait()

    def processes_of(self, node: str) -> dict[int, str]:
        """Every process on a node, by its pid on this machine."""
        own = self._inner(node)
        namespace = os.readlink(f"/proc/{own}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and os.readlink(entry / "ns" / "pid") == namespace:
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    )
        return found

    def _inner(self, node: str) -> int:
        machine = self._daemons[node]
        (inner,) = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
        return int(inner)

    def kill_slurmd_and_steps(self, node: str) -> list[str]:
        """Kill slurmd, its step daemons and all that they have started; return the commands. The machine stays up."""
        first = self._inner(node)
        there = {pid: command for pid, command in self.processes_of(node).items() if pid != first}
        for pid in there:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(there.values())

    def start_slurmd(self, node: str) -> None:
        """Start slurmd again on a node that stayed up."""
        subprocess.Popen(
            ["nsenter", "--target", str(self._inner(node)), "--all", "slurmd", "-N", node],
            env={**os.environ, "SLURM_CONF": str(self.conf)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).wait(timeout=10)

    # Commands on the login node.

    def _at_the_head(self) -> list[str]:
        return ["nsenter", "--target", str(self._inner("n0")), "--all", f"--wdns={self.runs}"]

    def slurm(self, *command: str, timeout_s: float = 20.0) -> str:
        """The output of a client command of Slurm."""
        program = _path_of(command[0])  # A test may have put `clients` into its PATH.
        return tools.call(
            *self._at_the_head(), "env", f"SLURM_CONF={self.conf}", program, *command[1:], timeout_s=timeout_s
        ).strip()

    def start(
        self, *arguments: str, program: tuple[str, ...] = (), **environment: str
    ) -> subprocess.Popen[str]:
        """A `kintsugi` command, or another program, on the login node."""
        command = subprocess.Popen(
            [*self._at_the_head(), *(program or (sys.executable, "-P", "-m", "kintsugi")), *arguments],
            env={
                **os.environ,
                "COLUMNS": "200",
                "PYTHONPATH": str(ROOT),
                "XDG_CACHE_HOME": str(self.runs.parent / "cache"),
                "KINTSUGI_TEST_MARK": self.mark,
                "SLURM_CONF": str(self.conf),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._commands.append(command)
        return command

    def ask(self, *arguments: str, timeout_s: float = 60.0) -> tuple[int, str]:
        command = self.start(*arguments)
        output, errors = command.communicate(timeout=timeout_s)
        return command.returncode, output + errors

    def clients(self) -> Path:
        """A folder with the client commands of Slurm, for a process that is not on the login node."""
        folder = self._folder / "clients"
        folder.mkdir(exist_ok=True)
        for name in ("srun", "scontrol", "scancel", "squeue"):
            there = " ".join(self._at_the_head())
            (folder / name).write_text(
                f'#!/bin/sh\nexec {there} env SLURM_CONF={self.conf} {_path_of(name)} "$@"\n'
            )
            (folder / name).chmod(0o755)
        return folder

    def allocate(self, count: int) -> tuple[str, str]:
        """Allocate nodes without a step; return the job and its list of nodes."""
        self.slurm("salloc", f"--nodes={count}", "--no-shell", "--no-kill", "--exclusive")
        job, nodes = self.slurm("squeue", "--noheader", "--format=%A %N").splitlines()[0].split()
        return job, nodes

    def jobs(self) -> list[str]:
        """Jobs that wait, run or end, with their state: `["12 RUNNING"]`."""
        return self.slurm("squeue", "--noheader", "--format=%A %T").splitlines()

    def states(self) -> dict[str, str]:
        """Node → its state, as `IDLE` or `DOWN*`."""
        lines = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {name: state.upper() for name, state in map(str.split, lines)}

    def wait_for_nodes(self, state: str, *, count: int, timeout_s: float = 30.0) -> None:
        def is_so() -> bool:
            with suppress(tools.ToolFailed, FileNotFoundError, ValueError):
                if list(self.states().values()).count(state) == count:
                    return True
            time.sleep(0.1)
            return False

        until(is_so, f"{count} nodes {state}", timeout_s=timeout_s)

    def pids(self) -> dict[int, str]:
        """Every process that a test has started through this cluster, on all nodes."""
        found = {}
        for pid in carriers(self.mark):
            with suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def assert_nothing_left(self, *, timeout_s: float = 30.0) -> None:
        """No process, no job, no scratch folder."""
        until(lambda: not self.pids(), f"the end of {self.pids()}", timeout_s=timeout_s)
        until(self._no_job, "the end of all jobs", timeout_s=timeout_s)
        scratch = self.runs.parent / "cache" / "kintsugi" / "hosts"
        assert not scratch.exists() or not os.listdir(scratch), os.listdir(scratch)

    def _no_job(self) -> bool:
        time.sleep(0.1)
        return not self.jobs()

    def until(self, condition: Callable[[], object], what: str, *, timeout_s: float = 60.0) -> None:
        until(condition, what, timeout_s=timeout_s)

    def logs(self) -> str:
        """The ends of all logs, for the message of a failed test."""
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self._folder.glob("*.log"))
        )

    def close(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for command in self._commands:
            with command:
                command.kill()
                command.wait(timeout=10)
        for host in list(self._daemons):
            self.power_off(host)
        self._stack.close()
