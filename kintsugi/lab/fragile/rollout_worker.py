"""Rollout worker: an engine that generates and scores samples for the controller, one request at a time.

Where it shares a device with a train worker, the controller's `rollout_start` makes it request the device from that
worker, and `rollout_end` return it. A rollout request without the event starts anyway, as soon as there is memory.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from safetensors.torch import load as deserialize
from torch import Tensor

from kintsugi.errors import DeviceOutOfMemory, WorldError
from kintsugi.lab.fragile.device import DeviceOwner, SharedDevice, allocate_with_retry, demand_of, device_path
from kintsugi.lab.fragile.directory import META_SERVER, ROLLOUT_PORT, address_of, announce
from kintsugi.lab.fragile.messages import NotifyEvent, RolledOut, RolloutOrder, UpdateWeights
from kintsugi.lab.fragile.metaserver import MetaClient
from kintsugi.lab.fragile.process import FragileProcess, begin
from kintsugi.lab.fragile.rpc import EngineError, RpcServer, call
from kintsugi.lab.fragile.sampler import Sampler
from kintsugi.lab.fragile.timeouts import HOUR_S, NOTIFY_S, TRANSFER_S
from kintsugi.lab.fragile.trainer import read_weights
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.types import Role, process_id

log = logging.getLogger("rollout")


class FragileRolloutWorker:
    """Consumes requests; waits for the meta-server and for memory of the device."""

    def __init__(self, process: FragileProcess) -> None:
        self._process = process
        self._needs = demand_of(process.config)
        self._sampler = Sampler(process.config, process=process.name)
        self._device: SharedDevice | None = None
        self._holds = False
        if process.shares_device:
            self._device = SharedDevice(device_path(process.run_dir, process.index))

    def serve(self) -> None:
        server = RpcServer(
            {
                "/update_weights": self._update_weights,
                "/rollout": self._rollout,
                "/notify_event": self._notify_event,
            },
            host=self._process.host,
            port=self._process.port(ROLLOUT_PORT + self._process.index),
            known_as=self._process.known_as,
        )
        announce(self._process.run_dir, self._process.name, server.address)
        log.info("%s serves at %s:%d", self._process.name, server.address.host, server.address.port)
        server.serve()

    def _update_weights(self, body: bytes) -> None:
        order = msgspec.msgpack.decode(body, type=UpdateWeights)
        log.info("update_weights begin, version %d", order.version)
        try:
            tensors = self._fetch(order)
        except WorldError as error:
            raise EngineError(
                f"InferenceEngineError: UpdateWeightError: Failed to update weights: {error}"
            ) from error
        self._sampler.load(order.version, tensors)
        log.info("update_weights success, version %d", order.version)

    def _fetch(self, order: UpdateWeights) -> dict[str, Tensor]:
        if order.checkpoint:
            return read_weights(Path(order.checkpoint), dtype=self._sampler.dtype)
        client = MetaClient(
            address_of(self._process.run_dir, META_SERVER), timeout_s=self._process.scale.of(TRANSFER_S)
        )
        tensors: dict[str, Tensor] = {}
        for name in order.names:
            tensors |= deserialize(client.get(f"{order.version}/{name}"))
        return tensors

    def _rollout(self, body: bytes) -> RolledOut:
        order = msgspec.msgpack.decode(body, type=RolloutOrder)
        log.info("Received /rollout request, step %d, %d prompts", order.step, len(order.prompts))
        if self._device is None:
            return self._sampler.roll_out(order.prompts)
        if not self._holds:
            self._wait_for_memory(self._device)
        with self._device.computing(DeviceOwner.ROLLOUT):
            return self._sampler.roll_out(order.prompts)

    def _wait_for_memory(self, device: SharedDevice) -> None:
        try:
            allocate_with_retry(
                device,
                DeviceOwner.ROLLOUT,
                self._needs.rollout,
                whom=self._neighbour,
                timeout_s=self._process.scale.of(HOUR_S),
            )
        except DeviceOutOfMemory as error:
            raise EngineError(f"InferenceEngineError: RolloutError: {error}") from error
        self._holds = True

    def _take(self, device: SharedDevice) -> None:
        device.allocate(DeviceOwner.ROLLOUT, self._needs.rollout)
        self._holds = True

    @property
    def _neighbour(self) -> str:
        return process_id(Role.MODEL, self._process.index)

    def _notify_event(self, body: bytes) -> None:
        order = msgspec.msgpack.decode(body, type=NotifyEvent)
        log.info("Received event %s, step %d", order.event, order.step)
        assert self._device is not None, "only workers that share a device are notified"
        if order.event == "rollout_start":
            self._notify_neighbour(order)
            self._take(self._device)
        else:
            self._device.release(DeviceOwner.ROLLOUT)
            self._holds = False
            self._notify_neighbour(order)

    def _notify_neighbour(self, order: NotifyEvent) -> None:
        address = address_of(self._process.run_dir, self._neighbour)
        call(
            address,
            "/notify_event",
            order,
            peer=self._neighbour,
            timeout_s=self._process.scale.of(NOTIFY_S),
        )


def main(bootstrap: Bootstrap) -> int:
    FragileRolloutWorker(begin(bootstrap)).serve()
    return 0
