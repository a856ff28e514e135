"""A real Kubernetes cluster on this machine: every node is a host of its own (network, processes, mounts, host name).

etcd, API server, controllers and scheduler run beside the launcher, on the first host; each other host has containerd
and a kubelet. Pods are real containers that run this machine's Python. The programs of version 1.20.2 are built once by
`programs/build_kubernetes.sh` (`make test-kubernetes`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.lab.testbed import hosts
from kintsugi.lab.testbed.process_tags import carriers
from tests.cluster.kubernetes_images import HOST, write_images
from tests.cluster.tiny_runs import until

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kintsugi" / "kubernetes-1.20.2"
BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
INSTALLED = ("etcd", "containerd", "ctr", "runc", "curl", "unshare", "nsenter", "ip")
NAMESPACE = "runs"
GRACE_S = 8
"""Silence of a kubelet after which its node is not ready (`--node-monitor-grace-period`; the default is 40 s)."""
TOKENS = """admin,admin,admin,"system:masters"
launcher,launcher,launcher,
laboratory,laboratory,laboratory,
nothing,nothing,nothing,
"""
CONTAINERD = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", \
"io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.opt"]
[grpc]
address = "{folder}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "docker.io/local/pause:1"
restrict_oom_score_adj = true
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""
KUBELET = """
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {address}
readOnlyPort: 0
healthzPort: 0
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
resolvConf: /etc/resolv.conf
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
nodeStatusUpdateFrequency: 2s
nodeLeaseDurationSeconds: 6
evictionHard: {{memory.available: 100Mi, nodefs.available: "0%", imagefs.available: "0%", nodefs.inodesFree: "0%"}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
makeIPTablesUtilChains: false
"""
BOOT = """
set -e
hostname {name}
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
echo 1 > /proc/sys/net/ipv4/ip_forward
containerd -c {folder}/containerd.toml > {folder}/containerd.log 2>&1 &
for i in $(seq 300); do ctr -a {folder}/c.sock version > /dev/null 2>&1 && break; sleep 0.1; done
for image in {images}; do ctr -a {folder}/c.sock -n k8s.io images import $image > /dev/null; done
exec {kubelet} --config={folder}/kubelet.yaml --kubeconfig={kubeconfig} --hostname-override={name} \
    --node-ip={address} --root-dir={folder}/kubelet --cert-dir={folder}/pki --container-runtime=remote \
    --container-runtime-endpoint=unix://{folder}/c.sock > {folder}/kubelet.log 2>&1
"""


def missing() -> str | None:
    """Why a real cluster can not be had here."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    absent = [program for program in INSTALLED if shutil.which(program) is None]
    absent += [program for program in BUILT if not (CACHE / program).exists()]
    if absent:
        return f"not installed: {', '.join(absent)} (make test-kubernetes)"
    return hosts.missing()


class KubernetesCluster:
    """A control plane and `count` nodes."""

    def __init__(self, folder: Path, *, count: int) -> None:
        self.mark = uuid4().hex
        self.folder = folder
        self.runs = folder / "runs"
        """Folder of the runs, which the pods can not see."""
        self.runs.mkdir(parents=True)
        self._cgroups = _cgroups()
        self._stack = ExitStack()
        self._network = hosts.Hosts(count + 1, folder=folder / "etc")
        self._stack.callback(self._network.close)
        self.head, *self.places = self._network.places
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: list[subprocess.Popen[str]] = []
        self.images = write_images(folder)
        self.server = f"https://{self.head.address}:6443"
        for user in ("admin", "launcher", "laboratory", "nothing", "wrong"):
            self.kubeconfig(user)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._start_control_plane()
        for place in self.places:
            self.power_on(place.name)
        self._make_namespace()
        until(lambda: len(self.ready_nodes()) == len(self.places), "the nodes", timeout_s=180.0)

    # The cluster.

    def kubeconfig(self, user: str) -> Path:
        """A kubeconfig with the token of a user, which is the name."""
        path = self.folder / f"{user}.kubeconfig"
        cluster = {"server": self.server, "insecure-skip-tls-verify": True}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": user}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def _in(self, host: str, *kinds: str) -> list[str]:
        place = next(place for place in self._network.places if place.name == host)
        paths = {path.rpartition("/")[2]: path for path in place.namespaces}
        names = {"net": "--net", "mount": "--mount"}
        return ["nsenter", *(f"{names[kind]}={paths['mnt' if kind == 'mount' else kind]}" for kind in kinds)]

    def _daemon(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            daemon = subprocess.Popen(
                [*self._in(self.head.name, "net"), *arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        # An API server that is asked to end waits for an etcd that is gone, and keeps its port.
        self._stack.callback(_kill, daemon)

    def _start_control_plane(self) -> None:
        (self.folder / "tokens.csv").write_text(TOKENS)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        folder, address = self.folder, self.head.address
        etcd = "http://127.0.0.1:2379"
        self._daemon(
            "etcd",
            *("etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls={etcd}"),
            *(f"--advertise-client-urls={etcd}", "--listen-peer-urls=http://127.0.0.1:2380"),
            *("--unsafe-no-fsync", "--log-level=warn"),
        )
        self._daemon(
            "apiserver",
            *(str(CACHE / "kube-apiserver"), f"--etcd-servers={etcd}", f"--bind-address={address}"),
            *(f"--advertise-address={address}", "--secure-port=6443", f"--cert-dir={folder}/certs"),
            *(f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC"),
            *(
                "--service-cluster-ip-range=10.96.0.0/16",
                "--service-account-issuer=https://kubernetes.default.svc",
            ),
            *(f"--service-account-signing-key-file={folder}/sa.key",),
            *(f"--service-account-key-file={folder}/sa.key", "--allow-privileged=true"),
            "--kubelet-preferred-address-types=InternalIP",
        )
        until(lambda: self.curl("GET", "/readyz") == "ok", "the API server", timeout_s=120.0)
        admin = f"--kubeconfig={self.kubeconfig('admin')}"
        self._daemon(
            "controllers",
            *(str(CACHE / "kube-controller-manager"), admin, "--leader-elect=false"),
            *(
                f"--service-account-private-key-file={folder}/sa.key",
                f"--node-monitor-grace-period={GRACE_S}s",
                f"--root-ca-file={folder}/certs/apiserver.crt",
            ),
            *("--node-monitor-period=1s", "--node-eviction-rate=10", "--secondary-node-eviction-rate=10"),
            *("--unhealthy-zone-threshold=0.99", "--controllers=*,-nodeipam,-service,-route"),
        )
        self._daemon("scheduler", str(CACHE / "kube-scheduler"), admin, "--leader-elect=false")

    def power_on(self, host: str) -> None:
        place = next(place for place in self.places if place.name == host)
        folder = self.folder / host
        (folder / "cni").mkdir(parents=True, exist_ok=True)
        subnet = self._subnet(place)
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": f"{folder}/ipam",
                "ranges": [[{"subnet": subnet}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        chain = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
        (folder / "cni" / "pods.conflist").write_text(json.dumps(chain))
        (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder))
        (folder / "kubelet.yaml").write_text(KUBELET.format(address=place.address))
        self._ip(host, "link", "set", "eth0", "up")
        for other in self._network.places:
            if other is not place:
                self._ip(other.name, "route", "replace", subnet, "via", place.address)
            if other in self.places and other is not place:  # A link that was down has lost its own.
                self._ip(host, "route", "replace", self._subnet(other), "via", other.address)
        boot = BOOT.format(
            name=host,
            folder=folder,
            images=" ".join(map(str, self.images)),
            kubelet=CACHE / "kubelet",
            kubeconfig=self.kubeconfig("admin"),
            address=place.address,
        )
        alone = ["unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with (folder / "boot.log").open("ab") as log:
            self._nodes[host] = subprocess.Popen(
                [*self._in(host, "net", "mount"), *alone, "sh", "-c", boot],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _subnet(self, place: HostNamespaces) -> str:
        """Addresses of the pods of a node."""
        return f"10.89.{self.places.index(place)}.0/24"

    def _ip(self, host: str, *arguments: str) -> None:
        subprocess.run([*self._in(host, "net"), "ip", *arguments], check=True)

    def power_off(self, host: str, *, is_silent: bool = True) -> None:
        """End everything on a node at once: kubelet, containerd, and all containers. With `is_silent` its link is cut
        before, as a machine without power says nothing; else its kernel closes their connections."""
        if is_silent:
            self._ip(host, "link", "set", "eth0", "down")
        _kill(self._nodes.pop(host))
        # A machine that is switched on again has no containers left; its images are imported again.
        for part in ("root", "state", "kubelet", "ipam", "pki"):
            shutil.rmtree(self.folder / host / part, ignore_errors=True)

    def _make_namespace(self) -> None:
        self.api("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for role, users in (("role", ("launcher", "laboratory")), ("laboratory", ("laboratory",))):
            self._make_role(role, users)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        until(lambda: self.api("GET", account).get("kind") == "ServiceAccount", "the account", timeout_s=60.0)

    def _make_role(self, name: str, users: Sequence[str]) -> None:
        """Create a role that is shipped, and give it to users."""
        role = yaml.safe_load((ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text())
        roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        self.api("POST", f"{roles}/roles", role)
        group = "rbac.authorization.k8s.io"
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": role["metadata"]["name"]},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user} for user in users],
        }
        self.api("POST", f"{roles}/rolebindings", binding)

    def curl(self, method: str, path: str, body: Any = None) -> str:
        """Ask the API server as its administrator."""
        patch = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        result = subprocess.run(
            [
                *(*self._in(self.head.name, "net"), "curl", "-sk", "-m", "20", "-X", method),
                *("-H", "Authorization: Bearer admin", "-H", f"Content-Type: {patch}"),
                *(("--data-binary", "@-") if body is not None else ()),
                self.server + path,
            ],
            input=None if body is None else json.dumps(body),
            capture_output=True,
            text=True,
            check=False,
        )
        return result.stdout

    def api(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.curl(method, path, body) or "{}")
        return answer

    def make(self, body: dict[str, Any], *, query: str = "") -> dict[str, Any]:
        """Create an object in its namespace; return the answer."""
        group = body["apiVersion"]
        top = "/api/v1" if group == "v1" else f"/apis/{group}"
        namespace = body["metadata"]["namespace"]
        return self.api("POST", f"{top}/namespaces/{namespace}/{body['kind'].lower()}s{query}", body)

    def items(self, resource: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.api("GET", f"/api/v1/namespaces/{NAMESPACE}/{resource}").get(
            "items", []
        )
        return found

    def ready_nodes(self) -> list[str]:
        return [
            node["metadata"]["name"]
            for node in self.api("GET", "/api/v1/nodes").get("items", [])
            if any(
                each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"]
            )
        ]

    # Runs.

    def template(self, name: str = "template.yaml") -> Path:
        """A pod template that brings this machine's Python into the pods."""
        path = self.runs / name
        path.write_text(yaml.safe_dump({"spec": self.pod_with_python("agent")}))
        return path

    def pod_with_python(self, name: str) -> dict[str, Any]:
        """What a pod needs for this machine's Python, in the container of a name."""
        shown = {"/usr", "/etc/alternatives", str(Path(sys.base_prefix)), str(Path(sys.prefix)), str(ROOT)}
        cache = CACHE.parent
        folders = sorted(
            folder for folder in shown if not any(folder.startswith(f"{each}/") for each in shown)
        )
        volumes = [{"name": f"v{index}", "hostPath": {"path": path}} for index, path in enumerate(folders)]
        mounts: list[dict[str, Any]] = [
            {"name": f"v{index}", "mountPath": path, "readOnly": True} for index, path in enumerate(folders)
        ]
        # Compiled kernels: every pod would compile them again.
        volumes.append({"name": "cache", "hostPath": {"path": str(cache)}})
        mounts.append({"name": "cache", "mountPath": str(cache)})
        environment = {
            "PYTHONPATH": str(ROOT),
            "KINTSUGI_TEST_MARK": self.mark,
            "HOME": str(Path.home()),
            "OMP_NUM_THREADS": "1",
        }
        container = {
            "name": name,
            "imagePullPolicy": "Never",
            "command": [sys.executable, "-P", "-m", "kintsugi"],
            "env": [{"name": key, "value": value} for key, value in environment.items()],
            "volumeMounts": mounts,
        }
        return {"containers": [container], "volumes": volumes}

    def start(self, *arguments: str, user: str = "launcher") -> subprocess.Popen[str]:
        """A `kintsugi` command beside the control plane."""
        environment = {
            **os.environ,
            "COLUMNS": "200",
            "PYTHONPATH": str(ROOT),
            "KINTSUGI_TEST_MARK": self.mark,
            "KUBECONFIG": str(self.folder / f"{user}.kubeconfig"),
            "OMP_NUM_THREADS": "1",
        }
        command = subprocess.Popen(
            [
                *self._in(self.head.name, "net", "mount"),
                f"--wdns={self.runs}",
                sys.executable,
                "-m",
                "kintsugi",
                *arguments,
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._commands.append(command)
        return command

    def ask(self, *arguments: str, timeout_s: float = 120.0, user: str = "launcher") -> tuple[int, str]:
        command = self.start(*arguments, user=user)
        output, errors = command.communicate(timeout=timeout_s)
        return command.returncode, output + errors

    def on_pods(self, *, pods: int = 3, image: str = HOST) -> list[str]:
        """Arguments of a run on pods of this cluster, of which several fit on a node with two CPUs."""
        return [
            *("--on", "k8s", f"cluster.kubernetes.image={image}", f"cluster.kubernetes.pods={pods}"),
            "cluster.kubernetes.cpus=0.5",
            f"cluster.kubernetes.template={self.template()}",
        ]

    def pods(self) -> dict[str, dict[str, Any]]:
        """Index of a host → its pod, of those that are not being deleted."""
        return {
            pod["metadata"]["labels"]["kintsugi/index"]: pod
            for pod in self.items("pods")
            if not pod["metadata"].get("deletionTimestamp")
            and pod["status"].get("phase") in ("Pending", "Running")
        }

    def pids(self) -> dict[int, str]:
        """Every process that a test has started, on all hosts."""
        found = {}
        for pid in carriers(self.mark):
            with suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pids_of_pod(self, pod: dict[str, Any]) -> dict[int, str]:
        """Processes in a pod, by its name in its network namespace's host name."""
        name = pod["metadata"]["name"]
        found = {}
        for pid, command in self.pids().items():
            with suppress(OSError):
                if f"HOSTNAME={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[pid] = command
        return found

    def cgroups_of_pod(self, pod: dict[str, Any]) -> dict[str, Path]:
        """Controller → the control group of the container of a pod."""
        pid = min(self.pids_of_pod(pod))
        found: dict[str, Path] = {}
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found |= {name: Path(f"/sys/fs/cgroup/{name}{path}") for name in controllers.split(",") if name}
        return found

    def assert_nothing_left(self, *, timeout_s: float = 40.0) -> None:
        """No process on any host, and no object in the cluster but those of the namespace itself."""
        until(lambda: not self.pids(), f"the end of {self.pids()}", timeout_s=timeout_s)

        def left() -> list[str]:
            secrets = [each for each in self.items("secrets") if each["type"] == "Opaque"]
            return [each["metadata"]["name"] for each in (*self.items("pods"), *secrets)]

        until(lambda: not left(), f"the end of {left()}", timeout_s=timeout_s)

    def close(self) -> None:
        for command in self._commands:
            if command.poll() is None:
                command.kill()
            with command:
                command.wait(timeout=10)
        for node in list(self._nodes.values()):
            _kill(node)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()
        for cgroup in sorted(_cgroups() - self._cgroups, key=lambda path: -len(path.parts)):
            with suppress(OSError):
                cgroup.rmdir()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _cgroups() -> set[Path]:
    """Groups of containers, whose folders outlive a node that was powered off."""
    return {
        path
        for top in Path("/sys/fs/cgroup").glob("*/")
        for path in (*top.glob("k8s.io/**/"), *top.glob("[0-9a-f]" * 12 + "*/**/"))
    }
