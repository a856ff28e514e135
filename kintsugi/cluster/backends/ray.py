"""Nodes of an existing Ray cluster: a placement group with one actor per node, which starts and watches a supervisor.

    host manager ─► RayBackend ─► ray_driver (imports Ray) ─► Ray ─► HostActor ─► supervisor ─► (joins the run)

Ray reserves nodes, starts supervisors and tells of dead nodes; nothing of the run goes through it but a sealed ticket
per host. Ray places the bundle of a dead node again, where another node has room or as soon as one appears: a replaced
host starts there. The run does not depend on Ray after that: when the head of the cluster is lost, the
driver is started again and again, and the supervisors go on.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from kintsugi.cluster.backends.command import EngineCommand
from kintsugi.cluster.backends.contract import HostCame, HostEvent, HostLeaves, HostOrder, HostWent
from kintsugi.cluster.backends.ray_protocol import (
    DRIVER,
    Came,
    Connected,
    Event,
    Facts,
    Failed,
    GiveBack,
    Nodes,
    Order,
    RayJob,
    RayNode,
    StartHost,
    Went,
    group_of,
    write_line,
)
from kintsugi.cluster.joining import HostNeeds, versions
from kintsugi.config.schema import Config, RaySection
from kintsugi.errors import ConfigError, DeadlineExceeded
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.waits import wait, wait_readable

REACH_S = 3.0
"""Time for the head of a cluster to accept a connection."""
CONNECT_S = 40.0
"""Time for a driver to join the cluster."""
ANSWER_S = 90.0
"""Time for a driver that answers one question."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pause before a driver is started again; it doubles."""
LEASE_MARGIN_S = 30.0
TOKEN_REFUSED = (
    "Ray refused the token: expected that of the cluster, by RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN or ~/.ray/auth_token, "
    "with RAY_AUTH_MODE=token"
)


def open_ray(config: Config, *, job: str) -> tuple[RayBackend, dict[str, HostNeeds], dict[str, str]]:
    """Open the back end of a run; return it with what each host has to have. Machines are named by Ray when it has
    placed them."""
    ray = config.cluster.ray
    num_hosts = config.cluster.hosts - 1
    order = RayJob(
        address=ray.address,
        job=group_of(job),
        num_hosts=num_hosts,
        cpus=ray.cpus,
        gpus=ray.gpus,
        lease_s=config.cluster.away_s + LEASE_MARGIN_S,
    )
    needs = HostNeeds(versions(), gpus=ray.gpus, said_by="cluster.ray")
    return RayBackend(order), {f"host-{number}": needs for number in range(1, num_hosts + 1)}, {}


def choose_nodes(nodes: Sequence[RayNode], section: RaySection) -> tuple[RayNode, ...]:
    """Return the nodes that have the resources, as many as there are or as asked for; Ray chooses among them. Pure.

    ConfigError names what is missing.
    """
    fitting = tuple(node for node in nodes if node.cpus >= section.cpus and node.gpus >= section.gpus)
    wanted = max(1, section.nodes)
    if len(fitting) >= wanted:
        return fitting[: section.nodes or None]
    found = "; ".join(
        f"{node.name} ({node.address}): {node.cpus:g} CPUs, {node.gpus:g} GPUs" for node in nodes
    )
    raise ConfigError(
        f"`cluster.ray`: expected {wanted} node{'s' * (wanted > 1)} with {section.cpus} CPUs and {section.gpus} GPUs, "
        f"found {len(fitting)} of {len(nodes)}: {found or 'none'}"
    )


def find_nodes(section: RaySection) -> tuple[RayNode, ...]:
    """Ask a cluster for its living nodes. ConfigError within seconds if it can not be reached or refuses."""
    for answer in _ask(section, "--nodes"):
        if isinstance(answer, Nodes):
            return answer.nodes
    raise ConfigError("`cluster.ray`: the driver of Ray ended without an answer")


def facts_of_nodes(section: RaySection, *, reached: str) -> list[Facts]:
    """Ask every living node for what a run has to know of it; `reached` is the address of this machine."""
    return [answer for answer in _ask(section, "--facts", reached) if isinstance(answer, Facts)]


