"""Jail for one command. A stand-alone program: `sandbox.py` executes this file with an isolated interpreter, sends the
order on standard input, and reads the result from a pipe.

    caller ─► jail (this program) ─► first process of the pid namespace ─► the command
                 unshares              builds and enters the root,            all that it starts
                                       gives up every right, watches

Each process dies with its parent (parent-death signal), and when the first process of a pid namespace ends, the kernel
kills all others in it: nothing is left, whichever process is killed. The command sees the interpreter and its libraries
read-only, an empty writable /tmp of bounded size, no /proc, no network, no other process, and only its three standard
descriptors. A seccomp filter refuses the system calls that lead out of the jail (namespaces, tracing, keys, all sockets
but Unix ones, which includes families that network namespaces do not isolate, such as AF_VSOCK), past the memory limit
(shared memory, semaphores), or to the first process, which could otherwise be limited until it cannot report.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # Importing `typing` would take longer than the rest of this program.
    from typing import Any, NoReturn

WORK = "/tmp"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
FIRST_USER = 0x40000000
"""First of the user ids that no system uses; each jail has its own, so that limits per user are limits per jail."""

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
_NEWPID, _NEWNET, _NEWCGROUP = 0x20000000, 0x40000000, 0x02000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_AT_FDCWD, _AT_RECURSIVE, _AT_NO_AUTOMOUNT = -100, 0x8000, 0x800
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _MOVE_MOUNT_F_EMPTY_PATH = 1, os.O_CLOEXEC, 0x4
_MNT_DETACH = 2
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_ADDR_NO_RANDOMIZE = 0x0040000
_CAP_SYS_ADMIN = 21

_NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "audit": 0xC000003E, "pivot_root": 155, "capset": 126, "clone": 56, "clone3": 435, "socket": 41,
        "socketpair": 53,
        "ptrace": 101, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "chroot": 161,
        "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "process_vm_readv": 310, "process_vm_writev": 311, "io_uring_setup": 425,
        "memfd_create": 319, "memfd_secret": 447, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "init_module": 175, "finit_module": 313, "kexec_load": 246, "personality": 135, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
        "pidfd_getfd": 438, "kcmp": 312, "syslog": 103, "swapon": 167, "quotactl": 179, "acct": 163,
        "shmget": 29, "msgget": 68, "semget": 64, "modify_ldt": 154, "prlimit64": 302, "sched_setparam": 142,
        "sched_setscheduler": 144, "sched_setaffinity": 203, "sched_setattr": 314, "setpriority": 141,
        "ioprio_set": 251, "io_setup": 206, "fanotify_init": 300, "statmount": 457, "listmount": 458,
        "move_pages": 279, "migrate_pages": 256, "get_robust_list": 274,
    },
    "aarch64": {
        "audit": 0xC00000B7, "pivot_root": 41, "capset": 91, "clone": 220, "clone3": 435, "socket": 198,
        "socketpair": 199,
        "ptrace": 117, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "chroot": 51,
        "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "process_vm_readv": 270, "process_vm_writev": 271, "io_uring_setup": 425,
        "memfd_create": 279, "memfd_secret": 447, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "init_module": 105, "finit_module": 273, "kexec_load": 104, "personality": 92, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
        "pidfd_getfd": 438, "kcmp": 272, "syslog": 116, "swapon": 224, "quotactl": 60, "acct": 89,
        "shmget": 194, "msgget": 186, "semget": 190, "prlimit64": 261, "sched_setparam": 118,
        "sched_setscheduler": 119, "sched_setaffinity": 122, "sched_setattr": 274, "setpriority": 140,
        "ioprio_set": 30, "io_setup": 0, "fanotify_init": 262, "statmount": 457, "listmount": 458,
        "move_pages": 239, "migrate_pages": 238, "get_robust_list": 100,
    },
}  # fmt: skip
"""System call numbers by machine. All from `ptrace` on are refused; those in `_OWN_ONLY` for other processes only."""
_OWN_ONLY = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
"""System calls with a pid as first argument; 0 is the caller."""

LONGEST_LOOK_S = 0.1
"""Longest time between two looks at what a program uses."""

_library = ctypes.CDLL(None, use_errno=True)


class _Progress:
    """Current step, for the message of a failure."""

    step = "reading the order"


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _call(number: int, *arguments: int | bytes | object) -> int:
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _check(_library.syscall(ctypes.c_long(number), *given))


def _prctl(option: int, first: int | object, second: int | object = 0) -> None:
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in (first, second)]
    _check(_library.prctl(option, *given, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _numbers() -> dict[str, int]:
    machine = os.uname().machine
    if machine not in _NUMBERS:
        raise OSError(0, f"no system call table for {machine}")
    return _NUMBERS[machine]


def die_with_parent(is_alive: bool) -> None:
    """Exit if the parent has ended. Checked after the parent-death signal is set: an earlier death sends none."""
    if not is_alive:
        os._exit(1)


def is_privileged() -> bool:
    """Whether this process may create namespaces without a user namespace."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(each for each in status if each.startswith("CapEff:"))
    return os.geteuid() == 0 and bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


