"""Agent programs as they are played: what they return, and every way in which they can fail to."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from kintsugi.config.schema import Config, GenerationSection, RolloutSection
from kintsugi.errors import ConfigError, DataError
from kintsugi.rollout.environments.protocol import Episode, EpisodeFailed, EpisodeHangs, EpisodeRecord
from kintsugi.rollout.environments.registry import find_environment
from kintsugi.rollout.trajectory import int32
from kintsugi.rollout.user_code.agent_runner import AgentRunner
from kintsugi.types import FinishReason, Row, SamplingParams
from tests.unit.rollout.agent_worlds import ScriptedPolicy, tokenizer

ROW = Row(prompt="12*34=", columns={"answer": "408"})


def config(**rollout: Any) -> Config:
    settings = {"environment": "a.program", "turn_timeout_s": 5.0, "max_turns": 4, **rollout}
    return Config(
        name="tiny", rollout=RolloutSection(**settings), generation=GenerationSection(max_length=256)
    )


def episode(id: int = 0, **fields: Any) -> Episode:
    made = Episode(id, "grpo:0:0:0", id, ROW, int32([5]), 0, SamplingParams(max_new_tokens=32))
    return msgspec.structs.replace(made, **fields)


def play(
    agent: Callable[..., Any],
    policy: ScriptedPolicy | None = None,
    *episodes: Episode,
    **rollout: Any,
) -> list[EpisodeRecord]:
    async def run() -> list[EpisodeRecord]:
        player = AgentRunner(agent, config=config(**rollout), tokenizer=tokenizer())
        try:
            async with asyncio.timeout(20):
                playing = [player.play(each, policy or ScriptedPolicy()) for each in episodes or (episode(),)]
                return await asyncio.gather(*playing)
        finally:
            await player.close()

    return asyncio.run(run())


async def solve(row: Row, *, base_url: str, api_key: str, model: str) -> float:
    """One question, right or wrong."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.completions.create(model=model, prompt=row.prompt)
    return float(answer.choices[0].text == row.columns["answer"])


def test_an_asynchronous_program_is_played_and_its_return_is_the_reward() -> None:
    (record,) = play(solve, ScriptedPolicy(lambda prompt: "408"))
    assert (record.rewards, record.success, record.finish) == ((1.0,), True, FinishReason.EOS)
    (turn,) = record.turns
    assert list(array("i", turn.fed)) == tokenizer().encode("12*34=")
    assert tokenizer().decode(list(array("i", turn.completion.tokens))) == "408"
    assert (record.prompt, record.text) == ("12*34=", "408")
    assert record.components == {"turns": 1, "branches": 1, "untrained_tokens": 0, "refused_requests": 0}


def test_an_ordinary_program_is_played_in_a_thread() -> None:
    threads = []

    def ordinary(row: Row, *, base_url: str, api_key: str, model: str, bonus: float) -> float:
        threads.append(threading.current_thread())
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            messages: Any = [{"role": "user", "content": row.prompt}]
            for _ in range(2):
                answer = client.chat.completions.create(model=model, messages=messages).choices[0].message
                messages += [answer, {"role": "user", "content": "sure?"}]
        return bonus

    (record,) = play(ordinary, options={"bonus": 0.5})
    assert threads[0] is not threading.main_thread()
    assert (record.rewards, record.success) == ((0.0, 0.5), False)
    told = "⟨\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n⟩"
    assert record.text == f"right{told}right"


def test_many_episodes_are_played_at_once() -> None:
    policy = ScriptedPolicy(holds=asyncio.Event())

    async def meets_the_others(row: Row, **given: Any) -> float:
        asking = asyncio.create_task(solve(row, **given))
        await policy.until_asked(6)
        assert policy.holds is not None
        policy.holds.set()
        return await asking

    records = play(meets_the_others, policy, *(episode(id) for id in range(6)))
    assert [record.id for record in records] == list(range(6))


