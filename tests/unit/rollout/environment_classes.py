"""Environments for tests: well-behaved, and wrong in every way. They tell what happened in files of a folder."""

import asyncio
import os
import signal
import threading
import time
from typing import Any

from kintsugi.rollout.environments.protocol import Observation, Step
from kintsugi.types import Row
from tests.unit.rollout.reward_functions import tell, told


class Echo:
    """Says every action back, until it is `9`; that earns 1, every turn before 0.25."""

    def __init__(self, *, stop: str = "") -> None:
        self._stop = (stop,) if stop else ()

    def reset(self, row: Row, *, seed: int) -> Any:
        self.seed = seed
        return Observation(stop=self._stop)

    def step(self, action: str) -> Any:
        done = action.startswith("9")
        return Step(
            f"{action}=", 1.0 if done else 0.25, done=done, info={"said": len(action), "note": "text"}
        )

    def close(self) -> Any:
        return None


class AsyncEcho(Echo):
    async def reset(self, row: Row, *, seed: int) -> Any:
        return super().reset(row, seed=seed)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> None:
        tell("closed", "async")


class Showing(Echo):
    """Shows how it is done: two words, then the end."""

    def __init__(self, *, stop: str = "") -> None:
        super().__init__(stop=stop)
        self._actions = iter(["12+", "9"])

    def demonstrate(self) -> str:
        return next(self._actions)


class Telling(Echo):
    """Tells how often it was begun and closed."""

    def reset(self, row: Row, *, seed: int) -> Any:
        tell("reset", str(seed))
        return "1+1="

    def close(self) -> None:
        tell("closed", "thread")


class Unclear:
    """Like an array of several truth values."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    def __hash__(self) -> int:
        return 0

    def __float__(self) -> float:
        raise RuntimeError("several elements can not be converted to one number")


class Wrong(Echo):
    """Does what `way` says instead of a step."""

    def __init__(self, *, way: str = "") -> None:
        super().__init__()
        self._sampled_groups = way

    def reset(self, row: Row, *, seed: int) -> Any:
        tell("reset", str(os.getpid()))
        if self._sampled_groups == "reset":
            return 17
        if self._sampled_groups == "nothing":
            return ""
        if self._sampled_groups == "foreign":
            return "Ω"
        if self._sampled_groups == "halved":
            return "\ud800"
        if self._sampled_groups == "dict":
            return {"observation": "1+1="}
        if self._sampled_groups == "stops at nothing":
            return Observation(stop=("",))
        return None

    def step(self, action: str) -> Any:
        match self._sampled_groups:
            case "raises":
                raise RuntimeError("no idea")
            case "stops":
                raise StopIteration
            case "exits":
                raise SystemExit("enough")
            case "none":
                return None
            case "nan":
                return Step("", float("nan"), done=True)
            case "number":
                return Step(5, 0.0)  # type: ignore[arg-type]
            case "maybe":
                return ("", 0.0, "maybe", {})
            case "info":
                return ("", 0.0, True, "info")
            case "awaitable":
                return asyncio.sleep(0)
            case "names":
                return ("", 0.0, True, {1: 2.0})
            case "unclear":
                return ("", 0.0, Unclear(), {})
            case "half":
                return Step("\ud800")
            case "omega":
                return Step("Ω")
        return super().step(action)

    def close(self) -> None:
        tell("closed", self._sampled_groups)
        if self._sampled_groups == "close":
            raise RuntimeError("will not close")


class Hanging(Echo):
    """Hangs in its thread the first time that anybody takes a step."""

    def step(self, action: str) -> Any:
        if not told("hanging"):
            tell("hanging", str(os.getpid()))
            time.sleep(60)
        return super().step(action)


class Huge(Echo):
    def step(self, action: str) -> Any:
        return Step("1" * 1_000_000)


class Slow(Showing):
    """Needs most of its time in every call, and never too long."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.6)

    def reset(self, row: Row, *, seed: int) -> Any:
        time.sleep(0.6)
        return super().reset(row, seed=seed)

    def step(self, action: str) -> Any:
        time.sleep(0.6)
        return super().step(action)

    def close(self) -> None:
        time.sleep(0.6)


class Undermining(Echo):
    """Leaves something behind that ends the process while the model is asked."""

    def reset(self, row: Row, *, seed: int) -> Any:
        tell("undermined", str(os.getpid()))
        threading.Timer(0.1, os._exit, [7]).start()
        return None


class Forking(Echo):
    """Comes back twice from its first step."""

    async def step(self, action: str) -> Any:
        if not told("forked"):
            tell("forked", str(os.getpid()))
            os.fork()
        return super().step(action)


class AsyncHanging(Echo):
    async def step(self, action: str) -> Any:
        await asyncio.sleep(60)


class Blocking(Echo):
    """Holds the loop of all episodes the first time that anybody takes a step."""

    async def step(self, action: str) -> Any:
        if not told("blocking"):
            tell("blocking", str(os.getpid()))
            time.sleep(60)  # noqa: ASYNC251 - that is what is wrong with it
        return super().step(action)


class Killing(Echo):
    """Kills its process when it is told `1`."""

    def step(self, action: str) -> Any:
        tell("killing", action)
        if action == "1":
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)


class Unmakeable(Echo):
    def __init__(self) -> None:
        raise OSError("no simulator here")


class Methodless:
    def reset(self, row: Row, *, seed: int) -> str:
        return ""

    def close(self) -> None:
        pass
