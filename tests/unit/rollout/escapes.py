"""Programs that try to get out of the sandbox, and say what came of it."""

ATTEMPTS = """
import ctypes, errno, json, os, resource, signal, socket, sys

library = ctypes.CDLL(None, use_errno=True)
found = {}

def attempt(name):
    def run(function):
        try:
            found[name] = repr(function())
        except OSError as error:
            found[name] = errno.errorcode.get(error.errno, str(error))
        except Exception as error:
            found[name] = type(error).__name__
    return run

def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

address, port, abstract, run_folder, secret_file, parent = json.loads(sys.stdin.read())

@attempt("internet socket")
def _():
    with socket.socket() as s:
        s.connect((address, port))

@attempt("virtual machine socket")
def _():
    with socket.socket(40, socket.SOCK_STREAM) as s:
        s.connect((2, 1024))

@attempt("netlink socket")
def _():
    socket.socket(16, socket.SOCK_RAW, 0)

@attempt("abstract unix socket")
def _():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(abstract)

@attempt("run folder")
def _():
    return os.listdir(run_folder)

@attempt("secret file")
def _():
    return open(secret_file).read()

@attempt("path out of the root")
def _():
    return open("../" * 20 + secret_file).read()

@attempt("environment of the parent")
def _():
    return open(f"/proc/{parent}/environ").read()

@attempt("own proc")
def _():
    return os.listdir("/proc/self/fd")

@attempt("environment")
def _():
    return sorted(set(os.environ) - {"LC_CTYPE"})

@attempt("descriptors")
def _():
    opened = []
    for number in range(3, 1024):
        try:
            os.fstat(number)
            opened.append(number)
        except OSError:
            pass
    return opened

@attempt("writing outside")
def _():
    open("/escaped", "w")

@attempt("writing the library")
def _():
    open(os.__file__, "a")

@attempt("writing the library after remounting")
def _():
    return call(library.mount(None, b"/", None, 0x20 | 0x1000, None))

@attempt("ptrace")
def _():
    return call(library.ptrace(16, 1, 0, 0))

@attempt("memory of the first process")
def _():
    return call(library.process_vm_readv(1, None, 0, None, 0, 0))

@attempt("new namespaces")
def _():
    return call(library.unshare(0x10000000))

@attempt("other root")
def _():
    os.chroot("/tmp")

@attempt("other user")
def _():
    os.setuid(0)

@attempt("memory without limit")
def _():
    os.memfd_create("more")

@attempt("raising limits")
def _():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

@attempt("large file")
def _():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open("large", "wb", buffering=0) as file:
        while file.write(bytes(2**20)):
            pass

@attempt("many files")
def _():
    kept = []
    while True:
        kept.append(open("/dev/null"))

@attempt("killing the parent by its number")
def _():
    os.kill(parent, signal.SIGKILL)

@attempt("killing the first process")
def _():
    os.kill(os.getppid(), signal.SIGKILL)

@attempt("any signal to the first process")
def _():
    for number in range(1, 65):
        os.kill(1, number)

@attempt("limits of the first process")
def _():
    resource.prlimit(1, resource.RLIMIT_AS, (0, 0))

@attempt("priority of the first process")
def _():
    os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))

@attempt("own limits and processors")
def _():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.sched_setaffinity(0, os.sched_getaffinity(0))

@attempt("semaphores, which are memory of the kernel")
def _():
    return call(library.semget(0, 32000, 0o600 | 0o1000))

@attempt("many timers, which are memory of the kernel")
def _():
    for _ in range(1000):
        call(library.timer_create(0, None, ctypes.byref(ctypes.c_long())))

@attempt("installed packages")
def _():
    return [os.listdir(path) for path in sys.path if path.endswith("-packages")]

@attempt("killing everybody")
def _():
    os.kill(-1, signal.SIGKILL)

@attempt("killing the group of the parent")
def _():
    os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)

@attempt("killing the own group")
def _():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(0, signal.SIGTERM)

found["user"], found["processes"] = os.getuid(), [os.getpid(), os.getppid()]
print(json.dumps(found))
"""

FORK_BOMB = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
        children += 1
except OSError as error:
    print(children, error.errno)
"""

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
print("left one behind")
"""