def test_the_branch_with_the_most_sampled_tokens_is_the_sample() -> None:
    async def asks_around(row: Row, *, base_url: str, api_key: str, model: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked = [
                client.completions.create(model=model, prompt=prompt, max_tokens=count)
                for prompt, count in (("a", 1), ("b", 4), ("c", 2))
            ]
            await asyncio.gather(*asked)
        return 1.0

    (record,) = play(asks_around, ScriptedPolicy(lambda prompt: "the answer is right"))
    assert record.prompt == "b"
    assert record.components["branches"] == 3 and record.components["untrained_tokens"] == 3


async def calculates(row: Row, *, base_url: str, api_key: str, model: str) -> float:
    """Asks until there is no sum in brackets."""
    text = row.prompt
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        while (
            "["
            in (reply := await client.completions.create(model=model, prompt=text, stop="]")).choices[0].text
        ):
            text += f"{reply.choices[0].text}]408;"
    return math.nan


def test_a_demonstration_is_played_by_the_program_with_what_the_row_says() -> None:
    row = Row(prompt="12*34=", columns={"completion": "408", "replies": ["[12*34]", "408"]})
    (record,) = play(calculates, None, episode(row=row, demonstrate=True))
    assert record.text == "[12*34]⟨408;⟩408"
    assert [turn.completion.finish for turn in record.turns] == [FinishReason.STOP, FinishReason.EOS]
    assert record.rewards == (0.0, 0.0)


def test_a_demonstration_without_replies_is_the_rows_completion() -> None:
    row = Row(prompt="12*34=", columns={"completion": "408"})
    assert play(calculates, None, episode(row=row, demonstrate=True))[0].text == "408"


@pytest.mark.parametrize("replies", [["[12*34]"], ["the answer is right " * 9]])
def test_a_demonstration_that_does_not_fit_the_program_is_a_mistake_in_the_data(replies: list[str]) -> None:
    row = Row(prompt="12*34=", columns={"completion": "408", "replies": replies})
    with pytest.raises(DataError, match=r"as many replies as the agent asks for|the agent asks for 16"):
        play(calculates, None, episode(row=row, demonstrate=True))


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ("408", "expected a list of texts"),
        ([408], "expected a list of texts"),
        (["[12*34]408"], "goes on after"),
    ],
)
def test_a_demonstration_that_no_model_could_give_is_a_mistake_in_the_data(replies: Any, said: str) -> None:
    row = Row(prompt="12*34=", columns={"completion": "408", "replies": replies})
    with pytest.raises(DataError, match=said):
        play(calculates, None, episode(row=row, demonstrate=True))


def returns(value: Any) -> Callable[..., Any]:
    async def program(row: Row, **given: Any) -> Any:
        await solve(row, **given)
        return value

    return program


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [1.0]])
def test_a_reward_that_is_no_finite_number_is_none(value: Any) -> None:
    with pytest.raises(EpisodeFailed, match="expected a finite number as its reward, got"):
        play(returns(value))


@pytest.mark.parametrize("value", [1, True])
def test_a_reward_may_be_any_finite_number(value: Any) -> None:
    assert play(returns(value))[0].rewards == (1.0,)


def test_an_ordinary_function_that_returns_something_to_await_is_told_so() -> None:
    def wraps(row: Row, **given: Any) -> Any:
        with openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
            client.completions.create(model="any", prompt="a")
        return solve(row, **given)

    with pytest.raises(EpisodeFailed, match="make it `async def`"):
        play(wraps)


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, StopIteration]
)
@pytest.mark.parametrize("is_async", [True, False])
def test_a_program_that_raises_is_named_with_what_it_raised(
    error: type[BaseException], is_async: bool
) -> None:
    async def raises(row: Row, **given: Any) -> float:
        raise error("on purpose")

    def raises_in_a_thread(row: Row, **given: Any) -> float:
        raise error("on purpose")

    # What a coroutine makes of a StopIteration is a RuntimeError.
    said = "raises_in_a_thread` raised" if not is_async else "raises` raised"
    with pytest.raises(EpisodeFailed, match=said):
        play(raises if is_async else raises_in_a_thread)


def test_a_mistake_in_the_data_is_no_failure_that_is_tried_again() -> None:
    async def refuses(row: Row, **given: Any) -> float:
        raise DataError("no column `number`")

    with pytest.raises(DataError, match="no column `number`"):
        play(refuses)


def test_a_program_that_asks_nothing_has_no_sample() -> None:
    async def guesses(row: Row, **given: Any) -> float:
        return 1.0

    with pytest.raises(EpisodeFailed, match="agent `guesses` returned without a token sampled"):
        play(guesses)


def test_a_program_that_hangs_is_ended() -> None:
    ended = []

    async def hangs(row: Row, **given: Any) -> float:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)
        return 1.0

    with pytest.raises(
        EpisodeFailed, match=r"did not ask or end for `rollout.turn_timeout_s`=0.2 s"
    ) as caught:
        play(hangs, turn_timeout_s=0.2)
    assert ended and not isinstance(caught.value, EpisodeHangs)


def test_a_program_that_can_not_be_ended_takes_its_process_with_it() -> None:
    released = threading.Event()

    def hangs(row: Row, **given: Any) -> float:
        released.wait()
        return 1.0

    try:
        with pytest.raises(EpisodeHangs):
            play(hangs, turn_timeout_s=0.1)
    finally:
        released.set()


