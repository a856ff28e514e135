"""Reward functions for tests: well-behaved, and wrong in every way. They tell what happened in files of a folder."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = "KINTSUGI_TEST_FOLDER"


def told(name: str) -> list[str]:
    """What functions wrote under a name, in any process."""
    file = Path(os.environ[FOLDER]) / name
    return file.read_text().splitlines() if file.exists() else []


def tell(name: str, text: str) -> None:
    with (Path(os.environ[FOLDER]) / name).open("a") as file:
        file.write(f"{text}\n")


def half(completions: list[str], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def broken(completions: list[str], **columns: Any) -> list[float]:
    tell("broken", str(len(completions)))
    raise RuntimeError("no verdict")


def interrupting(completions: list[str], **columns: Any) -> list[float]:
    raise KeyboardInterrupt("stop")


def forking(completions: list[str], **columns: Any) -> list[float]:
    """Returns twice."""
    os.fork()
    return [1.0] * len(completions)


def closing(completions: list[str], **columns: Any) -> list[float]:
    os.closerange(3, 65536)  # The connection may have a high number where many files are open.
    time.sleep(60)
    return [1.0] * len(completions)


def babbling(completions: list[str], **columns: Any) -> list[float]:
    """Writes what is no message to whoever listens."""
    for name in os.listdir("/proc/self/fd"):
        link = Path(f"/proc/self/fd/{name}")
        if link.is_socket():
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type == socket.SOCK_SEQPACKET:
                    connection.send(b"i\xc1")
    time.sleep(60)
    return [1.0] * len(completions)


def exiting(completions: list[str], **columns: Any) -> list[float]:
    sys.exit("enough")


def hanging_once(completions: list[str], **columns: Any) -> list[float]:
    """Hangs the first time that it is called."""
    if not told("hanging"):
        tell("hanging", str(os.getpid()))
        time.sleep(60)
    return [1.0] * len(completions)


def hanging_on_x(completions: list[str], **columns: Any) -> list[float]:
    """On x it waits for a program that it has started."""
    tell("hanging", completions[0])
    if "x" in completions:
        with subprocess.Popen(["sleep", "60"]) as started:
            tell("started", str(started.pid))
    return [1.0] * len(completions)


def killing_on_x(completions: list[str], **columns: Any) -> list[float]:
    tell("killing", completions[0])
    if "x" in completions:
        started = subprocess.Popen(["sleep", "60"])
        tell("started", str(started.pid))
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * len(completions)


def some_unjudged(completions: list[str], **columns: Any) -> list[Any]:
    """None, NaN, text and an exception, in turn, for all but the first completion."""
    return [1.0, None, float("nan"), "0.5", ValueError("no such unit")][: len(completions)]


def too_few(completions: list[str], **columns: Any) -> list[float]:
    return [1.0]


def nothing(completions: list[str], **columns: Any) -> None:
    return None


def not_async(completions: list[str], **columns: Any) -> Any:
    return meeting(completions)


async def meeting(completions: list[str], **columns: Any) -> list[float]:
    """Ends only when three groups are in it at once."""
    tell("meeting", completions[0])
    while len(told("meeting")) < 3:  # noqa: ASYNC110 - an event of one process is not one of another
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)


async def async_wrong(completions: list[str], **columns: Any) -> Any:
    """Wrong in the way that the first completion says."""
    match completions[0]:
        case "hangs":
            await asyncio.sleep(60)
        case "cancels":
            raise asyncio.CancelledError("by itself")
        case "exits":
            sys.exit("enough")
    return "nonsense"


async def async_blocking_on_x(completions: list[str], **columns: Any) -> list[float]:
    """Sleeps without awaiting: nothing else in the loop goes on."""
    tell("blocking", completions[0])
    if "x" in completions:
        time.sleep(60)  # noqa: ASYNC251 - this is what is wrong with it
    return [1.0] * len(completions)


def one_thread(completions: list[str], **columns: Any) -> list[float]:
    """Says in which process it ran, and what that had imported."""
    tell("process", f"{os.getpid()} {'torch' in sys.modules} {'kintsugi.rollout.worker' in sys.modules}")
    return [1.0] * len(completions)
