"""Service discovery: one file per name in the run folder, readable by every process."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from kintsugi.errors import UserError
from kintsugi.runtime.disk import write_atomically
from kintsugi.runtime.waits import wait

ADDRESSES_FOLDER = "addresses"
META_SERVER = "meta"
STORE = "store"
"""Name of the rendezvous store of plain fine-tuning, on the first rank."""
META_PORT, SCHEDULER_PORT, TRAIN_PORT, ROLLOUT_PORT = 8080, 8081, 8100, 8200
"""Ports on isolated hosts; workers add their index."""
_POLL_S = 0.02


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int


def announce(run_dir: Path, name: str, address: Address) -> None:
    folder = run_dir / ADDRESSES_FOLDER
    folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{name}.json", msgspec.json.encode(address), durable=False)


def find(run_dir: Path, name: str, *, timeout_s: float) -> Address:
    """Wait until a process has announced its address."""

    def attempt(remaining_s: float) -> Address | None:
        try:
            return address_of(run_dir, name)
        except UserError:
            time.sleep(min(_POLL_S, remaining_s))
            return None

    return wait(attempt, whom=name, what="its address", timeout_s=timeout_s)


def address_of(run_dir: Path, name: str) -> Address:
    path = run_dir / ADDRESSES_FOLDER / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except FileNotFoundError as error:
        known = sorted(each.stem for each in path.parent.glob("*.json"))
        raise UserError(f"expected one of {', '.join(known) or 'none yet'}, got {name!r}") from error