def test_a_program_that_does_not_let_itself_be_ended_is_left_behind() -> None:
    clung = []

    async def clings(row: Row, **given: Any) -> float:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            clung.append(row)
        return await solve(row, **given)

    with pytest.raises(EpisodeFailed, match="did not ask or end"):
        play(clings, turn_timeout_s=0.1)
    assert clung


def test_waiting_for_the_model_is_no_hanging() -> None:
    policy = ScriptedPolicy(holds=asyncio.Event())

    async def run() -> EpisodeRecord:
        player = AgentRunner(solve, config=config(turn_timeout_s=1.2), tokenizer=tokenizer())
        playing = asyncio.create_task(player.play(episode(), policy))
        await policy.until_asked(1)
        await asyncio.sleep(1.3)
        assert policy.holds is not None
        policy.holds.set()
        record = await playing
        await player.close()
        return record

    assert asyncio.run(run()).seconds < 1.2


async def talks_for_ever(row: Row, *, base_url: str, api_key: str, model: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        text = row.prompt
        while True:
            answer = await client.completions.create(model=model, prompt=text)
            text += answer.choices[0].text + " and"


@pytest.mark.parametrize(
    ("rollout", "name"), [({}, "max_turns_reached"), ({"max_turns": 99}, "context_length_exceeded")]
)
def test_a_program_that_does_not_stop_is_told_to_and_fails_by_that_name(
    rollout: dict[str, Any], name: str
) -> None:
    with pytest.raises(EpisodeFailed, match=f"raised BadRequestError.*its last refused request: {name}"):
        play(talks_for_ever, ScriptedPolicy(lambda prompt: "the model says that"), **rollout)


def test_a_program_that_stops_when_it_is_told_to_was_cut_off() -> None:
    async def knows_when_to_stop(row: Row, **given: Any) -> float:
        with pytest.raises(openai.BadRequestError):
            await talks_for_ever(row, **given)
        return 0.25

    (record,) = play(knows_when_to_stop)
    assert (record.finish, record.rewards) == (FinishReason.LENGTH, (0.0, 0.0, 0.0, 0.25))
    assert record.components["refused_requests"] == 1


def test_nonsense_that_a_program_sends_fails_by_name_when_it_gives_up() -> None:
    async def sends_nonsense(row: Row, *, base_url: str, api_key: str, model: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model=model, messages=[{"role": "clown"}])  # type: ignore[typeddict-item]
        return 1.0

    with pytest.raises(EpisodeFailed, match="its last refused request: 400: expected `role` to be one of"):
        play(sends_nonsense)


def test_a_model_that_can_not_be_reached_fails_the_episode_whatever_the_program_makes_of_it() -> None:
    async def shrugs(row: Row, **given: Any) -> float:
        with pytest.raises(openai.InternalServerError):
            await solve(row, **given)
        await asyncio.get_running_loop().create_future()
        return 1.0

    with pytest.raises(EpisodeFailed, match="no server is left"):
        play(shrugs, ScriptedPolicy(fails=True))


def test_a_thread_that_does_not_notice_that_its_model_is_gone_takes_its_process_with_it() -> None:
    released = threading.Event()

    def retries_for_ever(row: Row, *, base_url: str, api_key: str, model: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            while not released.wait(0.01):
                with pytest.raises((openai.InternalServerError, openai.NotFoundError)):
                    client.completions.create(model=model, prompt=row.prompt)
        return 1.0

    try:
        with pytest.raises(EpisodeHangs):
            play(retries_for_ever, ScriptedPolicy(fails=True), turn_timeout_s=0.2)
    finally:
        released.set()


def test_a_thread_that_notices_fails_by_what_it_could_not_have() -> None:
    def gives_up(row: Row, *, base_url: str, api_key: str, model: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            client.completions.create(model=model, prompt=row.prompt)
        return 1.0

    with pytest.raises(EpisodeFailed, match="no server is left") as caught:
        play(gives_up, ScriptedPolicy(fails=True))
    assert not isinstance(caught.value, EpisodeHangs)


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.delenv("no_proxy", raising=False)
        assert play(solve)[0].rewards == (0.0,)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("wants_more", {}, r"can be called with \(row, \*, base_url, api_key, model\)"),
        ("solve", {"tools": 3}, "unexpected keyword argument 'tools'"),
        ("solve", {"model": "other"}, "expected no 'model'"),
    ],
)
def test_a_function_that_can_not_be_called_as_an_agent_is_refused_before_the_run(
    name: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "agents_of_a_test.py").write_text(
        "async def solve(row, *, base_url, api_key, model): ...\n"
        "def wants_more(row, question, *, base_url, api_key, model): ...\n"
    )
    section = RolloutSection(environment=f"{tmp_path}/agents_of_a_test.py:{name}", options=options)
    with pytest.raises(ConfigError, match=said):
        find_environment(section)
