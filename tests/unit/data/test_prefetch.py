import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kintsugi.config.schema import AlgorithmSection, Config, DataSection, ModelSection, NewModel
from kintsugi.data import prefetch as feed_module
from kintsugi.data import tokenized
from kintsugi.data.columns import needs_of
from kintsugi.data.dataset import open_data
from kintsugi.data.prefetch import PrefetchingReader, measured_tokens
from kintsugi.data.tokenized import RowTokenizer, prompt_tokens
from kintsugi.errors import DataError
from kintsugi.model.tokenizer import Tokenizer, character_tokenizer
from kintsugi.types import Row

ALPHABET = "0123456789+=<>usay :"
TEMPLATE = "{% for m in messages %}<{{ m.role[:1] }}>{{ m.content }}{% endfor %}<a>"


def chatting() -> Tokenizer:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def settings(tmp_path: Path, *, algorithm: str = "sft", num_rows: int = 5, **data: Any) -> Config:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": f"{n}+1=", "completion": str(n + 1), "chosen": "1", "rejected": "2"}
        for n in range(num_rows)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    section = DataSection(
        source=str(path),
        completion_column="completion",
        num_eval=1,
        shuffle=False,
        cache_dir=str(tmp_path / "cache"),
        **data,
    )
    return Config(
        name="t",
        model=ModelSection(new=NewModel(alphabet=ALPHABET)),
        algorithm=AlgorithmSection(name=algorithm),  # type: ignore[arg-type]
        data=section,
    )


@pytest.mark.parametrize(
    ("row", "data", "expected"),
    [
        (Row("1+1="), DataSection(), "1+1="),
        (Row("1+1="), DataSection(chat_template=True), "<u>1+1=<a>"),
        (Row("1+1="), DataSection(chat_template=True, system="say"), "<s>say<u>1+1=<a>"),
        (
            Row("", messages=({"role": "system", "content": "a"}, {"role": "user", "content": "1"})),
            DataSection(system="say"),
            "<s>a<u>1<a>",
        ),
    ],
)
def test_a_prompt_is_plain_text_or_a_conversation_in_the_template(
    row: Row, data: DataSection, expected: str
) -> None:
    assert chatting().decode(prompt_tokens(row, chatting(), data=data)) == expected


def test_what_is_learned_ends_with_the_end_token(tmp_path: Path) -> None:
    tokenizer, config = chatting(), settings(tmp_path, algorithm="dpo")
    row, fed = PrefetchingReader(config, tokenizer, run_dir=tmp_path).training(
        stage="dpo", seed=0, epoch=0, position=0
    )
    assert tokenizer.decode(fed.prompt) == row.prompt
    end = tokenizer.eos_token_id
    assert fed.answers == {"chosen": [*tokenizer.encode("1"), end], "rejected": [*tokenizer.encode("2"), end]}