def _ask(section: RaySection, *question: str) -> list[Event]:
    """Start a driver for one question and return its answers."""
    where = f"`cluster.ray.address`: {section.address or 'the Ray node on this machine'}"
    if why := why_not_reached(section.address):
        raise ConfigError(f"{where}: {why}")
    driver = _Driver(RayJob(section.address, f"kintsugi-asks-{os.getpid()}"), *question)
    try:
        wait(driver.attempt_end, whom="Ray", what="its answer", timeout_s=ANSWER_S)
    except DeadlineExceeded:
        raise ConfigError(f"{where}: no answer for {ANSWER_S:g} s; {driver.explain()}") from None
    finally:
        answers = driver.events()
        explained = driver.explain()
        driver.close(timeout_s=1.0)
    if failed := [answer for answer in answers if isinstance(answer, Failed)]:
        raise ConfigError(f"{where}: {explained if explained == TOKEN_REFUSED else failed[0].why}")
    if not answers:
        raise ConfigError(f"{where}: {explained}")
    return answers


def why_not_reached(address: str) -> str:
    """Return why no process listens at an address of a cluster, as Ray itself asks for half a minute; empty if one
    does, or if the address is left to Ray."""
    if not address:
        return ""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()) or "/" in host:
        return "expected HOST:PORT, as `ray start --head` prints it"

    def attempt(remaining_s: float) -> str | None:
        try:
            socket.create_connection((host, int(port)), timeout=min(remaining_s, REACH_S)).close()
        except (OSError, OverflowError) as error:
            return f"no process listens there: {error}"
        return ""

    return wait(attempt, whom=address, what="a connection", timeout_s=REACH_S)


