"""The process beside a rollout worker: the user's rewards, environments and agent programs run here.

They have a process of their own because nothing is known about them. Code that hangs, even inside the interpreter's
lock, is killed instead of left behind; code that crashes takes no trajectories with it; code that uses CUDA finds a
process that was executed, not forked. The worker's heartbeats go on meanwhile. The process ends with the worker: by its
kernel's signal, or when the socket is closed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from typing import Protocol

import msgspec

from kintsugi.config import Config
from kintsugi.errors import UserError
from kintsugi.rollout.channel import Opening, Refused, attempt_send, receive
from kintsugi.rollout.judge import Judge
from kintsugi.rollout.sandbox import permit_unsandboxed
from kintsugi.rollout.scoring import load_rewards

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Body of the process; `user_process.py` executes it with the worker's own search path."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        return
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    content = receive(connection)
    assert content is not None, "the opening was sent before this process was executed"
    config = msgspec.msgpack.decode(content, type=Opening).config
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("kintsugi").setLevel(logging.INFO)
    permit_unsandboxed(config.rollout.allow_unsandboxed)
    try:
        runner = _opened(config, connection)
    except UserError as error:
        attempt_send(connection, Refused(str(error)))
        return
    runner.run()


class _Runner(Protocol):
    def run(self) -> None:
        """Until the worker is gone."""
        ...


def _opened(config: Config, connection: socket.socket) -> _Runner:
    """What the run needs of this process: somebody who plays episodes and says what they earn, or judges answers."""
    if config.rollout.environment is None:
        rewards = load_rewards(config.algorithm.reward)
        return Judge(connection, rewards, timeout_s=config.rollout.reward_timeout_s)
    # A process that judges needs neither a tokenizer nor a player, and starts a third sooner without.
    from kintsugi.model.plan import plan_model
    from kintsugi.rollout.players import open_player
    from kintsugi.rollout.playing import Playing

    _, tokenizer = plan_model(config)
    player = open_player(config, tokenizer)
    return Playing(connection, player, timeout_s=config.rollout.turn_timeout_s)
