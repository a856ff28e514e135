"""Messages between the back end and the process that talks to Ray (`ray_driver.py`), a line of JSON each.

    RayBackend ── StartHost, GiveBack (standard input) ──► ray_driver ── Ray ──► HostActor on each node
    RayBackend ◄── Connected, Came, Went, Failed (standard output) ── ray_driver

End of file on its standard input ends a driver, and leaves the hosts as they are.

Ray authenticates, but does not encrypt. A ticket holds the secret half of a key for one use, so it travels through Ray
sealed for the process that takes it: X25519 with a key that this process has just made, ChaCha20-Poly1305.
"""

from __future__ import annotations

import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kintsugi.errors import IntegrityError

DRIVER = "kintsugi.cluster.backends.ray_driver"
_KEY_BYTES = 32
_NONCE = bytes(12)
"""Each sealed ticket has a key of its own, so its nonce never repeats."""


def group_of(job: str) -> str:
    """Return the name of a run in Ray: that of its placement group, and the namespace of its actors."""
    return f"kintsugi-{job}"


class RayJob(msgspec.Struct, frozen=True):
    """Everything that a driver has to know of its run, in its first argument; holds no secret."""

    address: str
    """Address of the cluster; empty: Ray's own default."""
    job: str
    """Name of the run in Ray (`group_of`)."""
    num_hosts: int = 0
    cpus: int = 0
    gpus: int = 0
    lease_s: float = 90.0
    """A node that no driver has asked for this long, and whose supervisor has ended, gives itself back."""
    command: tuple[str, ...] = ()
    """Command of a supervisor; empty: that of the interpreter of Ray's workers."""
    numbers: dict[str, int] = {}
    """Host → number of its last order, of those that were given to an earlier driver."""


class RayNode(msgspec.Struct, frozen=True):
    """One living node of a cluster."""

    id: str
    name: str
    address: str
    cpus: float
    gpus: float


class StartHost(msgspec.Struct, frozen=True, tag=True):
    """Start a supervisor; one of the same host that still runs is ended."""

    host: str
    number: int
    """Number of the order; events carry it."""
    ticket: bytes


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """End all supervisors, remove what the run has in Ray, and end."""

    timeout_s: float


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The driver has joined the cluster."""


class Came(msgspec.Struct, frozen=True, tag=True):
    """A supervisor was started."""

    host: str
    number: int
    place: str


class Went(msgspec.Struct, frozen=True, tag=True):
    """A supervisor could not be started, or has ended, or its node is dead."""

    host: str
    number: int
    why: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The driver can not go on."""

    why: str


class Nodes(msgspec.Struct, frozen=True, tag=True):
    """Answer to a driver that was started with `--nodes`."""

    nodes: tuple[RayNode, ...]


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Answer of one node to a driver that was started with `--facts`: the last line of `kintsugi host-facts`."""

    node: RayNode
    answer: str


Order = StartHost | GiveBack
Event = Connected | Came | Went | Failed | Nodes | Facts


class TicketKey:
    """Key of the process that a ticket is sealed for; it never leaves it."""

    def __init__(self) -> None:
        self._secret = X25519PrivateKey.generate()

    @property
    def public(self) -> bytes:
        return self._secret.public_key().public_bytes_raw()

    def open(self, sealed: bytes) -> bytes:
        """Return the ticket; IntegrityError if it was not sealed for this key, or was changed."""
        try:
            sender = X25519PublicKey.from_public_bytes(sealed[:_KEY_BYTES])
            key = _derive(self._secret.exchange(sender), sealed[:_KEY_BYTES], self.public)
            return ChaCha20Poly1305(key).decrypt(_NONCE, sealed[_KEY_BYTES:], None)
        except (InvalidTag, ValueError) as error:
            raise IntegrityError("expected a ticket that was sealed for this process") from error


def seal(ticket: bytes, *, public: bytes) -> bytes:
    """Seal a ticket for the process with this public key."""
    secret = X25519PrivateKey.generate()
    sender = secret.public_key().public_bytes_raw()
    shared = secret.exchange(X25519PublicKey.from_public_bytes(public))
    return sender + ChaCha20Poly1305(_derive(shared, sender, public)).encrypt(_NONCE, ticket, None)


def _derive(shared: bytes, sender: bytes, receiver: bytes) -> bytes:
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=b"kintsugi ticket" + sender + receiver).derive(shared)


def supervisor_environment(inherited: dict[str, str]) -> dict[str, str]:
    """Environment of a supervisor below Ray: that of the worker without what is Ray's own, its token above all. The
    accelerators that Ray has assigned stay.

    >>> supervisor_environment({"PATH": "/bin", "RAY_AUTH_TOKEN": "s3cret", "CUDA_VISIBLE_DEVICES": "3"})
    {'PATH': '/bin', 'CUDA_VISIBLE_DEVICES': '3'}
    """
    return {name: value for name, value in inherited.items() if not name.startswith("RAY_")}


def write_line(descriptor: int, body: Order | Event) -> None:
    """Write one line, whole."""
    line = memoryview(msgspec.json.encode(body) + b"\n")
    while line:
        line = line[os.write(descriptor, line) :]
