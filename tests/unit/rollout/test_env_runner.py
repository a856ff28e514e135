import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.config.schema import Config, GenerationSection, ModelSection, NewModel, RolloutSection
from kintsugi.errors import DataError
from kintsugi.model.plan import plan_model
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.environments.protocol import Episode, EpisodeFailed, EpisodeHangs, EpisodeRecord
from kintsugi.rollout.trajectory import int32
from kintsugi.rollout.user_code.env_runner import EnvironmentRunner, checked_step, open_player
from kintsugi.types import Completion, FinishReason, Row, SamplingParams
from tests.unit.rollout.environment_classes import Unclear
from tests.unit.rollout.reward_functions import FOLDER, told

HERE = "tests.unit.rollout.environment_classes"
ROW = Row("1+1=", {"answer": "2", "completion": "2"})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))


def settings(
    environment: str, *, timeout_s: float = 5.0, max_turns: int = 8, max_length: int = 32, **options: Any
) -> Config:
    return Config(
        name="t",
        model=ModelSection(new=NewModel(alphabet="0123456789+=")),
        generation=GenerationSection(max_length=max_length),
        rollout=RolloutSection(
            environment=f"{HERE}.{environment}",
            options=options,
            turn_timeout_s=timeout_s,
            max_turns=max_turns,
        ),
    )


class Script:
    """A model that says what stands here, and what it was asked."""

    def working(self) -> None:
        self.num_calls += 1

    def __init__(self, config: Config, *said: str, finish: FinishReason = FinishReason.EOS) -> None:
        _, self._tokenizer = plan_model(config)
        self._said, self._finish = list(said), finish
        self.asked: list[tuple[str, int, int, tuple[str, ...]]] = []
        self.num_calls = 0

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        turn: int,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Completion:
        self.asked.append((self._tokenizer.decode(prompt), turn, max_new_tokens, tuple(stop)))
        ids = self._tokenizer.encode(self._said.pop(0))
        if self._finish is FinishReason.EOS:
            ids.append(self._tokenizer.eos_token_id)
        logprobs = array("f", [-0.5] * len(ids)).tobytes()
        return Completion(0, int32(ids), logprobs, int32([3] * len(ids)), self._finish)


def episode(*, demonstrate: bool = False, row: Row = ROW) -> Episode:
    sampling = SamplingParams(max_new_tokens=5, num_samples=2)
    return Episode(1, "grpo:0:0:0", 0, row, int32([3, 12, 3, 13]), 7, sampling, demonstrate)


def play(config: Config, script: Script, given: Episode | None = None) -> EpisodeRecord:
    async def played() -> EpisodeRecord:
        player = open_player(config, plan_model(config)[1])
        assert isinstance(player, EnvironmentRunner)
        try:
            return await player.play(given or episode(), script)
        finally:
            await player.close()

    return asyncio.run(played())


def failure(config: Config, *said: str) -> str:
    with pytest.raises(EpisodeFailed) as caught:
        play(config, Script(config, *said))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["Echo", "AsyncEcho"])
def test_what_the_model_says_and_reads_stands_in_one_row_of_turns(kind: str) -> None:
    config = settings(kind)
    script = Script(config, "12", "9")
    record = play(config, script)
    assert [array("i", turn.fed).tolist() for turn in record.turns] == [[3, 12, 3, 13], [3, 4, 13]]
    assert [array("i", turn.completion.tokens).tolist() for turn in record.turns] == [[3, 4, 1], [11, 1]]
    assert script.asked == [("1+1=", 0, 5, ()), ("1+1=1212=", 1, 5, ())]
    assert (record.rewards, record.finish, record.success) == ((0.25, 1.0), FinishReason.EOS, True)
    assert record.components == {"said": 3.0, "turns": 2.0}
    assert (record.prompt, record.text) == ("1+1=", "12⟨12=⟩9")


def test_a_turn_ends_at_the_environments_stop_texts_without_an_end_token() -> None:
    config = settings("Echo", stop="+")
    script = Script(config, "1+", "9+", finish=FinishReason.STOP)
    record = play(config, script)
    assert script.asked[1] == ("1+1=1+1+=", 1, 5, ("+",))
    assert record.finish is FinishReason.STOP


def test_what_reset_says_takes_the_place_of_the_rows_prompt() -> None:
    config = settings("Telling")
    script = Script(config, "9")
    record = play(config, script, episode(row=Row("99+99=")))
    assert script.asked[0][0] == "1+1=" == record.prompt
    assert told("reset") == ["7"] and told("closed") == ["thread"]


def test_an_episode_that_does_not_end_is_cut_off_after_its_last_turn() -> None:
    config = settings("Echo", max_turns=2)
    record = play(config, Script(config, "1", "2"))
    assert (record.finish, len(record.turns)) == (FinishReason.LENGTH, 2)
    assert not record.success


def test_a_full_context_cuts_an_episode_off_and_the_last_turn_has_only_the_room_that_is_left() -> None:
    config = settings("Echo", max_length=10)
    script = Script(config, "1", "2", "3")
    record = play(config, script)
    assert [asked[2] for asked in script.asked] == [5, 2]
    assert record.finish is FinishReason.LENGTH
    assert sum(len(turn.fed) + len(turn.completion.tokens) for turn in record.turns) // 4 == 10


