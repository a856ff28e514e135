from collections.abc import Callable

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection, Config
from kintsugi.errors import ConfigError, RemoteError
from kintsugi.protocol.rollout import EpisodesDone, FetchSamples
from kintsugi.rollout import worker as worker_module
from kintsugi.rollout.user_code import process
from kintsugi.rollout.user_code.process import UserProcess
from kintsugi.runtime.waits import WAITS
from kintsugi.telemetry.events import QuarantineCause
from tests.unit.rollout.reward_functions import told
from tests.unit.rollout.worlds import InlineJudging, World, config, run

REWARDS = "tests.unit.rollout.reward_functions"


def for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards in a process of their own, as in a run."""
    monkeypatch.setattr(worker_module, "UserProcess", UserProcess)
    monkeypatch.setattr(process, "GRACE_S", 0.1)


def test_a_reward_that_raises_is_tried_again_and_then_quarantined_with_its_reason(
    world: Callable[[Config], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    for_real(monkeypatch)
    here = world(config(reward=f"{REWARDS}.broken"))
    here.answers = ["12"]
    done = here.ask(run()).result().expect(EpisodesDone)
    assert done.samples == ()
    assert set(done.quarantined) == {"grpo:0:0:0/0", "grpo:0:0:0/1"}
    assert all("RuntimeError: no verdict" in reason for reason in done.quarantined.values())
    assert here.quarantines() == [("grpo:0:0:0", QuarantineCause.USER_CODE)]
    assert told("broken") == ["2", "2"]


def test_a_reward_that_hangs_is_ended_and_the_groups_after_it_are_scored(
    world: Callable[[Config], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    for_real(monkeypatch)
    here = world(config(reward=f"{REWARDS}.hanging_once", timeout_s=1.0))
    here.answers = ["12"]
    first = here.begin(run("grpo:0:0:0"))
    second = here.begin(run("grpo:0:1:0"))
    here.until(lambda: first.done and second.done)
    assert len(told("hanging")) == 1
    assert all(len(p.result().expect(EpisodesDone).samples) == 2 for p in (first, second))


def test_a_reward_that_can_not_be_imported_ends_the_worker_with_the_reason(
    world: Callable[[Config], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    for_real(monkeypatch)
    here = world(config(reward="my_lost_module.reward"))
    here.answers = ["12"]
    here.begin(run())
    with pytest.raises(ConfigError, match=r"my_lost_module\.reward.*modules are looked for in"):
        here.until(lambda: False)


def test_a_sample_that_can_not_be_judged_is_set_aside_and_the_rest_of_its_group_is_kept(
    world: Callable[[Config], World],
) -> None:
    here = world(config(reward=f"{REWARDS}.some_unjudged"))
    here.answers = ["12"]
    done = here.ask(run(num_samples=3)).result().expect(EpisodesDone)
    assert [meta.key for meta in done.samples] == ["grpo:0:0:0/0"]
    assert set(done.texts) == {"grpo:0:0:0/0"}
    assert done.quarantined == {
        "grpo:0:0:0/1": "reward 'some_unjudged': expected a finite number, got None",
        "grpo:0:0:0/2": "reward 'some_unjudged': expected a finite number, got nan",
    }
    with pytest.raises(RemoteError, match="does not keep sample"):
        here.ask(FetchSamples(("grpo:0:0:0/1",))).result()


def test_the_reward_is_the_weighted_sum_and_each_functions_time_is_told(
    world: Callable[[Config], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    for_real(monkeypatch)
    settings = config()
    rewards = (f"{REWARDS}.length * 0.25", f"{REWARDS}.half * -1")
    here = world(msgspec.structs.replace(settings, algorithm=AlgorithmSection(reward=rewards)))
    here.answers = ["12"]
    done = here.ask(run()).result().expect(EpisodesDone)
    assert [(meta.reward, meta.reward_components) for meta in done.samples] == [
        (0.0, {"length": 2.0, "half": 0.5})
    ] * 2
    assert set(done.timing) == {"actor_generate", "reward", "reward.length", "reward.half"}


def test_a_worker_that_waits_for_a_verdict_says_so(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, InlineJudging.holding = ["12"], True
    pending = here.begin(run())
    here.until(lambda: any(wait.whom == "reward process" for wait in WAITS.declared()))
    InlineJudging.holding = False
    here.until(lambda: pending.done)
    assert not any(wait.whom == "reward process" for wait in WAITS.declared())
