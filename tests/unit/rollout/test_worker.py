import os
from collections.abc import Callable

import pytest

from kintsugi.config.schema import Config
from kintsugi.errors import RefusedError, RemoteError
from kintsugi.protocol.generation import Generate
from kintsugi.protocol.membership import Ping
from kintsugi.protocol.rollout import Drop, EpisodesDone, FetchSamples, SamplesFetched
from kintsugi.rollout.trajectory import trajectory_digest
from kintsugi.runtime.waits import WAITS
from kintsugi.telemetry.events import QuarantineCause
from kintsugi.transport.rpc import LATE_S
from kintsugi.types import Wait
from tests.unit.rollout.worlds import InlineJudging, World, config, run


def generation_waits() -> list[Wait]:
    return [wait for wait in WAITS.declared() if wait.what == "Generated"]


def test_a_group_is_generated_scored_kept_and_handed_over(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers = ["12"]
    done = here.ask(run()).result().expect(EpisodesDone)
    assert [meta.key for meta in done.samples] == ["grpo:0:0:0/0", "grpo:0:0:0/1"]
    assert all(meta.version == 3 and meta.holder == "rollout-0" for meta in done.samples)
    assert all(meta.num_loss_tokens == 3 for meta in done.samples)
    assert [text.completion for text in done.texts.values()] == ["12", "12"]
    fetched = here.ask(FetchSamples(tuple(meta.key for meta in done.samples))).result().expect(SamplesFetched)
    assert [trajectory_digest(t) for t in fetched.samples] == [meta.digest for meta in done.samples]


def test_a_demonstration_needs_no_generation(world: Callable[[Config], World]) -> None:
    here = world(config())
    done = here.ask(run("warmup:0:0:0", stage="warmup", num_samples=1)).result().expect(EpisodesDone)
    (meta,) = done.samples
    assert meta.num_loss_tokens == len(done.texts[meta.key].completion) + 1
    assert meta.version == -1


def test_a_completion_of_zero_tokens_is_set_aside_with_its_reason(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers = [""]
    done = here.ask(run()).result().expect(EpisodesDone)
    assert done.samples == ()
    assert set(done.quarantined.values()) == {"a completion of zero tokens"}
    assert here.quarantines() == [("grpo:0:0:0", QuarantineCause.SAMPLE)]


def test_dropped_samples_are_gone(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers = ["12"]
    here.ask(run())
    here.master.send("rollout-0", Drop(("grpo:0:0:0",)))
    here.ask(Ping())
    with pytest.raises(RemoteError, match="does not keep sample"):
        here.ask(FetchSamples(("grpo:0:0:0/0",))).result()


def test_a_prompt_that_does_not_fit_is_refused_with_the_limit(world: Callable[[Config], World]) -> None:
    here = world(config())
    with pytest.raises(RemoteError, match=r"generation\.max_length is 32"):
        here.ask(run(new_tokens=64)).result()


def test_the_end_of_the_lifeline_ends_the_worker(world: Callable[[Config], World]) -> None:
    here = world(config())
    os.close(here._lifeline)
    here.until(lambda: here.worker.membership.shutdown_reason is not None)
    here._lifeline = os.open(os.devnull, os.O_RDONLY)
    assert here.worker.membership.shutdown_reason == "agent and launcher are gone"


def test_a_master_that_took_over_gets_the_answer_of_a_group_that_was_running(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    here.begin(run())
    here.until(lambda: len(here.held) == 1)
    here.restart_master()
    again = here.begin(run(timeout_s=30.0))
    here.ask(Ping())
    here.holding = False
    here.until(lambda: again.done)
    assert len(again.result().expect(EpisodesDone).samples) == 2
    assert here.num_generated == 1


def test_a_group_that_is_asked_for_again_has_the_time_of_the_later_order(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    here.begin(run(timeout_s=10.0))
    here.until(lambda: len(here.held) == 1)
    again = here.begin(run(timeout_s=30.0))
    here.ask(Ping())

    def is_held_twice() -> bool:
        if here.clock.ahead_s < 20.0:
            here.clock.ahead_s += (
                0.8 * LATE_S
            )  # A larger step would be a pause of the worker, which does not count.
        return len(here.held) == 2

    here.until(is_held_twice)
    here.holding = False
    here.until(lambda: again.done)
    assert len(again.result().expect(EpisodesDone).samples) == 2


def test_a_group_that_is_given_more_time_is_declared_with_it(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    here.begin(run(timeout_s=20.0))
    here.until(lambda: len(here.held) == 1)
    (before,) = generation_waits()
    again = here.begin(run(timeout_s=40.0))
    here.ask(Ping())
    (after,) = generation_waits()
    assert after.since == before.since and after.until > before.until + 10.0
    here.holding = False
    here.until(lambda: again.done)
    assert generation_waits() == []


def test_a_master_that_took_over_gets_a_finished_group_as_it_was_answered_before(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers = ["12"]
    first = here.ask(run()).result().expect(EpisodesDone)
    here.restart_master()
    here.answers = ["99"]
    assert here.ask(run()).result().expect(EpisodesDone) == first
    assert [text.completion for text in first.texts.values()] == ["12", "12"]
    assert here.num_generated == 1


def test_the_same_group_is_run_anew_after_steps_were_undone(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    old = here.begin(run())
    here.until(lambda: len(here.held) == 1)
    new = here.begin(run(lineage=1))
    here.until(lambda: len(here.held) == 2)
    with pytest.raises(RemoteError, match="grpo:0:0:0 was dropped"):
        old.result()
    here.holding = False
    here.until(lambda: new.done)
    here.until(lambda: here.num_generated == 2)
    assert here.ask(run(version=4, lineage=1)).result().body == new.result().body
    here.ask(run(lineage=2))
    assert here.num_generated == 3


@pytest.mark.parametrize("moment", ["generating", "failing", "scoring"])
def test_a_dropped_group_is_not_kept_when_it_ends(moment: str, world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, here.holding, InlineJudging.holding = ["12"], moment != "scoring", True
    pending = here.begin(run())
    here.until(lambda: here.num_generated == 1 if moment == "scoring" else len(here.held) == 1)
    here.ask(Ping())
    here.master.send("rollout-0", Drop(("grpo:0:0:0",)))
    here.until(lambda: pending.done)
    if moment == "failing":
        assert here.manager is not None
        here.manager.fail(here.held.pop(), RefusedError("not now"))
    here.holding = InlineJudging.holding = False
    here.ask(run("grpo:0:1:0"))
    with pytest.raises(RemoteError, match="does not keep sample"):
        here.ask(FetchSamples(("grpo:0:0:0/0",))).result()


def test_an_evaluation_is_answered_again_until_the_next_version_is_evaluated(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers = ["12"]
    problem = run("eval:3:0:0", stage="eval", split="eval", version=3)
    first = here.ask(problem).result().body
    here.restart_master()
    assert here.ask(problem).result().body == first
    assert here.num_generated == 1
    here.ask(run("eval:4:0:0", stage="eval", split="eval", version=4))
    here.ask(problem)
    assert here.num_generated == 3


def test_a_group_outlives_the_manager_and_is_asked_of_the_next_one(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    pending = here.begin(run())
    here.until(lambda: len(here.held) == 1)
    here.kill_manager()
    here.publish_book()
    late = here.begin(run("grpo:0:1:0"))
    here.ask(Ping())
    assert not pending.done and not late.done
    here.restart_manager()
    here.publish_book(manager_registered=False)
    here.ask(Ping())
    here.publish_book()
    here.until(lambda: len(here.held) == 2)
    asked = [delivery.body for delivery in here.held]
    assert all(isinstance(body, Generate) and body.timeout_s < 20.0 for body in asked)
    here.holding = False
    here.until(lambda: pending.done and late.done)
    assert all(len(p.result().expect(EpisodesDone).samples) == 2 for p in (pending, late))


def test_a_manager_that_is_replaced_in_one_address_book_is_asked_again_too(
    world: Callable[[Config], World],
) -> None:
    here = world(config())
    here.answers, here.holding = ["12"], True
    pending = here.begin(run())
    here.until(lambda: len(here.held) == 1)
    here.kill_manager()
    here.restart_manager()
    here.holding = False
    here.publish_book()
    here.until(lambda: pending.done)
    assert len(pending.result().expect(EpisodesDone).samples) == 2


def test_a_group_fails_at_its_deadline_when_no_manager_comes(world: Callable[[Config], World]) -> None:
    here = world(config())
    here.kill_manager()
    here.publish_book()
    pending = here.ask(run(timeout_s=0.1))
    with pytest.raises(RemoteError, match="for manager-0: Generate grpo:0:0:0"):
        pending.result()