def test_an_observation_of_any_size_cuts_an_episode_off_and_is_not_turned_into_tokens_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(tokenizer: Tokenizer, text: str, *, add_special: bool = False) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text, add_special=add_special)

    config = settings("Huge")
    script = Script(config, "1")
    monkeypatch.setattr(Tokenizer, "encode", counted)
    record = play(config, script)
    assert record.finish is FinishReason.LENGTH and len(record.turns) == 1
    assert max(encoded) < 10_000


def test_many_episodes_are_played_at_once() -> None:
    config = settings("Echo")

    async def together() -> list[EpisodeRecord]:
        player = open_player(config, plan_model(config)[1])
        scripts = [Script(config, "1", "9") for _ in range(100)]
        return await asyncio.gather(*(player.play(episode(), script) for script in scripts))

    assert all(len(record.turns) == 2 for record in asyncio.run(together()))


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("raises", "`step` of the environment raised RuntimeError: no idea (line "),
        ("stops", "`step` of the environment raised StopIteration:  (line "),
        ("exits", "`step` of the environment raised SystemExit: enough (line "),
        (
            "none",
            "`step` of the environment: expected a `Step` or a tuple (observation, reward, done, info), got None",
        ),
        ("nan", "`step` of the environment: expected a finite number as its reward, got nan"),
        ("number", "`step` of the environment: expected text as its observation, got 5"),
        ("maybe", "`step` of the environment: expected True or False as `done`, got 'maybe'"),
        ("info", "`step` of the environment: expected a dict with names as its `info`, got 'info'"),
        ("names", "`step` of the environment: expected a dict with names as its `info`, got {1: 2.0}"),
        ("unclear", "`step` of the environment raised ValueError: the truth value is ambiguous"),
        ("half", "`step` of the environment: expected text as its observation, got '\\ud800'"),
        ("awaitable", "`step` of the environment gave something to await; make it `async def`"),
        ("omega", "`step` of the environment: the tokenizer has no token for ['Ω'] in 'Ω'"),
        ("reset", "`reset` of the environment: expected text, an `Observation` or None, got 17"),
        ("nothing", "`reset` of the environment: expected a prompt of 1 to 31 tokens"),
        ("foreign", "`reset` of the environment: the tokenizer has no token for ['Ω'] in 'Ω'"),
        ("halved", "`reset` of the environment: expected text, an `Observation` or None, got '\\ud800'"),
        ("dict", "`reset` of the environment: expected text, an `Observation` or None, got {'obs"),
        ("stops at nothing", "`reset` of the environment: expected text, an `Observation` or None, got Obs"),
        ("close", "`close` of the environment raised RuntimeError: will not close"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'sleep' was never awaited")
def test_each_way_to_fail_gives_one_clear_reason_and_the_environment_is_closed(
    way: str, expected: str
) -> None:
    assert failure(settings("Wrong", way=way), "9").startswith(expected)
    assert told("closed") == [way]


def test_an_asynchronous_step_that_hangs_is_interrupted() -> None:
    config = settings("AsyncHanging", timeout_s=0.05)
    assert (
        failure(config, "1") == "`step` of the environment took longer than `rollout.turn_timeout_s`=0.05 s"
    )


def test_an_ordinary_step_that_hangs_can_not_be_interrupted_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: _slowly())
    config = settings("Hanging", timeout_s=0.05)
    with pytest.raises(EpisodeHangs, match="`step` of the environment took longer than"):
        play(config, Script(config, "1"))


def _slowly() -> None:
    """Long enough to be late, short enough for the thread to end with the test."""
    import threading

    threading.Event().wait(0.3)


def test_a_constructor_that_raises_is_told() -> None:
    assert failure(settings("Unmakeable"), "9").startswith("`__init__` of the environment raised OSError")


def test_the_users_own_mistake_is_not_an_episodes() -> None:
    config = settings("Echo")
    config = msgspec.structs.replace(config, rollout=RolloutSection(environment="calculator"))
    with pytest.raises(DataError, match="column `answer`"):
        play(config, Script(config, "9"), episode(row=Row("1+1=")))


def test_an_environment_that_can_show_how_it_is_done_is_learned_in_whole_episodes() -> None:
    config = settings("Showing", stop="+")
    record = play(config, Script(config), episode(demonstrate=True))
    assert [array("i", turn.fed).tolist() for turn in record.turns] == [[3, 12, 3, 13], [3, 4, 12, 13]]
    assert [array("i", turn.completion.tokens).tolist() for turn in record.turns] == [[3, 4, 12], [11, 1]]
    assert [turn.completion.finish for turn in record.turns] == [FinishReason.STOP, FinishReason.EOS]
    assert set(array("i", record.turns[0].completion.versions)) == {-1}


def test_of_one_that_can_not_the_rows_completion_is_learned() -> None:
    config = settings("Echo")
    record = play(config, Script(config), episode(demonstrate=True))
    (turn,) = record.turns
    assert array("i", turn.completion.tokens).tolist() == [4, 1]
    assert record.text == "2"


def test_a_step_may_be_a_tuple_of_numpy_values() -> None:
    import numpy as np

    step = checked_step(("x", np.float32(0.5), np.bool_(True), {"frame": Unclear(), "seen": np.int64(3)}))
    assert (step.reward, step.done, step.info) == (0.5, True, {"seen": 3.0})
    assert type(step.reward) is float and type(step.done) is bool
