"""Links between hosts as a test wants them: a shim in front of the rollout workers' answers to ranks of other hosts.

`KINTSUGI_TEST_LINKS` is a list of words: `delay=0.03` makes a link that lets one request through at a time and takes so
many seconds for each; `corrupt=5` changes a byte of the first sample in a worker's fifth answer, `corrupt=5+` in all
from there on; `die=25` ends the worker that is first asked 25 times, as SIGKILL would. What struck leaves a file in
`<run>.gates`.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec


class Links:
    """The words, how often this process was asked from other hosts, and what is on its way there."""

    def __init__(self, words: str) -> None:
        self._options = dict(word.split("=") for word in words.split(","))
        self._numbers = itertools.count(1)
        self._free_at: dict[str, float] = {}
        """By host: when its link has let through what is on it."""
        self._travelling: deque[tuple[float, Any, tuple[str, ...]]] = deque()
        self._gates = Path(os.environ["KINTSUGI_TEST_RUN"]).with_suffix(".gates")

    def change(self, module: ModuleType) -> None:
        """Put the shim around the answers of `RolloutWorker` and into its waiting for requests."""
        worker = module.RolloutWorker
        hand_over, attempt = worker._hand_over, worker._attempt

        def handed_over(this: Any, delivery: Any, keys: tuple[str, ...]) -> None:
            host = delivery.peer.host
            if host == this.membership._register.peer.host:
                hand_over(this, delivery, keys)
                return
            delay_s = float(self._options.get("delay", "0"))
            due = max(time.monotonic(), self._free_at.get(host, 0.0)) + delay_s
            self._free_at[host] = due
            self._travelling.append((due, delivery, keys))
            threading.Timer(due - time.monotonic(), this.endpoint.wake).start()

        def attempted(this: Any, remaining_s: float) -> Any:
            for _, delivery, keys in self._arrived():
                number = next(self._numbers)
                if number == int(self._options.get("die", "0")):
                    self._die_once()
                if self._corrupts(number):
                    self._answer_wrongly(this, delivery, keys)
                else:
                    hand_over(this, delivery, keys)
            return attempt(this, remaining_s)

        worker._hand_over, worker._attempt = handed_over, attempted

    def _arrived(self) -> list[tuple[float, Any, tuple[str, ...]]]:
        now = time.monotonic()
        arrived = [each for each in self._travelling if each[0] <= now]
        self._travelling = deque(each for each in self._travelling if each[0] > now)
        return arrived

    def _corrupts(self, number: int) -> bool:
        which = self._options.get("corrupt", "0")
        return number == int(which.rstrip("+")) or (which.endswith("+") and number > int(which[:-1]))

    def _answer_wrongly(self, worker: Any, delivery: Any, keys: tuple[str, ...]) -> None:
        from kintsugi.protocol.rollout import SamplesFetched

        samples = [worker._finished[key.rpartition("/")[0]].trajectories[key] for key in keys]
        tokens = bytes([samples[0].tokens[0] ^ 1]) + samples[0].tokens[1:]
        samples[0] = msgspec.structs.replace(samples[0], tokens=tokens)
        (self._gates / "corrupted").write_text(keys[0])
        worker.endpoint.reply(delivery, SamplesFetched(tuple(samples)))

    def _die_once(self) -> None:
        try:
            with (self._gates / "died").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
