"""A rollout worker whose groups are episodes, played in a process of their own, as in a run."""

import os
import signal
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError
from kintsugi.protocol.rollout import Drop, EpisodesDone, FetchSamples, SamplesFetched
from kintsugi.rollout import worker as worker_module
from kintsugi.rollout.user_code import process
from kintsugi.rollout.user_code.process import UserProcess
from kintsugi.runtime.waits import WAITS
from kintsugi.telemetry.events import QuarantineCause
from tests.unit.rollout.reward_functions import told
from tests.unit.rollout.worlds import World, config, run

HERE = "tests.unit.rollout.environment_classes"


@pytest.fixture(autouse=True)
def _for_real(monkeypatch: pytest.MonkeyPatch, world: Callable[[Config], World]) -> None:
    monkeypatch.setattr(worker_module, "UserProcess", UserProcess)
    monkeypatch.setattr(process, "GRACE_S", 0.1)


def acted(here: World) -> EpisodesDone:
    return here.ask(run()).result().expect(EpisodesDone)


def test_episodes_are_played_turn_by_turn_and_what_was_read_is_not_learned(
    world: Callable[[Config], World],
) -> None:
    here = world(config(environment=f"{HERE}.Echo"))
    here.answers = ["12", "9"]
    done = acted(here)
    assert [(meta.reward, meta.num_loss_tokens) for meta in done.samples] == [(1.25, 5)] * 2
    assert done.samples[0].reward_components == {"success": 1.0, "return": 1.25, "said": 3.0, "turns": 2.0}
    assert {text.completion for text in done.texts.values()} == {"12⟨12=⟩9"}
    assert here.num_generated == 4, "each turn of each episode was asked for by itself"
    fetched = here.ask(FetchSamples((done.samples[1].key,))).result().expect(SamplesFetched)
    (trajectory,) = fetched.samples
    observed = len(here.tokenizer.encode("12="))
    assert trajectory.loss_mask.endswith(b"\1" * 3 + b"\0" * observed + b"\1" * 2)
    assert {
        version
        for version, mask in zip(array("i", trajectory.versions), trajectory.loss_mask, strict=True)
        if mask
    } == {3}


def test_a_warm_up_learns_episodes_that_the_environment_shows(world: Callable[[Config], World]) -> None:
    here = world(config(environment=f"{HERE}.Showing", options={"stop": "+"}))
    order = run("warmup:0:0:0", stage="warmup", num_samples=1)
    (meta,) = here.ask(order).result().expect(EpisodesDone).samples
    assert (meta.num_loss_tokens, meta.version, meta.reward_components) == (5, -1, {})
    assert here.num_generated == 0


def test_an_environment_that_raises_is_tried_again_and_then_quarantined_with_its_reason(
    world: Callable[[Config], World],
) -> None:
    here = world(config(environment=f"{HERE}.Wrong", options={"way": "raises"}))
    here.answers = ["12"]
    done = acted(here)
    assert done.samples == () and set(done.quarantined) == {"grpo:0:0:0/0", "grpo:0:0:0/1"}
    assert all("`step` of the environment raised RuntimeError" in why for why in done.quarantined.values())
    assert here.quarantines() == [("grpo:0:0:0", QuarantineCause.USER_CODE)]
    assert len(told("reset")) == 4 and here.num_generated == 2, "nothing is sampled twice"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Hanging", "Blocking"])
def test_an_environment_that_hangs_costs_its_process_and_nobodys_samples(
    kind: str, world: Callable[[Config], World], tmp_path: Path
) -> None:
    here = world(config(environment=f"{HERE}.{kind}", timeout_s=0.4))
    here.answers = ["12", "9"]
    done = acted(here)
    assert told(kind.lower()), "it hung"
    assert len(done.samples) == 2 and done.quarantined == {}
    assert "it is replaced" in (tmp_path / "events.jsonl").read_text()
    assert here.num_generated == 4, "what was sampled before is remembered"


