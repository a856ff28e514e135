from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kintsugi.cluster.namespaces import HostNamespaces
from kintsugi.config.schema import ActorSection, ClusterSection, Config, RolloutSection
from kintsugi.lab.fragile import messages
from kintsugi.lab.fragile.directory import announce
from kintsugi.lab.fragile.process import FragileProcess
from kintsugi.lab.fragile.rpc import RpcServer
from kintsugi.lab.fragile.timeouts import Scale
from kintsugi.lab.fragile.workers import Workers


class World:
    """A scheduler and one worker of each kind, which note what they are asked."""

    def __init__(self, run_dir: Path) -> None:
        self.asked: list[tuple[str, str]] = []
        self.obstacles: dict[str, Callable[[], object]] = {}
        """Path → what happens before it is answered."""
        self._run_dir = run_dir
        self._serve(
            "scheduler-0", start=messages.JobSpec("job-1"), cancel=None, status=messages.JobStatus({})
        )
        self._serve("model-0", rendezvous=messages.Rendezvous("127.0.0.1:1"), join=None, upload_weights=None)
        self._serve("rollout-0", update_weights=None, notify_event=None)
        config = Config(
            name="test",
            actor=ActorSection(workers=1),
            rollout=RolloutSection(workers=1),
            cluster=ClusterSection(share_device="keep"),
        )
        scale = Scale(hour_s=0.6, half_minute_s=0.1)
        self.workers = Workers(FragileProcess("master-0", run_dir, HostNamespaces("host-0"), config, scale))
        self.workers.start()
        self.asked.clear()

    def _serve(self, name: str, **answers: msgspec.Struct | None) -> None:
        def route(path: str) -> Callable[[bytes], msgspec.Struct | None]:
            def answer(body: bytes) -> msgspec.Struct | None:
                self.asked.append((name, path))
                self.obstacles.get(path, lambda: None)()
                return answers[path]

            return answer

        server = RpcServer({f"/{path}": route(path) for path in answers}, host="127.0.0.1")
        server.serve_in_thread()
        announce(self._run_dir, name, server.address)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_clean_up_looks_cancels_and_looks_again_at_every_job(world: World) -> None:
    world.workers.clean_up()
    assert world.asked == [("scheduler-0", path) for path in ("status", "cancel", "status")] * 2


def test_a_slow_scheduler_makes_clean_up_fail_with_an_error_of_its_own(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    world.obstacles["status"] = lambda: never.wait(0.2)
    with caplog.at_level(logging.INFO):
        world.workers.clean_up()
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all("failed to stop job: timeout" in error for error in errors)


def test_an_event_that_nobody_takes_in_time_is_given_up(world: World) -> None:
    never = threading.Event()
    world.obstacles["notify_event"] = lambda: never.wait(0.5)
    failures = world.workers.notify(messages.NotifyEvent("rollout_start", 3))
    assert list(failures) == ["rollout-0"]
    assert "timed out" in str(failures["rollout-0"])


def test_weights_go_both_ways_at_once(world: World) -> None:
    world.workers.update_weights(messages.UpdateWeights(1, ("a",)), messages.UploadShard(1))
    assert set(world.asked) == {("rollout-0", "update_weights"), ("model-0", "upload_weights")}
