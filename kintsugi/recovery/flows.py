"""The operations of each flow, in order, beside the names that MindIO and the training frameworks have for them.

python -m kintsugi.recovery.flows > docs/recovery.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kintsugi.protocol.recovery import (
    DeviceClean,
    DeviceStop,
    NotifyNormal,
    PreLock,
    RebuildGroup,
    Repair,
    Rollback,
)
from kintsugi.recovery.rank import FLOWS, Flow, Operation
from kintsugi.recovery.states import STEPS, RecoveryState, markdown

_S = RecoveryState

MESSAGES: Mapping[RecoveryState, type[Operation]] = {
    _S.PRE_LOCKING: PreLock,
    _S.DEVICE_STOPPING: DeviceStop,
    _S.DEVICE_CLEANING: DeviceClean,
    _S.REBUILDING: RebuildGroup,
    _S.REPAIRING: Repair,
    _S.ROLLING_BACK: Rollback,
    _S.NOTIFYING: NotifyNormal,
}
"""Operation that the ranks carry out in a state; in the others they carry out none."""


class Names(NamedTuple):
    """Names of an operation elsewhere."""

    mindio: str
    """State of MindIO's controller, and the operation that it sends to its processors."""
    framework: str
    """Call or effect in the framework, on an Ascend NPU."""


_ABNORMAL, _CLEAR, _REPAIR = "STATE_OP_ABNORMAL", "STATE_OP_ENV_CLEAR", "STATE_OP_REPAIR"

NAMES: Mapping[Flow, Mapping[type[Operation], Names]] = {
    Flow.ROLLBACK: {
        PreLock: Names(f"`{_ABNORMAL}`, `OP_PRELOCK`", "every rank pauses after one step"),
        DeviceStop: Names(f"`{_CLEAR}`, `OP_DEVICE_STOP`", "stop callback: `stop_device`"),
        DeviceClean: Names(f"`{_CLEAR}`, `OP_DEVICE_CLEAN`", "clean callback: `restart_device`"),
        RebuildGroup: Names(f"`{_REPAIR}`", "rebuild callback: process groups destroyed and created"),
        Repair: Names(f"`{_REPAIR}`, `OP_REPAIR`", "repair callback: state from a replica"),
        Rollback: Names(f"`{_REPAIR}`, `OP_ROLLBACK`", "rollback callback"),
        NotifyNormal: Names("`STATE_OP_NORMAL`, `OP_NOTIFY_NORMAL`", "training goes on"),
    },
    Flow.RESTORE: {
        PreLock: Names(f"`{_ABNORMAL}`, `OP_PRELOCK`", "every rank pauses after one step"),
        DeviceStop: Names(f"`{_CLEAR}`, `OP_DEVICE_STOP`", "`_tft_stop_callback`: `_stop_device`"),
        DeviceClean: Names(
            f"`{_CLEAR}`, `OP_DEVICE_CLEAN`", "`_tft_clean_callback`: `_reset_snapshot_state`"
        ),
        RebuildGroup: Names(
            f"`{_REPAIR}`",
            "`_tft_rebuild_groups`: `_finalize_comm`, `_rebuild_group`, `set_is_arf`",
        ),
        Repair: Names(f"`{_REPAIR}`, `OP_REPAIR`", "`_tft_repair_callback`: state from a replica"),
        NotifyNormal: Names("`STATE_OP_NORMAL`, `OP_NOTIFY_NORMAL`", "training goes on"),
    },
}

_TITLES = {
    Flow.ROLLBACK: ("PyTorch: the flow with a rollback", "MindSpeed, torch_npu"),
    Flow.RESTORE: ("MindSpore: the flow without a rollback", "MindSpore"),
}


def flow_markdown(flow: Flow) -> str:
    """Return the table of one flow: every state of a recovery, and the operation in it."""
    title, framework = _TITLES[flow]
    head = f"| state | operation | MindIO | {framework} | ends when |"
    return "\n".join([f"## {title}", "", head, "|---|---|---|---|---|", *_rows(flow), ""])


def _rows(flow: Flow) -> Iterator[str]:
    for state, event in STEPS:
        operation = MESSAGES.get(state)
        if operation is None:
            yield f"| {state} | | | | {event} |"
        elif operation not in FLOWS[flow]:
            yield f"| {state} | left at once | | | |"
        else:
            mindio, framework = NAMES[flow][operation]
            yield f"| {state} | `{operation.__name__}` | {mindio} | {framework} | {event} |"


def page() -> str:
    """Return `docs/recovery.md`."""
    return "\n".join([markdown(), *map(flow_markdown, Flow)])


if __name__ == "__main__":
    sys.stdout.write(page())