def test_a_late_answer_to_a_process_that_is_gone_reaches_nobody_else(
    world: Callable[[Config], World],
) -> None:
    here = world(config(environment=f"{HERE}.Telling"))
    here.answers, here.holding = ["1#", "9"], True
    pending = here.begin(run(num_samples=4))
    here.until(lambda: len(here.held) == 4)
    done_before = len(told("reset"))
    pid = here.worker._user_process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    here.until(lambda: len(told("reset")) == 2 * done_before)
    here.held.reverse()
    here.holding = False
    here.until(lambda: pending.done)
    done = pending.result().expect(EpisodesDone)
    assert [text.completion for text in done.texts.values()] == [f"1{n}⟨1{n}=⟩9" for n in range(4)]
    assert here.num_generated == 8, "what was being sampled was waited for"


@pytest.mark.slow
def test_each_call_of_an_environment_has_its_own_time(world: Callable[[Config], World]) -> None:
    here = world(config(environment=f"{HERE}.Slow", timeout_s=1.6))
    here.answers = ["9"]
    assert len(acted(here).samples) == 2
    shown = here.ask(run("warmup:0:0:0", stage="warmup", num_samples=1)).result().expect(EpisodesDone)
    assert len(shown.samples) == 1


@pytest.mark.slow
def test_what_ends_the_process_while_the_model_is_asked_is_set_aside_in_the_end(
    world: Callable[[Config], World],
) -> None:
    here = world(config(environment=f"{HERE}.Undermining"))
    here.answers, here.holding = ["1"], True
    assert set(acted(here).quarantined.values()) == {"the environment process exited with code 7"}


def test_an_episode_that_comes_back_twice_is_heard_once(world: Callable[[Config], World]) -> None:
    here = world(config(environment=f"{HERE}.Forking"))
    here.answers = ["9"]
    assert len(acted(here).samples) == 2
    assert told("forked") == [str(here.worker._user_process.pid)], "its process was replaced"
    assert here.num_generated == 2


def test_episodes_of_a_group_that_was_dropped_end(world: Callable[[Config], World]) -> None:
    here = world(config(environment=f"{HERE}.Telling"))
    here.answers, here.holding = ["12"], True
    here.begin(run())
    here.until(lambda: len(here.held) == 2)
    here.master.send("rollout-0", Drop(("grpo:0:0:0",)))
    here.until(lambda: not here.worker._running)
    here.holding = False
    here.until(lambda: not here.worker._user_process.is_busy)
    assert told("closed") == ["thread"] * 2 and here.worker._sampled_groups.load == 0


@pytest.mark.slow
def test_an_environment_that_kills_its_process_is_found_out_and_set_aside(
    world: Callable[[Config], World],
) -> None:
    here = world(config(environment=f"{HERE}.Killing"))
    here.answers = ["1"]
    done = acted(here)
    assert set(done.quarantined.values()) == {"the environment process killed by SIGSEGV"}
    assert here.quarantines() == [("grpo:0:0:0", QuarantineCause.SAMPLE)]
    assert len(told("killing")) >= 4


def test_a_completion_of_zero_tokens_is_set_aside(world: Callable[[Config], World]) -> None:
    here = world(config(environment=f"{HERE}.Echo"))
    here.answers = [""]
    assert set(acted(here).quarantined.values()) == {"turn 0: a completion of zero tokens"}
    assert here.quarantines() == [("grpo:0:0:0", QuarantineCause.SAMPLE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "expected"),
    [("my_lost_module.Game", "modules are looked for in"), (f"{HERE}.Methodless", "has no step")],
)
def test_an_environment_that_can_not_be_used_ends_the_worker_with_the_reason(
    environment: str, expected: str, world: Callable[[Config], World]
) -> None:
    here = world(config(environment=environment))
    here.answers = ["12"]
    here.begin(run())
    with pytest.raises(ConfigError, match=expected):
        here.until(lambda: False)


def test_a_worker_that_waits_for_an_environment_says_so(world: Callable[[Config], World]) -> None:
    here = world(config(environment=f"{HERE}.AsyncHanging", timeout_s=0.4))
    here.answers = ["12"]
    pending = here.begin(run())
    here.until(lambda: any(wait.whom == "environment process" for wait in WAITS.declared()))
    here.until(lambda: pending.done)
    assert set(pending.result().expect(EpisodesDone).quarantined.values()) == {
        "`step` of the environment took longer than `rollout.turn_timeout_s`=0.4 s"
    }
