"""Distribution of weights to the servers: to all at the same time, and to later ones when they join.

A server is admitted when it has acknowledged the weights by version and digest. A server that joined later, or that
replied with a fault, must also answer a probe: a tiny request that shows that it can generate with them.

Slow servers are reported while they load. After the deadline a slow server is left behind: the others continue with the
new version, and the slow one is stale and gets no requests until it has loaded the version that is current then.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from kintsugi.errors import (
    DeadlineExceeded,
    IntegrityError,
    KintsugiError,
    ProcessDied,
    RefusedError,
    damage_of,
    is_overwritten,
)
from kintsugi.generation.server_fleet import Identity, ManagedServer, ServerFleet, identity
from kintsugi.generation.transcript import verify_answer
from kintsugi.protocol.generation import Generate, Generated
from kintsugi.protocol.weights import LoadWeights, WeightsLoaded
from kintsugi.runtime.clock import Clock
from kintsugi.telemetry.events import BytesDamaged, Note, NoteEvent
from kintsugi.transport import Endpoint, PendingReply
from kintsugi.types import SamplingParams, Wait, WeightManifest

MAX_LOAD_ATTEMPTS = 3
DEADLINE_S = 60.0
SLOW_FACTOR = 3.0
"""A server is slow if it takes this many times as long as the slowest finished one, and at least `SLOW_S`."""
SLOW_S = 1.0
PROBE_TIMEOUT_S = 30.0
KEPT_VERSIONS = 8

Loaded = Callable[[WeightsLoaded | KintsugiError], None]
"""Called once with the servers that have loaded the weights, or with the error."""


class ModelVersion(msgspec.Struct, frozen=True):
    """A version that the manager received: `ModelVersion(3, "9f…", step=3, since=1.7e9, servers=("server-0",))`."""

    version: int
    digest: str
    step: int
    since: float
    """Wall clock of when it was first received."""
    servers: tuple[str, ...] = ()
    """Servers that hold it now."""


class WeightDistribution:
    """Never blocks: `turn` acts on what has changed."""

    def __init__(
        self,
        endpoint: Endpoint,
        fleet: ServerFleet,
        *,
        emit: Callable[[NoteEvent], object],
        clock: Clock,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._endpoint = endpoint
        self._fleet = fleet
        self._emit = emit
        self._clock = clock
        self._weights: LoadWeights | None = None
        self._callbacks: list[Loaded] = []
        """Callbacks of the requests for `_weights`, until they are answered."""
        self._deadline_s = deadline_s
        self._since = 0.0
        """Time at which `_weights` were last received."""
        self._loads: dict[str, WeightsLoaded] = {}
        """Acknowledgement of each server that has loaded them."""
        self._slowest_s = 0.0
        self._reported_slow: set[str] = set()
        """Servers that were reported as slow, or left behind, with these weights."""
        self._versions: deque[ModelVersion] = deque(maxlen=KEPT_VERSIONS)

    def distribute(self, weights: LoadWeights, then: Loaded) -> None:
        """Set the current weights. The same weights come again when a new master took over or a publishing rank was
        replaced: servers that hold them keep them, and later servers fetch them from the new sources."""
        manifest = weights.manifest
        if identity(manifest) != self._fleet.current:
            self._loads = {}
            self._slowest_s = 0.0
            self._reported_slow = set()
            superseded = f"superseded by version {manifest.version} before all servers had loaded it"
            self._answer_requests(RefusedError(superseded))
            self._versions.append(
                ModelVersion(manifest.version, manifest.digest, manifest.step, self._clock.wall())
            )
        self._weights, self._fleet.current = weights, identity(manifest)
        self._callbacks.append(then)
        self._since = self._clock.monotonic()
        for member in self._fleet:
            member.load_faults = 0

    def versions(self) -> tuple[ModelVersion, ...]:
        """The last few versions, the current one last."""
        held: dict[Identity | None, list[str]] = {}
        for member in self._fleet:
            held.setdefault(member.held, []).append(member.process)
        return tuple(
            msgspec.structs.replace(each, servers=tuple(sorted(held.get((each.version, each.digest), ()))))
            for each in self._versions
        )

    def turn(self) -> None:
        if self._weights is None:
            return
        now = self._clock.monotonic()
        for member in self._fleet.in_use():
            self._send(member, self._weights)
            self._probe_suspect(member, now=now)
        self._report_slow(self._weights.manifest, now=now)
        self._answer(self._weights.manifest, now=now)

    def awaited(self) -> Wait | None:
        """Servers that have not loaded the weights, if a request waits for them."""
        if not self._callbacks or self._weights is None:
            return None
        whom = ", ".join(self._missing()) or "server"
        what = f"loading version {self._weights.manifest.version}"
        return Wait(whom, what, self._since, self._since + self._deadline_s)

    def _send(self, member: ManagedServer, weights: LoadWeights) -> None:
        """Send the weights, also to a server that is still loading earlier ones: it drops a superseded version."""
        wanted = identity(weights.manifest)
        is_failing = member.load_faults >= MAX_LOAD_ATTEMPTS
        if self._holds(member) or member.loading == wanted or is_failing:
            return
        member.loading = wanted
        self._endpoint.request(
            member.process,
            weights,
            deadline_s=MAX_LOAD_ATTEMPTS * self._deadline_s,
            on_done=partial(self._loaded, member, weights),
        )

    def _holds(self, member: ManagedServer) -> bool:
        return member.held is not None and member.held == self._fleet.current

    def _loaded(self, member: ManagedServer, weights: LoadWeights, pending: PendingReply) -> None:
        manifest = weights.manifest
        try:
            loaded = pending.result().expect(WeightsLoaded)
            _verify_loaded(loaded, manifest, server=member.process)
        except KintsugiError as error:
            if is_overwritten(error) and weights is not self._weights:
                member.loading = None  # Meanwhile the version was published again, after a rollback.
            else:
                self._load_failed(member, manifest, error)
            return
        if identity(manifest) == self._fleet.current:
            self._loads[member.process] = loaded
            self._slowest_s = max(self._slowest_s, self._clock.monotonic() - self._since)
        if member.proven:
            self._admit(member, manifest)
        else:
            self._probe(member, manifest, then=partial(self._proven, member, manifest))

    def _probe(
        self, member: ManagedServer, manifest: WeightManifest, *, then: Callable[[PendingReply], None]
    ) -> None:
        self._endpoint.request(
            member.process, probe(manifest.version), deadline_s=PROBE_TIMEOUT_S, on_done=then
        )

    def _proven(self, member: ManagedServer, manifest: WeightManifest, pending: PendingReply) -> None:
        try:
            _verify_probe(pending, version=manifest.version, server=member.process)
        except KintsugiError as error:
            self._load_failed(member, manifest, error)
            return
        member.proven = True
        self._emit(
            Note(
                f"{member.process} {member.peer.incarnation} is admitted: "
                f"it answered the probe of version {manifest.version}"
            )
        )
        self._admit(member, manifest)

    def _admit(self, member: ManagedServer, manifest: WeightManifest) -> None:
        if member.loading == identity(manifest):
            member.loading = None
        member.held = identity(manifest)
        member.suspect = False
        if member.process in self._reported_slow and self._holds(member):
            self._reported_slow.discard(member.process)
            self._emit(Note(f"{member.process} has caught up with version {manifest.version}"))

    def _load_failed(self, member: ManagedServer, manifest: WeightManifest, error: KintsugiError) -> None:
        """Retry a live server a few times; a dead one is removed by the next address book. A version whose memory is
        being overwritten is not retried: the next one follows, or this one again after a rollback."""
        if member.loading != identity(manifest):
            return  # A later version is on its way to it.
        member.loading = None
        if isinstance(error, ProcessDied):
            return
        message = f"{member.process} did not load version {manifest.version}: {error}"
        damage = damage_of(error)
        self._emit(Note(message) if damage is None else BytesDamaged(message, origin=damage.origin))
        if is_overwritten(error):
            member.load_faults = MAX_LOAD_ATTEMPTS
            return
        member.load_faults += 1
        if member.load_faults >= MAX_LOAD_ATTEMPTS:
            self._answer_requests(error)

    def _probe_suspect(self, member: ManagedServer, *, now: float) -> None:
        """Probe a suspect server: it gets no requests while others are healthy, which could show that it has
        recovered."""
        if not member.suspect or not self._holds(member) or now < member.probe_at or self._weights is None:
            return
        member.probe_at = now + PROBE_TIMEOUT_S
        manifest = self._weights.manifest
        self._probe(member, manifest, then=partial(self._probed, member, manifest))

    def _probed(self, member: ManagedServer, manifest: WeightManifest, pending: PendingReply) -> None:
        try:
            _verify_probe(pending, version=manifest.version, server=member.process)
        except KintsugiError:
            member.doubt(self._clock.monotonic())
            return
        if member.held == identity(manifest):
            member.suspect = False

    def _answer(self, manifest: WeightManifest, *, now: float) -> None:
        """Answer the requests for a version: when every live server has acknowledged it, or when the deadline has
        passed and some have. The others are left behind."""
        if not self._callbacks:
            return
        missing, servers = self._missing(), self._fleet.in_use()
        is_over = now >= self._since + self._deadline_s
        if len(missing) < len(servers) and (is_over or not missing):
            for process in missing:
                self._reported_slow.add(process)
                self._emit(
                    Note(
                        f"{process} is left behind: it has not loaded version {manifest.version} within "
                        f"{self._deadline_s:g} s"
                    )
                )
            self._answer_requests(self._loaded_by(manifest, but=missing))
        elif is_over:
            whom = ", ".join(missing) or "any generation server"
            what = f"loading version {manifest.version}"
            self._answer_requests(DeadlineExceeded(whom=whom, what=what, waited_s=self._deadline_s))

    def _loaded_by(self, manifest: WeightManifest, *, but: list[str]) -> WeightsLoaded:
        names = sorted(member.process for member in self._fleet.in_use() if member.process not in but)
        loads = [load for process, load in self._loads.items() if process in names]
        return WeightsLoaded(
            manifest.version,
            manifest.digest,
            tuple(names),
            late=tuple(but),
            pause_ms={process: pause for load in loads for process, pause in load.pause_ms.items()},
            fetch_s={process: fetch for load in loads for process, fetch in load.fetch_s.items()},
        )

    def _report_slow(self, manifest: WeightManifest, *, now: float) -> None:
        """Report once, long before the deadline, which servers the others wait for."""
        waited_s = now - self._since
        if not self._callbacks or not self._loads or waited_s < max(SLOW_S, SLOW_FACTOR * self._slowest_s):
            return
        rate = manifest.size / 1e6 / waited_s
        for process in self._missing():
            if process not in self._reported_slow:
                self._reported_slow.add(process)
                self._emit(
                    Note(
                        f"{process} is slow to load version {manifest.version}: {waited_s:.1f} s so far, less than "
                        f"{rate:.1f} MB/s; the slowest other took {self._slowest_s:.1f} s"
                    )
                )

    def _missing(self) -> list[str]:
        return sorted(member.process for member in self._fleet.in_use() if not self._holds(member))

    def _answer_requests(self, outcome: WeightsLoaded | KintsugiError) -> None:
        requested, self._callbacks = self._callbacks, []
        for then in requested:
            then(outcome)


def probe(version: int) -> Generate:
    """The smallest request that exercises all of a server; every vocabulary has these tokens."""
    prompt = array("i", [0, 1]).tobytes()
    sampling = SamplingParams(temperature=0.0, max_new_tokens=2)
    return Generate("probe", 0, prompt, sampling, version, timeout_s=PROBE_TIMEOUT_S)


def _verify_loaded(loaded: WeightsLoaded, manifest: WeightManifest, *, server: str) -> None:
    if identity(loaded) != identity(manifest):
        raise IntegrityError(
            f"{server}: expected version {manifest.version} with digest {manifest.digest}, "
            f"got version {loaded.version} with digest {loaded.digest}"
        )


def _verify_probe(pending: PendingReply, *, version: int, server: str) -> None:
    """Check that something was sampled, all of it with these weights."""
    generated = pending.result().expect(Generated)
    verify_answer(generated, probe(version), server=server)
    for completion in generated.completions:
        versions = set(array("i", completion.versions))
        if not completion.tokens or versions != {version}:
            raise IntegrityError(
                f"{server}: expected tokens of version {version} as answer to the probe, "
                f"got {len(completion.tokens) // 4} of versions {sorted(versions)}"
            )
