"""How weights reach the servers: to all at once, and to later ones when they appear.

A server is admitted when it has acknowledged the weights by version and digest; one that joined later, or whose last
answer was a fault, only after it has shown with a tiny request of ours that it can generate with them.

Who is slow is named while it happens. After the deadline it is left behind: the others go on with the new version, and
it is stale, and gets no requests, until it has caught up with what is current then.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from kintsugi.errors import DeadlineExceeded, IntegrityError, KintsugiError, ProcessDied, RefusedError
from kintsugi.generation.fleet import Fleet, Identity, Member, identity
from kintsugi.generation.transcript import verify_answer
from kintsugi.messages import Generate, Generated, LoadWeights, WeightsLoaded
from kintsugi.runtime import Clock
from kintsugi.transport import Endpoint, PendingReply
from kintsugi.types import Sampling, Wait, WeightManifest

MAX_LOAD_ATTEMPTS = 3
DEADLINE_S = 60.0
PATIENCE = 3.0
"""Who takes so many times as long as the slowest of those who are done is slow, if that is `SLOW_S` or more."""
SLOW_S = 1.0
PROBE_TIMEOUT_S = 30.0
KEPT_VERSIONS = 8

Loaded = Callable[[WeightsLoaded | KintsugiError], None]
"""Told once: who has loaded the weights, or why not all have."""


class ModelVersion(msgspec.Struct, frozen=True):
    """A version that the manager was given: `ModelVersion(3, "9f…", step=3, since=1.7e9, servers=("server-0",))`."""

    version: int
    digest: str
    step: int
    since: float
    """Wall clock of when it was given first."""
    servers: tuple[str, ...] = ()
    """Who holds it now."""


class Distribution:
    """Never blocks: `turn` acts on what has changed."""

    def __init__(
        self,
        endpoint: Endpoint,
        fleet: Fleet,
        *,
        note: Callable[[str], None],
        clock: Clock,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._endpoint = endpoint
        self._fleet = fleet
        self._note = note
        self._clock = clock
        self._weights: LoadWeights | None = None
        self._asked: list[Loaded] = []
        """Those who gave `_weights`, until they are told."""
        self._deadline_s = deadline_s
        self._since = 0.0
        """When `_weights` were given last."""
        self._loads: dict[str, WeightsLoaded] = {}
        """How it went for each server that has loaded them."""
        self._slowest_s = 0.0
        self._named: set[str] = set()
        """Who was slow, or left behind, with these weights, and was said to be."""
        self._versions: deque[ModelVersion] = deque(maxlen=KEPT_VERSIONS)

    def distribute(self, weights: LoadWeights, then: Loaded) -> None:
        """Take the weights that count from now on. The same ones come again when a master took over or a rank that
        published them was replaced: whoever holds them keeps them, and later ones get them from the new sources."""
        manifest = weights.manifest
        if identity(manifest) != self._fleet.current:
            self._loads, self._slowest_s, self._named = {}, 0.0, set()
            superseded = f"superseded by version {manifest.version} before all servers had loaded it"
            self._tell(RefusedError(superseded))
            self._versions.append(
                ModelVersion(manifest.version, manifest.digest, manifest.step, self._clock.wall())
            )
        self._weights, self._fleet.current = weights, identity(manifest)
        self._asked.append(then)
        self._since = self._clock.monotonic()
        for member in self._fleet:
            member.load_faults = 0

    def versions(self) -> tuple[ModelVersion, ...]:
        """The last few, the current one last."""
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
            self._look_again(member, now=now)
        self._name_slow(self._weights.manifest, now=now)
        self._answer(self._weights.manifest, now=now)

    def awaited(self) -> Wait | None:
        """For whom this waits, if anybody waits for this."""
        if not self._asked or self._weights is None:
            return None
        whom = ", ".join(self._missing()) or "server"
        what = f"loading version {self._weights.manifest.version}"
        return Wait(whom, what, self._since, self._since + self._deadline_s)

    def _send(self, member: Member, weights: LoadWeights) -> None:
        """Also to who is still loading earlier ones: it does not finish what nobody wants."""
        wanted = identity(weights.manifest)
        is_failing = member.load_faults >= MAX_LOAD_ATTEMPTS
        if self._holds(member) or member.loading == wanted or is_failing:
            return
        member.loading = wanted
        self._endpoint.request(
            member.process,
            weights,
            deadline_s=MAX_LOAD_ATTEMPTS * self._deadline_s,
            on_done=partial(self._loaded, member, weights.manifest),
        )

    def _holds(self, member: Member) -> bool:
        return member.held is not None and member.held == self._fleet.current

    def _loaded(self, member: Member, manifest: WeightManifest, pending: PendingReply) -> None:
        try:
            loaded = pending.result().expect(WeightsLoaded)
            _verify_loaded(loaded, manifest, server=member.process)
        except KintsugiError as error:
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
        self, member: Member, manifest: WeightManifest, *, then: Callable[[PendingReply], None]
    ) -> None:
        self._endpoint.request(
            member.process, probe(manifest.version), deadline_s=PROBE_TIMEOUT_S, on_done=then
        )

    def _proven(self, member: Member, manifest: WeightManifest, pending: PendingReply) -> None:
        try:
            _verify_probe(pending, version=manifest.version, server=member.process)
        except KintsugiError as error:
            self._load_failed(member, manifest, error)
            return
        member.proven = True
        self._note(
            f"{member.process} {member.peer.incarnation} is admitted: "
            f"it answered the probe of version {manifest.version}"
        )
        self._admit(member, manifest)

    def _admit(self, member: Member, manifest: WeightManifest) -> None:
        if member.loading == identity(manifest):
            member.loading = None
        member.held = identity(manifest)
        member.suspect = False
        if member.process in self._named and self._holds(member):
            self._named.discard(member.process)
            self._note(f"{member.process} has caught up with version {manifest.version}")

    def _load_failed(self, member: Member, manifest: WeightManifest, error: KintsugiError) -> None:
        """A living server is asked again, a few times; one that died is gone with the next address book."""
        if member.loading != identity(manifest):
            return  # Something later is on its way to it.
        member.loading = None
        if isinstance(error, ProcessDied):
            return
        self._note(f"{member.process} did not load version {manifest.version}: {error}")
        member.load_faults += 1
        if member.load_faults >= MAX_LOAD_ATTEMPTS:
            self._tell(error)

    def _look_again(self, member: Member, *, now: float) -> None:
        """A suspect server gets no requests while others are healthy, so that it has to be asked whether it is well."""
        if not member.suspect or not self._holds(member) or now < member.probe_at or self._weights is None:
            return
        member.probe_at = now + PROBE_TIMEOUT_S
        manifest = self._weights.manifest
        self._probe(member, manifest, then=partial(self._looked, member, manifest))

    def _looked(self, member: Member, manifest: WeightManifest, pending: PendingReply) -> None:
        try:
            _verify_probe(pending, version=manifest.version, server=member.process)
        except KintsugiError:
            member.doubt(self._clock.monotonic())
            return
        if member.held == identity(manifest):
            member.suspect = False

    def _answer(self, manifest: WeightManifest, *, now: float) -> None:
        """A version is loaded when every server that lives has acknowledged it, or when the deadline is over and some
        have: those who have not are left behind."""
        if not self._asked:
            return
        missing, servers = self._missing(), self._fleet.in_use()
        is_over = now >= self._since + self._deadline_s
        if len(missing) < len(servers) and (is_over or not missing):
            for process in missing:
                self._named.add(process)
                self._note(
                    f"{process} is left behind: it has not loaded version {manifest.version} within "
                    f"{self._deadline_s:g} s"
                )
            self._tell(self._loaded_by(manifest, but=missing))
        elif is_over:
            whom = ", ".join(missing) or "any generation server"
            what = f"loading version {manifest.version}"
            self._tell(DeadlineExceeded(whom=whom, what=what, waited_s=self._deadline_s))

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

    def _name_slow(self, manifest: WeightManifest, *, now: float) -> None:
        """Say once who the others wait for, long before it is left behind."""
        waited_s = now - self._since
        if not self._asked or not self._loads or waited_s < max(SLOW_S, PATIENCE * self._slowest_s):
            return
        rate = manifest.size / 1e6 / waited_s
        for process in self._missing():
            if process not in self._named:
                self._named.add(process)
                self._note(
                    f"{process} is slow to load version {manifest.version}: {waited_s:.1f} s so far, less than "
                    f"{rate:.1f} MB/s; the slowest other took {self._slowest_s:.1f} s"
                )

    def _missing(self) -> list[str]:
        return sorted(member.process for member in self._fleet.in_use() if not self._holds(member))

    def _tell(self, outcome: WeightsLoaded | KintsugiError) -> None:
        asked, self._asked = self._asked, []
        for then in asked:
            then(outcome)


def probe(version: int) -> Generate:
    """The smallest request that goes through all of a server: every vocabulary has these tokens."""
    prompt = array("i", [0, 1]).tobytes()
    sampling = Sampling(temperature=0.0, max_new_tokens=2)
    return Generate("probe", 0, prompt, sampling, version, timeout_s=PROBE_TIMEOUT_S)


def _verify_loaded(loaded: WeightsLoaded, manifest: WeightManifest, *, server: str) -> None:
    if identity(loaded) != identity(manifest):
        raise IntegrityError(
            f"{server}: expected version {manifest.version} with digest {manifest.digest}, "
            f"got version {loaded.version} with digest {loaded.digest}"
        )


def _verify_probe(pending: PendingReply, *, version: int, server: str) -> None:
    """Something was sampled, all of it with these weights."""
    generated = pending.result().expect(Generated)
    verify_answer(generated, probe(version), server=server)
    for completion in generated.completions:
        versions = set(array("i", completion.versions))
        if not completion.tokens or versions != {version}:
            raise IntegrityError(
                f"{server}: expected tokens of version {version} as answer to the probe, "
                f"got {len(completion.tokens) // 4} of versions {sorted(versions)}"
            )
