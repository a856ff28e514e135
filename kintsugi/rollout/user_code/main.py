"""User process: a child of the rollout worker in which the user's rewards, environments and agent programs run.

User code is isolated because nothing is known about it. Code that hangs, even while holding the GIL, is killed with the
process. Code that crashes the process loses no trajectories, and the worker's heartbeats continue. Code that uses CUDA
finds a process that was executed, not forked. The process ends with the worker: by the parent-death signal, or when the
socket is closed.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Protocol

import msgspec

from kintsugi.config.schema import Config
from kintsugi.errors import UserError
from kintsugi.rollout.rewards.spec import load_rewards
from kintsugi.rollout.sandbox.sandbox import permit_unsandboxed
from kintsugi.rollout.user_code.channel import OpenUserCode, UserCodeRefused, attempt_send, receive
from kintsugi.rollout.user_code.reward_runner import RewardRunner
from kintsugi.runtime.proc import die_with_parent
from kintsugi.runtime.stacks import enable_stack_dumps


def main(descriptor: int, parent: int) -> None:
    """Run the process; `process.py` starts it with the worker's `sys.path`."""
    die_with_parent()
    if os.getppid() != parent:
        return
    enable_stack_dumps()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    content = receive(connection)
    assert content is not None, "the opening was sent before this process was executed"
    config = msgspec.msgpack.decode(content, type=OpenUserCode).config
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("kintsugi").setLevel(logging.INFO)
    permit_unsandboxed(config.rollout.allow_unsandboxed)
    try:
        runner = _opened(config, connection)
    except UserError as error:
        attempt_send(connection, UserCodeRefused(str(error)))
        return
    runner.run()


class _Runner(Protocol):
    def run(self) -> None:
        """Serve requests until the worker closes the connection."""
        ...


def _opened(config: Config, connection: socket.socket) -> _Runner:
    """Create the runner that the recipe needs: one for episodes of an environment, or one for reward functions."""
    if config.rollout.environment is None:
        rewards = load_rewards(config.algorithm.reward)
        return RewardRunner(connection, rewards, timeout_s=config.rollout.reward_timeout_s)
    # Imported here: a process for reward functions needs neither, and starts a third faster without them.
    from kintsugi.model.plan import plan_model
    from kintsugi.rollout.user_code.env_runner import open_player
    from kintsugi.rollout.user_code.episode_runner import EpisodeRunner

    _, tokenizer = plan_model(config)
    player = open_player(config, tokenizer)
    return EpisodeRunner(connection, player, timeout_s=config.rollout.turn_timeout_s)
