"""Which rows a rollout worker hands out, and when."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection, Config, DataSection
from kintsugi.data.prefetch import PrefetchingReader
from kintsugi.errors import RemoteError
from kintsugi.protocol.rollout import Drop, EpisodesDone, FetchSamples, SamplesFetched
from kintsugi.rollout import worker
from kintsugi.runtime.waits import WAITS
from tests.unit.rollout.worlds import World, config, run

MakeWorld = Callable[[Config], World]


def test_a_pair_is_the_chosen_answer_and_the_rejected_one(world: MakeWorld) -> None:
    settings = msgspec.structs.replace(
        config(), algorithm=AlgorithmSection(name="dpo", group_size=2), warmup=None
    )
    here = world(settings)
    done = here.ask(run("dpo:0:0:0", stage="dpo")).result().expect(EpisodesDone)
    keys = tuple(meta.key for meta in done.samples)
    assert keys == ("dpo:0:0:0/0", "dpo:0:0:0/1")
    fetched = here.ask(FetchSamples(keys)).result().expect(SamplesFetched)
    prompt = done.texts[keys[0]].prompt
    first, second = (int(number) for number in prompt.removesuffix("=").split("+"))
    for trajectory, key in zip(fetched.samples, keys, strict=True):
        ids = memoryview(trajectory.tokens).cast("i").tolist()
        assert here.tokenizer.decode(ids) == prompt + done.texts[key].completion
        assert sum(trajectory.loss_mask) == len(done.texts[key].completion) + 1
    right = [int(done.texts[key].completion[::-1]) == first + second for key in keys]
    assert right == [True, False]


def test_the_data_are_open_before_the_first_row_is_requested(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def noted(*arguments: Any, **keywords: Any) -> PrefetchingReader:
        opened.append("data")
        return PrefetchingReader(*arguments, **keywords)

    monkeypatch.setattr(worker, "PrefetchingReader", noted)
    here = world(config())
    here.until(lambda: bool(opened))
    here.answers = ["1"]
    here.ask(run()).result().expect(EpisodesDone)
    assert opened == ["data"], "the first request found them open"


def test_data_that_can_not_be_opened_are_reported_by_the_first_request(
    world: MakeWorld, tmp_path: Path
) -> None:
    missing = DataSection(source=str(tmp_path / "none.jsonl"), prompt_column="prompt")
    here = world(msgspec.structs.replace(config(), data=missing, warmup=None))
    for _ in range(3):
        here.worker.turn()
    with pytest.raises(RemoteError, match=r"none\.jsonl"):
        here.ask(run()).result()


class TestStream:
    def line(self, **record: Any) -> str:
        return json.dumps({"answer": "1", **record}) + "\n"

    @pytest.fixture
    def here(self, world: MakeWorld, tmp_path: Path) -> World:
        (tmp_path / "held.jsonl").write_text(self.line(prompt="1+1="))
        (tmp_path / "rows.jsonl").touch()
        data = DataSection(source=f"stream:{tmp_path}/rows.jsonl", eval_source=str(tmp_path / "held.jsonl"))
        made = world(msgspec.structs.replace(config(), data=data, warmup=None))
        made.answers = ["1"]
        return made

    def test_a_group_waits_for_its_row_and_says_so(self, here: World, tmp_path: Path) -> None:
        asked = here.begin(run())
        here.until(lambda: any(wait.whom == "stream" for wait in WAITS.declared()))
        assert not asked.done
        here.begin(run("grpo:0:1:0"))
        here.worker.turn()
        (tmp_path / "rows.jsonl").write_text(self.line(prompt="2+2="))
        here.until(lambda: asked.done)
        assert (tmp_path / "events.jsonl").read_text().count("waiting for a stream: row 0 has not come") == 1
        assert {text.prompt for text in asked.result().expect(EpisodesDone).texts.values()} == {"2+2="}

    def test_a_row_that_does_not_come_in_time_is_an_error(self, here: World) -> None:
        with pytest.raises(RemoteError, match=r"waited .* s for stream: the row of grpo:0:0:0"):
            here.ask(run(timeout_s=0.05)).result()

    def test_a_group_that_is_dropped_meanwhile_is_not_begun(self, here: World, tmp_path: Path) -> None:
        asked = here.begin(run())
        here.until(lambda: any(wait.whom == "stream" for wait in WAITS.declared()))
        here.master.send("rollout-0", Drop(("grpo:0:0:0",)))
        here.until(lambda: asked.done)
        (tmp_path / "rows.jsonl").write_text(self.line(prompt="2+2="))
        here.worker.turn()
        assert here.num_generated == 0