class _Driver:
    """A driver process: orders are written to it, its events are read. Never blocks but in `close`."""

    def __init__(self, job: RayJob, *question: str) -> None:
        order_read, self._orders = os.pipe2(os.O_CLOEXEC)
        self._events, event_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(event_write, True)
        try:
            self._command = EngineCommand(
                [sys.executable, "-P", "-m", DRIVER, msgspec.json.encode(job).decode(), *question],
                stdin=order_read,
                stdout=event_write,
                environment={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            )
        except OSError:
            os.close(self._orders)
            os.close(self._events)
            raise
        finally:
            os.close(order_read)
            os.close(event_write)
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._command.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended, or never will connect."""
        return self._command.ended or self.explain() == TOKEN_REFUSED

    def attempt_end(self, remaining_s: float) -> bool | None:
        """Attempt of a wait for its end, which reads its events, so that its pipe does not fill."""
        wait_readable(self._events, whom="Ray", what="its answer", timeout_s=min(remaining_s, 0.1))
        self._read()
        return True if self.ended else None

    def order(self, order: Order) -> None:
        with suppress(BrokenPipeError):
            write_line(self._orders, order)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self._events, 65536):
                self._unread += part

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        self._read()
        *lines, self._unread = self._unread.split(b"\n")
        return [msgspec.json.decode(line, type=Event) for line in lines]

    def explain(self) -> str:
        """Describe why it does not connect, or how it has ended."""
        return explain_output(self._command.output()) or self._command.explain()

    def close(self, *, timeout_s: float) -> None:
        os.close(self._orders)  # It ends by that.
        self._command.close(timeout_s=timeout_s)
        os.close(self._events)


def explain_output(output: str) -> str:
    """Return what the messages of Ray's own core mean, which no error of Python tells; empty if nothing known. Pure."""
    if "InvalidAuthToken" in output or "Unauthenticated" in output:
        return TOKEN_REFUSED
    return ""


class RayBackend:
    """The hosts of one run: host-1 is the first bundle of its placement group, host-2 the second."""

    def __init__(self, job: RayJob, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._job, self._clock = job, clock
        self._numbers: dict[str, int] = {}
        self._waiting: dict[str, HostOrder] = {}
        """Orders whose host has not come: the next driver gets them too."""
        self._events: list[HostEvent] = []
        self._driver: _Driver | None = None
        self._is_connected = self._was_connected = self._is_given_back = False
        self._start_at = self._connect_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._failure = ""
        """Reason that the driver has told."""
        self._told = ""
        """Reason why the last driver ended, as it was written; drivers are started again and again."""

    def start(self, orders: Sequence[HostOrder]) -> None:
        for order in orders:
            self.replace(order)

    def replace(self, order: HostOrder) -> None:
        number = self._numbers[order.host] = self._numbers.get(order.host, 0) + 1
        self._waiting[order.host] = order
        if self._driver is not None:
            self._driver.order(StartHost(order.host, number, order.ticket))
        elif not self._was_connected:
            self._start_at = 0.0

    def poll(self) -> list[HostEvent]:
        if not self._is_given_back:
            self._turn(self._clock.monotonic())
        events, self._events = self._events, []
        return events

    def _turn(self, now: float) -> None:
        if self._driver is None:
            if now >= self._start_at:
                self._start_driver(now)
            return
        ended = self._driver.ended  # First: what it wrote before its end is read below.
        for event in self._driver.events():
            if isinstance(event, Failed):
                self._failure = event.why
            else:
                self._take(event)
        late = not self._is_connected and now > self._connect_until
        if late or ended:
            explained = self._driver.explain()
            self._close_driver(0.0)
            if late:
                self._failure = f"it did not join the cluster within {CONNECT_S:g} s"
            self._driver_ended(explained if explained == TOKEN_REFUSED else self._failure or explained, now)

    def _take(self, event: Event) -> None:
        match event:
            case Connected():
                self._is_connected = self._was_connected = True
                self._pause_s = FIRST_PAUSE_S
            case Came(host, number, place) if number == self._numbers.get(host, 0):
                self._waiting.pop(host, None)
                self._events.append(HostCame(host, place))
            case Went(host, number, why) if number == self._numbers.get(host, 0):
                self._waiting.pop(host, None)
                self._events.append(HostWent(host, why))
            case _:
                pass  # Of an order that a later one has replaced.

    def _start_driver(self, now: float) -> None:
        self._is_connected, self._connect_until = False, now + CONNECT_S
        self._failure = ""
        numbers = {host: number - (host in self._waiting) for host, number in self._numbers.items()}
        if not self._was_connected and (why := why_not_reached(self._job.address)):
            self._driver_ended(f"{self._job.address}: {why}", now)
            return
        try:
            self._driver = _Driver(msgspec.structs.replace(self._job, numbers=numbers))
        except OSError as error:
            self._driver_ended(f"{sys.executable}: {error.strerror}", now)
            return
        for order in self._waiting.values():
            self._driver.order(StartHost(order.host, self._numbers[order.host], order.ticket))

    def _driver_ended(self, why: str, now: float) -> None:
        """Start another one after a pause. Hosts that are there go on meanwhile; those that never came are told."""
        self._start_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if why != self._told:
            self._told = why
            sys.stderr.write(f"the driver of Ray ended: {why}\n")
        if not self._was_connected:
            waiting, self._waiting = self._waiting, {}
            self._events += [HostWent(host, f"Ray: {why}") for host in waiting]

    def _close_driver(self, timeout_s: float) -> None:
        assert self._driver is not None
        self._driver.close(timeout_s=timeout_s)
        self._driver = None

    def asked_to_end(self, host: str, why: str) -> None:
        self._events.append(HostLeaves(host, why))

    def give_back(self, *, timeout_s: float) -> None:
        if self._is_given_back:
            return
        self._is_given_back = True
        self._waiting.clear()
        now = self._clock.monotonic()
        if self._driver is None and self._was_connected:
            self._start_driver(now)
        if self._driver is not None:
            self._driver.order(GiveBack(timeout_s))
            with suppress(DeadlineExceeded):
                wait(self._driver.attempt_end, whom="Ray", what="to take the nodes back", timeout_s=timeout_s)
            self._close_driver(0.1)