def unshare(user: int) -> None:
    """Enter new namespaces of every kind; an unprivileged process also creates a user namespace."""
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | _NEWCGROUP
    if is_privileged():
        _Progress.step = "unsharing namespaces"
        _check(_library.unshare(flags))
        return
    _Progress.step = "unsharing namespaces as an ordinary user"
    outer_user, outer_group = os.geteuid(), os.getegid()
    _check(_library.unshare(flags | _NEWUSER))
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {outer_user} 1"),
        ("gid_map", f"{user} {outer_group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(content)


def _set_attributes(path: bytes, attributes: int, *, flags: int = 0) -> None:
    request = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _call(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, request, len(request))


def build_root(visible: list[str], *, hidden: list[str], work_bytes: int) -> None:
    """Enter a new root with the visible paths read-only (without the hidden folders in them), a few devices and an
    empty working folder."""
    _Progress.step = "making mounts private"
    _check(_library.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    trees: list[tuple[str, int]] = []
    links: list[tuple[str, str]] = []
    for path in [*visible, *DEVICES]:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.exists(path):
            _Progress.step = f"making {path} visible"
            flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE | _AT_NO_AUTOMOUNT
            trees.append((path, _call(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)))
    _Progress.step = "mounting an empty root"
    _mount_memory(WORK, "mode=755,size=1m,nr_inodes=4096")
    for path, tree in trees:
        _Progress.step = f"making {path} visible"
        target = WORK + path
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _call(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
        os.close(tree)
        device = _ATTR_NODEV if path not in DEVICES else 0
        _set_attributes(os.fsencode(target), _ATTR_RDONLY | _ATTR_NOSUID | device, flags=_AT_RECURSIVE)
    for path in filter(os.path.isdir, (WORK + each for each in hidden)):
        _mount_memory(path, "mode=555,size=4k,nr_inodes=2")
        _set_attributes(os.fsencode(path), _ATTR_RDONLY)
    for path, aim in links:
        os.makedirs(os.path.dirname(WORK + path), exist_ok=True)
        os.symlink(aim, WORK + path)
    os.makedirs(WORK + WORK, exist_ok=True)
    _mount_memory(WORK + WORK, f"mode=1777,size={work_bytes},nr_inodes=1024")
    _Progress.step = "entering the root"
    os.chdir(WORK)
    _call(_numbers()["pivot_root"], b".", b".")
    _check(_library.umount2(b".", _MNT_DETACH))
    _set_attributes(b"/", _ATTR_RDONLY)


def _mount_memory(path: str, options: str) -> None:
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    _check(_library.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options.encode()))


def give_up_rights(user: int) -> None:
    """Drop all privileges: become a user that owns nothing, without capabilities."""
    _Progress.step = "giving up rights"
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, data = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _call(_numbers()["capset"], header, data)


def refuse_system_calls() -> None:
    """Install the seccomp filter; child processes inherit it."""
    _Progress.step = "installing the system call filter"
    numbers = dict(_numbers())
    audit, clone, clone3 = (numbers.pop(name) for name in ("audit", "clone", "clone3"))
    families = [numbers.pop(name) for name in ("socket", "socketpair")]
    own_only = [numbers.pop(name) for name in _OWN_ONLY if name in numbers]
    refused = [number for name, number in numbers.items() if name != "capset"]
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    namespaces = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET | _NEWCGROUP
    # (operation, value, instructions to skip if true, if false); 0 is the call's number, 4 its machine, 16 its first
    # argument.
    program = [(load, 4, 0, 0), (equal, audit, 1, 0), (give, kill, 0, 0), (load, 0, 0, 0)]
    program += [(at_least, 0x40000000, 0, 1), (give, refuse, 0, 0)]
    for number in refused:
        program += [(equal, number, 0, 1), (give, refuse, 0, 0)]
    for number in own_only:
        program += [(equal, number, 0, 4), (load, 16, 0, 0), (equal, 0, 0, 1), (give, allow, 0, 0)]
        program += [(give, refuse, 0, 0)]
    program += [(equal, clone3, 0, 1), (give, unknown, 0, 0)]
    program += [(equal, clone, 0, 3), (load, 16, 0, 0), (any_bit, namespaces, 0, 1), (give, refuse, 0, 0)]
    # Both take the family as their first argument; 1 is AF_UNIX. The number is loaded again where it was replaced.
    program += [(load, 0, 0, 0)]
    for number in families:
        program += [(equal, number, 0, 4), (load, 16, 0, 0), (equal, 1, 1, 0), (give, refuse, 0, 0)]
        program += [(give, allow, 0, 0)]
    program += [(give, allow, 0, 0)]
    code = b"".join(struct.pack("=HBBI", op, yes, no, value) for op, value, yes, no in program)
    buffer = ctypes.create_string_buffer(code)
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(filter_program))


def in_memory(content: bytes) -> int:
    """Return the descriptor of a sealed memory file with `content`."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)
    return descriptor


def set_limits(limits: dict[str, Any]) -> None:
    for name, value in (
        ("CPU", limits["cpu_s"]),
        ("AS", limits["memory_bytes"]),
        ("NPROC", limits["processes"]),
        ("FSIZE", limits["file_bytes"]),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
        ("SIGPENDING", limits["open_files"]),
    ):
        # A program that ignores the signal at the soft limit is killed a second later.
        hard = value + 1 if name == "CPU" else value
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))


def start_command(order: dict[str, Any], stdin: int) -> int:
    """Fork and execute the command; raises OSError if it could not be executed."""
    _Progress.step = f"executing {order['arguments'][0]}"
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.dup2(stdin, 0)
            os.set_inheritable(writer, False)
            for descriptor in range(3, 64):
                if descriptor != writer:
                    _close(descriptor)
            for number in range(1, 32):
                if number not in (signal.SIGKILL, signal.SIGSTOP):
                    signal.signal(number, signal.SIG_DFL)
            set_limits(order["limits"])
            os.execve(order["arguments"][0], order["arguments"], order["environment"])
        except BaseException as error:  # noqa: BLE001 - a forked child must not return into its parent's code
            refusal = error.errno if isinstance(error, OSError) else 0
            os.write(writer, f"{refusal} {error}".encode())
        os._exit(1)
    os.close(writer)
    why = os.read(reader, 4096)
    os.close(reader)
    if why:
        code, _, text = why.decode().partition(" ")
        raise OSError(int(code), text)
    return pid


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        pass


def await_command(pid: int) -> dict[str, Any]:
    """Wait for the command and reap its orphans; return its exit code and what all its processes used."""
    while True:
        ended, status, usage = os.wait4(-1, 0)
        if ended == pid:
            everything = resource.getrusage(resource.RUSAGE_CHILDREN)
            return {
                "code": os.waitstatus_to_exitcode(status),
                "cpu_s": everything.ru_utime + everything.ru_stime,
                "memory_bytes": usage.ru_maxrss * 1024,
            }


class Usage:
    """Memory and processor time of the processes below one process, summed: read from /proc, outside of the jail."""

    def __init__(self, first: int, *, proc: int) -> None:
        """`proc` is a descriptor of /proc: the path is gone once the first process has entered its root."""
        self._first = first
        self._proc = proc
        self._seen: dict[tuple[int, str], float] = {}
        """CPU time of each process that was ever seen: (pid, start time) → seconds."""
        self.cpu_s = 0.0
        self.memory_bytes = 0
        self.held_up_s = 0.0
        """Time that processes waited for a CPU that was busy with something else."""
        self._held_up: dict[int, float] = {}

    def look(self) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        waited_for, memory = 0.0, 0
        for pid in self._processes():
            try:
                fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
                schedule = self._read(f"{pid}/schedstat").split()
                resident, shared = map(int, self._read(f"{pid}/statm").split()[1:3])
            except (OSError, ValueError):  # It has ended.
                continue
            if len(fields) < 20 or len(schedule) < 2:
                continue
            memory += resident - shared
            if pid != self._first:
                self._seen[pid, fields[19]] = (int(fields[11]) + int(fields[12])) / tick
            waited_for += sum(map(int, fields[11 if pid != self._first else 13 : 15])) / tick
            self._held_up[pid] = int(schedule[1]) / 1e9
        # Children that were never waited for are missing in one sum, those that lived between two looks in the other.
        self.cpu_s = max(self.cpu_s, waited_for, sum(self._seen.values()))
        self.memory_bytes = memory * resource.getpagesize()
        self.held_up_s = sum(self._held_up.values())

    def _processes(self) -> list[int]:
        found, new = [], [self._first]
        while new:
            pid = new.pop()
            found.append(pid)
            try:
                folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
            except OSError:
                continue
            try:
                for thread in os.listdir(folder):
                    new += map(int, self._read(f"{pid}/task/{thread}/children").split())
            except OSError:
                continue
            finally:
                os.close(folder)
        return found

    def _read(self, path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=self._proc), encoding="utf-8", errors="replace") as file:
            return file.read()


def supervise(first: int, limits: dict[str, Any], *, proc: int) -> dict[str, Any] | None:
    """Wait for the end of the first process; kill it, and all inside with it, if the program exceeds a limit.

    Limits hold for all processes of a program together. Time that they waited for a CPU does not count, so that a busy
    machine does not change the result. Returns the report of a kill, None if the process ended by itself.
    """
    pidfd = os.pidfd_open(first)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    usage, since = Usage(first, proc=proc), time.monotonic()
    look_s, idle_since, cpu_before = 0.02, 0.0, 0.0
    while not poller.poll(look_s * 1000):
        look_s = min(look_s * 1.5, LONGEST_LOOK_S)
        usage.look()
        unhindered_s = time.monotonic() - since - usage.held_up_s
        if usage.cpu_s - cpu_before >= 0.05 * max(unhindered_s - idle_since, 0.0):
            idle_since, cpu_before = unhindered_s, usage.cpu_s
        why = ""
        if usage.cpu_s > limits["cpu_s"] + 0.1:
            why = "cpu"
        elif usage.memory_bytes > limits["memory_bytes"]:
            why = "memory"
        elif unhindered_s - idle_since >= limits["idle_s"]:
            why = "idle"
        elif unhindered_s >= limits["slow_s"]:
            why = "slow"
        if why:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poller.poll()
            return {"killed": why, "cpu_s": usage.cpu_s, "memory_bytes": usage.memory_bytes}
    return None


def be_first_process(order: dict[str, Any], *, user: int, report: int, parent: int) -> NoReturn:
    """Build the root, drop privileges, run the command and report its end; when this process ends, all inside do."""
    os.setsid()
    # The kernel delivers signals from inside the namespace to its first process only if it has a handler: it has none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stdin = order["channel"] if order["channel"] >= 0 else in_memory(order["stdin"].encode())
    is_isolated = order["isolated"]
    if is_isolated:
        build_root(order["visible"], hidden=order["hidden"], work_bytes=order["limits"]["file_bytes"] * 2)
        os.chdir(WORK)
        os.umask(0o022)
        give_up_rights(user)
    # After the change of user, which would reset the signal.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    poller = select.poll()
    poller.register(parent, 0)
    die_with_parent(is_alive=not poller.poll(0))
    os.close(parent)
    _library.personality(ctypes.c_ulong(_ADDR_NO_RANDOMIZE))
    for name, content in order["files"].items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(content)
    if is_isolated:
        refuse_system_calls()
    pid = start_command(order, stdin)
    for descriptor in (1, 2, stdin):
        os.close(descriptor)
    outcome = await_command(pid)
    if not is_isolated:
        _kill_group(pid)
    os.write(report, json.dumps(outcome).encode() + b"\n")
    os._exit(0)


def _kill_group(pid: int) -> None:
    """Kill the command's process group: without a pid namespace no more of its processes can be found."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def main(report: int) -> None:
    os.set_inheritable(report, False)
    with os.fdopen(0, "rb", closefd=False) as handed_over:
        order = json.load(handed_over)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    die_with_parent(is_alive=os.getppid() == order["parent"])
    user = FIRST_USER + os.getpid()
    try:
        # If memory runs out, the kernel kills this process first, not the caller.
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
        if order["isolated"]:
            unshare(user)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        parent, alive = os.pipe2(os.O_CLOEXEC)
        # On SIGTERM the first process is killed, and with it all processes inside; it is reaped below.
        first: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: _kill(first))
        pid = os.fork()
        first.append(pid)
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(alive)
            os.close(proc)
            try:
                be_first_process(order, user=user, report=report, parent=parent)
            except (OSError, ValueError) as error:
                _report(report, error)
                os._exit(1)
        os.close(parent)
        for descriptor in (1, 2, order["channel"]):
            _close(descriptor)
        killed = supervise(pid, order["limits"], proc=proc)
        if killed is not None:
            os.write(report, json.dumps(killed).encode() + b"\n")
        os.close(report)
        # The pid stays reserved until SIGTERM is ignored, so that the handler cannot kill another process.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.waitpid(pid, 0)
    except OSError as error:
        _report(report, error)


def _report(report: int, error: OSError | ValueError) -> None:
    number, why = (error.errno, error.strerror) if isinstance(error, OSError) else (0, str(error))
    os.write(report, json.dumps({"error": f"{_Progress.step}: {why}", "errno": number}).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
