"""The control plane against Ray actor calls and JSON, interleaved in one run.

    python benchmarks/control_plane.py [--json FILE] [--ray-python .venv-ray/bin/python]

Ours: two processes, one caller, CURVE on. Ray: one driver, one actor, on the same machine. Every round measures ours
and then Ray; the table gives medians over the rounds. For Ray the kinder way is taken wherever there is a choice:
samples as numpy arrays, and of two ways to keep 64 calls under way the faster one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kintsugi.protocol import membership, wire
from kintsugi.protocol.membership import Ok, Ping
from kintsugi.protocol.messages import Body
from kintsugi.protocol.rollout import FetchSamples, SamplesFetched
from kintsugi.runtime.processes import SystemProcesses
from kintsugi.transport import Endpoint, PendingReply, new_key_pair
from kintsugi.types import FinishReason, Peer, Role, Trajectory

HERE = Path(__file__).parent
OUTSTANDING = 64
NUM_TOKENS = 512
ROUNDS = 7
DEADLINE_S = 30.0


class Meeting(msgspec.Struct, frozen=True):
    """What the serving process needs to know."""

    public_key: bytes
    secret_key: bytes
    caller: Peer


def endpoint_of(process: str, keys: tuple[bytes, bytes]) -> Endpoint:
    return Endpoint(job="bench", process=process, incarnation="a", public_key=keys[0], secret_key=keys[1])


def serve(descriptor: int) -> None:
    """The other process: answers every request at once, until it is killed."""
    sample = SamplesFetched((trajectory(),))
    meeting = msgspec.msgpack.decode(os.read(descriptor, 1 << 16), type=Meeting)
    endpoint = endpoint_of("server-0", (meeting.public_key, meeting.secret_key))
    endpoint.admit(meeting.caller)
    endpoint.send(
        meeting.caller.process,
        membership.Register(endpoint.peer(host="here"), Role.SERVER, os.getpid()),
    )
    while True:
        for delivery in endpoint.poll(1.0):
            endpoint.reply(delivery, sample if isinstance(delivery.body, FetchSamples) else Ok())


@contextmanager
def our_server() -> Iterator[Endpoint]:
    """An endpoint with a server process that it can ask."""
    caller, server_keys = endpoint_of("model-0", new_key_pair()), new_key_pair()
    caller.admit(Peer("server-0", "a", "here", "", server_keys[0]))
    readable, writable = os.pipe()
    os.write(writable, msgspec.msgpack.encode(Meeting(*server_keys, caller.peer(host="here"))))
    child = SystemProcesses().spawn([sys.executable, __file__, "--serve", str(readable)], pass_fds=[readable])
    try:
        while "server-0" not in caller.peers or not caller.peers["server-0"].address:
            for delivery in caller.poll(1.0):
                assert isinstance(delivery.body, membership.Register)
                caller.admit(delivery.body.peer)
        yield caller
    finally:
        child.send_signal(9)
        child.wait_ended(whom="server-0", timeout_s=10)
        child.close()
        os.close(readable)
        os.close(writable)
        caller.close()


def sequential(caller: Endpoint, count: int, *, body: Body) -> None:
    for _ in range(count):
        caller.call("server-0", body, deadline_s=DEADLINE_S)


def outstanding(caller: Endpoint, count: int, *, body: Body) -> None:
    under_way: deque[PendingReply] = deque()
    for _ in range(count):
        under_way.append(caller.request("server-0", body, deadline_s=DEADLINE_S))
        while len(under_way) == OUTSTANDING:
            take_finished(caller, under_way)
    while under_way:
        take_finished(caller, under_way)


def take_finished(caller: Endpoint, under_way: deque[PendingReply]) -> None:
    if not under_way[0].done:
        caller.poll(1.0)
    while under_way and under_way[0].done:
        under_way.popleft().result()


def trajectory() -> Trajectory:
    return Trajectory(
        key="grpo:0:17:0/3",
        tokens=np.arange(NUM_TOKENS, dtype="<i4").tobytes(),
        loss_mask=np.ones(NUM_TOKENS, dtype="u1").tobytes(),
        logprobs=np.linspace(-3, 0, NUM_TOKENS, dtype="<f4").tobytes(),
        versions=np.full(NUM_TOKENS, 7, dtype="<i4").tobytes(),
        finish=FinishReason.EOS,
    )


def as_lists(sample: Trajectory) -> dict[str, Any]:
    return {
        "key": sample.key,
        "tokens": np.frombuffer(sample.tokens, "<i4").tolist(),
        "loss_mask": np.frombuffer(sample.loss_mask, "u1").tolist(),
        "logprobs": np.frombuffer(sample.logprobs, "<f4").tolist(),
        "versions": np.frombuffer(sample.versions, "<i4").tolist(),
        "finish": sample.finish.value,
    }


def seconds_of(work: Callable[[int], None], count: int) -> float:
    start = time.perf_counter()
    work(count)
    return time.perf_counter() - start


class Ray:
    """The Ray side, in its own interpreter."""

    def __init__(self, python: Path) -> None:
        self._driver = subprocess.Popen(
            [str(python), str(HERE / "control_plane_ray.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": ""},
            text=True,
        )
        self.version: str = self._read()["version"]

    def _read(self) -> dict[str, Any]:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise RuntimeError(f"the Ray side ended with {self._driver.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, case: str, count: int) -> float:
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps({"case": case, "count": count}) + "\n")
        self._driver.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait(30)


def through_codec(count: int) -> None:
    envelope = wire.Envelope("job", 1, "rollout-0", "a", 7, wire.MessageKind.REPLY)
    body = SamplesFetched((trajectory(),))
    for _ in range(count):
        wire.decode(wire.encode(envelope, body))


def through_json(count: int) -> None:
    record = as_lists(trajectory())
    for _ in range(count):
        json.loads(json.dumps(record))


def row(what: str, unit: str, ours: float, *, peer: str, theirs: float, **case: Any) -> dict[str, Any]:
    return {
        "case": {"what": what, **case},
        "unit": unit,
        "ours": round(ours, 2),
        "peers": {peer: round(theirs, 2)},
        "ratio": {peer: round(theirs / ours if unit.startswith("µs") else ours / theirs, 1)},
    }


def codec_row(rounds: int) -> dict[str, Any]:
    times = [
        (seconds_of(through_codec, 20_000) / 20_000, seconds_of(through_json, 300) / 300)
        for _ in range(rounds)
    ]
    ours, theirs = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    return row("codec: encode + decode", "µs", ours, peer="json", theirs=theirs, tokens=NUM_TOKENS)


def ray_rows(python: Path, rounds: int) -> list[dict[str, Any]]:
    ping, fetch = Ping(), FetchSamples((trajectory().key,))
    cases: dict[str, tuple[int, int, Callable[..., None], Body]] = {
        "sequential": (3000, 600, sequential, ping),
        "outstanding": (12_800, 2560, outstanding, ping),
        "hand_over": (3000, 600, sequential, fetch),
    }
    ours: dict[str, list[float]] = {case: [] for case in cases}
    theirs: dict[str, list[float]] = {case: [] for case in cases}
    ray = Ray(python)
    try:
        with our_server() as caller:
            for number in range(rounds + 1):
                for case, (count, ray_count, run, body) in cases.items():
                    seconds = seconds_of(partial(run, caller, body=body), count)
                    ray_seconds = ray.seconds(case, ray_count)
                    if case == "outstanding":
                        ray_seconds = min(ray_seconds, ray.seconds("outstanding_in_batches", ray_count))
                    if number > 0:  # The first round warms both sides up.
                        ours[case].append(seconds / count)
                        theirs[case].append(ray_seconds / ray_count)
    finally:
        ray.close()
    us = {case: statistics.median(times) * 1e6 for case, times in ours.items()}
    ray_us = {case: statistics.median(times) * 1e6 for case, times in theirs.items()}
    peer = "ray"
    return [
        row(
            "call, one at a time",
            "µs",
            us["sequential"],
            peer=peer,
            theirs=ray_us["sequential"],
            version=ray.version,
        ),
        row(
            "calls, 64 outstanding",
            "calls/s",
            1e6 / us["outstanding"],
            peer=peer,
            theirs=1e6 / ray_us["outstanding"],
            version=ray.version,
        ),
        row(
            "hand-over of a sample",
            "µs",
            us["hand_over"],
            peer=peer,
            theirs=ray_us["hand_over"],
            tokens=NUM_TOKENS,
            version=ray.version,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ray-python", type=Path, default=HERE.parent / ".venv-ray" / "bin" / "python")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    rows = [codec_row(arguments.rounds)]
    if arguments.ray_python.exists():
        rows += ray_rows(arguments.ray_python, arguments.rounds)
    else:
        print(f"no Ray at {arguments.ray_python}: `make bench` installs it, or name one with --ray-python")
    for entry in rows:
        ((peer, theirs),) = entry["peers"].items()
        what, ours, unit = entry["case"]["what"], entry["ours"], entry["unit"]
        print(f"{what:24} {ours:>12,.2f} {unit:8} {peer:5} {theirs:>12,.2f}   {entry['ratio'][peer]:.1f}×")
    if arguments.json:
        host = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        report = {"host": host, "date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
