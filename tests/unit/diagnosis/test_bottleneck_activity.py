"""Who was at work when, and what follows for a run, from files as processes write them."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kintsugi.diagnosis.activity import FIRST_SIZE, any_active, read_activity
from kintsugi.diagnosis.bottleneck import Bottleneck, find_bottleneck, format_bottleneck
from kintsugi.diagnosis.evidence import EvidenceBundle
from kintsugi.diagnosis.timeseries import Interval, common, seconds, seconds_within, union, without
from kintsugi.errors import UserError
from kintsugi.telemetry.events import Event, Span, Stamp, Transition, stamped
from kintsugi.telemetry.readings import HeartbeatReading, ProcessReading
from kintsugi.types import Wait

START = 1_700_000_000.0
BOOTED = START - 5000.0
"""Where monotonic clocks began."""


@dataclass
class Recorded:
    """A run folder that processes have written to; times are seconds since the start."""

    folder: Path
    lines: dict[str, list[tuple[float, bytes]]] = field(default_factory=dict)

    def _add(
        self, file: str, process: str, at: float, content: Event | HeartbeatReading | ProcessReading
    ) -> None:
        stamp = Stamp(START + at, START + at - BOOTED, process)
        self.lines.setdefault(file, []).append((at, stamped(stamp, content)))

    def phase(self, at: float, name: str) -> None:
        self._add("events/master-0.jsonl", "master-0", at, Transition("master", "run", "", name, ""))

    def step(self, number: int, *, begin: float, **phases: float) -> float:
        """The phases of a step, one after the other; when it ended."""
        at = begin
        for name, length in phases.items():
            self.phase(at, name)
            at += length
        span = Span("step", START + begin - BOOTED, at - begin, {"step": str(number)})
        self._add("events/master-0.jsonl", "master-0", at, span)
        return at

    def span(self, process: str, name: str, begin: float, end: float, *, ticket: str) -> None:
        span = Span(name, START + begin - BOOTED, end - begin, {"ticket": ticket})
        self._add(f"events/{process}.spans.jsonl", process, end, span)

    def sample(self, process: str, at: float, *, cpu_s: float, run_delay_s: float) -> None:
        values = {"cpu_s": cpu_s, "run_delay_s": run_delay_s}
        self._add("figures/agent-0.jsonl", "agent-0", at, ProcessReading(process, 7, "S", values))

    def beat(self, process: str, at: float, *waits: Wait, steps: int = 0) -> None:
        beat = HeartbeatReading("1", {"steps": steps}, 0.0, waits, {})
        self._add(f"figures/{process}.jsonl", process, at, beat)

    def write(self) -> Path:
        (self.folder / "events").mkdir(parents=True, exist_ok=True)
        for name, lines in self.lines.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(line for _, line in sorted(lines)))
        return self.folder


def shares(report: Bottleneck) -> dict[tuple[str, str], float]:
    return {(part.kind, part.where): part.share for part in report.parts}


def with_a_slow_reward(folder: Path) -> Recorded:
    """Two workers of eight groups a step, which a reward judges one after the other in 0.4 s each, while idle servers
    wait for the processor for three quarters of the little that they want it."""
    run = Recorded(folder)
    at = 0.0
    for step in range(4):
        for worker in range(2):
            for group in range(8):
                ticket = f"grpo:0:{16 * step + 2 * group + worker}:0"
                rollout, server = f"rollout-{worker}", f"server-{worker}"
                judged = at + 0.12 + 0.4 * (group + 1)
                run.span(server, "generate", at + 0.05, at + 0.1, ticket=ticket)
                run.span(rollout, "actor_generate", at + 0.01, at + 0.12, ticket=ticket)
                run.span(rollout, "reward", at + 0.12, judged, ticket=ticket)
                run.span(rollout, "episode", at, judged, ticket=ticket)
        at = run.step(step + 1, begin=at, collecting=3.4, training=0.2, committing=0.01, publishing=0.03)
    run.phase(at, "ended")
    for second in range(int(at) + 1):
        for server in ("server-0", "server-1"):
            run.sample(server, float(second), cpu_s=0.01 * second, run_delay_s=0.035 * second)
    return run


def test_a_reward_that_sleeps_is_what_holds_the_run_up(tmp_path: Path) -> None:
    report = find_bottleneck(with_a_slow_reward(tmp_path / "run").write())
    assert (report.dominant, report.steps) == ("compute", 4)
    assert shares(report)["compute", "reward"] == pytest.approx(3.2 / 3.64, abs=0.01)
    assert "mostly reward (88%)" in report.figure
    assert "a worker takes 400 ms for a group" in report.figure
    assert "async def" in report.suggestion and "rollout.workers" in report.suggestion
    assert report.shares["system"] < 0.06
    assert ("compute", "environment") not in shares(report)


def test_a_copied_folder_is_read_by_what_it_says_and_not_by_when_it_was_copied(tmp_path: Path) -> None:
    folder = with_a_slow_reward(tmp_path / "run").write()
    before = find_bottleneck(folder)
    for number, path in enumerate(sorted((folder / "events").iterdir())):
        os.utime(path, (START + 86400.0 * (1 + number),) * 2)
    assert find_bottleneck(folder) == before


def test_demonstrations_are_not_sampled(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    at = 0.0
    for step in range(30):
        for row in range(8):
            begin = at + 0.01 * row
            run.span("rollout-0", "episode", begin, begin + 0.005, ticket=f"sft:0:{8 * step + row}:0")
        at = run.step(step + 1, begin=at, collecting=0.1, training=0.3)
    run.phase(at, "evaluating")
    run.span("server-0", "generate", at, at + 1.0, ticket="eval:30:0:0")
    run.phase(at + 1.0, "ended")
    found = shares(find_bottleneck(run.write()))
    assert not [where for _, where in found if where == "sampling"]
    assert found["compute", "data"] == pytest.approx(30 * 0.04 / 13, abs=0.002)
    assert found["compute", "evaluation"] == pytest.approx(1 / 13, abs=0.002)


def test_an_environment_plays_whenever_its_episode_asks_nothing_of_the_model(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    for turn in range(3):
        run.span("server-0", "generate", 3.0 * turn + 0.1, 3.0 * turn + 0.9, ticket="grpo:0:0:0")
        run.span("rollout-0", "actor_generate", 3.0 * turn, 3.0 * turn + 1.0, ticket="grpo:0:0:0")
    run.span("rollout-0", "episode", 0.0, 9.0, ticket="grpo:0:0:0")
    run.phase(run.step(1, begin=0.0, collecting=9.0), "ended")
    report = find_bottleneck(run.write())
    assert shares(report)["compute", "environment"] == pytest.approx(6 / 9, abs=0.001)
    assert shares(report)["compute", "sampling"] == pytest.approx(2.4 / 9, abs=0.001)
    assert shares(report)["system", "coordination"] == pytest.approx(0.6 / 9, abs=0.001)
    assert "sandboxes" in report.suggestion


def test_requests_on_their_way_are_the_systems_time(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.span("server-0", "generate", 6.0, 7.0, ticket="grpo:0:0:0")
    run.span("rollout-0", "actor_generate", 0.5, 9.5, ticket="grpo:0:0:0")
    run.phase(run.step(1, begin=0.0, collecting=10.0), "ended")
    report = find_bottleneck(run.write())
    assert report.dominant == "system"
    assert shares(report)["system", "coordination"] == pytest.approx(0.9)
    assert "in 89% of it a request is in flight" in report.figure


def test_what_servers_generate_at_once_counts_once(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    for server in range(8):
        run.span(f"server-{server}", "generate", 0.0, 3.0, ticket=f"grpo:0:{server}:0")
    run.phase(run.step(1, begin=0.0, collecting=4.0, training=6.0), "ended")
    assert shares(find_bottleneck(run.write()))["compute", "sampling"] == pytest.approx(0.3)


@pytest.mark.parametrize("length", [35.0, 700.0, 1500.0])
def test_steps_may_take_as_long_as_they_like(tmp_path: Path, length: float) -> None:
    run = Recorded(tmp_path / "run")
    at = 0.0
    for step in range(40):
        run.span("server-0", "generate", at, at + 0.2 * length, ticket=f"grpo:0:{step}:0")
        at = run.step(step + 1, begin=at, collecting=0.2 * length, training=0.8 * length)
    run.phase(at, "ended")
    report = find_bottleneck(run.write())
    assert report.seconds == pytest.approx(20 * length, rel=0.01)
    assert (report.dominant, report.steps) == ("compute", 20)
    assert shares(report)["compute", "training"] == pytest.approx(0.8, abs=0.01)


def test_a_first_step_that_has_lasted_for_an_hour_is_told_of(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.phase(0.0, "collecting")
    run.span("server-0", "generate", 0.0, 600.0, ticket="grpo:0:0:0")
    run.phase(600.0, "training")
    run.beat("model-0", 3600.0)
    report = find_bottleneck(run.write())
    assert (report.seconds, report.steps) == (3600.0, 0)
    assert shares(report)["compute", "training"] == pytest.approx(5 / 6, abs=0.001)


def test_a_reward_that_has_not_ended_is_known_from_who_waits_for_it(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.phase(0.0, "collecting")
    run.span("server-0", "generate", 0.0, 1.0, ticket="grpo:0:0:0")
    run.span("rollout-0", "actor_generate", 0.0, 1.0, ticket="grpo:0:0:0")
    run.span("rollout-1", "reward", 0.5, 1.0, ticket="grpo:0:1:0")
    monotonic = START + 1.0 - BOOTED
    for half in range(3, 61):
        run.beat(
            "rollout-0", half / 2, Wait("reward process", "an outcome", monotonic, monotonic + 600), steps=0
        )
    report = find_bottleneck(run.write())
    assert shares(report)["compute", "reward"] == pytest.approx(29 / 30, abs=0.001)
    assert "a worker takes 500 ms for a group" in report.figure


def test_a_generation_that_has_not_ended_is_known_from_the_steps_that_are_counted(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.phase(run.step(1, begin=0.0, training=10.0), "collecting")
    run.span("rollout-0", "actor_generate", 1.0, 2.0, ticket="grpo:0:0:0")
    for half in range(20, 81):
        run.beat("server-0", half / 2, steps=min(half, 60))
    found = shares(find_bottleneck(run.write()))
    assert found["compute", "sampling"] == pytest.approx(20 / 40, abs=0.001)
    assert found["system", "coordination"] == pytest.approx(10 / 40, abs=0.001)


def test_a_moment_of_the_past_is_looked_at_as_it_was_then(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    at = run.step(1, begin=0.0, training=100.0)
    run.phase(run.step(2, begin=at, saving=1000.0), "ended")
    folder = run.write()
    assert find_bottleneck(folder, at=START + 150).shares["compute"] == pytest.approx(1.0)
    assert find_bottleneck(folder).dominant == "storage"


def test_nothing_is_said_of_time_whose_spans_are_gone(tmp_path: Path) -> None:
    """Of four bounded files the oldest begins at the fifth of ten steps."""
    run = Recorded(tmp_path / "run")
    at = 0.0
    for step in range(10):
        run.span("server-0", "generate", at, at + 9.0, ticket=f"grpo:0:{step}:0")
        at = run.step(step + 1, begin=at, collecting=9.0, training=1.0)
    run.phase(at, "ended")
    folder = run.write()
    path = folder / "events" / "server-0.spans.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for number, part in enumerate((lines[9:], lines[8:9], lines[6:8], lines[4:6])):
        name = f"server-0.spans.{number}.jsonl" if number else path.name
        (path.parent / name).write_bytes(b"".join(part))
    report = find_bottleneck(folder)
    assert report.seconds == pytest.approx(100.0 - 49.0)
    assert ("system", "coordination") not in shares(report)


def test_of_a_long_file_as_much_is_read_as_reaches_back(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    padding = "x" * 500
    for second in range(6000):
        run.span("server-0", "generate", float(second), second + 0.5, ticket=f"{second}{padding}")
    folder = run.write()
    assert (folder / "events" / "server-0.spans.jsonl").stat().st_size > 2 * FIRST_SIZE
    bundle = EvidenceBundle(run="")
    for since in (5990.0, 3000.0, 10.0):
        activity = read_activity(folder, bundle, since=START + since, until=START + 6000.0)
        assert seconds(any_active(activity.generating)) == pytest.approx((6000 - since) / 2, abs=0.01)


def test_a_folder_without_phases_is_refused(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    run.beat("model-0", 1.0)
    with pytest.raises(UserError, match="no phase of its work"):
        find_bottleneck(run.write())


def test_every_part_that_is_told_has_a_figure_and_a_suggestion(tmp_path: Path) -> None:
    report = find_bottleneck(with_a_slow_reward(tmp_path / "run").write())
    assert all(part.figure and part.suggestion for part in report.parts)
    assert report.suggestion in format_bottleneck(report)


def test_what_is_done_with_intervals_is_what_is_true_of_their_moments() -> None:
    """Against a grid of moments, for intervals that meet at its points."""
    generator = random.Random(3)

    def some() -> list[Interval]:
        begins = [generator.randrange(30) for _ in range(generator.randrange(6))]
        return [(float(begin), float(begin + generator.randrange(6))) for begin in begins]

    def moments(intervals: list[Interval]) -> set[int]:
        return {moment for begin, end in intervals for moment in range(int(begin), int(end))}

    for _ in range(500):
        first, second = some(), some()
        one, two = union(first), union(second)
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(one))
        assert moments(one) == moments(first)
        assert moments(common(one, two)) == moments(first) & moments(second)
        assert moments(without(one, two)) == moments(first) - moments(second)
        assert seconds(one) == len(moments(first))
        begin, end = sorted((generator.randrange(36), generator.randrange(36)))
        assert seconds_within(one, begin, end) == len(moments(first) & set(range(begin, end)))
