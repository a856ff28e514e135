from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from kintsugi.cluster.host_monitor import ASK_TIME_S, ClockSync
from kintsugi.protocol.agents import AskTime, TimeTold
from kintsugi.protocol.bootstrap import Bootstrap
from kintsugi.runtime.clock import SYSTEM_CLOCK, SystemClock
from kintsugi.telemetry.readings import ClockOffsetReading, ReadingsLog, figures_in
from kintsugi.transport import Endpoint
from kintsugi.types import Role
from tests.unit.transport.harness import introduce, make_endpoint

OFFSET_S = 2.5


class WrongClock(SystemClock):
    """Of a host whose clock is ahead."""

    def wall(self) -> float:
        return super().wall() + OFFSET_S


def bootstrap_of(agent: Endpoint, master: Endpoint, run_dir: Path) -> Bootstrap:
    return Bootstrap(
        job="job",
        run_dir=str(run_dir),
        process="agent-1",
        role=Role.AGENT,
        host="host-1",
        incarnation="a",
        public_key=b"",
        secret_key=b"",
        master=master.peer(host="host-0"),
        lifeline=-1,
    )


def busy_master(master: Endpoint, ended: threading.Event) -> None:
    """Answers late and never equally late, as one does that has much else to do."""
    draw = random.Random(3)
    while not ended.is_set():
        for delivery in master.poll(0.01):
            assert isinstance(delivery.body, AskTime)
            time.sleep(draw.expovariate(200))
            told = TimeTold(SYSTEM_CLOCK.wall())
            time.sleep(draw.expovariate(200))
            master.reply(delivery, told)


def test_a_clock_that_is_wrong_is_measured_within_ten_milliseconds_under_load(tmp_path: Path) -> None:
    agent, master = make_endpoint("agent-1"), make_endpoint("master-0")
    introduce(agent, master)
    figures = ReadingsLog(tmp_path, process="agent-1")
    own = bootstrap_of(agent, master, tmp_path)
    times = ClockSync(agent, figures, own=own, clock=WrongClock())
    ended = threading.Event()
    thread = threading.Thread(target=busy_master, args=(master, ended))
    thread.start()
    for question in range(12):
        times.tick(question * ASK_TIME_S)
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            agent.poll(0.01)
    ended.set()
    thread.join()
    figures.close()
    samples = [record.sample for record in figures_in(tmp_path)]
    assert len(samples) >= 10
    last = samples[-1]
    assert isinstance(last, ClockOffsetReading)
    assert last.host == "host-1"
    assert abs(last.offset_s - OFFSET_S) <= last.error_s + 1e-6
    assert last.error_s < 0.01
    agent.close()
    master.close()
