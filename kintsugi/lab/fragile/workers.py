"""The controller's view of the workers: names, addresses, and calls to several of them concurrently."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec

from kintsugi.lab.fragile import messages
from kintsugi.lab.fragile.directory import Address, find
from kintsugi.lab.fragile.process import FragileProcess
from kintsugi.lab.fragile.rpc import CallFailed, WorkerGone, begin, call, request, wait_future_ordered
from kintsugi.lab.fragile.scheduler import SCHEDULER
from kintsugi.lab.fragile.timeouts import NOTIFY_S, REQUEST_S, STOP_JOB_S
from kintsugi.protocol.training import CallDone, RunCall
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.types import Role, Trajectory, process_id

log = logging.getLogger("workers")

T = TypeVar("T")
_START_S = 120.0
"""Not scaled: the start-up time of a process does not shrink."""


class Workers:
    """Calls run in threads; results are awaited in the order of the workers' names."""

    def __init__(self, process: FragileProcess) -> None:
        self._process = process
        config = process.config
        self._names = {
            Role.MODEL: [process_id(Role.MODEL, index) for index in range(config.actor.workers)],
            Role.ROLLOUT: [process_id(Role.ROLLOUT, index) for index in range(config.rollout.workers)],
        }
        self._scheduler = find(process.run_dir, SCHEDULER, timeout_s=_START_S)
        self._addresses: dict[str, Address] = {}
        self._jobs: list[str] = []
        self._request_s = process.scale.of(REQUEST_S)

    def names(self, role: Role) -> list[str]:
        return self._names[role]

    def start(self) -> None:
        """Start both jobs, and let the ranks form their process group."""
        for name, role in (("train_worker", Role.MODEL), ("rollout_worker", Role.ROLLOUT)):
            order = messages.StartJob(name, tuple(self._names[role]))
            job = request(
                self._scheduler, "/start", order, peer=SCHEDULER, kind=messages.JobSpec, timeout_s=_START_S
            )
            log.info("Started job %s", job.uid)
            self._jobs.append(job.uid)
        for names in self._names.values():
            for name in names:
                self._addresses[name] = find(self._process.run_dir, name, timeout_s=_START_S)
        first = self._names[Role.MODEL][0]
        rendezvous = request(
            self._addresses[first],
            "/rendezvous",
            messages.Empty(),
            peer=first,
            kind=messages.Rendezvous,
            timeout_s=_START_S,
        )
        self.each(Role.MODEL, "/join", rendezvous)

    def each(self, role: Role, path: str, body: msgspec.Struct) -> None:
        """Send the same request to all workers of a role."""
        names = self._names[role]
        self.wait_ordered([self._begin(name, path, body) for name in names], whom=", ".join(names), what=path)

    def first(self, path: str, body: msgspec.Struct) -> None:
        """Send a request to the first train worker, which is responsible for checkpoints."""
        name = self._names[Role.MODEL][0]
        self.wait_ordered([self._begin(name, path, body)], whom=name, what=path)

    def update_weights(self, update: messages.UpdateWeights, upload: messages.UploadShard) -> None:
        """Upload and download the weights concurrently."""
        receiving = self._begin_update(update)
        sending = [self._begin(name, "/upload_weights", upload) for name in self._names[Role.MODEL]]
        self.wait_ordered(receiving + sending, whom="all workers", what="weights")

    def update_by_checkpoint(self, update: messages.UpdateWeights, upload: messages.UploadShard) -> None:
        """Check the checkpoint first, then load it."""
        self.first("/upload_weights", upload)
        self.wait_ordered(self._begin_update(update), whom="rollout workers", what="weights")

    def _begin_update(self, update: messages.UpdateWeights) -> list[Future[bytes]]:
        """Start the update of all rollout workers; those that are gone are skipped."""

        def one(name: str) -> bytes:
            try:
                return call(
                    self._addresses[name], "/update_weights", update, peer=name, timeout_s=self._request_s
                )
            except WorkerGone as error:
                log.warning("%s takes no weights: %s", name, error)
                return b""

        return [begin(partial(one, name), name=f"{name}/update") for name in self._names[Role.ROLLOUT]]

    def roll_out(
        self, prompts: Sequence[messages.Prompt], *, step: int
    ) -> dict[str, Future[messages.RolledOut]]:
        """Distribute the prompts over the rollout workers."""
        names = self._names[Role.ROLLOUT]
        return {
            name: self._begin_request(
                name,
                "/rollout",
                messages.RolloutOrder(step, tuple(prompts[number :: len(names)])),
                kind=messages.RolledOut,
            )
            for number, name in enumerate(names)
        }

    def train(
        self, calls: Mapping[str, RunCall], trajectories: Mapping[str, Trajectory]
    ) -> dict[str, CallDone]:
        """Send each rank its part of a call, with the samples."""
        pending = [
            self._begin_request(
                name,
                "/train_batch",
                messages.TrainBatch(
                    each,
                    {item.key: trajectories[item.key] for shard in each.shards for item in shard.items},
                ),
                kind=CallDone,
            )
            for name, each in calls.items()
        ]
        answers = self.wait_ordered(pending, whom=", ".join(calls), what="/train_batch")
        return dict(zip(calls, answers, strict=True))

    def notify(self, event: messages.NotifyEvent) -> dict[str, CallFailed]:
        """Notify the rollout workers that share a device; return the failures."""
        timeout_s = self._process.scale.of(NOTIFY_S)
        pending = {
            name: self._begin(name, "/notify_event", event, timeout_s=timeout_s)
            for name in self._names[Role.ROLLOUT][: self._process.num_shared]
        }
        failures = {}
        for name, future in pending.items():
            try:
                self.wait_ordered([future], whom=name, what="/notify_event")
            except CallFailed as error:
                failures[name] = error
        return failures

    def clean_up(self) -> None:
        """Stop the jobs; errors are logged and otherwise ignored, since the run ends anyway."""
        for uid in self._jobs:
            log.info("Stopping job with UID: %s", uid)
            try:
                self._stop(messages.JobSpec(uid))
            except CallFailed as error:
                log.error("Error stopping job %s: failed to stop job: timeout (%s)", uid, error)
        log.info("scheduler cleanup_jobs finished")

    def _stop(self, job: messages.JobSpec) -> None:
        """Check that the job exists, cancel it, check that it is gone, within half a minute in total."""
        deadline = SYSTEM_CLOCK.monotonic() + self._process.scale.of(STOP_JOB_S)
        for path in ("/status", "/cancel", "/status"):
            remaining_s = deadline - SYSTEM_CLOCK.monotonic()
            call(self._scheduler, path, job, peer=SCHEDULER, timeout_s=remaining_s)

    def wait_ordered(self, pending: Sequence[Future[T]], *, whom: str, what: str) -> list[T]:
        return wait_future_ordered(pending, whom=whom, what=what, timeout_s=2 * self._request_s)

    def _begin(
        self, name: str, path: str, body: msgspec.Struct, *, timeout_s: float | None = None
    ) -> Future[bytes]:
        """Start a call without a response body."""
        address = self._addresses[name]
        limit_s = self._request_s if timeout_s is None else timeout_s
        return begin(lambda: call(address, path, body, peer=name, timeout_s=limit_s), name=f"{name}{path}")

    def _begin_request(self, name: str, path: str, body: msgspec.Struct, *, kind: type[T]) -> Future[T]:
        address, limit_s = self._addresses[name], self._request_s
        return begin(
            lambda: request(address, path, body, peer=name, kind=kind, timeout_s=limit_s),
            name=f"{name}{path}",
        )
