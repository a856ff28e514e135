"""A master driven by hand: events go in, requests stay open until the test answers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

from kintsugi.config.schema import (
    ActorSection,
    AlgorithmSection,
    CheckpointSection,
    Config,
    DataSection,
    EvaluationSection,
)
from kintsugi.control.master import FAULT_GRACE_S, Master
from kintsugi.control.phases.table import Phase
from kintsugi.control.placement import plan_layout
from kintsugi.control.protocol import (
    Began,
    Decision,
    Effect,
    Event,
    Exited,
    Forget,
    Joined,
    Replied,
    Request,
    RequestFailed,
    Tell,
    Tick,
)
from kintsugi.control.state import MasterState
from kintsugi.errors import Fault, KintsugiError, fault_of
from kintsugi.journal.facts import Fact
from kintsugi.protocol.agents import StartProcess, StopProcess
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import Drop
from kintsugi.recovery.rank import Flow
from kintsugi.types import Peer, Role, role_of
from tests.unit.control.world import Rewards, World, every_second_is_right, scored

__all__ = ["CONFIG", "Driven", "fold", "new_state", "scored"]

CONFIG = Config(
    name="driven",
    algorithm=AlgorithmSection(steps=3, batch_size=2, group_size=2),
    actor=ActorSection(logical_shards=2),
    data=DataSection(num_eval=2),
    eval=EvaluationSection(num_samples=0),
    checkpoint=CheckpointSection(every=1),
)
WALL = 1_700_000_000.0
STEP_S = 0.01


def new_state(config: Config = CONFIG) -> MasterState:
    return MasterState(min_valid=2, keep_checkpoints=config.checkpoint.keep)


def fold(facts: Sequence[Fact], config: Config = CONFIG) -> MasterState:
    """Where a master stands that has read these facts."""
    state = new_state(config)
    for fact in facts:
        state.apply(fact)
    return state


class Driven:
    """`until` answers what is open in the order of asking, with what a healthy worker would say."""

    def __init__(
        self,
        config: Config = CONFIG,
        *,
        state: MasterState | None = None,
        num_eval_rows: int = 0,
        flow: Flow = Flow.ROLLBACK,
        world: World | None = None,
        rewards: Rewards = every_second_is_right,
    ) -> None:
        layout = plan_layout(config)
        self.master = Master(
            config,
            state=state or new_state(config),
            layout=layout,
            num_rows=10,
            num_eval_rows=num_eval_rows,
            checkpoint_folder="checkpoints",
        )
        self._num_eval_rows = num_eval_rows
        hosts = {plan.process: plan.host for plan in layout}
        self.world = world or World(hosts, flow=flow, rewards=rewards)
        self.now = 0.0
        self.open: dict[str, Request] = {}
        self.facts: list[Fact] = []
        self.effects: list[Effect] = []
        self._held: set[str] = set()
        self.unstartable: set[str] = set()
        """Processes whose start fails."""

    @property
    def state(self) -> MasterState:
        return self.master.state

    def feed(self, event: Event) -> Decision:
        self.now += STEP_S
        decision = self.master.decide(event, self.now)
        self.facts += decision.facts
        self.effects += decision.effects
        for effect in decision.effects:
            match effect:
                case Request(token=token, body=body):
                    self.open[token] = effect
                    self.world.asked(body)
                case Tell(to=to, body=Drop(tickets=tickets)):
                    kept = self.world.kept.get(to, set())
                    kept -= {key for key in kept if key.partition("/")[0] in tickets}
                case _:
                    pass
        for effect in decision.effects:
            if isinstance(effect, Forget):
                self._give_up(effect.process, effect.fault)
        return decision

    def _give_up(self, process: str, fault: Fault) -> None:
        """The transport fails what is still asked of somebody who is gone."""
        for request in [request for request in self.open.values() if request.to == process]:
            del self.open[request.token]
            self.feed(RequestFailed(request.token, request.to, fault))

    def begin(self, *, restore_step: int | None = None) -> None:
        """The agents are there and everything else is ordered; a given step means a run that is resumed from it."""
        path = f"checkpoints/step-{restore_step}" if restore_step else None
        resumed = restore_step is not None
        incarnation, time = str(self.state.term + 1), WALL + self.now
        self.feed(Began("job", "digest", incarnation, resumed, restore_step or 0, path, time=time))
        for agent in self.world.agents:
            self.join(agent, f"{self.state.term}.0", self.world.hosts[agent])

    def succeed(self, *, carried_out: bool) -> Driven:
        """The master dies after its latest decision, and its agent starts another, which this gives.

        `carried_out`: what was asked had been done, only the answers are lost; else it was never received.
        """
        config, world = self.master.config, deepcopy(self.world)
        state = fold(self.facts, config)
        successor = Driven(config, state=state, num_eval_rows=self._num_eval_rows, world=world)
        successor.facts, successor.now = list(self.facts), self.now
        for request in self.open.values() if carried_out else ():
            if world.is_alive(request.to):
                successor.serve(request)
        return successor

    def take_over(self, *, agents_first: bool = True) -> None:
        """Begin as the successor of a master that died; everybody who lives reports."""
        members, living = self.state.members.members, self.world.living()
        agents = [(name, members[name].incarnation, self.world.hosts[name]) for name in self.world.agents]
        incarnation = str(self.state.term + 1)
        step, time = self.state.step, WALL + self.now
        self.feed(Began("job", "digest", incarnation, restore_step=step, adopting=True, time=time))
        for process, incarnation, host in agents + living if agents_first else living + agents:
            self.join(process, incarnation, host)

    def join(self, process: str, incarnation: str, host: str) -> None:
        role = role_of(process)
        children = self.world.reports(host) if role is Role.AGENT else ()
        capabilities = {"store": process, "flow": self.world.flow.value} if role is Role.MODEL else {}
        peer = Peer(process, incarnation, host, f"tcp://{process}", b"key")
        self.feed(Joined(peer, role, 1, capabilities, children))

    def asked(self, kind: type[Body]) -> list[Request]:
        """Requests of a kind whose answers the master waits for."""
        awaited = [request for request in self.open.values() if self.master.pending.is_open(request.token)]
        return [request for request in awaited if isinstance(request.body, kind)]

    def serve(self, request: Request) -> Body | Fault:
        """What the process that was asked says."""
        try:
            if isinstance(request.body, StartProcess) and request.body.process in self.unstartable:
                raise KintsugiError(f"{request.body.process} does not start")
            return self.world.serve(request.to, request.body)
        except KintsugiError as error:
            return fault_of(error, process=request.to, time=0.0)

    def answer(self, request: Request, body: Body | None = None) -> Decision:
        """Let the process answer, or this body be its answer."""
        del self.open[request.token]
        before = self.world.living()
        said = body or self.serve(request)
        if isinstance(request.body, StopProcess):
            for process, incarnation, _ in set(before) - set(self.world.living()):
                self.feed(Exited(process, incarnation, -9))
        if isinstance(said, Fault):
            return self.feed(RequestFailed(request.token, request.to, said))
        decision = self.feed(Replied(request.token, request.to, said))
        for process, incarnation, host in self.world.living():
            if (process, incarnation, host) not in before:
                self.join(process, incarnation, host)
        return decision

    def fail(self, request: Request, message: str, *, kind: str = "StorageError") -> Decision:
        del self.open[request.token]
        fault = Fault(request.token, kind, request.to, message, 0.0)
        return self.feed(RequestFailed(request.token, request.to, fault))

    def until(self, reached: Phase | Callable[[], bool]) -> None:
        """Answer everything, and let time pass when nothing is asked, until a phase is entered or a condition holds."""

        def is_reached() -> bool:
            return reached() if not isinstance(reached, Phase) else self.master.phase is reached

        for _ in range(1000):
            if is_reached():
                return
            self.go_on()
        raise AssertionError(f"still {self.master.phase} after a thousand answers")

    def hold(self, request: Request) -> None:
        """Leave a request open until the test answers it."""
        self._held.add(request.token)

    def go_on(self) -> None:
        """One more answer of somebody who lives, or some time."""
        answerable = (one for one in self.open.values() if one.token not in self._held)
        request = next((one for one in answerable if self.world.is_alive(one.to)), None)
        if request is not None:
            self.answer(request)
        else:
            self.pass_time(0.2)

    def lose(self, process: str, *, after: int = 0) -> Decision:
        """It dies, and its agent says so after this many answers of others."""
        incarnation = self.world.kill(process)
        assert incarnation is not None, f"{process} does not live"
        for _ in range(after):
            self.go_on()
        return self.feed(Exited(process, incarnation, -9))

    def pass_time(self, seconds: float) -> Decision:
        self.now += seconds
        return self.feed(Tick())

    def let_grace_pass(self) -> Decision:
        return self.pass_time(FAULT_GRACE_S)
