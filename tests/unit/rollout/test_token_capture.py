"""Requests become tokens that continue, exactly, what was sampled before."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.user_code.observation_tokens import _MARKER
from kintsugi.rollout.user_code.token_capture import CapturedReply, CapturedRequest, TokenCapture
from kintsugi.types import Completion, FinishReason
from tests.unit.rollout.agent_worlds import CHATML, HEADERS, WITHOUT_THOUGHTS, completed, tokenizer

texts = st.text(alphabet="the answer is 408.\n +", min_size=1, max_size=30)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def chat(
    capture: TokenCapture, messages: Sequence[dict[str, Any]], completion: Completion, **variables: Any
) -> CapturedReply:
    """Ask, and answer by that completion, as the endpoint does."""
    asking = CapturedRequest(capture)
    prompt = asking.encode_conversation(messages, variables=variables)
    told = text_of(capture.tokenizer, completion)
    return capture.keep(asking.answered(told, completion, message=assistant(told)), prompt, completion)


def write(
    capture: TokenCapture, text: str, completion: Completion, *, told: str | None = None
) -> CapturedReply:
    asking = CapturedRequest(capture)
    prompt = asking.encode_prompt(text)
    whole = text_of(capture.tokenizer, completion)
    said = asking.answered(whole if told is None else told, completion, message={})
    return capture.keep(said, prompt, completion)


def text_of(tokens: Tokenizer, completion: Completion) -> str:
    ids = list(array("i", completion.tokens))
    return tokens.decode(ids[:-1] if completion.finish is FinishReason.EOS else ids)


def said(
    text: str, *, finish: FinishReason = FinishReason.EOS, tokens: Tokenizer | None = None
) -> Completion:
    tokens = tokens or tokenizer()
    end = tokens.eos_token_id if finish is FinishReason.EOS else None
    return completed(tokens.encode(text), finish=finish, end=end)


@st.composite
def cut_somehow(draw: st.DrawFn, text: str, tokens: Tokenizer) -> list[int]:
    """Tokens of a text as a policy may sample them: rarely those of its encoder."""
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    parts = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    return [token for part in parts for token in tokens.encode(part)]


def columns(reply: CapturedReply) -> tuple[list[int], list[int], list[float]]:
    """Tokens, mask and log-probabilities of the branch that ends with a reply."""
    tokens, mask, logprobs = [], [], []
    for turn in reply.turns():
        fed, sampled = array("i", turn.fed), array("i", turn.completion.tokens)
        tokens += [*fed, *sampled]
        mask += [0] * len(fed) + [1] * len(sampled)
        logprobs += [0.0] * len(fed) + list(array("f", turn.completion.logprobs))
    return tokens, mask, logprobs


@pytest.mark.parametrize("template", [CHATML, HEADERS], ids=["chatml", "headers"])
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_conversation_that_goes_on_is_continued_to_the_token(template: str, data: st.DataObject) -> None:
    tokens_of = tokenizer(template)
    capture = TokenCapture(tokens_of)
    messages = [user(data.draw(texts))]
    sampled: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        text = data.draw(texts)
        completion = completed(data.draw(cut_somehow(text, tokens_of)), end=tokens_of.eos_token_id)
        before = capture.replies[-1].tokens if capture.replies else ()
        reply = chat(capture, messages, completion)
        sampled += reply.sampled
        assert reply.prompt[: len(before)] == before
        # To the model it reads as if the whole conversation had gone through the template.
        shown = tokens_of.apply_chat_template(messages)
        assert tokens_of.decode(reply.prompt, skip_special=False) == shown
        messages += [assistant(text), user(data.draw(texts))]
    tokens, mask, _ = columns(reply)
    assert tokens == list(reply.tokens)
    assert [token for token, is_sampled in zip(tokens, mask, strict=True) if is_sampled] == sampled
    assert capture.num_branches == 1 and capture.longest() is reply


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_plain_text_that_goes_on_is_continued_to_the_token(data: st.DataObject) -> None:
    capture = TokenCapture(tokenizer())
    text = data.draw(texts)
    sampled: list[int] = []
    for _ in range(data.draw(st.integers(1, 4))):
        written = data.draw(texts)
        completion = completed(data.draw(cut_somehow(written, tokenizer())), finish=FinishReason.LENGTH)
        reply = write(capture, text, completion)
        sampled += reply.sampled
        assert tokenizer().decode(reply.prompt) == text
        text += written + data.draw(st.just("") | texts)
    tokens, mask, _ = columns(reply)
    assert tokens == list(reply.tokens)
    assert [token for token, is_sampled in zip(tokens, mask, strict=True) if is_sampled] == sampled


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_reply_that_was_cut_off_is_ended_by_the_template(finish: FinishReason) -> None:
    capture = TokenCapture(tokenizer())
    chat(capture, [user("12*34?")], said("it is", finish=finish))
    messages = [user("12*34?"), assistant("it is"), user("go on")]
    second = chat(capture, messages, said("408"))
    assert tokenizer().decode(second.prompt, skip_special=False) == tokenizer().apply_chat_template(messages)
    assert second.before is capture.replies[0]


def test_thoughts_that_the_template_drops_stay_in_the_tokens_that_sampled_them() -> None:
    tokens = tokenizer(WITHOUT_THOUGHTS)
    capture = TokenCapture(tokens)
    thought = "<think>12*34</think>it is 408"
    first = chat(capture, [user("12*34?")], said(thought, tokens=tokens))
    second = chat(capture, [user("12*34?"), assistant(thought), user("sure?")], said("yes", tokens=tokens))
    assert second.prompt[: len(first.tokens)] == first.tokens
    assert thought in tokens.decode(second.prompt)


@pytest.mark.parametrize(
    "repeated",
    [
        assistant("408"),
        assistant("  408\n"),
        assistant("408", refusal=None, audio=None, tool_calls=None),
        assistant("408", name="solver"),
    ],
)
def test_a_reply_is_recognised_however_the_program_writes_it_down(repeated: dict[str, Any]) -> None:
    capture = TokenCapture(tokenizer())
    chat(capture, [user("12*34?")], said("408"))
    assert chat(capture, [user("12*34?"), repeated, user("sure?")], said("yes")).before is capture.replies[0]


@pytest.mark.parametrize(
    "messages",
    [
        [user("12*35?"), assistant("408"), user("sure?")],
        [user("12*34?"), assistant("409"), user("sure?")],
        [user("12*34?"), user("sure?")],
        [user("12*34?")],
    ],
)
def test_a_conversation_that_was_changed_is_another_branch(messages: list[dict[str, Any]]) -> None:
    capture = TokenCapture(tokenizer())
    chat(capture, [user("12*34?")], said("408"))
    other = chat(capture, messages, said("no, it is not"))
    assert capture.num_branches == 2
    assert sum(columns(other)[1]) == other.num_sampled


def test_other_tools_are_another_branch() -> None:
    capture = TokenCapture(tokenizer())
    tool = {"type": "function", "function": {"name": "times"}}
    chat(capture, [user("12*34?")], said("408"), tools=[tool])
    longer = [user("12*34?"), assistant("408"), user("sure?")]
    assert chat(capture, longer, said("yes")).before is None
    assert chat(capture, longer, said("yes"), tools=[tool]).before is capture.replies[0]


def test_what_the_template_does_not_look_at_makes_no_branch() -> None:
    capture = TokenCapture(tokenizer())
    tool = {"type": "function", "function": {"name": "times"}}
    letter_by_letter = [token for letter in "the answer" for token in tokenizer().encode(letter)]
    sampled = completed(letter_by_letter, end=tokenizer().eos_token_id)
    first = chat(capture, [user("12*34?")], sampled, tools=[tool], tool_choice="required")
    longer = [user("12*34?"), assistant("the answer"), user("sure?")]
    second = chat(capture, longer, said("yes"), tools=[tool], tool_choice="auto")
    assert second.prompt[: len(first.tokens)] == first.tokens


def test_a_changed_reply_keeps_the_tokens_before_the_change() -> None:
    """They were sampled in the same context, whatever the program put after them."""
    capture = TokenCapture(tokenizer())
    first = chat(capture, [user("12*34?")], said("it is 408, surely"))
    other = chat(capture, [user("12*34?"), assistant("it is 409"), user("sure?")], said("yes"))
    assert other.before is first
    kept = other.num_shared - len(first.prompt)
    assert 0 < kept < len(first.sampled)
    tokens, mask, logprobs = columns(other)
    assert tokens == list(other.tokens)
    assert sum(mask) == other.num_sampled == kept + len(other.sampled)
    assert logprobs[len(first.prompt)] == pytest.approx(-0.01)


def test_two_continuations_of_a_reply_share_it() -> None:
    capture = TokenCapture(tokenizer())
    begun = [user("12*34?"), assistant("408")]
    first = chat(capture, begun[:1], said("408"))
    short = chat(capture, [*begun, user("sure?")], said("yes"))
    long = chat(capture, [*begun, user("why?")], said("twelve times thirty four"))
    assert short.before is long.before is first
    assert capture.num_branches == 2
    assert capture.longest() is long
    assert capture.num_sampled == long.num_sampled + len(short.sampled)


def test_which_branch_is_trained_does_not_depend_on_who_came_first() -> None:
    answers = {"a": "the answer", "b": "is right", "c": "is four"}
    chosen = set()
    for order in itertools.permutations(answers):
        capture = TokenCapture(tokenizer())
        for question in order:
            chat(capture, [user(question)], said(answers[question]))
        found = capture.longest()
        assert found is not None
        chosen.add(found.tokens)
    assert len(chosen) == 1


def test_text_that_goes_on_after_the_stop_text_keeps_all_that_was_sampled() -> None:
    capture = TokenCapture(tokenizer())
    first = write(capture, "12*34=", said("[12*34]", finish=FinishReason.STOP), told="[12*34")
    second = write(capture, "12*34=[12*34]408;", said("408"))
    assert second.prompt[: len(first.tokens)] == first.tokens


def test_text_that_goes_on_before_the_stop_text_keeps_what_is_in_it() -> None:
    capture = TokenCapture(tokenizer())
    sampled = [token for part in ("let me see", "\nObservation", ":") for token in tokenizer().encode(part)]
    first = write(capture, "12*34?", completed(sampled, finish=FinishReason.STOP), told="let me see")
    second = write(capture, "12*34?let me see -> 408", said("408"))
    assert second.before is first
    assert tokenizer().decode(second.prompt) == "12*34?let me see -> 408"
    kept = second.num_shared - len(first.prompt)
    assert tokenizer().decode(second.prompt[len(first.prompt) :][:kept]) == "let me see"


def test_a_reply_without_text_is_not_taken_for_the_beginning_of_every_prompt() -> None:
    capture = TokenCapture(tokenizer())
    write(capture, "1+1=", completed([tokenizer().eos_token_id]))
    assert write(capture, "1+1=2, 2+2=", said("4")).before is None
    assert capture.num_branches == 2


def test_a_prompt_of_tokens_continues_the_reply_whose_tokens_it_has() -> None:
    capture = TokenCapture(tokenizer())
    first = capture.keep(None, [5, 6], completed([7, 8]))
    assert capture.keep(None, [5, 6, 7, 8, 9], completed([10])).before is first
    assert capture.keep(None, [5, 6, 9], completed([10])).before is None


def test_a_template_that_hides_earlier_replies_begins_a_new_branch() -> None:
    last_only = "{{ messages[-1].content }}<|im_start|>"
    tokens = tokenizer(last_only)
    capture = TokenCapture(tokens)
    chat(capture, [user("12*34?")], said("408", tokens=tokens))
    second = chat(capture, [user("12*34?"), assistant("408"), user("sure?")], said("yes", tokens=tokens))
    assert second.before is None


def test_a_message_that_looks_like_our_placeholder_begins_a_new_branch() -> None:
    capture = TokenCapture(tokenizer(CHATML))
    chat(capture, [user(_MARKER)], said("408"))
    messages = [user(_MARKER), assistant("408"), user("sure?")]
    second = chat(capture, messages, said("yes"))
    assert tokenizer().decode(second.prompt, skip_special=False) == tokenizer().apply_chat_template(messages)


def test_requests_at_once_are_numbered_by_what_they_ask() -> None:
    asked: list[tuple[tuple[int, ...], int, tuple[str, ...]]] = [
        ((1,), 8, ()),
        ((2,), 8, ()),
        ((1,), 9, ()),
        ((1,), 8, ("]",)),
    ]
    numbers = []
    for order in (asked, asked[::-1]):
        capture = TokenCapture(tokenizer())
        found = {}
        for prompt, limit, stop in order:
            with capture.numbered(prompt, max_new_tokens=limit, stop=stop) as number:
                found[prompt, limit, stop] = number
        numbers.append(found)
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0].values())) == len(asked)


def test_the_same_request_has_another_number_the_second_time() -> None:
    capture = TokenCapture(tokenizer())
    asked: dict[str, Any] = {"max_new_tokens": 8, "stop": ()}
    with capture.numbered([1], **asked) as first, capture.numbered([1], **asked) as second:
        assert first != second


def test_a_request_that_came_to_nothing_leaves_its_number() -> None:
    capture = TokenCapture(tokenizer())
    found = []

    def fail() -> None:
        with capture.numbered([1], max_new_tokens=8, stop=()) as number:
            found.append(number)
            raise ConnectionResetError

    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            fail()
    assert found[0] == found[1]
