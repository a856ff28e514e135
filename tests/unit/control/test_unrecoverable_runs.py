"""End of a run that cannot be recovered: what is saved before, and what is not."""

from __future__ import annotations

import msgspec
import pytest

from kintsugi.config.schema import CheckpointSection, Config
from kintsugi.control.pending import Purpose
from kintsugi.control.phases.table import Phase
from kintsugi.control.protocol import Finish, Request
from kintsugi.journal.facts import RunEnded, StrategyChosen
from kintsugi.protocol.training import RunCall, Save
from tests.unit.control.driven import CONFIG, Driven

NEVER = msgspec.structs.replace(CONFIG, checkpoint=CheckpointSection(every=0))


def training(config: Config = CONFIG, *, step: int) -> Driven:
    driven = Driven(config)
    driven.begin()
    driven.until(lambda: driven.state.step == step and driven.master.phase is Phase.TRAINING)
    return driven


def dumps(driven: Driven) -> list[tuple[str, int]]:
    requests = [effect for effect in driven.effects if isinstance(effect, Request)]
    bodies = [(r.to, r.body) for r in requests if r.token.startswith(f"{Purpose.DUMP}:")]
    return [(to, body.step) for to, body in bodies if isinstance(body, Save)]


def last_strategy(driven: Driven) -> str:
    return [fact.strategy for fact in driven.facts if isinstance(fact, StrategyChosen)][-1]


@pytest.mark.parametrize(("config", "step"), [(CONFIG, 1), (NEVER, 0)], ids=["saved", "nothing trained"])
def test_a_step_that_is_saved_already_or_has_nothing_in_it_is_not_written_again(
    config: Config, step: int
) -> None:
    driven = training(config, step=step)
    driven.fail(driven.asked(RunCall)[0], "no such reward", kind="ConfigError")
    driven.until(Phase.ENDED)
    assert (last_strategy(driven), dumps(driven), driven.state.outcome) == ("dump", [], "failed")


def test_a_step_that_no_checkpoint_holds_is_written_by_one_rank_that_holds_it() -> None:
    driven = training(NEVER, step=1)
    driven.fail(driven.asked(RunCall)[0], "no such reward", kind="ConfigError")
    driven.until(Phase.ENDED)
    assert (last_strategy(driven), dumps(driven)) == ("dump", [("model-0", 1)])
    assert driven.state.saved_steps == [1]


def test_where_no_rank_lives_and_none_comes_nobody_is_asked_to_write() -> None:
    driven = training(NEVER, step=1)
    driven.unstartable = {"model-0", "model-1"}
    for rank in ("model-0", "model-1"):
        driven.lose(rank)
    driven.until(Phase.ENDED)
    assert (last_strategy(driven), dumps(driven), driven.state.outcome) == ("exit", [], "failed")


def test_an_heir_to_a_run_that_failed_says_why_it_did() -> None:
    driven = training(step=1)
    driven.fail(driven.asked(RunCall)[0], "no such reward", kind="ConfigError")
    driven.until(Phase.ENDED)
    ended = driven.facts[-1]
    assert isinstance(ended, RunEnded) and ended.fault is not None
    successor = driven.succeed(carried_out=True)
    successor.take_over()
    (finish,) = [effect for effect in successor.effects if isinstance(effect, Finish)]
    assert (finish.outcome, finish.faults) == ("failed", (ended.fault,))


@pytest.mark.parametrize(("lost", "saved"), [("model-0", []), ("model-1", [1])], ids=["writer", "another"])
def test_a_run_whose_writer_is_lost_ends_without_a_dump_and_any_other_rank_may_go(
    lost: str, saved: list[int]
) -> None:
    driven = training(NEVER, step=1)
    driven.fail(driven.asked(RunCall)[0], "no such reward", kind="ConfigError")
    (dump,) = driven.asked(Save)
    assert dump.to == "model-0"
    driven.lose(lost)
    driven.let_grace_pass()
    assert (driven.master.phase is Phase.ENDED) == (saved == [])
    driven.until(Phase.ENDED)
    assert (driven.state.saved_steps, driven.state.outcome) == (saved, "failed")
