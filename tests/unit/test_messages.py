from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kintsugi import wire
from kintsugi.errors import Fault
from kintsugi.messages import Body, Failed, Ok
from kintsugi.wire import Envelope, Message, MessageKind

BODIES = typing.get_args(Body)


def sample(kind: type[object]) -> object:
    """Any value of an annotated type."""
    return msgspec.convert(_plain(kind), kind, strict=True)


def _plain(kind: typing.Any) -> object:
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        config = kind.__struct_config__
        hints = typing.get_type_hints(kind)
        if config.array_like:
            return [_plain(hints[name]) for name in kind.__struct_fields__]
        fields = {
            name: None if hints[name] == kind | None else _plain(hints[name])
            for name in kind.__struct_fields__
        }
        return fields if config.tag is None else {**fields, "type": config.tag}
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        return next(iter(typing.cast(typing.Any, kind))).value
    if origin is tuple:
        arguments = typing.get_args(kind)
        return [_plain(arguments[0])] if arguments[-1] is ... else [_plain(part) for part in arguments]
    if origin is dict:
        return {_plain(part): _plain(value) for part, value in [typing.get_args(kind)]}
    if origin is typing.Literal:
        return typing.get_args(kind)[0]
    if origin is not None:
        return _plain(typing.get_args(kind)[0])
    return {str: "text", int: 7, float: 0.5, bytes: b"\0\1", bool: True}[kind]


ENVELOPE = Envelope("job", 1, "model-0", "a", 7, MessageKind.REQUEST)


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type[Body]) -> None:
    body = sample(kind)
    assert isinstance(body, kind)
    assert wire.decode(wire.encode(ENVELOPE, body)) == Message(ENVELOPE, body)


@given(
    st.builds(
        Envelope,
        st.text(),
        st.integers(0, 2**31),
        st.text(),
        st.text(),
        st.integers(0, 2**63),
        st.sampled_from(MessageKind),
        st.none() | st.text(),
    )
)
def test_every_envelope_survives_the_wire(envelope: Envelope) -> None:
    frame = wire.encode(envelope, Ok())
    assert wire.decode(frame).envelope == wire.decode_envelope(frame) == envelope


def test_a_wrong_field_is_named_in_the_error_and_the_sender_still_known() -> None:
    frame = msgspec.msgpack.encode([ENVELOPE, {"type": "CommitStep", "step": "three"}])
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at `\$\[1\]\.step`"):
        wire.decode(frame)
    assert wire.decode_envelope(frame) == ENVELOPE


def test_an_unknown_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Evil'"):
        wire.decode(msgspec.msgpack.encode([ENVELOPE, {"type": "Evil"}]))


@given(st.binary(max_size=200))
@example(b"\x92\x96\xa7\x00\x00\x00\x00\x00\x00\x80")
def test_decoding_nonsense_raises_nothing_but_a_decode_error(frame: bytes) -> None:
    for decode in (wire.decode, wire.decode_envelope):
        try:
            decode(frame)
        except msgspec.MsgspecError:
            continue


def test_defaults_take_no_room_on_the_wire() -> None:
    fault = Fault("f1", "StorageError", "model-0", "disk full", 0.0)
    assert b"cause" not in wire.encode(ENVELOPE, Failed(fault))
