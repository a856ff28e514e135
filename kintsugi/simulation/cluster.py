"""A whole cluster in one thread on virtual time: master, agents, ranks, servers, launcher, network, disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from kintsugi.config.schema import Config
from kintsugi.control.master import Master
from kintsugi.control.placement import plan_layout
from kintsugi.control.protocol import Began
from kintsugi.journal.facts import Fact, FilterReason, SampleQuarantined, StepCommitted, TicketFiltered
from kintsugi.model.seats import Seat, digest_of_box, mesh_of
from kintsugi.protocol.agents import StartProcess
from kintsugi.recovery.rank import Flow
from kintsugi.simulation.coverage import Coverage
from kintsugi.simulation.faults import PlannedSimFault, SimulatedFaultPlan
from kintsugi.simulation.hosts import SimulatedAgent, SimulatedHost
from kintsugi.simulation.injection import POISON, SimulatedInjector
from kintsugi.simulation.invariants import Invariants, Reference
from kintsugi.simulation.master import JOURNAL, LARGE, NewMaster, SimulatedMaster, described
from kintsugi.simulation.memory_disk import MemoryDisk
from kintsugi.simulation.network import SimulatedNetwork, SimulatedProcess
from kintsugi.simulation.ranks import Checkpoints, HostMemory, Rendezvous, SimulatedRank
from kintsugi.simulation.workers import SimulatedManager, SimulatedRollout, SimulatedServer, SimulatedWorker
from kintsugi.simulation.world import World
from kintsugi.types import Peer, Role, process_id, ticket_of

MASTER_ADDRESS = "sim://master-0"
CONVERGENCE_S = 240.0
"""Virtual time within which a run must end after the last fault."""
RESTART_S = (0.02, 0.2)
"""Time that a launcher or agent needs to start a successor."""
IMPORT_S = (0.05, 0.4)
"""Time from the start of a process to its first message."""


class SimulationOutcome(msgspec.Struct):
    """Result of a simulated run."""

    outcome: str
    facts: list[Fact]
    state_digest: str
    """Digest of the state after the last committed step."""
    violations: list[str]
    faults: list[PlannedSimFault]
    """Faults that took effect."""
    scalings: list[PlannedSimFault]
    """Scaling requests that were made."""
    num_steps: int
    num_rollbacks: int
    num_events: int
    num_processes: int
    virtual_s: float
    trace_hash: str
    reference: Reference
    trace: list[str] = []

    @property
    def counts(self) -> bool:
        """Whether the run counts for a campaign: three faults, one of them during a recovery."""
        in_recovery = any((fault.fired_in or "").startswith("recovering") for fault in self.faults)
        return len(self.faults) >= 3 and in_recovery and self.num_steps >= 10 and self.num_processes >= 9


class SimulatedCluster:
    """One run, from the start of the launcher to the end of the master."""

    def __init__(
        self,
        config: Config,
        *,
        seed: int,
        plan: SimulatedFaultPlan | None = None,
        reference: Reference | None = None,
        coverage: Coverage | None = None,
        new_master: NewMaster = Master,
        flow: Flow = Flow.ROLLBACK,
        num_rows: int = 1000,
        keep_trace: bool = False,
    ) -> None:
        self.config, self.layout = config, plan_layout(config)
        self.world = World(seed, keep_trace=keep_trace)
        self.network = SimulatedNetwork(self.world, is_large=len(self.layout) > LARGE)
        self.disk = MemoryDisk()
        self.disk.mkdir(JOURNAL.parent)
        self.checkpoints: Checkpoints = {}
        unfinished: Checkpoints = {}
        self.requests: dict[str, int] = {}
        """Requests of users in the run folder: request → number of servers."""
        self._num_requests = 0
        self.master: SimulatedMaster | None = None
        self.outcome: str | None = None
        self._new_master, self._flow, self._num_rows = new_master, flow, num_rows
        self._rendezvous = Rendezvous()
        self._num_born = self._num_masters = self._num_sessions = 0
        self._agents: dict[str, int] = {}
        self.hosts: dict[str, SimulatedHost] = {
            plan.host: SimulatedHost(
                plan.host, memory=HostMemory(self.checkpoints, unfinished), spawn=self._spawn
            )
            for plan in self.layout
            if plan.role is Role.AGENT
        }
        self.invariants = Invariants(
            reference=reference,
            coverage=coverage or Coverage(),
            touched=self._is_touched,
            survives=self._survives,
            is_saved=lambda step: step in self._saved_steps().values(),
            max_staleness=config.asynchrony.max_staleness,
        )
        self.injector = SimulatedInjector(self, plan or SimulatedFaultPlan([]))
        self.invariants.follow(self.injector.follow)

    def run(self) -> SimulationOutcome:
        """Run until the end of the run, or until the time limit."""
        self._start_session(resumed=False)
        self.injector.begin()
        world, invariants = self.world, self.invariants
        while self.outcome is None and not invariants.violations:
            if not world.turn():
                invariants.violated("nothing is under way and the run has not ended")
            elif world.now > self.injector.last_at + CONVERGENCE_S:
                state = self.master.state if self.master is not None else "without a master"
                waited = f"{CONVERGENCE_S:.0f} s after the last fault"
                invariants.violated(f"still {state} at step {invariants.step}, {waited}")
        if self.outcome == "failed" and not self._failed_rightly():
            invariants.violated(f"the run failed: {self._cause()}")
        if self.outcome == "finished":
            invariants.compare_ends()
            assert self.master is not None
            end = self.master.master.state
            invariants.compare_servers(end, num_planned=self.config.generation.servers)
            invariants.compare_samples(end)
        last = max(invariants.found.digests, default=0)
        return SimulationOutcome(
            self.outcome or "broken off",
            invariants.facts,
            invariants.found.digests.get(last, ""),
            invariants.violations,
            [fault for fault in self.injector.plan.faults if fault.fired_in is not None],
            [scaling for scaling in self.injector.plan.scalings if scaling.fired_in is not None],
            invariants.step,
            invariants.num_rollbacks,
            world.num_events,
            len(self.layout) + 1,
            world.now,
            world.trace_hash,
            invariants.found,
            world.trace or [],
        )

    def _is_touched(self, process: str) -> bool:
        return self.injector.touched(process)

    def _failed_rightly(self) -> bool:
        """Return whether a failed run was right to fail: because of the user's mistake, or because a step had too many
        groups that cannot be scored. With weights that only this run had, there may be so many by chance."""
        if self.injector.poisoned and POISON in self._cause():
            return True
        return len(self._unscorable_groups()) > self.config.algorithm.batch_size

    def _unscorable_groups(self) -> set[str]:
        """Return the groups that were dropped since the last commit because of samples that cannot be scored: too few
        were left, or none was, and then no fact names the group itself."""
        dropped: set[str] = set()
        aside: Counter[str] = Counter()
        for fact in self.invariants.facts:
            match fact:
                case StepCommitted():
                    dropped.clear()
                case TicketFiltered(ticket=ticket, reason=FilterReason.TOO_FEW_VALID):
                    dropped.add(ticket)
                case SampleQuarantined(key=key):
                    aside[ticket_of(key)] += 1
                    if aside[ticket_of(key)] == self.config.algorithm.group_size:
                        dropped.add(ticket_of(key))
                case _:
                    pass
        return dropped

    def _cause(self) -> str:
        last = self.invariants.facts[-1] if self.invariants.facts else None
        fault = getattr(last, "fault", None)
        return fault.message if fault is not None else repr(last)

    def scale(self, servers: int) -> None:
        """Request a number of servers; the master sees it immediately or at its next tick."""
        self._num_requests += 1
        self.requests[f"{self._num_requests:04d}"] = servers
        if self.process("master-0") is not None and self.master is not None:
            self.world.after(0.0, self.master.enter, self.master.take_requests, ())

    # Processes.

    def process(self, name: str) -> SimulatedProcess | None:
        """Return the live process of this name."""
        if name == "master-0":
            return self.master if self.master is not None and self.master.alive else None
        for host in self.hosts.values():
            if host.agent is not None and host.agent.name == name:
                return host.agent
            if name in host.children:
                return host.children[name]
        return None

    def _survives(self, step: int) -> str:
        """Return the holders of the state of a step, of each of its boxes: live ranks, or the memory of hosts. Empty if
        one of the boxes has no holder. A step that was prepared in another mesh than it was committed in later, after
        recovery, is not one that the journal could verify: such snapshots do not count."""
        committed = self._committed_digest(step)
        holders: dict[int, dict[str, str]] = {}
        """Number of boxes → box → a holder: some may be left of a step that ranks of another mesh have assembled."""

        def note(box: str, holder: str) -> None:
            holders.setdefault(Seat.of(box).boxes, {}).setdefault(box, holder)

        for host in self.hosts.values():
            for child in host.children.values():
                if isinstance(child, SimulatedRank) and not child.stopped:
                    state = child.adapter.committed
                    if state.step == step:
                        note(state.box, child.name)
            for owner, kept in host.memory.snapshots.items():
                for snapshot in kept:
                    is_known = snapshot.digest == digest_of_box(committed, Seat.of(snapshot.box))
                    if snapshot.step == step and (snapshot.committed or is_known):
                        note(snapshot.box, f"{host.name} (snapshot of {owner})")
        complete = (found for boxes, found in holders.items() if len(found) == boxes)
        return ", ".join(next(complete, {}).values())

    def _committed_digest(self, step: int) -> str:
        """Digest of a step in the journal, as it was committed last."""
        facts = (fact for fact in reversed(self.invariants.facts) if isinstance(fact, StepCommitted))
        return next((fact.state_digest for fact in facts if fact.step == step), "")

    def _saved_steps(self) -> dict[str, int]:
        """Path of each checkpoint → its step."""
        return {path: next(iter(boxes.values())).step for path, boxes in self.checkpoints.items()}

    # Starts.

    def _start_session(self, *, resumed: bool) -> None:
        """Start a session: agents on all hosts, with new keys, and the master on the first host."""
        self._num_sessions += 1
        for index, host in enumerate(self.hosts.values()):
            self._start_agent(host, process_id(Role.AGENT, index))
        self._start_master(resumed=resumed)

    def _resume(self) -> None:
        """Resume a stopped run with new processes and the contents of the disk."""
        for host in self.hosts.values():
            self.lose_memory(host)
            for process in [*host.children.values(), host.agent]:
                if process is not None:
                    process.on_exit = lambda process, status: None
                    process.end(0)
            host.children.clear()
            host.agent = None
        self.world.after(0.5, self._start_session_again)

    def _start_session_again(self) -> None:
        self._agents.clear()
        self._start_session(resumed=True)

    def cut_power(self, *, torn_bytes: int) -> None:
        """Cut the power of the disk: writes that were not durable are lost, except for so many bytes of the last
        one."""
        self.disk = self.disk.restarted(power_cut=True, torn_bytes=torn_bytes)

    def lose_memory(self, host: SimulatedHost) -> None:
        """Lose the memory of a host: no process is left that holds it."""
        host.memory.snapshots.clear()
        host.memory.replicas.clear()

    def _master_peer(self) -> Peer:
        incarnation = self.master.incarnation if self.master is not None else "1"
        return Peer("master-0", incarnation, "host-0", MASTER_ADDRESS, b"key of master-0")

    def _agent_key(self, name: str) -> bytes:
        return f"key of {name} {self._num_sessions}".encode()

    def _start_agent(self, host: SimulatedHost, name: str) -> None:
        number = self._agents.get(name, -1) + 1
        self._agents[name] = number
        self._num_born += 1
        agent = SimulatedAgent(
            self.network,
            self.world,
            name=name,
            role=Role.AGENT,
            host=host.name,
            incarnation=str(number),
            key=self._agent_key(name),
            master=self._master_peer(),
            pid=self._num_born,
            home=host,
            restart_master=self._restart_master,
        )
        agent.on_exit = self._agent_ended
        agent.endpoint.accepted = self.invariants.watch_messages(name, str(number))
        agent.boot(0.01 * self.world.random.random())
        if host.name == "host-0" and number and self.process("master-0") is None and self.outcome is None:
            self._restart_master()

    def _agent_ended(self, agent: SimulatedProcess, status: int) -> None:
        """Restart an agent, unless it ended with the run."""
        host = self.hosts[agent.host]
        host.agent = None
        if status == 0:
            return
        delay_s = self.world.random.uniform(*RESTART_S)
        self.world.after(delay_s, self._start_agent_again, host, agent.name)

    def _start_agent_again(self, host: SimulatedHost, name: str) -> None:
        if host.agent is None and self.outcome is None:
            self._start_agent(host, name)

    def _restart_master(self) -> None:
        delay_s = self.world.random.uniform(*RESTART_S)
        self.world.after(delay_s, self._adopt)

    def _adopt(self) -> None:
        host = self.hosts["host-0"]
        if host.agent is not None and self.process("master-0") is None and self.outcome is None:
            self._start_master(adopting=True)

    def _start_master(self, *, resumed: bool = False, adopting: bool = False) -> None:
        self._num_masters += 1
        incarnation = str(self._num_masters)
        self.disk = self.disk.restarted()
        try:
            master = self._new_master_process(incarnation)
        except Exception as error:  # noqa: BLE001 - a journal that can not be folded is what this simulator looks for.
            self.invariants.violated(f"the journal can not be taken over: {described(error)}")
            return
        self.master = master
        home = self.hosts["host-0"]
        home.adopt(master)
        self.injector.master_born(master)
        for index, host in enumerate(self.hosts.values()):
            # Every agent of the session has the key that its launcher made, also a restarting one.
            name = process_id(Role.AGENT, index)
            known = Peer(name, str(self._agents[name]), host.name, "", self._agent_key(name))
            master.endpoint.admit(known if host.agent is None else host.agent.peer)
        step, path = 0, None
        if resumed:
            reached = master.master.state.step
            there = {path: saved for path, saved in self._saved_steps().items() if saved <= reached}
            path = max(there, key=there.__getitem__, default=None)
            step = there[path] if path is not None else 0
        began = Began(
            "simulated", "", incarnation, resumed, step, path, adopting and bool(master.master.state.job)
        )
        master.begin(began)

    def _new_master_process(self, incarnation: str) -> SimulatedMaster:
        return SimulatedMaster(
            self.network,
            self.world,
            name="master-0",
            role=Role.MASTER,
            host="host-0",
            incarnation=incarnation,
            key=b"key of master-0",
            address=MASTER_ADDRESS,
            config=self.config,
            layout=self.layout,
            disk=self.disk,
            observer=self.invariants,
            num_rows=self._num_rows,
            requests=self.requests,
            new_master=self._new_master,
            on_finish=self._finished,
        )

    def _finished(self, outcome: str) -> None:
        if outcome == "stopped" and self.injector.resumes:
            self.injector.resumes = False
            assert self.master is not None
            self.master.on_exit = lambda process, status: None
            self.world.after(0.0, self.master.end, 0)
            self.world.after(0.1, self._resume)
        else:
            self.outcome = outcome

    def _spawn(self, host: SimulatedHost, order: StartProcess, term: int) -> SimulatedWorker:
        self._num_born += 1
        agent = host.agent
        assert agent is not None
        make: Callable[..., SimulatedWorker] = {
            Role.ROLLOUT: SimulatedRollout,
            Role.SERVER: SimulatedServer,
            Role.MANAGER: SimulatedManager,
            Role.MODEL: self._new_rank,
        }[order.role]
        worker = make(
            self.network,
            self.world,
            name=order.process,
            role=order.role,
            host=host.name,
            incarnation=order.incarnation,
            key=f"key {self._num_born}".encode(),
            term=term,
            master=agent.endpoint.directory.peers["master-0"],
            pid=self._num_born,
        )
        worker.endpoint.accepted = self.invariants.watch_messages(worker.name, worker.incarnation)
        self.injector.worker_started(worker)
        worker.boot(self.world.random.uniform(*IMPORT_S))
        return worker

    def _new_rank(self, *arguments: object, **names: object) -> SimulatedRank:
        memory = self.hosts[str(names["host"])].memory
        actor = self.config.actor
        return SimulatedRank(
            *arguments,
            rendezvous=self._rendezvous,
            memory=memory,
            flow=self._flow,
            num_ranks=actor.workers,
            mesh=mesh_of(actor.layout),
            violated=self.invariants.violated,
            **names,
        )


def undisturbed(config: Config, *, flow: Flow = Flow.ROLLBACK, num_rows: int = 1000) -> Reference:
    """Return the result of a configuration without faults."""
    outcome = SimulatedCluster(config, seed=0, flow=flow, num_rows=num_rows).run()
    assert outcome.outcome == "finished" and not outcome.violations, outcome.violations
    return outcome.reference
