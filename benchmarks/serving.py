"""`kintsugi serve` under load: many streaming clients, some of which leave, and a server that is killed half-way.

    python benchmarks/serving.py --clients 500 --seconds 60 --json serving.json

Every client asks again and again, each time with a seed of a fixed set, whose answers were asked for before, one after
the other and undisturbed. A share of the requests is left in the middle. Half-way one of the two servers is killed with
-9. Every request that was not left must be answered, with the text of the undisturbed pass to the letter (the gateway
runs in deterministic mode); afterwards no page is in use, and the gateway has as many descriptors as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.serving import Served, make_model, serving, until

NUM_QUESTIONS = 200
SHORTEST = 20
"""Tokens of a completion."""
REST_S = 60.0
MOST_IN_REFERENCE = 16
"""Requests of the undisturbed pass that are under way at once."""


@dataclass
class Record:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    num_characters: int = 0
    wrong: list[str] = field(default_factory=list)


def question(number: int) -> dict[str, Any]:
    """One of a fixed set, of different lengths."""
    generator = random.Random(number)
    words = " ".join("".join(generator.choices("abcdefghij", k=4)) for _ in range(generator.randint(1, 8)))
    return {
        "model": "tiny",
        "prompt": words,
        "seed": number,
        "max_tokens": generator.randint(SHORTEST, 100),
        "ignore_eos": True,
        "stream": True,
    }


async def ask(
    session: aiohttp.ClientSession, address: str, number: int, *, leave_after: int | None = None
) -> tuple[str, float]:
    """(text, seconds to its first event). Leaves after so many characters, by closing the connection."""
    since = time.monotonic()
    first_s = 0.0
    texts: list[str] = []
    async with session.post(f"{address}/v1/completions", json=question(number)) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            first_s = first_s or time.monotonic() - since
            if line.startswith(b"data: [DONE]"):
                return "".join(texts), first_s
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            texts.append(event["choices"][0]["text"])
            if leave_after is not None and sum(map(len, texts)) >= leave_after:
                response.close()
                raise EOFError
    raise RuntimeError("the stream ended without [DONE]")


async def client(
    session: aiohttp.ClientSession,
    address: str,
    *,
    until_s: float,
    share: float,
    expected: Sequence[str],
    seed: int,
    record: Record,
) -> None:
    """Ask until the time is up; what is under way then is waited for."""
    generator = random.Random(seed)
    while time.monotonic() < until_s:
        number = generator.randrange(len(expected))
        leave_after = generator.randint(1, SHORTEST - 1) if generator.random() < share else None
        since = time.monotonic()
        try:
            text, first_s = await ask(session, address, number, leave_after=leave_after)
        except EOFError:
            record.outcomes["left"] += 1
            continue
        except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
            record.outcomes["failed"] += 1
            record.wrong.append(f"question {number}: {type(error).__name__}: {error}")
            continue
        is_right = text == expected[number]
        record.outcomes["right" if is_right else "wrong"] += 1
        record.first_s.append(first_s)
        record.whole_s.append(time.monotonic() - since)
        record.num_characters += len(text)
        if not is_right:
            record.wrong.append(f"question {number}: expected {expected[number]!r}, got {text!r}")


async def reference(address: str, count: int) -> list[str]:
    gate = asyncio.Semaphore(MOST_IN_REFERENCE)

    async def one(session: aiohttp.ClientSession, number: int) -> str:
        async with gate:
            return (await ask(session, address, number))[0]

    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(one(session, number) for number in range(count))))


async def load(
    served: Served, expected: Sequence[str], arguments: argparse.Namespace
) -> tuple[Record, float]:
    record = Record()
    since = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = [
            asyncio.create_task(
                client(
                    session,
                    served.address,
                    until_s=since + arguments.seconds,
                    share=arguments.leave,
                    expected=expected,
                    seed=number,
                    record=record,
                )
            )
            for number in range(arguments.clients)
        ]
        await asyncio.sleep(arguments.seconds / 2)
        (pid,) = await asyncio.to_thread(served.kill_servers, 0)
        print(f"half-way: killed server-0 (process {pid}) with -9", flush=True)
        await asyncio.gather(*clients)
    return record, time.monotonic() - since


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny")
        options = ("--servers", "2", "--deterministic", "--queue", str(arguments.clients + 100))
        with serving(model, *options) as served:
            expected = asyncio.run(reference(served.address, NUM_QUESTIONS))
            until(served.is_at_rest, "rest", timeout_s=REST_S)
            descriptors = served.num_descriptors()
            record, wall_s = asyncio.run(load(served, expected, arguments))
            until(served.is_at_rest, "every page, and both servers", timeout_s=REST_S)
            until(lambda: served.num_descriptors() <= descriptors, "every descriptor", timeout_s=REST_S)
            return {
                "clients": arguments.clients,
                "seconds": arguments.seconds,
                "wall_s": wall_s,
                **{key: record.outcomes[key] for key in ("right", "wrong", "failed", "left")},
                "tokens_per_s": record.num_characters / wall_s,
                "first_token_median_s": median(record.first_s),
                "first_token_p99_s": quantiles(record.first_s, n=100)[98],
                "request_median_s": median(record.whole_s),
                "restarts": sum(served.figure("server_restarts_total").values()),
                "resent": sum(served.figure("resent_requests_total").values()),
                "descriptors_before": descriptors,
                "descriptors_after": served.num_descriptors(),
                "pages_used_after": sum(served.figure("server_pages_used").values()),
                "first_mistakes": record.wrong[:5],
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--leave", type=float, default=0.3, help="share of requests that are left in the middle"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    for name, value in result.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["wrong"] or result["failed"] or not result["right"] or result["restarts"] != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
