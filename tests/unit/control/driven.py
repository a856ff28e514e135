"""A master driven by hand: events go in, requests stay open until the test answers them."""

from __future__ import annotations

from collections.abc import Callable

from kintsugi.config import (
    ActorSection,
    AlgorithmSection,
    CheckpointSection,
    Config,
    DataSection,
    EvaluationSection,
)
from kintsugi.control.agenda import carried_stage
from kintsugi.control.layout import plan_layout
from kintsugi.control.master import FAULT_GRACE_S, Master
from kintsugi.control.phases import Phase
from kintsugi.control.protocol import (
    Began,
    Decision,
    Effect,
    Event,
    Exited,
    Joined,
    Replied,
    Request,
    RequestFailed,
    Tick,
)
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault
from kintsugi.facts import Fact
from kintsugi.messages import (
    Body,
    CallDone,
    DeviceClean,
    DeviceStop,
    EpisodesDone,
    HashWeights,
    LoadWeights,
    NotifyNormal,
    Ok,
    PreLock,
    ProcessStarted,
    Publish,
    Published,
    RankReady,
    RebuildGroup,
    Repair,
    Rollback,
    RunCall,
    RunEpisodes,
    Save,
    Saved,
    StartProcess,
    StartStage,
    WeightsHashed,
    WeightsLoaded,
)
from kintsugi.types import (
    Finish,
    Peer,
    Role,
    SampleMeta,
    StreamSource,
    Ticket,
    WeightManifest,
    role_of,
    sample_key,
)

CONFIG = Config(
    name="driven",
    algorithm=AlgorithmSection(steps=3, batch_size=2, group_size=2),
    actor=ActorSection(logical_shards=2),
    data=DataSection(num_eval=2),
    eval=EvaluationSection(num_samples=0),
    checkpoint=CheckpointSection(every=1),
)


def new_state(config: Config = CONFIG) -> MasterState:
    return MasterState(min_valid=2, keep_checkpoints=config.checkpoint.keep)


def scored(ticket: Ticket, *, version: int, holder: str = "rollout-0") -> EpisodesDone:
    """Every second sample is right."""
    metas = []
    for index in range(ticket.num_samples):
        reward, key = float(index % 2), sample_key(ticket.id, index)
        metas.append(
            SampleMeta(key, ticket.id, 8, 4, reward, {"exact": reward}, Finish.EOS, version, holder, key)
        )
    return EpisodesDone(ticket.id, tuple(metas))


class Driven:
    """`until` answers what is open in the order of asking, with what a healthy worker would say."""

    def __init__(self, config: Config = CONFIG, *, state: MasterState | None = None, num_eval_rows: int = 0):
        self.master = Master(
            config,
            state=state or new_state(config),
            layout=plan_layout(config),
            num_rows=10,
            num_eval_rows=num_eval_rows,
            checkpoint_folder="checkpoints",
        )
        self._hosts = {plan.process: plan.host for plan in plan_layout(config)}
        self._stages: dict[str, str] = {}
        self._generations: dict[str, int] = {}
        self.now = 0.0
        self.open: dict[str, Request] = {}
        self.facts: list[Fact] = []
        self.effects: list[Effect] = []

    @property
    def state(self) -> MasterState:
        return self.master.state

    def feed(self, event: Event) -> Decision:
        self.now += 0.01
        decision = self.master.decide(event, self.now)
        self.facts += decision.facts
        self.effects += decision.effects
        self.open |= {effect.token: effect for effect in decision.effects if isinstance(effect, Request)}
        return decision

    def begin(self, *, restore_step: int | None = None) -> None:
        """The agents are there and everything else is ordered; a given step means a run that is resumed from it."""
        path = f"checkpoints/step-{restore_step}" if restore_step else None
        resumed = restore_step is not None
        self.feed(Began("job", "digest", str(self.state.epoch + 1), resumed, restore_step or 0, path))
        for process in self._hosts:
            if role_of(process) is Role.AGENT:
                self._join(process, f"{self.state.epoch}.0")

    def _join(self, process: str, incarnation: str) -> None:
        peer = Peer(process, incarnation, self._hosts[process], f"tcp://{process}", b"key")
        self.feed(Joined(peer, role_of(process), 1))

    def asked(self, kind: type[Body]) -> list[Request]:
        """Open requests of a kind."""
        return [request for request in self.open.values() if isinstance(request.body, kind)]

    def answer(self, request: Request, body: Body | None = None) -> Decision:
        del self.open[request.token]
        decision = self.feed(Replied(request.token, request.to, body or self._healthy(request)))
        if isinstance(request.body, StartProcess):
            self._join(request.body.process, request.body.incarnation)
        return decision

    def fail(self, request: Request, message: str) -> Decision:
        del self.open[request.token]
        fault = Fault(request.token, "StorageError", request.to, message, 0.0)
        return self.feed(RequestFailed(request.token, request.to, fault))

    def until(self, reached: Phase | Callable[[], bool]) -> None:
        """Answer everything until the master has entered a phase, or a condition holds."""

        def is_reached() -> bool:
            return reached() if not isinstance(reached, Phase) else self.master.phase is reached

        for _ in range(1000):
            if is_reached():
                return
            self.answer(next(iter(self.open.values())))
        raise AssertionError(f"still {self.master.phase} after a thousand answers")

    def _ready(self, rank: str, body: Body) -> RankReady:
        """A rank that stands where the journal says, or wherever it was repaired or rolled back to."""
        if isinstance(body, Repair):
            self._stages[rank] = carried_stage(self.master.config, step=body.step).name
        if isinstance(body, RebuildGroup):
            self._generations[rank] = body.generation
        step = self.state.step
        generation, stage = self._generations.get(rank, 0), self._stages.get(rank, "")
        return RankReady(step, f"state {step}", generation=generation, stage=stage)

    def lose(self, process: str) -> Decision:
        """Its agent says that it ended."""
        member = self.state.members.members[process]
        self._stages.pop(process, None)
        self._generations.pop(process, None)
        return self.feed(Exited(process, member.incarnation, -9))

    def let_grace_pass(self) -> Decision:
        self.now += FAULT_GRACE_S
        return self.feed(Tick())

    def _healthy(self, request: Request) -> Body:
        match request.body:
            case StartProcess(process=process, incarnation=incarnation):
                return ProcessStarted(process, incarnation, 1, b"key")
            case RunEpisodes(ticket=ticket, version=version):
                return scored(ticket, version=version, holder=request.to)
            case (
                PreLock()
                | DeviceStop()
                | DeviceClean()
                | RebuildGroup()
                | Repair()
                | Rollback()
                | NotifyNormal()
            ):
                return self._ready(request.to, request.body)
            case StartStage(stage=stage):
                self._stages[request.to] = stage
                return self._ready(request.to, request.body)
            case RunCall(step=step):
                return CallDone(step, f"state {step}", {"loss": 0.5}, {"forward": 0.1})
            case Publish(version=version, step=step):
                manifest = WeightManifest(version, step, (), 0, f"weights {step}")
                return Published(manifest, (StreamSource(request.to),))
            case LoadWeights(manifest=manifest):
                return WeightsLoaded(manifest.version, manifest.digest, ("server-0", "server-1"))
            case Save(step=step, folder=folder):
                return Saved(step, f"{folder}/step-{step}", "digest")
            case HashWeights():
                return WeightsHashed("sha256")
            case _:
                return Ok()
