"""The ways out of a rank for its weights: every transport that `weights.choice` may ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kintsugi.cluster.segments import SegmentClient
from kintsugi.messages import Body
from kintsugi.observe.events import Alert
from kintsugi.transport import Blob
from kintsugi.weights.collective import CollectiveOutlet
from kintsugi.weights.device import DeviceSlots
from kintsugi.weights.publish import Publisher
from kintsugi.weights.stream import Answer
from kintsugi.weights.upload import UploadOutlet
from kintsugi.worker import Shell

FOLDER = "weights"
"""Of the run folder: versions for the transport `disk`, by rank."""


def open_publisher(
    shell: Shell, *, device: torch.device, segments: SegmentClient | None, store: str
) -> Publisher:
    """`store` is where the servers of a collective meet."""

    def say(message: str) -> None:
        shell.events.emit(Alert(message))

    def submit(process: str, body: Body, blobs: Sequence[Blob], deadline_s: float) -> Answer:
        return shell.submit(process, body, deadline_s=deadline_s, blobs=blobs)

    host = shell.bootstrap.host
    return Publisher(
        process=shell.process,
        host=host,
        segments=segments,
        folder=Path(shell.bootstrap.run_dir).absolute() / FOLDER / shell.process,
        card=DeviceSlots(device, host=host) if device.type == "cuda" else None,
        outlets=(
            CollectiveOutlet(process=shell.process, store=store, say=say),
            UploadOutlet(submit, process=shell.process, say=say),
        ),
    )