class TestKeptTokens:
    @pytest.fixture(autouse=True)
    def keep_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(feed_module, "_WORTH_KEEPING", 1)

    def measured(self, config: Config, tokenizer: Tokenizer) -> list[tokenized.TokenizedRow]:
        part = open_data(config).parts[0]
        feeding = RowTokenizer(tokenizer, config.data, needs_of(config))
        found = measured_tokens(part.train, part.train_digest, feeding)
        return [found[index] for index in range(len(found))]

    def files(self, tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "cache" / "tokens").glob("*"))

    def test_they_are_what_would_be_made_again(self, tmp_path: Path) -> None:
        config, tokenizer = settings(tmp_path), chatting()
        made, kept = self.measured(config, tokenizer), self.measured(config, tokenizer)
        assert made == kept
        assert len(self.files(tmp_path)) == 1
        row, fed = PrefetchingReader(config, tokenizer, run_dir=tmp_path).training(
            stage="sft", seed=0, epoch=0, position=2
        )
        assert fed == made[2] == RowTokenizer(tokenizer, config.data, needs_of(config)).tokenize(row)

    def test_a_worker_takes_them_instead_of_its_tokenizer(self, tmp_path: Path) -> None:
        config, tokenizer = settings(tmp_path), chatting()
        made = self.measured(config, tokenizer)
        feed = PrefetchingReader(config, tokenizer, run_dir=tmp_path)
        tokenizer.encode_prompt = None  # type: ignore[method-assign,assignment]
        assert feed.training(stage="sft", seed=0, epoch=0, position=1)[1] == made[1]

    @pytest.mark.parametrize("change", ["content", "tokenizer", "template", "system", "needs"])
    def test_whatever_they_follow_from_makes_others(self, tmp_path: Path, change: str) -> None:
        config, tokenizer = settings(tmp_path, chat_template=True), chatting()
        self.measured(config, tokenizer)
        data = config.data
        if change == "content":
            config = settings(tmp_path, chat_template=True, num_rows=6)
        elif change == "tokenizer":
            tokenizer = character_tokenizer(ALPHABET[::-1])
            tokenizer.chat_template = TEMPLATE
        elif change == "template":
            tokenizer.chat_template = TEMPLATE + ":"
        elif change == "system":
            config = msgspec.structs.replace(config, data=msgspec.structs.replace(data, system="say"))
        else:
            config = settings(tmp_path, chat_template=True, algorithm="dpo")
        rows = [open_data(config).parts[0].train.row(index) for index in range(4)]
        expected = [RowTokenizer(tokenizer, config.data, needs_of(config)).tokenize(row) for row in rows]
        assert self.measured(config, tokenizer)[:4] == expected
        assert len(self.files(tmp_path)) == 2

    @pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
    def test_damaged_ones_are_recognised_and_made_again(self, tmp_path: Path, damage: str) -> None:
        config, tokenizer = settings(tmp_path), chatting()
        made = self.measured(config, tokenizer)
        (path,) = self.files(tmp_path)
        content = bytearray(path.read_bytes())
        content[-40] ^= 1
        path.write_bytes(bytes({"cut": content[:-7], "flipped": content, "emptied": b""}[damage]))
        assert self.measured(config, tokenizer) == made
        assert path.read_bytes()[:-1] != content[:-1]


class TestReady:
    def test_the_next_rows_are_made_ready_and_are_the_same(self, tmp_path: Path) -> None:
        config = settings(tmp_path, num_rows=9)
        plain, ahead = (PrefetchingReader(config, chatting(), run_dir=tmp_path) for _ in range(2))
        for position in range(8):
            ask = {"stage": "sft", "seed": 0, "epoch": 0, "position": position}
            assert ahead.training(**ask) == plain.training(**ask)  # type: ignore[arg-type]
            ahead.make_ready(within_s=5.0)

    def test_a_row_that_was_made_ready_is_not_made_again(self, tmp_path: Path) -> None:
        feed = PrefetchingReader(settings(tmp_path), chatting(), run_dir=tmp_path)
        feed.training(stage="sft", seed=0, epoch=0, position=0)
        feed.make_ready(within_s=5.0)
        feed._read = None  # type: ignore[method-assign,assignment]
        assert feed.training(stage="sft", seed=0, epoch=0, position=2)[0].prompt == "2+1="


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_rows_that_are_tokenized_together_have_the_tokens_of_each_alone(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "_ROWS_AT_ONCE", 4)
    config = settings(tmp_path, algorithm=algorithm, num_rows=15, chat_template=True, system="say")
    part = open_data(config, run_dir=tmp_path).parts[0]
    feeding = RowTokenizer(chatting(), config.data, needs_of(config))
    found = measured_tokens(part.train, None, feeding)
    assert isinstance(found, list)
    assert found == [feeding.tokenize(part.train.row(index)) for index in range(len(part.train))]


def test_the_row_that_can_not_be_tokenized_is_named_among_many(tmp_path: Path) -> None:
    config = settings(tmp_path, algorithm="grpo", num_rows=15, chat_template=True)
    part = open_data(config, run_dir=tmp_path).parts[0]
    tokenizer = character_tokenizer(ALPHABET.replace("7", ""))
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(DataError, match=r"no token for \['7'\] in '<u>7\+1=<a>'"):
        measured_tokens(part.train, None, RowTokenizer(tokenizer, config.data, needs_of(config)))


def test_texts_are_not_made_as_long_as_the_longest() -> None:
    tokenizer = chatting()
    tokenizer._backend.enable_padding(pad_id=0, pad_token="<pad>")
    assert tokenizer.encode_each(["1", "123"]) == [tokenizer.encode("1"), tokenizer.encode("123")]
