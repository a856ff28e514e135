import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from kintsugi.errors import DataError, ModelError
from kintsugi.model.tokenizer import Tokenizer, character_tokenizer

ALPHABET = "0123456789+= \n"
TEMPLATE = (
    "{{ eos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_characters_become_ids_in_the_alphabets_order_and_come_back() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    text = "12+34=\n46"
    ids = tokenizer.encode(text)
    assert ids == [2 + ALPHABET.index(character) for character in text]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 2 + len(ALPHABET))


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    ids = [*tokenizer.encode("1+1"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids) == "1+1"
    assert tokenizer.decode(ids, skip_special=False) == "1+1<eos><pad>"


def test_a_completions_text_leaves_out_the_end_token_and_nothing_else() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    four, six = tokenizer.encode("46")
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert tokenizer.text_of_completion([four, six, end], ended=True) == "46"
    assert tokenizer.text_of_completion([four, six], ended=False) == "46"
    assert tokenizer.text_of_completion([four, pad, six, end], ended=True) == "4<pad>6"
    assert tokenizer.text_of_completion([four, six, pad], ended=False) == "46<pad>"
    assert tokenizer.text_of_completion([end, four, end, end], ended=True) == "<eos>4<eos>"
    assert (
        tokenizer.text_of_completion([end], ended=True) == tokenizer.text_of_completion([], ended=False) == ""
    )


def with_own_tokens(folder: Path, template: str) -> Tokenizer:
    """A tokenizer whose post-processor puts its own tokens around a text; `<bos>` is one of them."""
    character_tokenizer(ALPHABET).save(folder)
    path = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_special_tokens(["<bos>"])
    special = [(token, backend.token_to_id(token)) for token in ("<bos>", "<eos>")]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    backend.save(str(path))
    edit_config(folder, bos_token="<bos>")
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("<bos> $A", "1+1=", "<bos>1+1="),
        ("<bos> $A", "<bos>1+1=", "<bos>1+1="),
        ("<bos> $A <eos>", "1+1=", "<bos>1+1="),
        ("$A <eos>", "1+1=", "1+1="),
        ("$A", "1+1=", "1+1="),
    ],
)
def test_a_plain_prompt_begins_with_bos_once_if_the_tokenizer_puts_it_there_and_is_never_ended(
    template: str, text: str, expected: str, tmp_path: Path
) -> None:
    tokenizer = with_own_tokens(tmp_path, template)
    assert tokenizer.decode(tokenizer.encode_prompt(text), skip_special=False) == expected


def test_a_plain_prompt_of_a_tokenizer_without_bos_is_only_its_text() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    assert tokenizer.encode_prompt("1+1=") == tokenizer.encode("1+1=")


def test_a_chat_prompt_is_one_users_turn_and_the_assistants_beginning(tmp_path: Path) -> None:
    import transformers

    template = "{{ bos_token }}{{ messages[0].content }}\n{% if add_generation_prompt %}= {% endif %}"
    tokenizer = with_own_tokens(tmp_path, "<bos> $A")
    tokenizer.chat_template = template
    ids = tokenizer.encode_conversation([{"role": "user", "content": "1+1"}])
    assert tokenizer.decode(ids, skip_special=False) == "<bos>1+1\n= "
    edit_config(tmp_path, chat_template=template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    message = {"role": "user", "content": "1+1"}
    assert ids == theirs.apply_chat_template([message], add_generation_prompt=True)["input_ids"]


def test_a_chat_prompt_without_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match=r"field `chat_template` is missing"):
        character_tokenizer(ALPHABET).encode_conversation([{"role": "user", "content": "1+1="}])


def test_a_character_outside_the_alphabet_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"no token for \['x'\] in '1x2'"):
        character_tokenizer(ALPHABET).encode("1x2")


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_must_have_distinct_characters(alphabet: str) -> None:
    with pytest.raises(ModelError, match="distinct characters"):
        character_tokenizer(alphabet)


