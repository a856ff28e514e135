"""Train worker: one rank, which executes HTTP requests of the controller, one at a time."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save as serialize

from kintsugi.errors import DeviceOutOfMemory, StorageError, WorldError
from kintsugi.lab.fragile.device import DeviceOwner, SharedDevice, allocate_with_retry, demand_of, device_path
from kintsugi.lab.fragile.directory import META_SERVER, TRAIN_PORT, address_of, announce
from kintsugi.lab.fragile.messages import (
    CommitFragileStep,
    NotifyEvent,
    Rendezvous,
    SaveCheckpoint,
    StartFragileStage,
    TrainBatch,
    Uploaded,
    UploadShard,
)
from kintsugi.lab.fragile.metaserver import MetaClient
from kintsugi.lab.fragile.process import FragileProcess, begin
from kintsugi.lab.fragile.rpc import EngineError, RpcServer
from kintsugi.lab.fragile.storage import write_checkpoint
from kintsugi.lab.fragile.timeouts import HOUR_S, TRANSFER_S
from kintsugi.lab.fragile.trainer import Trainer, read_weights, return_freed_memory
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.protocol.training import CallDone
from kintsugi.types import Role, process_id

log = logging.getLogger("train")

_JOIN_S = 60.0


class FragileTrainWorker:
    """Consumes requests; waits for the other ranks, the meta-server and the disk."""

    def __init__(self, process: FragileProcess) -> None:
        self._process = process
        self._config = config = process.config
        self._needs = demand_of(config)
        self._ranks = [process_id(Role.MODEL, index) for index in range(config.actor.workers)]
        self._trainer = Trainer(config, process=process.name, host=process.host)
        self._device: SharedDevice | None = None
        self._holds = False
        if process.shares_device:
            self._device = SharedDevice(device_path(process.run_dir, process.index))
            self._take(self._device)

    def serve(self) -> None:
        server = RpcServer(
            {
                "/rendezvous": lambda body: Rendezvous(self._trainer.store),
                "/join": self._join,
                "/start_stage": self._start_stage,
                "/train_batch": self._train_batch,
                "/commit": self._commit,
                "/upload_weights": self._upload_weights,
                "/save": self._save,
                "/notify_event": self._notify_event,
            },
            host=self._process.host,
            port=self._process.port(TRAIN_PORT + self._process.index),
            known_as=self._process.known_as,
        )
        announce(self._process.run_dir, self._process.name, server.address)
        log.info("%s serves at %s:%d", self._process.name, server.address.host, server.address.port)
        server.serve()

    def _join(self, body: bytes) -> None:
        store = msgspec.msgpack.decode(body, type=Rendezvous).store
        self._trainer.join(self._ranks, store=store, timeout_s=_JOIN_S)

    def _start_stage(self, body: bytes) -> None:
        order = msgspec.msgpack.decode(body, type=StartFragileStage)
        self._trainer.start_stage(order.stage, step=order.step)

    def _train_batch(self, body: bytes) -> CallDone:
        order = msgspec.msgpack.decode(body, type=TrainBatch)
        log.info("Received /train_batch request, step %d, %s", order.call.step, order.call.call)
        if self._device is None:
            return self._trainer.run(order.call, order.trajectories)
        try:
            if not self._holds:
                neighbour = process_id(Role.ROLLOUT, self._process.index)
                allocate_with_retry(
                    self._device,
                    DeviceOwner.TRAIN,
                    self._needs.train,
                    whom=neighbour,
                    timeout_s=self._process.scale.of(HOUR_S),
                )
                self._holds = True
            with self._device.computing(DeviceOwner.TRAIN):
                return self._trainer.run(order.call, order.trajectories)
        except DeviceOutOfMemory as error:
            raise EngineError(f"TrainEngineError: {error}") from error

    def _commit(self, body: bytes) -> None:
        self._trainer.commit(msgspec.msgpack.decode(body, type=CommitFragileStep).step)

    def _upload_weights(self, body: bytes) -> Uploaded:
        order = msgspec.msgpack.decode(body, type=UploadShard)
        if order.checkpoint:
            return self._check_checkpoint(Path(order.checkpoint))
        log.info("upload_weights begin, version %d", order.version)
        client = MetaClient(
            address_of(self._process.run_dir, META_SERVER), timeout_s=self._process.scale.of(TRANSFER_S)
        )
        weights = self._trainer.weights()
        mine = [
            name for number, name in enumerate(weights) if number % len(self._ranks) == self._process.index
        ]
        try:
            for name in mine:
                client.put(f"{order.version}/{name}", serialize({name: weights[name].contiguous().clone()}))
        except WorldError as error:
            raise EngineError(
                f"TrainEngineError: UploadWeightsError: Upload weights request timeout: {error}"
            ) from error
        log.info("upload_weights success, version %d, %d tensors", order.version, len(mine))
        return Uploaded(tuple(weights))

    def _check_checkpoint(self, folder: Path) -> Uploaded:
        log.info("upload_weights begin, type=disk")
        log.info("Reading checkpoint from %s", folder)
        try:
            weights = read_weights(folder, dtype=getattr(torch, self._config.actor.dtype))
        except StorageError as error:
            log.error("%s", error)
            raise EngineError("TrainEngineError: UploadWeightsError: Invalid checkpoint format") from error
        return Uploaded(tuple(weights))

    def _save(self, body: bytes) -> None:
        order = msgspec.msgpack.decode(body, type=SaveCheckpoint)
        log.info("Saving checkpoint of step %d to %s", order.step, order.folder)
        try:
            write_checkpoint(
                Path(order.folder), self._trainer.files(), timeout_s=self._process.scale.of(TRANSFER_S)
            )
        except StorageError as error:
            log.error("Checkpoint save failed, but some files already written")
            raise EngineError(f"TrainEngineError: SaveError: {error}") from error

    def _notify_event(self, body: bytes) -> None:
        """Handle the event of a rollout worker that takes the device or returns it."""
        event = msgspec.msgpack.decode(body, type=NotifyEvent).event
        log.info("Received event %s", event)
        assert self._device is not None, "only workers that share a device are notified"
        if event == "rollout_start":
            self._device.release(DeviceOwner.TRAIN)
            self._holds = False
        else:
            self._take(self._device)

    def _take(self, device: SharedDevice) -> None:
        device.allocate(DeviceOwner.TRAIN, self._needs.train)
        self._holds = True


def main(bootstrap: Bootstrap) -> int:
    return_freed_memory()
    FragileTrainWorker(begin(bootstrap)).serve()
    return 0
