import pytest

from kintsugi.errors import ModelError
from kintsugi.model.tokenizer import Tokenizer, character_tokenizer
from kintsugi.rollout.user_code.observation_tokens import observation_tokens

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


def chat_tokenizer(template: str) -> Tokenizer:
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    return tokenizer


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_plain_text_is_put_behind_what_was_said_as_it_is() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    assert observation_tokens("84\n", tokenizer, chat=False, ended_by=None) == tokenizer.encode("84\n")


@pytest.mark.parametrize("ended", [True, False])
def test_in_a_chat_it_is_a_users_turn_and_a_turn_that_was_ended_is_not_ended_twice(ended: bool) -> None:
    tokenizer = chat_tokenizer(CHAT)
    ids = observation_tokens("84", tokenizer, chat=True, ended_by=tokenizer.eos_token_id if ended else None)
    end = [] if ended else [tokenizer.eos_token_id]
    assert ids == [
        *end,
        *tokenizer.encode("\n[user]84"),
        tokenizer.eos_token_id,
        *tokenizer.encode("\n[assistant]"),
    ]


def test_what_follows_is_what_the_template_makes_of_the_whole_conversation() -> None:
    tokenizer = chat_tokenizer(CHAT)
    asked = [{"role": "user", "content": "2+2"}]
    said = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    prompt = tokenizer.encode_conversation(asked)
    sampled = [*tokenizer.encode("4"), tokenizer.eos_token_id]
    observed = observation_tokens("sure?", tokenizer, chat=True, ended_by=sampled[-1])
    assert [*prompt, *sampled, *observed] == tokenizer.encode_conversation([*asked, *said])


def test_a_template_that_hides_what_was_said_is_refused() -> None:
    with pytest.raises(ModelError, match="does not show what was said"):
        observation_tokens("84", chat_tokenizer("{{ messages[-1].content }}"), chat=True, ended_by=None)