def test_a_saved_tokenizer_loads_here_and_in_transformers_with_the_same_ids(tmp_path: Path) -> None:
    import transformers

    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.save(tmp_path)
    text = "12 + 3=15\n<eos>"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).encode(text) == tokenizer.encode(text)
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == tokenizer.decode(
        tokenizer.encode(text)
    )
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize("field", ["eos_token", "pad_token"])
def test_a_tokenizer_without_end_or_padding_token_is_refused_by_file_and_field(
    field: str, tmp_path: Path
) -> None:
    character_tokenizer(ALPHABET).save(tmp_path)
    edit_config(tmp_path, **{field: None})
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: field `{field}` is missing; set it to"):
        Tokenizer.load(tmp_path)


def test_a_special_token_that_is_no_token_is_refused(tmp_path: Path) -> None:
    character_tokenizer(ALPHABET).save(tmp_path)
    edit_config(tmp_path, eos_token="<end>")
    with pytest.raises(ModelError, match=r"field `eos_token` is '<end>', which is not a token"):
        Tokenizer.load(tmp_path)


def test_special_tokens_stored_as_objects_or_in_the_older_file_are_found(tmp_path: Path) -> None:
    character_tokenizer(ALPHABET).save(tmp_path)
    edit_config(tmp_path, eos_token={"content": "<eos>", "special": True}, pad_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)


def test_a_missing_or_damaged_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected the file tokenizer\.json in"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("place", ["string", "list", "file"])
def test_a_chat_template_formats_a_conversation_as_transformers_does(place: str, tmp_path: Path) -> None:
    import transformers

    character_tokenizer(ALPHABET).save(tmp_path)
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "no"}]
        edit_config(tmp_path, chat_template=TEMPLATE if place == "string" else named)
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    ours = Tokenizer.load(tmp_path).apply_chat_template(messages)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours == "<eos>[user] 1+1=\n[assistant] 2\n[assistant]"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(999) %}{% endfor %}{% endfor %}",
            "more than 1,000,000",
        ),
        ("{% for a in range(2 ** 64) %}{% endfor %}", "more than 1,000,000"),
        ("{{ 'x' * 2000000000 }}", "got 2,000,000,000"),
        ("{{ (2000000000 * messages[0].content)[0] }}", "got 6,000,000,000"),
        ("{{ 3 ** 9999999999 }}", "exponent of at most 64"),
    ],
)
def test_a_chat_template_that_would_burn_time_or_memory_is_refused(template: str, reason: str) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=f"the chat template failed: .*{reason}"):
        tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}])


def test_the_limits_of_a_chat_template_are_for_one_rendering() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    loops = "{% for a in range(9, 0, -1) %}{% for b in range(99999) %}{% endfor %}{{ a }}{% endfor %}"
    tokenizer.chat_template = loops + "{{ '-' * 3 }}{{ 2 ** 10 }}{{ range(0) | list }}"
    for _ in range(2):
        assert tokenizer.apply_chat_template([]) == "987654321---1024[]"


def test_conversations_without_a_template_are_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"field `chat_template` is missing.*plain text prompts"):
        character_tokenizer(ALPHABET).apply_chat_template([{"role": "user", "content": "1"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "failed"),
        ("{% if %}", "failed"),
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_reported(template: str, expected: str) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=expected):
        tokenizer.apply_chat_template([{"role": "user", "content": "1"}])


def test_a_long_text_leaves_other_threads_running() -> None:
    text = "ab" * 40_000
    tokenizer = character_tokenizer("ab")
    num_ticks, encoded = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not encoded.wait(0.001):
            num_ticks += 1

    other = threading.Thread(target=tick)
    other.start()
    try:
        ids = tokenizer.encode(text)
    finally:
        encoded.set()
        other.join()
    assert ids == tokenizer.encode("ab") * 40_000
    assert num_ticks > 5


def test_a_long_text_that_has_no_tokens_is_not_repeated_in_the_error() -> None:
    with pytest.raises(DataError, match="no token for") as refused:
        character_tokenizer("ab").encode("abc" * 100_000)
    assert len(str(refused.value)) < 300
